"""A small paged cache for kernel tests: planes full of noise, a scattered block table, and what must not change.

The page ids are never neighbours (2p + 1 by default), planes start as random bytes, and `host_planes` copies all of
them, so that one comparison of whole planes says both "the right bytes" and "no other byte".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pagedkv import codecs
from pagedkv.devices.protocol import Array, Device, Graph, Stream
from pagedkv.ops.ops import Ops
from pagedkv.ops.views import PagedKVBatchLayerView
from pagedkv.values.attention_shape import AttentionShape, Route, workspace_bytes
from pagedkv.values.planes import PageOrder, plane_inventory
from pagedkv.values.profiles import ROLES
from tests.kernels.arrays import BF16_NAN, MARK_BF16, Bits, Rng, Table, bf16_noise, to_device, to_host

AnyRoute = Route | Literal["context"]
HostPlanes = dict[str, npt.NDArray[Any]]


@dataclass
class PagedCache:
    """Planes of one layer on a device, and the ops that use them."""

    device: Device
    ops: Ops
    stream: Stream
    view: PagedKVBatchLayerView
    table: Table

    @classmethod
    def build(
        cls, device: Device, profile: str, *, head_dim: int = 64, kv_heads: int = 2, order: PageOrder = "page-major",
        table: Table, rng: Rng | None, ops: Ops | None = None, max_context: int | None = None,
        allocate: Callable[..., Array] | None = None,
    ) -> PagedCache:
        """Make a cache with pages for every id of the table, and one more.

        Planes hold random bytes; without `rng` they are left as `allocate` gives them, by default unwritten.
        """
        stream = device.stream()
        pages = max(int(table.max()), 0) + 2
        planes: dict[str, Array] = {}
        for geometry in plane_inventory(profile, layers=1, kv_heads=kv_heads, head_dim=head_dim, pages=pages,
                                        order=order):
            planes[geometry.role] = (allocate or device.empty)(geometry.shape, geometry.dtype)
            if rng is not None:
                noise = rng.integers(0, 256, geometry.span_bytes, dtype=np.uint8)
                device.copy(planes[geometry.role], noise.view(geometry.dtype).reshape(geometry.shape), stream)
        k, v, k_scale, v_scale = (planes.get(role) for role in ROLES)
        view = PagedKVBatchLayerView(
            k, v, k_scale, v_scale, to_device(device, stream, table), head_dim, kv_heads,
            profile, order, max_context or 64 * table.shape[1],  # type: ignore[arg-type]
        )  # fmt: skip
        return cls(device, ops or Ops(device), stream, view, table)

    def put(self, array: npt.NDArray[Any]) -> Array:
        """Copy a host array to the device."""
        return to_device(self.device, self.stream, array)

    def get(self, array: Array) -> npt.NDArray[Any]:
        """Copy a device array to the host, after everything on the stream."""
        return to_host(self.device, self.stream, array)

    def ints(self, values: list[int]) -> Array:
        """Return a device array of int32 selectors."""
        return self.put(np.array(values, np.int32))

    def set(self, array: Array, values: Any) -> None:
        """Copy numbers over a device array of selectors, or a host array over one of its shape."""
        self.device.copy(array, np.asarray(values, array.dtype), self.stream)

    def capture(self, op: Callable[..., None], *arguments: Any, **keywords: Any) -> Graph:
        """Record one call of an op with this cache's view."""
        self.device.begin_capture(self.stream)
        op(self.view, *arguments, **keywords, stream=self.stream)
        return self.device.end_capture(self.stream)

    def host_planes(self) -> HostPlanes:
        """Copy every plane to the host, by role."""
        return {geometry.role: self.get(plane) for plane, geometry in self.view.planes}

    def overwrite(self, byte: int) -> None:
        """Fill every plane with one byte; 0xFF is NaN in each format that has one."""
        for plane, geometry in self.view.planes:
            content = np.full(geometry.span_bytes, byte, np.uint8)
            self.device.copy(plane, content.view(geometry.dtype).reshape(geometry.shape), self.stream)

    def append(
        self, k: Bits, v: Bits, first_positions: list[int], table_rows: list[int],
        valid_columns: list[int] | None = None,
    ) -> None:
        """Append host rows (B, W, Hkv, D)."""
        valid = None if valid_columns is None else self.ints(valid_columns)
        self.ops.append(self.view, self.put(k), self.put(v), self.ints(first_positions), self.ints(table_rows),
                        valid_columns=valid, stream=self.stream)  # fmt: skip

    def fill(self, rng: Rng, row: int, tokens: int, scale: float = 1.0) -> None:
        """Append noise at positions [0, tokens) of a table row."""
        if tokens:
            shape = (1, tokens, self.view.num_kv_heads, self.view.head_dim)
            self.append(bf16_noise(rng, shape, scale), bf16_noise(rng, shape, scale), [0], [row])

    def with_rows(
        self, planes: HostPlanes, k: Bits, v: Bits, first_positions: list[int], table_rows: list[int],
        live_columns: list[int],
    ) -> HostPlanes:
        """Return host planes as they must be after an append of the live columns, by `pagedkv.codecs`."""
        expected = {role: plane.copy() for role, plane in planes.items()}
        head_dim = self.view.head_dim
        for kind, rows in (("k", k), ("v", v)):
            code, scale = codecs.encode(self.view.storage, kind, rows.reshape(-1, head_dim))  # type: ignore[arg-type]
            for role, encoded in ((f"{kind}_code", code), (f"{kind}_scale", scale)):
                if encoded is None:
                    continue
                target = expected[role]
                values = encoded.view(target.dtype).reshape(*rows.shape[:3], -1)
                for entry, live in enumerate(live_columns):
                    for column in range(live):
                        position = first_positions[entry] + column
                        page = self.table[table_rows[entry], position // 64]
                        for head in range(self.view.num_kv_heads):
                            place = (page, head) if self.view.order == "page-major" else (head, page)
                            target[(*place, position % 64)] = values[entry, column, head]
        return expected

    def attend(
        self, q: Bits, first_positions: list[int], table_rows: list[int], *, route: AnyRoute,
        new_rows: tuple[Bits, Bits] | None = None, valid_columns: list[int] | None = None, scale: float | None = None,
    ) -> tuple[Bits, npt.NDArray[np.float32]]:
        """Run attention of host queries (B, W, Hq, D); give out and lse.

        Causal routes append `new_rows` (k, v) first; for route "context" they are the temporary rows, and the first
        positions are the context lengths.
        """
        out, lse = self.put(np.full(q.shape, MARK_BF16, np.uint16)), self.put(np.full(q.shape[:3], np.float32(np.nan)))
        op: Callable[..., None] = self.ops.causal_attention if new_rows else self.ops.causal_attention_cached
        options: dict[str, Any] = {"route": route}
        if route == "context":
            op, options = self.ops.context_attention, {}
        op(self.view, self.put(q), *map(self.put, new_rows or ()), out, self.ints(first_positions),
           self.ints(table_rows), valid_columns=None if valid_columns is None else self.ints(valid_columns),
           scale=scale, lse=lse, workspace=self.workspace(route, q), stream=self.stream, **options)  # fmt: skip
        return self.get(out), self.get(lse)

    def workspace(self, route: AnyRoute, q: Bits) -> Array | None:
        """Return a workspace of exactly the bytes that a call with these queries needs; None for 0."""
        batch, width, heads, head_dim = q.shape
        shape = AttentionShape("decode" if route == "context" else route, batch, width, heads, self.view.num_kv_heads,
                               head_dim, self.view.max_context)  # fmt: skip
        needed = workspace_bytes(shape)
        return self.device.empty((needed,), np.uint8) if needed else None


def kill_columns(arrays: Iterable[Bits], live: Iterable[int]) -> None:
    """Make the columns of batch entry b from live[b] on NaN."""
    for array, (entry, count) in itertools.product(list(arrays), list(enumerate(live))):
        array[entry, count:] = BF16_NAN


def assert_same_planes(expected: HostPlanes, found: HostPlanes) -> None:
    """Compare every byte of every plane; say where the first difference lies."""
    assert expected.keys() == found.keys()
    for role, plane in expected.items():
        different = np.argwhere(plane != found[role])
        first = tuple(different[0].tolist()) if len(different) else ()
        assert not len(different), (
            f"{role}: {len(different)} elements differ, the first at {first}: "
            f"expected {plane[first]!r}, got {found[role][first]!r}"
        )
