"""What a kernel is told about a layer's cache: planes, table, geometry.  (C14.1, C14.2)

A view owns nothing and knows no allocator, request, reservation or frontier; positions, lengths and row selectors are
inputs of each op.  It is checked once, when it is made, so that the ops need not ask again:

    k_pages, v_pages     code planes, PlaneGeometry.shape of their role, C-contiguous, 256-byte aligned
    k_scales, v_scales   scale planes, exactly when the profile has them
    block_table          (C, L) int32: row `table_rows[b]` of it serves batch entry b (C11.3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pagedkv.devices.protocol import Array
from pagedkv.errors import MisuseError
from pagedkv.values.planes import PageOrder, PlaneGeometry
from pagedkv.values.profiles import ROLES, Profile, plane_schema, resolve_profile
from pagedkv.values.quantities import PAGE_TOKENS, SLAB_ALIGN_BYTES


@dataclass(frozen=True, eq=False)
class PagedKVBatchLayerView:
    """One layer of one pool, for any rows of its block table.  (C14.1)

    Args:
        k_pages, v_pages, k_scales, v_scales: device planes; scales None for bf16.
        block_table: (C, L) int32, device, C-contiguous.
        head_dim, kv_heads: D and Hkv.
        profile: a profile, its name or an alias.
        order: "page-major" or "head-major".
        max_context: no position reaches it; 1 <= max_context <= 64 * L.  It sizes launches and workspace.

    Raises:
        ConfigError: the profile does not exist or does not support head_dim (C4.5).
        MisuseError: a plane is missing, superfluous, misshapen, strided, misaligned or shares bytes with another;
            the table has another dtype or shape; max_context is beyond the table (C14.2).
    """

    k_pages: Array
    v_pages: Array
    k_scales: Array | None
    v_scales: Array | None
    block_table: Array
    head_dim: int
    kv_heads: int
    profile: Profile
    order: PageOrder
    max_context: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", resolve_profile(self.profile))
        self._check_numbers()
        for geometry in self.geometries:
            self._check_plane(geometry)
        for role, plane in (("k_scale", self.k_scales), ("v_scale", self.v_scales)):
            if plane is not None and role not in {geometry.role for geometry in self.geometries}:
                raise MisuseError(f"plane {role} of profile {self.profile.name}", expected="None",
                                  got=describe(plane), remedy="pass no scale planes", clause="C4")
        check_array("the block table", self.block_table, np.int32, (None, None), "C11.1")
        rows, blocks = self.block_table.shape
        if not 1 <= self.max_context <= PAGE_TOKENS * blocks or rows < 1:
            raise MisuseError("max_context of a view", expected=f"1 to {PAGE_TOKENS} * {blocks} tokens of its table",
                              got=f"{self.max_context} tokens and {rows} rows",
                              remedy="bind a table that is wide enough", clause="C14.2")
        check_disjoint(self.named_arrays, writes=None)

    @cached_property
    def geometries(self) -> tuple[PlaneGeometry, ...]:
        """The planes' geometry in ordinal order: K code, V code, K scale, V scale.  (C4.2)"""
        page_axis = 0 if self.order == "page-major" else 1
        shape = getattr(self.k_pages, "shape", ())
        pages = int(shape[page_axis]) if len(shape) == 4 else 0
        return tuple(
            PlaneGeometry(plane.role, 0, plane.dtype, plane.extent, self.kv_heads, pages, self.order)
            for plane in plane_schema(self.profile, self.head_dim)
        )

    @cached_property
    def arguments(self) -> tuple[object, ...]:
        """Kernel arguments of the planes: four pointers, then head and page strides in bytes of each role."""
        by_role = {geometry.role: geometry for geometry in self.geometries}
        strides: list[object] = []
        for role in ROLES:
            geometry = by_role.get(role)
            strides.append(np.int64(geometry.head_stride_bytes if geometry else 0))
            strides.append(np.int64(geometry.page_stride_bytes if geometry else 0))
        return (self.k_pages, self.v_pages, self.k_scales, self.v_scales, *strides)

    @property
    def code_arguments(self) -> tuple[object, ...]:
        """The same of the code planes alone, for kernels of planes without scales."""
        return (*self.arguments[:2], *self.arguments[4:8])

    @property
    def pages(self) -> int:
        """N: page groups of the pool."""
        return self.geometries[0].pages

    @cached_property
    def named_arrays(self) -> tuple[tuple[str, Array], ...]:
        """Every array a kernel may read through this view, by name."""
        planes = zip(ROLES, (self.k_pages, self.v_pages, self.k_scales, self.v_scales), strict=True)
        return (*((role, plane) for role, plane in planes if plane is not None), ("block_table", self.block_table))

    def _check_numbers(self) -> None:
        for what, value in (("kv_heads", self.kv_heads), ("max_context", self.max_context)):
            if type(value) is not int or value < 1:
                raise MisuseError(f"{what} of a view", expected="a positive integer", got=repr(value),
                                  remedy="pass the pool's geometry", clause="C14.1")
        if self.order not in ("page-major", "head-major"):
            raise MisuseError("the page order of a view", expected="'page-major' or 'head-major'",
                              got=repr(self.order), remedy="pass the pool's order", clause="C3.4")

    def _check_plane(self, geometry: PlaneGeometry) -> None:
        plane = dict(self.named_arrays).get(geometry.role)
        name = f"plane {geometry.role} of profile {self.profile.name}"
        shape = tuple(extent or None for extent in geometry.shape)  # no page groups: k_pages has no such axis
        check_array(name, plane, geometry.dtype, shape, "C14.2")
        if geometry.pages < 1 or geometry.pages > np.iinfo(np.int32).max:
            raise MisuseError(name, expected="1 to 2^31 - 1 page groups", got=f"{geometry.pages}",
                              remedy=f"pass planes in {self.order} order", clause="C3.6")
        check_aligned(name, plane, SLAB_ALIGN_BYTES, "C3.10")


@dataclass(frozen=True, eq=False)
class PagedKVLayerView:
    """One layer of one pool for one sequence: as the batched view, with one table row (L,) int32.  (C14.1)

    Raises:
        As `PagedKVBatchLayerView`.
    """

    k_pages: Array
    v_pages: Array
    k_scales: Array | None
    v_scales: Array | None
    table_row: Array
    head_dim: int
    kv_heads: int
    profile: Profile
    order: PageOrder
    max_context: int

    def __post_init__(self) -> None:
        check_array("the table row", self.table_row, np.int32, (None,), "C11.1")
        object.__setattr__(self, "profile", self.batched.profile)

    @cached_property
    def batched(self) -> PagedKVBatchLayerView:
        """The same planes with the row as a table of one row: what the ops take, with table_rows = [0]."""
        return PagedKVBatchLayerView(
            self.k_pages, self.v_pages, self.k_scales, self.v_scales, self.table_row.reshape(1, -1), self.head_dim,
            self.kv_heads, self.profile, self.order, self.max_context,
        )


# ---- checks that ops share -----------------------------------------------------------------------------------------


def describe(array: object) -> str:
    """Return dtype, shape and layout as an error tells them."""
    dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
    if dtype is None or shape is None:
        return repr(array)
    return f"{dtype} {tuple(shape)}{'' if array.flags.c_contiguous else ', not C-contiguous'}"  # type: ignore[attr-defined]


def check_array(
    name: str, array: object, dtype: np.dtype[np.generic] | type[np.generic], shape: Sequence[int | None], clause: str
) -> None:
    """Refuse an array of another dtype, shape (None: any extent) or layout.  (C14.2)

    Raises:
        MisuseError: with what was expected and got.
    """
    found = getattr(array, "shape", None)
    if (
        found is not None
        and len(found) == len(shape)
        and all(wanted is None or wanted == extent for wanted, extent in zip(shape, found, strict=True))
        and array.dtype == dtype  # type: ignore[attr-defined]
        and array.flags.c_contiguous  # type: ignore[attr-defined]
    ):
        return
    axes = ", ".join("any" if extent is None else str(extent) for extent in shape)
    raise MisuseError(name, expected=f"C-contiguous {np.dtype(dtype)} ({axes})", got=describe(array),
                      remedy="pass an array of exactly this form; nothing is converted", clause=clause)


def address_range(array: Array) -> tuple[int, int]:
    """Return the first byte address of an array and the one behind its last."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    begin = int(interface["data"][0])
    return begin, begin + int(array.nbytes)


def check_aligned(name: str, array: Array, align_bytes: int, clause: str) -> None:
    """Refuse an array whose first byte is not aligned.

    Raises:
        MisuseError: with the address's remainder.
    """
    remainder = address_range(array)[0] % align_bytes
    if remainder and array.nbytes:
        raise MisuseError(name, expected=f"a {align_bytes}-byte aligned address", got=f"one {remainder} bytes behind",
                          remedy="allocate it from the device", clause=clause)


def check_disjoint(arrays: Sequence[tuple[str, Array]], *, writes: set[str] | None) -> None:
    """Refuse arrays that share bytes, unless both are only read (`writes` None: every pair counts).

    Raises:
        MisuseError: with the names of the first such pair.
    """
    ranges = sorted((*address_range(array), name) for name, array in arrays if array.nbytes)
    for index, (_, end, name) in enumerate(ranges):
        for begin, _, other in ranges[index + 1 :]:
            if begin >= end:
                break
            if writes is None or name in writes or other in writes:
                raise MisuseError(f"{name} together with {other}", expected="arrays that share no byte",
                                  got="overlapping address ranges", remedy="give each its own memory", clause="C14.2")
