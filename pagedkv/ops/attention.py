"""Attention: causal over a sequence, and of a draft block over its whole context.  (C14.4, C14.6)

    decode, context   one block for each tile of query rows and key group; a merge where there are several groups
    prefill           one block for each tile of query rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.devices.protocol import Array, Kernel, Stream
from pagedkv.errors import MisuseError
from pagedkv.ops.append import launch_append
from pagedkv.ops.checks import check_array, check_memory
from pagedkv.ops.modules import HasKernels
from pagedkv.ops.views import WRITTEN_BY_APPEND, LayerView, PagedKVBatchLayerView, Selectors, batched_view
from pagedkv.values.attention_shape import AttentionShape, Route, workspace_bytes
from pagedkv.values.checks import checked_number
from pagedkv.values.profiles import HEAD_DIMS_CONTEXT
from pagedkv.values.quantities import ROW_ALIGN_BYTES

ATTENTION_BLOCK = (128, 1, 1)
SCALE_MAX = 1e38
"""Kernels multiply scores with the scale times log2(e), which must be a finite float32."""


def causal_attention(
    ops: HasKernels, view: LayerView, q: Array, k: Array, v: Array, out: Array, first_positions: Array,
    table_rows: Array | None = None, *, route: Route, valid_columns: Array | None = None, scale: float | None = None,
    lse: Array | None = None, workspace: Array | None, stream: Stream,
) -> None:
    """Append k and v, then let query column j of row b, at position p, see [0, p].  (C14.4)

    Launches: 2, or 3 where decode spans several key groups.  Inert columns, and columns at negative positions, write
    nothing to the cache and give exact +0 (lse -infinity).  `out` is overwritten completely.

    Args:
        view: of a batch, with table_rows; or of one sequence, without (B = 1).
        route: "decode" (any B, W 1 to 16) or "prefill" (B = 1, any W); named by the unit, never inferred.
        scale: multiplies dot(q, k); None is D ** -0.5.
        lse: receives the natural logarithm of the softmax denominator, to about 1e-6.
        workspace: `workspace_bytes` of the call's AttentionShape; None where that is 0.

    Raises:
        MisuseError: arrays of another form, that overlap, or that the device may not use (C14.2); a workspace that is
            too small, W or B outside the route, or a scale that is not finite.
        StaleHandle, CaptureRefused: as `PagedKVLayerView`.
    """
    call = _Call(ops, view, batched_view(view, stream), q, out, Selectors(first_positions, table_rows, valid_columns),
                 lse, workspace)
    shape, factor = call.check_causal(route, scale, (("k", k), ("v", v)))
    launch_append(ops, "append_rows", call.view, k, v, call.selectors, stream)
    call.launch_causal(shape, factor, stream)


def causal_attention_cached(
    ops: HasKernels, view: LayerView, q: Array, out: Array, first_positions: Array, table_rows: Array | None = None, *,
    route: Route, valid_columns: Array | None = None, scale: float | None = None, lse: Array | None = None,
    workspace: Array | None, stream: Stream,
) -> None:
    """Attend as `causal_attention` does, over the cache; no byte of the cache changes.  (C14.4)

    Launches: 1, or 2 where decode spans several key groups.  Raises: as `causal_attention`.
    """
    call = _Call(ops, view, batched_view(view, stream), q, out, Selectors(first_positions, table_rows, valid_columns),
                 lse, workspace)
    shape, factor = call.check_causal(route, scale, ())
    call.launch_causal(shape, factor, stream)


def context_attention(
    ops: HasKernels, view: LayerView, q: Array, k: Array, v: Array, out: Array, context_lengths: Array,
    table_rows: Array | None = None, *, valid_columns: Array | None = None, scale: float | None = None,
    lse: Array | None = None, workspace: Array | None, stream: Stream,
) -> None:
    """Let each live column of row b see positions [0, context_lengths[b]) and every live row of k, v.  (C14.4)

    Launches: 1, or 2 where max_context spans several key groups.  Non-causal; no byte of the cache changes, and k,
    v are stored nowhere.  Inert columns give exact +0 (lse -infinity), and their inputs are not read.

    Args:
        view: of a draft pool: head-major, bf16, D 64 or 128; of a batch, or of one sequence without table_rows (B = 1).
        q, k, v: W from 1 to 16 columns; k and v are the temporary rows.
        context_lengths: (B,) int32 on the device, 0 <= n_b <= max_context; where it is 0 or negative, no table entry is
            read.
        scale, lse: as of `causal_attention`.
        workspace: `workspace_bytes` of the decode AttentionShape of the call; None where that is 0.

    Raises:
        MisuseError: a view that is not a draft pool's; else as `causal_attention`.
    """
    batched = batched_view(view, stream)
    if batched.order != "head-major" or view.storage.is_quantized or view.head_dim not in HEAD_DIMS_CONTEXT:
        raise MisuseError("the view of context attention", expected="head-major bf16 planes of head_dim 64 or 128",
                          got=f"{view.order} {view.storage.name} planes of head_dim {view.head_dim}",
                          remedy="pass a layer of the pool draft; other pools have causal_attention", clause="C14.4")
    selectors = Selectors(context_lengths, table_rows, valid_columns, positions_name="context_lengths")
    call = _Call(ops, view, batched, q, out, selectors, lse, workspace)
    shape, factor = call.check("decode", scale, (("k", k), ("v", v)))
    arguments = (q, k, v, out, lse, *batched.code_arguments, *call.last_arguments(shape, factor))
    kernels = ops.kernels.context(view.head_dim)
    _launch_split(kernels["context_attention"], kernels["context_attention_merge"], shape, arguments, stream)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arrays of one attention call, but for its k and v rows; `view` is the batch view of `given`."""

    ops: HasKernels
    given: LayerView
    view: PagedKVBatchLayerView
    q: Array
    out: Array
    selectors: Selectors
    lse: Array | None
    workspace: Array | None

    def check_causal(
        self, route: Route, scale: float | None, rows: Sequence[tuple[str, Array]]
    ) -> tuple[AttentionShape, float]:
        """Check a causal call; with `rows` to append, it writes planes too."""
        shape, factor = self.check(route, scale, rows, writes=WRITTEN_BY_APPEND if rows else ())
        self.selectors.check_width(shape.width, self.view.max_context)
        return shape, factor

    def check(
        self, route: Route, scale: float | None, rows: Sequence[tuple[str, Array]], *, writes: Sequence[str] = ()
    ) -> tuple[AttentionShape, float]:
        """Refuse arrays that do not fit each other; return the call's shape and the factor of its scores."""
        view, q = self.view, self.q
        aligned = ROW_ALIGN_BYTES
        check_array("q", q, np.uint16, (None, None, None, view.head_dim), "C14.4", align_bytes=aligned)
        batch, width, query_heads = (int(extent) for extent in q.shape[:3])
        shape = AttentionShape(route, batch, width, query_heads, view.num_kv_heads, view.head_dim, view.max_context)
        check_array("out", self.out, np.uint16, q.shape, "C14.4", align_bytes=aligned)
        for name, array in rows:
            check_array(name, array, np.uint16, (batch, width, view.num_kv_heads, view.head_dim), "C14.4",
                        align_bytes=aligned)
        self.selectors.check(batch, self.given)
        written: list[tuple[str, Array]] = [("out", self.out)]
        if self.lse is not None:
            check_array("lse", self.lse, np.float32, (batch, width, query_heads), "C14.4")
            written.append(("lse", self.lse))
        needed_bytes, given_bytes = workspace_bytes(shape), 0
        if self.workspace is not None:
            check_array("the workspace", self.workspace, np.uint8, (None,), "C14.4", align_bytes=aligned)
            written.append(("the workspace", self.workspace))
            given_bytes = int(self.workspace.nbytes)
        if given_bytes < needed_bytes:
            raise MisuseError("the workspace", expected=f"at least {needed_bytes} bytes", got=f"{given_bytes} bytes",
                              remedy="for store.workspace raise decode_columns_max of the StoreConfig, or "
                                     "prefill_columns_max for the prefill route; size your own with workspace_bytes",
                              clause="C14.4", needed_bytes=needed_bytes)
        factor = math.pow(view.head_dim, -0.5) if scale is None else checked_number(
            "the scale", scale, SCALE_MAX, remedy="pass a Python float, or None for D ** -0.5", clause="C14.4"
        )
        check_memory(self.ops, (("q", q), *rows, *written, *self.selectors.named_arrays, *view.named_arrays),
                     writes={*(name for name, _ in written), *writes})
        return shape, factor

    def launch_causal(self, shape: AttentionShape, factor: float, stream: Stream) -> None:
        """Launch causal attention over the cache."""
        arguments = (self.q, self.out, self.lse, *self.view.arguments, *self.last_arguments(shape, factor))
        kernels = self.ops.kernels.attention(self.view.storage, self.view.head_dim)
        if shape.route == "prefill":
            grid = (shape.tiles, shape.kv_heads, 1)
            kernels["causal_attention_prefill"].launch(grid, ATTENTION_BLOCK, arguments, stream)
            return
        _launch_split(kernels["causal_attention_decode"], kernels["causal_attention_merge"], shape, arguments, stream)

    def last_arguments(self, shape: AttentionShape, factor: float) -> tuple[object, ...]:
        """Return the last kernel arguments: selectors, W, Hkv, group, scale in base 2, workspace, key groups."""
        is_split = shape.route == "decode" and shape.groups > 1
        return (
            *self.selectors.arguments(self.view), np.int32(shape.width), np.int32(shape.kv_heads),
            np.int32(shape.query_heads // shape.kv_heads), np.float32(factor * math.log2(math.e)),
            self.workspace if is_split else None, np.int32(shape.groups),
        )


def _launch_split(
    attend: Kernel, merge: Kernel, shape: AttentionShape, arguments: tuple[object, ...], stream: Stream
) -> None:
    attend.launch((shape.groups * shape.tiles, shape.kv_heads, shape.batch), ATTENTION_BLOCK, arguments, stream)
    if shape.groups > 1:
        merge.launch((shape.tiles, shape.kv_heads, shape.batch), ATTENTION_BLOCK, arguments, stream)
