"""Views: planes, block table and geometry of one layer's cache, which an op reads and writes.  (C14.1, C14.2)

A view owns nothing and knows no allocator, request, reservation or frontier.  Positions, lengths and row selectors are
inputs of each op: its `Selectors`.  A view is checked once, at construction, so that no op checks it again:

    k_pages, v_pages               code planes, PlaneGeometry.shape of their role, C-contiguous, 256-byte aligned
    k_scale_pages, v_scale_pages   scale planes, exactly when the profile has them
    block_tables                   (C, L) int32: batch entry b reads row `table_rows[b]` of it (C11.3)
    codec_counts                   (3,) uint64, or None: appends add to it what CODEC_EVENTS names (codecs 8)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pagedkv.devices.protocol import Array, Stream
from pagedkv.errors import CaptureRefused, MisuseError, shown
from pagedkv.ops.checks import check_array, check_disjoint, describe, is_array
from pagedkv.values.checks import checked_integer
from pagedkv.values.planes import PageOrder, PlaneGeometry
from pagedkv.values.profiles import CODEC_EVENTS, ROLES, Profile, plane_schema, resolve_profile
from pagedkv.values.quantities import PAGE_TOKENS, ROW_ALIGN_BYTES, SLAB_ALIGN_BYTES

WRITTEN_BY_APPEND = (*ROLES, "codec_counts")
"""Names of a view's arrays that an append writes."""


@dataclass(frozen=True, eq=False)
class PagedKVBatchLayerView:
    """One layer of one pool, for any rows of its block table.  (C14.1)

    Args:
        k_pages, v_pages, k_scale_pages, v_scale_pages: device planes; scales None for bf16.
        block_tables: (C, L) int32, device, C-contiguous.
        head_dim, num_kv_heads: D and Hkv.
        storage: a profile, its name or an alias.
        order: "page-major" or "head-major".
        max_context: every position is below it; 1 <= max_context <= 64 * L.  It sizes launches and workspace.
        codec_counts: (3,) uint64, device; appends add the groups of each of CODEC_EVENTS.  None counts nothing.

    Raises:
        ConfigError: the profile does not exist or does not support head_dim (C4.5).
        MisuseError: a plane is missing, superfluous, misshapen, strided, misaligned or shares bytes with another;
            the table has another dtype or shape; max_context is beyond the table (C14.2).
    """

    k_pages: Array
    v_pages: Array
    k_scale_pages: Array | None
    v_scale_pages: Array | None
    block_tables: Array
    head_dim: int
    num_kv_heads: int
    storage: Profile
    order: PageOrder
    max_context: int
    codec_counts: Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", resolve_profile(self.storage))
        self._check_numbers()
        for geometry in self.geometries:
            self._check_plane(geometry)
        surplus = self._by_role.keys() - {geometry.role for geometry in self.geometries}
        for role in sorted(surplus):
            raise MisuseError(f"plane {role} of profile {self.storage.name}", expected="None",
                              got=describe(self._by_role[role]), remedy="pass no scale planes", clause="C4")
        check_array("the block table", self.block_tables, np.int32, (None, None), "C11.1")
        rows, blocks = self.block_tables.shape
        if not 1 <= self.max_context <= PAGE_TOKENS * blocks or rows < 1:
            raise MisuseError("max_context of a view", expected=f"1 to {PAGE_TOKENS} * {blocks} tokens of its table",
                              got=f"{self.max_context} tokens and {rows} rows",
                              remedy="bind a table that is wide enough", clause="C14.2")
        if self.codec_counts is not None:
            if not self.storage.is_quantized:
                raise MisuseError(f"codec_counts of profile {self.storage.name}", expected="None",
                                  got=describe(self.codec_counts), remedy="pass none: its rows have no groups",
                                  clause="codecs 8")
            check_counts("codec_counts", self.codec_counts)
        check_disjoint(self.named_arrays, writes=None)

    @cached_property
    def geometries(self) -> tuple[PlaneGeometry, ...]:
        """The planes' geometry in ordinal order: K code, V code, K scale, V scale.  (C4.2)"""
        page_axis = 0 if self.order == "page-major" else 1
        shape = self.k_pages.shape if is_array(self.k_pages) else ()
        pages = int(shape[page_axis]) if len(shape) == 4 else 0
        return tuple(
            PlaneGeometry(plane.role, 0, plane.dtype, plane.extent, self.num_kv_heads, pages, self.order)
            for plane in plane_schema(self.storage, self.head_dim)
        )

    @property
    def planes(self) -> tuple[tuple[Array, PlaneGeometry], ...]:
        """The planes with their geometry, in ordinal order."""
        return tuple((self._by_role[geometry.role], geometry) for geometry in self.geometries)

    @cached_property
    def arguments(self) -> tuple[object, ...]:
        """Kernel arguments of the planes: four pointers, then head and page strides in bytes of each role."""
        strides: dict[str, tuple[int, int]] = {
            geometry.role: (geometry.head_stride_bytes, geometry.page_stride_bytes) for geometry in self.geometries
        }
        return (self.k_pages, self.v_pages, self.k_scale_pages, self.v_scale_pages,
                *(np.int64(stride) for role in ROLES for stride in strides.get(role, (0, 0))))

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
        """Every array that a kernel may read or write through this view, by name."""
        counts = () if self.codec_counts is None else (("codec_counts", self.codec_counts),)
        return (*self._by_role.items(), ("block_tables", self.block_tables), *counts)

    @cached_property
    def _by_role(self) -> dict[str, Array]:
        planes = zip(ROLES, (self.k_pages, self.v_pages, self.k_scale_pages, self.v_scale_pages), strict=True)
        return {role: plane for role, plane in planes if plane is not None}

    def _check_numbers(self) -> None:
        for what, value in (("num_kv_heads", self.num_kv_heads), ("max_context", self.max_context)):
            checked_integer(f"{what} of a view", value, 1, np.iinfo(np.int32).max, remedy="pass the pool's geometry",
                            clause="C14.1")
        if type(self.order) is not str or self.order not in ("page-major", "head-major"):
            raise MisuseError("the page order of a view", expected="'page-major' or 'head-major'",
                              got=shown(self.order), remedy="pass the pool's order", clause="C3.4")

    def _check_plane(self, geometry: PlaneGeometry) -> None:
        plane = self._by_role.get(geometry.role)
        name = f"plane {geometry.role} of profile {self.storage.name}"
        shape = tuple(extent or None for extent in geometry.shape)  # no page groups: k_pages has no such axis
        check_array(name, plane, geometry.dtype, shape, "C14.2", align_bytes=SLAB_ALIGN_BYTES)
        if not 1 <= geometry.pages <= np.iinfo(np.int32).max:
            raise MisuseError(name, expected="1 to 2^31 - 1 page groups", got=f"{geometry.pages}",
                              remedy=f"pass planes in {self.order} order", clause="C3.6")


@dataclass(frozen=True, eq=False)
class PagedKVLayerView:
    """One layer of one pool for one sequence: as the batch view, with one table row (L,) int32.  (C14.1)

    Ops take it without `table_rows`, for B = 1, and not under capture: a graph would freeze the address of a row that
    gets another sequence later (C15.2).

    Args:
        require_current: called before every launch; raises once the row belongs to another sequence.  Views of
            `Store.layer_view` have it.

    Raises:
        As `PagedKVBatchLayerView`.  An op that takes the view raises CaptureRefused on a capturing stream, and what
        `require_current` raises: StaleHandle when the sequence has ended.
    """

    k_pages: Array
    v_pages: Array
    k_scale_pages: Array | None
    v_scale_pages: Array | None
    block_table: Array
    head_dim: int
    num_kv_heads: int
    storage: Profile
    order: PageOrder
    max_context: int
    codec_counts: Array | None = None
    require_current: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        check_array("the table row", self.block_table, np.int32, (None,), "C11.1")
        object.__setattr__(self, "storage", self.batched.storage)

    @cached_property
    def batched(self) -> PagedKVBatchLayerView:
        """The same planes with the row as a table of one row, which table_rows = [0] selects."""
        return PagedKVBatchLayerView(
            self.k_pages, self.v_pages, self.k_scale_pages, self.v_scale_pages, self.block_table.reshape(1, -1),
            self.head_dim, self.num_kv_heads, self.storage, self.order, self.max_context, self.codec_counts,
        )


def check_counts(name: str, counts: Array) -> Array:
    """Refuse counters of codec events that are not (3,) uint64 on an aligned address, and return them.  (codecs 8)"""
    check_array(name, counts, np.uint64, (len(CODEC_EVENTS),), "codecs 8", align_bytes=ROW_ALIGN_BYTES)
    return counts


LayerView = PagedKVBatchLayerView | PagedKVLayerView


def batched_view(view: LayerView, stream: Stream) -> PagedKVBatchLayerView:
    """Return the view of a batch that a launch uses; refuse what is no view, and one of a sequence that has ended."""
    if isinstance(view, PagedKVBatchLayerView):
        return view
    if not isinstance(view, PagedKVLayerView):
        raise MisuseError("the view", expected="a PagedKVBatchLayerView or a PagedKVLayerView", got=shown(view),
                          remedy="pass store.views[pool][layer], or store.layer_view(sequence)", clause="C14.1")
    if getattr(stream, "is_capturing", False):
        raise CaptureRefused("a view of one sequence", expected="a stream that is not capturing", got="one that is",
                             remedy="capture with store.views[pool][layer] and table_rows", clause="C15.2")
    if view.require_current is not None:
        view.require_current()
    return view.batched


@dataclass(frozen=True, slots=True)
class Selectors:
    """Positions, table rows and live columns of a call, each (B,) int32; `live` None means that all columns are live.

    `table_rows` is None for a view of one sequence.  With `has_live` an array of live columns is required.

    The two names are those of the op's parameters: first_positions or context_lengths, valid_columns or counts.
    """

    positions: Array
    table_rows: Array | None
    live: Array | None
    positions_name: str = "first_positions"
    live_name: str = "valid_columns"
    has_live: bool = False

    @property
    def named_arrays(self) -> tuple[tuple[str, Array], ...]:
        """The arrays of the call by name; without those that are None."""
        optional = (("table_rows", self.table_rows), (self.live_name, self.live))
        return ((self.positions_name, self.positions), *(pair for pair in optional if pair[1] is not None))

    def arguments(self, view: PagedKVBatchLayerView) -> tuple[object, ...]:
        """Return the kernel arguments that select: the table and its width, then the three arrays."""
        tables = view.block_tables
        return (tables, np.int32(tables.shape[1]), self.positions, self.table_rows, self.live)

    def check(self, batch: int, view: LayerView) -> None:
        """Refuse an array that is not (B,) int32, and selectors of another kind of view."""
        if isinstance(view, PagedKVLayerView):
            if batch != 1 or self.table_rows is not None:
                raise MisuseError("a call with a view of one sequence", expected="B = 1 and no table_rows",
                                  got=f"B = {batch}, table_rows {describe(self.table_rows)}",
                                  remedy="pass store.views[pool][layer] for a batch", clause="C14.1")
        else:
            check_array("table_rows", self.table_rows, np.int32, (batch,), "C14.4")
        check_array(self.positions_name, self.positions, np.int32, (batch,), "C14.4")
        if self.has_live or self.live is not None:
            check_array(self.live_name, self.live, np.int32, (batch,), "C14.4")

    def check_width(self, width: int, max_context: int) -> None:
        """Refuse a call whose columns are all live and more than a context holds."""
        if self.live is None and width > max_context:
            raise MisuseError("a dense call", expected=f"at most max_context = {max_context} columns",
                              got=f"{width} columns", remedy="pass valid_columns, or fewer columns", clause="C14.2")
