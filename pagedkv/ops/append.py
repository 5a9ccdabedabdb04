"""Append: K and V rows through the codec into the pages that a block table names.  (C14.4, C4.4)"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pagedkv.devices.protocol import Array, Stream
from pagedkv.errors import MisuseError, shown
from pagedkv.ops.checks import check_array, check_memory, describe
from pagedkv.ops.modules import HasKernels
from pagedkv.ops.views import WRITTEN_BY_APPEND, LayerView, PagedKVBatchLayerView, Selectors, batched_view, check_counts
from pagedkv.values.profiles import Profile, plane_schema, resolve_profile
from pagedkv.values.quantities import ROW_ALIGN_BYTES, ceil_div

APPEND_THREADS = 64
WARP_LANES = 32
LANE_DIMS = 16
LANE_DIMS_BF16 = 8


def append(
    ops: HasKernels, view: LayerView, k: Array, v: Array, first_positions: Array, table_rows: Array | None = None, *,
    valid_columns: Array | None = None, stream: Stream,
) -> None:
    """Write column j of row b at position first_positions[b] + j, through the view's codec.  (C14.4, C4.4)

    Launches: 1.  Columns at or beyond valid_columns[b], and those at negative positions, are neither read nor written,
    nor are their events counted.

    Args:
        view: of a batch, with table_rows; or of one sequence, without (B = 1).

    Raises:
        MisuseError: arrays of another form, that overlap, or that the device may not use (C14.2).
        StaleHandle, CaptureRefused: as `PagedKVLayerView`.
    """
    selectors = Selectors(first_positions, table_rows, valid_columns)
    batched = batched_view(view, stream)
    _check_append(ops, view, batched, k, v, selectors)
    launch_append(ops, "append_rows", batched, k, v, selectors, stream)


def append_prefix(
    ops: HasKernels, view: LayerView, k: Array, v: Array, first_positions: Array, counts: Array,
    table_rows: Array | None = None, *, stream: Stream,
) -> None:
    """Write the first counts[b] columns of each row; no byte of the rejected tail is read or changed.  (C14.4)

    Launches: 1.  counts: (B,) int32 on the device, 0 <= counts[b] <= W.  View and errors: as of `append`.
    """
    selectors = Selectors(first_positions, table_rows, counts, live_name="counts", has_live=True)
    batched = batched_view(view, stream)
    _check_append(ops, view, batched, k, v, selectors)
    launch_append(ops, "append_prefix", batched, k, v, selectors, stream)


def launch_append(
    ops: HasKernels, kernel: str, view: PagedKVBatchLayerView, k: Array, v: Array, selectors: Selectors,
    stream: Stream,
) -> None:
    """Launch an append of checked arrays."""
    batch, width, kv_heads, head_dim = k.shape
    row_lanes = head_dim // (LANE_DIMS if view.storage.is_quantized else LANE_DIMS_BF16)
    blocks = ceil_div(batch * width * kv_heads, WARP_LANES // row_lanes)
    counts = () if view.codec_counts is None else (view.codec_counts,)
    arguments = (
        k, v, *view.arguments, *selectors.arguments(view), np.int32(batch), np.int32(width), np.int32(kv_heads),
        *counts,
    )
    kernels = ops.kernels.encoding(view.storage, head_dim, counts_events=bool(counts))
    kernels[kernel].launch((blocks, 1, 1), (APPEND_THREADS, 1, 1), arguments, stream)


def encode_unrotated(
    ops: HasKernels, profile: str | Profile, kind: Literal["k", "v"], rows: Array, codes: Array, scales: Array, *,
    event_counts: Array | None = None, stream: Stream,
) -> None:
    """Encode rows of values that are taken as rotated already: the entry of codec tests.  (codecs 6)

    Launches: 1.  rows: (N, D) float32; codes: (N, code bytes) uint8; scales: (N, scale bytes) uint8; event_counts:
    None, or (3,) uint64 to which the groups of each of CODEC_EVENTS are added.

    Raises:
        ConfigError: a profile or head_dim outside C4.5.
        MisuseError: bf16, which has no codec (codecs 2), another kind, or arrays of another form.
    """
    resolved = resolve_profile(profile)
    if not resolved.is_quantized or type(kind) is not str or kind not in ("k", "v"):
        raise MisuseError("encoding without rotation", expected="a quantized profile and kind 'k' or 'v'",
                          got=f"{resolved.name}, {shown(kind)}", remedy="bf16 rows are copied bit for bit",
                          clause="codecs 6")
    check_array("the rows", rows, np.float32, (None, None), "codecs 6", align_bytes=ROW_ALIGN_BYTES)
    count, head_dim = (int(extent) for extent in rows.shape)
    row_bytes: dict[str, int] = {plane.role: plane.row_bytes for plane in plane_schema(resolved, head_dim)}
    for name, array, role in (("the codes", codes, "code"), ("the scales", scales, "scale")):
        check_array(name, array, np.uint8, (count, row_bytes[f"{kind}_{role}"]), "codecs 6",
                    align_bytes=ROW_ALIGN_BYTES)
    named = (("the rows", rows), ("the codes", codes), ("the scales", scales))
    counts = () if event_counts is None else (check_counts("event_counts", event_counts),)
    check_memory(ops, (*named, *(("event_counts", array) for array in counts)),
                 writes={"the codes", "the scales", "event_counts"})
    if not count:
        return
    warp_rows = WARP_LANES // (head_dim // LANE_DIMS)
    arguments = (rows, codes, scales, np.int64(count), np.int32(kind == "v"), *counts)
    kernel = ops.kernels.encoding(resolved, head_dim, counts_events=bool(counts))["encode_unrotated"]
    kernel.launch((ceil_div(count, warp_rows), 1, 1), (WARP_LANES, 1, 1), arguments, stream)


def _check_append(
    ops: HasKernels, given: LayerView, view: PagedKVBatchLayerView, k: Array, v: Array, selectors: Selectors
) -> None:
    check_array("k", k, np.uint16, (None, None, view.num_kv_heads, view.head_dim), "C14.4",
                align_bytes=ROW_ALIGN_BYTES)
    batch, width = int(k.shape[0]), int(k.shape[1])
    if batch < 1 or width < 1:
        raise MisuseError("k", expected="at least one row and one column", got=describe(k),
                          remedy="skip the call when there is nothing to append", clause="C14.4")
    check_array("v", v, np.uint16, k.shape, "C14.4", align_bytes=ROW_ALIGN_BYTES)
    selectors.check(batch, given)
    selectors.check_width(width, view.max_context)
    check_memory(ops, (("k", k), ("v", v), *selectors.named_arrays, *view.named_arrays), writes=WRITTEN_BY_APPEND)
