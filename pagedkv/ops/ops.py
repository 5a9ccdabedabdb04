"""The ops: checked launches of the kernels on one explicit stream.  (C14.2, C14.4)

    append, append_prefix                     write K and V rows through the codec
    causal_attention, causal_attention_cached append then attend; attend only
    context_attention                         a draft block attends to the whole context and to itself
    zero_pages, fill_pages                    clear whole page groups, or fill them with a word
    pack_pages, unpack_pages                  gather and scatter whole page groups, for transfers
    copy_columns                              copy a page group's committed columns to another (C10.5)
    bf16_from_f32, f32_from_bf16              conversions (NumPy and CuPy have no BF16)
    encode_unrotated                          codec edges, for tests (codecs 6)

Every op allocates nothing, synchronizes nothing and takes its stream.  Everything is checked before the first launch: a
refusal changes nothing.  Arrays are device arrays in NumPy order, C-contiguous; BF16 is uint16 bits:

    q, out (B, W, Hq, D)   k, v (B, W, Hkv, D)   lse (B, W, Hq) float32   workspace uint8, at least `workspace_bytes`
    first_positions, context_lengths, valid_columns, counts, table_rows (B,) int32

What cannot be checked without reading the device stays with the caller: mapped blocks, distinct table rows, positions
below max_context, -1 rows only where no column is live (C14.2, C14.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from pagedkv.devices.protocol import Array, Device, Kernel, ModuleSpec, Stream
from pagedkv.errors import MisuseError
from pagedkv.ops.modules import attention_module, context_module, page_moves_module
from pagedkv.ops.views import PagedKVBatchLayerView, check_aligned, check_array, check_disjoint, describe
from pagedkv.values.attention_shape import AttentionShape, Route, workspace_bytes
from pagedkv.values.planes import PackedPlanes, PageOrder, PlaneGeometry
from pagedkv.values.profiles import HEAD_DIMS_CONTEXT, ROLES, Profile, plane_schema, resolve_profile
from pagedkv.values.quantities import PAGE_TOKENS, ROW_ALIGN_BYTES, ceil_div

ATTENTION_THREADS = 128
APPEND_THREADS = 64
WARP_LANES = 32
LANE_DIMS = 16
LANE_DIMS_BF16 = 8
MOVE_THREADS = 256
FILL_THREADS = 128
SCALE_MAX = 1e38
"""Times log2(e) it is still a finite float32, which is what kernels multiply scores with."""
MOVE_PAGES_THREADS = 128
PAGES_MAX = 1 << 31
"""Page ids are int32 everywhere on a device (C11.1)."""

ATTENTION_KERNELS = ("append_rows", "append_prefix", "encode_unrotated", "causal_attention_decode",
                     "causal_attention_merge", "causal_attention_prefill")
CONTEXT_KERNELS = ("context_attention", "context_attention_merge")
PAGE_MOVE_KERNELS = ("fill_pages", "pack_pages", "unpack_pages", "copy_columns", "bf16_from_f32", "f32_from_bf16")


class Ops:
    """The kernels' wrappers on one device; modules load at first use, or all at once by `prepare`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels: dict[tuple[str, str, int], dict[str, Kernel]] = {}

    def prepare(self, profile: str | Profile, head_dim: int, *, order: PageOrder = "page-major") -> None:
        """Compile and load every kernel of one (profile, head_dim), so that a capture need not.

        Args:
            order: "head-major" adds context attention, which the BF16 planes of a draft have.

        Raises:
            ConfigError: a profile or head_dim outside C4.5, or a head-major one outside context attention's (C14.4).
        """
        self._attention_kernels(resolve_profile(profile), head_dim)
        if order == "head-major":
            self._context_kernels(head_dim)
        self._page_moves()

    # ---- append ----------------------------------------------------------------------------------------------------

    def append(
        self, view: PagedKVBatchLayerView, k: Array, v: Array, first_positions: Array, table_rows: Array, *,
        valid_columns: Array | None = None, stream: Stream,
    ) -> None:
        """Write column j of row b at position first_positions[b] + j, through the view's codec.  (C14.4, C4.4)

        Launches: 1.  Columns at or beyond valid_columns[b] are neither read nor written.

        Raises:
            MisuseError: an array of another dtype, shape or layout, or arrays that overlap.
        """
        self._check_append(view, k, v, first_positions, table_rows, valid_columns, "valid_columns")
        self._launch_append("append_rows", view, k, v, first_positions, table_rows, valid_columns, stream)

    def append_prefix(
        self, view: PagedKVBatchLayerView, k: Array, v: Array, first_positions: Array, counts: Array,
        table_rows: Array, *, stream: Stream,
    ) -> None:
        """Write the first counts[b] columns of each row; no byte of the rejected tail is read or changed.  (C14.4)

        Launches: 1.  counts: (B,) int32 on the device, 0 <= counts[b] <= W.

        Raises:
            MisuseError: an array of another dtype, shape or layout, or arrays that overlap.
        """
        self._check_append(view, k, v, first_positions, table_rows, counts, "counts")
        self._launch_append("append_prefix", view, k, v, first_positions, table_rows, counts, stream)

    # ---- attention -------------------------------------------------------------------------------------------------

    def causal_attention(
        self, view: PagedKVBatchLayerView, q: Array, k: Array, v: Array, out: Array, first_positions: Array,
        table_rows: Array, *, route: Route, valid_columns: Array | None = None, scale: float | None = None,
        lse: Array | None = None, workspace: Array | None, stream: Stream,
    ) -> None:
        """Append k and v, then let query column j of row b, at position p, see [0, p].  (C14.4)

        Launches: 2, or 3 where decode spans several key groups.  Inert columns write nothing to the cache and give
        exact +0 (lse -infinity).  `out` is overwritten completely.

        Args:
            route: "decode" (any B, W 1 to 16) or "prefill" (B = 1, any W); named by the unit, never inferred.
            scale: multiplies dot(q, k); None is D ** -0.5.
            lse: receives the natural logarithm of the softmax denominator, to about 1e-6.
            workspace: `workspace_bytes` of the call's AttentionShape; None where that is 0.

        Raises:
            MisuseError: an array of another dtype, shape or layout, arrays that overlap, a workspace that is too small,
                W or B outside the route, or a scale that is not finite.
        """
        shape, factor = self._check_causal(view, q, out, first_positions, table_rows, route, valid_columns, scale, lse,
                                           workspace, (("k", k), ("v", v)))
        self._check_append(view, k, v, first_positions, table_rows, valid_columns, "valid_columns")
        self._launch_append("append_rows", view, k, v, first_positions, table_rows, valid_columns, stream)
        self._launch_attention(shape, view, q, out, first_positions, table_rows, valid_columns, factor, lse, workspace,
                               stream)

    def causal_attention_cached(
        self, view: PagedKVBatchLayerView, q: Array, out: Array, first_positions: Array, table_rows: Array, *,
        route: Route, valid_columns: Array | None = None, scale: float | None = None, lse: Array | None = None,
        workspace: Array | None, stream: Stream,
    ) -> None:
        """Attend as `causal_attention` does, over what the cache holds; no byte of it changes.  (C14.4)

        Launches: 1, or 2 where decode spans several key groups.

        Raises:
            MisuseError: as `causal_attention`.
        """
        shape, factor = self._check_causal(view, q, out, first_positions, table_rows, route, valid_columns, scale, lse,
                                           workspace, ())
        self._launch_attention(shape, view, q, out, first_positions, table_rows, valid_columns, factor, lse, workspace,
                               stream)

    def context_attention(
        self, view: PagedKVBatchLayerView, q: Array, k: Array, v: Array, out: Array, context_lengths: Array,
        table_rows: Array, *, valid_columns: Array | None = None, scale: float | None = None, lse: Array | None = None,
        workspace: Array | None, stream: Stream,
    ) -> None:
        """Let each live column of row b see positions [0, context_lengths[b]) and every live row of k, v.  (C14.4)

        Launches: 1, or 2 where max_context spans several key groups.  Non-causal; no byte of the cache changes, and k,
        v are stored nowhere.  Inert columns give exact +0 (lse -infinity), and their inputs are not read.

        Args:
            view: of a draft pool: head-major, bf16, D 64 or 128.
            q, k, v: W from 1 to 16 columns; k and v are the temporary rows.
            context_lengths: (B,) int32 on the device, 0 <= n_b <= max_context; where 0, no table entry is read.
            scale, lse: as of `causal_attention`.
            workspace: `workspace_bytes` of the decode AttentionShape of the call; None where that is 0.

        Raises:
            MisuseError: a view that is not a draft pool's; else as `causal_attention`.
        """
        _check_draft_view(view)
        shape, factor = self._check_attention(view, q, out, ("context_lengths", context_lengths), table_rows, "decode",
                                              valid_columns, scale, lse, workspace, (("k", k), ("v", v)))
        kernels = self._context_kernels(view.head_dim)
        arguments = (
            q, k, v, out, lse, *view.code_arguments, view.block_table, np.int32(view.block_table.shape[1]),
            context_lengths, table_rows, valid_columns, *_attention_numbers(shape, factor, workspace),
        )
        self._launch_split(kernels["context_attention"], kernels["context_attention_merge"], shape, arguments, stream)

    # ---- pages and conversions -------------------------------------------------------------------------------------

    def zero_pages(self, planes: Sequence[tuple[Array, PlaneGeometry]], page_ids: Array, *, stream: Stream) -> None:
        """Clear every byte of the listed page groups in every plane given.  (C14.4)

        Launches: one per plane.  page_ids: (n,) int32 on the device, 0 <= id < N, trusted; n = 0 does nothing.

        Raises:
            MisuseError: a plane that is not of its geometry, or page ids of another form.
        """
        self.fill_pages(planes, page_ids, [0] * len(planes), stream=stream)

    def fill_pages(
        self, planes: Sequence[tuple[Array, PlaneGeometry]], page_ids: Array, words: Sequence[int], *, stream: Stream
    ) -> None:
        """Write words[i] over every four bytes of the listed page groups in plane i.  (C14.4)

        Launches: one per plane.  page_ids: (n,) int32 on the device, 0 <= id < N, trusted; n = 0 does nothing.

        Args:
            words: one 32-bit pattern per plane, 0 to 2^32 - 1.

        Raises:
            MisuseError: a plane that is not of its geometry, page ids of another form, or words that do not fit.
        """
        check_array("the page ids", page_ids, np.int32, (None,), "C14.4")
        for plane, geometry in planes:
            _check_plane(plane, geometry)
        if len(words) != len(planes) or any(not 0 <= word < 1 << 32 for word in words):
            raise MisuseError("the words to fill pages with", expected=f"{len(planes)} numbers of 32 bits",
                              got=repr(list(words)), remedy="pass one pattern per plane", clause="C14.4")
        count = int(page_ids.shape[0])
        if not count:
            return
        kernel = self._page_moves()["fill_pages"]
        for (plane, geometry), word in zip(planes, words, strict=True):
            arguments = (plane, page_ids, np.int64(geometry.head_stride_bytes), np.int64(geometry.page_stride_bytes),
                         np.int32(PAGE_TOKENS * geometry.row_bytes), np.uint32(word))
            kernel.launch((count, geometry.kv_heads, 1), (FILL_THREADS, 1, 1), arguments, stream)

    def pack_pages(
        self, planes: Sequence[tuple[Array, PlaneGeometry]], page_ids: Array, packed: Array, *, stream: Stream
    ) -> None:
        """Gather the listed page groups of every plane given, in listed order.  (C14.4, C8.3)

        Launches: one per plane.

        Args:
            page_ids: (n,) int32 on the device, 0 <= id < N, trusted; n = 0 does nothing.
            packed: uint8 on the device, at least `PackedPlanes(planes, n).total_bytes`, laid out as that says.

        Raises:
            MisuseError: a plane that is not of its geometry, page ids of another form, or a packed array that is too
                small or overlaps another.
        """
        self._move_pages("pack_pages", planes, page_ids, packed, stream)

    def unpack_pages(
        self, planes: Sequence[tuple[Array, PlaneGeometry]], page_ids: Array, packed: Array, *, stream: Stream
    ) -> None:
        """Scatter packed page groups to the listed ids in every plane given: the reverse of `pack_pages`.  (C14.4)

        Launches: one per plane.  page_ids are distinct.

        Raises:
            MisuseError: as `pack_pages`.
        """
        self._move_pages("unpack_pages", planes, page_ids, packed, stream)

    def _move_pages(
        self, kernel: str, planes: Sequence[tuple[Array, PlaneGeometry]], page_ids: Array, packed: Array,
        stream: Stream,
    ) -> None:
        check_array("the page ids", page_ids, np.int32, (None,), "C14.4")
        check_array("the packed pages", packed, np.uint8, (None,), "C14.4")
        check_aligned("the packed pages", packed, ROW_ALIGN_BYTES, "C3.10")
        for plane, geometry in planes:
            _check_plane(plane, geometry)
        count = int(page_ids.shape[0])
        if not count:
            return
        layout = PackedPlanes(tuple(geometry for _, geometry in planes), count)
        if packed.nbytes < layout.total_bytes:
            raise MisuseError("the packed pages", expected=f"at least {layout.total_bytes} bytes for {count} pages",
                              got=f"{packed.nbytes} bytes", remedy="size it with PackedPlanes.total_bytes",
                              clause="C14.4")
        named = [(f"{geometry.role} {geometry.layer}", plane) for plane, geometry in planes]
        check_disjoint((("the packed pages", packed), ("the page ids", page_ids), *named), writes={"the packed pages"}
                       if kernel == "pack_pages" else {name for name, _ in named})
        launch = self._page_moves()[kernel].launch
        for (plane, geometry), packed_geometry, offset in zip(planes, layout.planes, layout.offsets_bytes, strict=True):
            piece = packed[offset : offset + packed_geometry.span_bytes]
            arguments = (
                *((piece, plane) if kernel == "pack_pages" else (plane, piece)), page_ids,
                np.int64(packed_geometry.head_stride_bytes), np.int64(packed_geometry.page_stride_bytes),
                np.int64(geometry.head_stride_bytes), np.int64(geometry.page_stride_bytes),
                np.int32(PAGE_TOKENS * geometry.row_bytes),
            )
            launch((count, geometry.kv_heads, 1), (MOVE_PAGES_THREADS, 1, 1), arguments, stream)

    def copy_columns(
        self, planes: Sequence[tuple[Array, PlaneGeometry]], source: int, destination: int, columns: int, *,
        stream: Stream,
    ) -> None:
        """Copy the first columns of every head of one page group to another, in every plane given.  (C10.5, C14.4)

        What a private tail needs of the page it is copied from: the rest of the destination keeps its bytes.

        Launches: one per plane.  The three numbers are frozen at capture.

        Args:
            source: page id, 0 <= source < N of every plane; nothing of it changes.
            destination: another page id, 0 <= destination < N of every plane.
            columns: committed columns, 1 to 64; behind them nothing is read or written.

        Raises:
            MisuseError: a number outside its range, one page id for both, a plane that is not of its geometry, or
                planes that overlap.
        """
        for plane, geometry in planes:
            _check_plane(plane, geometry)
        pages = min((geometry.pages for _, geometry in planes), default=PAGES_MAX)
        source = _checked_integer("the source page of copied columns", source, 0, pages - 1)
        destination = _checked_integer("the destination page of copied columns", destination, 0, pages - 1)
        columns = _checked_integer("the number of copied columns", columns, 1, PAGE_TOKENS)
        if source == destination:
            raise MisuseError("the destination page of copied columns", expected=f"another page than source {source}",
                              got=str(destination), remedy="copy into a page of its own", clause="C10.5")
        check_disjoint([(f"plane {geometry.role} of layer {geometry.layer}", plane) for plane, geometry in planes],
                       writes=None)
        kernel = self._page_moves()["copy_columns"]
        for plane, geometry in planes:
            arguments = (plane, np.int32(source), np.int32(destination), np.int64(geometry.head_stride_bytes),
                         np.int64(geometry.page_stride_bytes), np.int32(columns * geometry.row_bytes))
            kernel.launch((geometry.kv_heads, 1, 1), (MOVE_PAGES_THREADS, 1, 1), arguments, stream)

    def bf16_from_f32(self, destination: Array, source: Array, *, stream: Stream) -> None:
        """Round float32 to BF16 bits (uint16): RNE; a NaN keeps sign and upper payload and becomes quiet.  (C14.4)

        Launches: 1.

        Raises:
            MisuseError: another dtype, shapes that differ, or arrays that overlap.
        """
        self._convert("bf16_from_f32", destination, np.uint16, source, np.float32, stream)

    def f32_from_bf16(self, destination: Array, source: Array, *, stream: Stream) -> None:
        """Promote BF16 bits (uint16) to float32, exactly.  (C14.4)

        Launches: 1.

        Raises:
            MisuseError: another dtype, shapes that differ, or arrays that overlap.
        """
        self._convert("f32_from_bf16", destination, np.float32, source, np.uint16, stream)

    def encode_unrotated(
        self, profile: str | Profile, kind: Literal["k", "v"], rows: Array, codes: Array, scales: Array, *,
        stream: Stream,
    ) -> None:
        """Encode rows of values that are taken as rotated already: the entry of codec tests.  (codecs 6)

        Launches: 1.  rows: (N, D) float32; codes: (N, code bytes) uint8; scales: (N, scale bytes) uint8.

        Raises:
            ConfigError: a profile or head_dim outside C4.5.
            MisuseError: bf16, which has no codec (codecs 2), another kind, or arrays of another form.
        """
        resolved = resolve_profile(profile)
        if not resolved.is_quantized or kind not in ("k", "v"):
            raise MisuseError("encoding without rotation", expected="a quantized profile and kind 'k' or 'v'",
                              got=f"{resolved.name}, {kind!r}", remedy="bf16 rows are copied bit for bit",
                              clause="codecs 6")
        check_array("the rows", rows, np.float32, (None, None), "codecs 6")
        count, head_dim = (int(extent) for extent in rows.shape)
        row_bytes: dict[str, int] = {plane.role: plane.row_bytes for plane in plane_schema(resolved, head_dim)}
        check_array("the codes", codes, np.uint8, (count, row_bytes[f"{kind}_code"]), "codecs 6")
        check_array("the scales", scales, np.uint8, (count, row_bytes[f"{kind}_scale"]), "codecs 6")
        named = (("the rows", rows), ("the codes", codes), ("the scales", scales))
        for name, array in named:
            check_aligned(name, array, ROW_ALIGN_BYTES, "C3.10")
        check_disjoint(named, writes={"the codes", "the scales"})
        if not count:
            return
        warp_rows = WARP_LANES // (head_dim // LANE_DIMS)
        arguments = (rows, codes, scales, np.int64(count), np.int32(kind == "v"))
        kernel = self._attention_kernels(resolved, head_dim)["encode_unrotated"]
        kernel.launch((ceil_div(count, warp_rows), 1, 1), (WARP_LANES, 1, 1), arguments, stream)

    # ---- kernels ---------------------------------------------------------------------------------------------------

    def _attention_kernels(self, profile: Profile, head_dim: int) -> dict[str, Kernel]:
        return self._loaded(("attention", profile.name, head_dim), lambda: attention_module(profile, head_dim),
                            ATTENTION_KERNELS)

    def _context_kernels(self, head_dim: int) -> dict[str, Kernel]:
        return self._loaded(("context", "bf16", head_dim), lambda: context_module(head_dim), CONTEXT_KERNELS)

    def _page_moves(self) -> dict[str, Kernel]:
        return self._loaded(("page moves", "", 0), page_moves_module, PAGE_MOVE_KERNELS)

    def _loaded(
        self, key: tuple[str, str, int], spec: Callable[[], ModuleSpec], names: Sequence[str]
    ) -> dict[str, Kernel]:
        """Return kernels by name, loaded at the first use of `key`; a hit costs one look-up."""
        kernels = self._kernels.get(key)
        if kernels is None:
            module = self._device.load(spec())
            kernels = self._kernels[key] = {name: module.kernel(name) for name in names}
        return kernels

    def _launch_append(
        self, kernel: str, view: PagedKVBatchLayerView, k: Array, v: Array, first_positions: Array,
        table_rows: Array, live: Array | None, stream: Stream,
    ) -> None:
        batch, width, kv_heads, head_dim = k.shape
        row_lanes = head_dim // (LANE_DIMS if view.profile.is_quantized else LANE_DIMS_BF16)
        blocks = ceil_div(batch * width * kv_heads, WARP_LANES // row_lanes)
        arguments = (
            k, v, *view.arguments, view.block_table, np.int32(view.block_table.shape[1]), first_positions, table_rows,
            live, np.int32(batch), np.int32(width), np.int32(kv_heads),
        )
        launch = self._attention_kernels(view.profile, head_dim)[kernel]
        launch.launch((blocks, 1, 1), (APPEND_THREADS, 1, 1), arguments, stream)

    def _launch_attention(
        self, shape: AttentionShape, view: PagedKVBatchLayerView, q: Array, out: Array, first_positions: Array,
        table_rows: Array, valid_columns: Array | None, scale: float, lse: Array | None, workspace: Array | None,
        stream: Stream,
    ) -> None:
        kernels = self._attention_kernels(view.profile, view.head_dim)
        arguments = (
            q, out, lse, *view.arguments, view.block_table, np.int32(view.block_table.shape[1]), first_positions,
            table_rows, valid_columns, *_attention_numbers(shape, scale, workspace),
        )
        if shape.route == "prefill":
            grid = (shape.tiles, shape.kv_heads, 1)
            kernels["causal_attention_prefill"].launch(grid, (ATTENTION_THREADS, 1, 1), arguments, stream)
            return
        self._launch_split(kernels["causal_attention_decode"], kernels["causal_attention_merge"], shape, arguments,
                           stream)

    def _launch_split(
        self, attend: Kernel, merge: Kernel, shape: AttentionShape, arguments: tuple[object, ...], stream: Stream
    ) -> None:
        """Launch one block for each tile and key group, and the merge where there are several groups."""
        block = (ATTENTION_THREADS, 1, 1)
        attend.launch((shape.groups * shape.tiles, shape.kv_heads, shape.batch), block, arguments, stream)
        if shape.groups > 1:
            merge.launch((shape.tiles, shape.kv_heads, shape.batch), block, arguments, stream)

    # ---- refusals --------------------------------------------------------------------------------------------------

    def _check_append(
        self, view: PagedKVBatchLayerView, k: Array, v: Array, first_positions: Array, table_rows: Array,
        live: Array | None, live_name: str,
    ) -> None:
        _check_view(view)
        check_array("k", k, np.uint16, (None, None, view.kv_heads, view.head_dim), "C14.4")
        batch, width = int(k.shape[0]), int(k.shape[1])
        if batch < 1 or width < 1:
            raise MisuseError("k", expected="at least one row and one column", got=describe(k),
                              remedy="skip the call when there is nothing to append", clause="C14.4")
        check_array("v", v, np.uint16, k.shape, "C14.4")
        selectors = _check_selectors(batch, ("first_positions", first_positions), table_rows, (live_name, live))
        for name, array in (("k", k), ("v", v)):
            check_aligned(name, array, ROW_ALIGN_BYTES, "C3.10")
        if live is None and width > view.max_context:
            raise _too_wide(width, view.max_context)
        check_disjoint((("k", k), ("v", v), *selectors, *view.named_arrays),
                       writes=set(ROLES))

    def _check_causal(
        self, view: PagedKVBatchLayerView, q: Array, out: Array, first_positions: Array, table_rows: Array,
        route: Route, valid_columns: Array | None, scale: float | None, lse: Array | None, workspace: Array | None,
        rows: Sequence[tuple[str, Array]],
    ) -> tuple[AttentionShape, float]:
        _check_view(view)
        checked = self._check_attention(view, q, out, ("first_positions", first_positions), table_rows, route,
                                        valid_columns, scale, lse, workspace, rows)
        if valid_columns is None and checked[0].width > view.max_context:
            raise _too_wide(checked[0].width, view.max_context)
        return checked

    def _check_attention(
        self, view: PagedKVBatchLayerView, q: Array, out: Array, positions: tuple[str, Array], table_rows: Array,
        route: Route, valid_columns: Array | None, scale: float | None, lse: Array | None, workspace: Array | None,
        rows: Sequence[tuple[str, Array]],
    ) -> tuple[AttentionShape, float]:
        check_array("q", q, np.uint16, (None, None, None, view.head_dim), "C14.4")
        batch, width, query_heads = (int(extent) for extent in q.shape[:3])
        shape = AttentionShape(route, batch, width, query_heads, view.kv_heads, view.head_dim, view.max_context)
        check_array("out", out, np.uint16, q.shape, "C14.4")
        for name, array in rows:
            check_array(name, array, np.uint16, (batch, width, view.kv_heads, view.head_dim), "C14.4")
        selectors = _check_selectors(batch, positions, table_rows, ("valid_columns", valid_columns))
        written: list[tuple[str, Array]] = [("out", out)]
        if lse is not None:
            check_array("lse", lse, np.float32, (batch, width, query_heads), "C14.4")
            written.append(("lse", lse))
        needed_bytes = workspace_bytes(shape)
        if workspace is not None:
            check_array("the workspace", workspace, np.uint8, (None,), "C14.4")
            check_aligned("the workspace", workspace, ROW_ALIGN_BYTES, "C3.10")
            written.append(("the workspace", workspace))
        given_bytes = 0 if workspace is None else int(workspace.nbytes)
        if given_bytes < needed_bytes:
            raise MisuseError("the workspace", expected=f"at least {needed_bytes} bytes", got=f"{given_bytes} bytes",
                              remedy="size it with workspace_bytes", clause="C14.4", needed_bytes=needed_bytes)
        for name, array in (("q", q), ("out", out), *rows):
            check_aligned(name, array, ROW_ALIGN_BYTES, "C3.10")
        check_disjoint((("q", q), *rows, *written, *selectors, *view.named_arrays),
                       writes={name for name, _ in written})
        return shape, _checked_scale(scale, view.head_dim)

    def _convert(
        self, kernel: str, destination: Array, destination_dtype: type[np.generic], source: Array,
        source_dtype: type[np.generic], stream: Stream,
    ) -> None:
        check_array("the source", source, source_dtype, (None,) * getattr(source, "ndim", 1), "C14.4")
        check_array("the destination", destination, destination_dtype, source.shape, "C14.4")
        named = (("the destination", destination), ("the source", source))
        check_disjoint(named, writes={"the destination"})
        count = int(source.size)
        if count:
            grid = (ceil_div(count, MOVE_THREADS), 1, 1)
            arguments = (destination, source, np.int64(count))
            self._page_moves()[kernel].launch(grid, (MOVE_THREADS, 1, 1), arguments, stream)


def _check_plane(plane: Array, geometry: PlaneGeometry) -> None:
    name = f"plane {geometry.role} of layer {geometry.layer}"
    check_array(name, plane, geometry.dtype, geometry.shape, "C14.2")
    check_aligned(name, plane, ROW_ALIGN_BYTES, "C3.10")


def _attention_numbers(shape: AttentionShape, scale: float, workspace: Array | None) -> tuple[object, ...]:
    """Return the last arguments of every attention kernel: W, Hkv, group, scale in base 2, workspace, key groups."""
    is_split = shape.route == "decode" and shape.groups > 1
    return (
        np.int32(shape.width), np.int32(shape.kv_heads), np.int32(shape.query_heads // shape.kv_heads),
        np.float32(scale * math.log2(math.e)), workspace if is_split else None, np.int32(shape.groups),
    )


def _check_selectors(
    batch: int, positions: tuple[str, Array], table_rows: Array, live: tuple[str, Array | None]
) -> list[tuple[str, Any]]:
    selectors = [positions, ("table_rows", table_rows)]
    if live[1] is not None:
        selectors.append(live)
    for name, array in selectors:
        check_array(name, array, np.int32, (batch,), "C14.4")
    return selectors


def _too_wide(width: int, max_context: int) -> MisuseError:
    return MisuseError("a dense call", expected=f"at most max_context = {max_context} columns", got=f"{width} columns",
                       remedy="pass valid_columns, or fewer columns", clause="C14.2")


def _check_view(view: object) -> None:
    if not isinstance(view, PagedKVBatchLayerView):
        raise MisuseError("the view", expected="a PagedKVBatchLayerView", got=type(view).__name__,
                          remedy="pass store.views[pool][layer], or `batched` of a PagedKVLayerView", clause="C14.1")


def _checked_integer(name: str, value: object, first: int, last: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not first <= value <= last:
        raise MisuseError(name, expected=f"an integer from {first} to {last}", got=repr(value),
                          remedy="take page ids and columns from the ledgers", clause="C10.5")
    return int(value)


def _check_draft_view(view: object) -> None:
    _check_view(view)
    assert isinstance(view, PagedKVBatchLayerView)
    if view.order != "head-major" or view.profile.is_quantized or view.head_dim not in HEAD_DIMS_CONTEXT:
        raise MisuseError("the view of context attention", expected="head-major bf16 planes of head_dim 64 or 128",
                          got=f"{view.order} {view.profile.name} planes of head_dim {view.head_dim}",
                          remedy="pass a layer of the pool draft; other pools have causal_attention", clause="C14.4")


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return math.pow(head_dim, -0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= SCALE_MAX:
        raise MisuseError("the scale", expected=f"a number from {-SCALE_MAX:g} to {SCALE_MAX:g}, or None for D ** -0.5",
                          got=repr(scale), remedy="pass a Python float", clause="C14.4")
    return float(scale)
