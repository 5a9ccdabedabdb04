"""Mistakes to plant in kernel sources: a few changed words each, and the named test that must fail for it.

A source that is rewritten makes its mistake fail to plant, and the message says so: plant it anew in the new text.
Nothing is written to `cuda_src`: the changed module is compiled from one flat text, and a device that stands in for
the real one hands out its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pagedkv.devices.protocol import ModuleSpec
from pagedkv.tools.kernels.report import read_headers
from tests.host.codec_cases import QUANTIZED_SIDES
from tests.kernels import (
    test_append,
    test_attention_invariance,
    test_causal_attention,
    test_context_attention,
    test_copy_columns,
    test_scenarios,
)
from tests.kernels.kernel_texts import flat_text

_EXPORT = re.compile(r"^PK_EXPORT\((\w+)\)$", re.MULTILINE)
_COMPILED_ALREADY = frozenset(("kernels/runtime.cuh", "cpu_device/runtime.h"))
"""Comes before the text of every module."""


@dataclass(frozen=True)
class Planted:
    """In `file`, each old text becomes the new one; `source` is the kernel source that is compiled with it.

    `caught_by` is a test, `arguments` what it takes besides the device, `rng` and `ops`.  Under the emulator the
    sanitizer reports one of `kinds`, where any are named, in the same test.  `order` is that of lanes, warps and blocks
    in which the mistake shows at once.
    """

    what: str
    file: str
    source: str
    edits: tuple[tuple[str, str], ...]
    caught_by: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    order: Literal["ascending", "descending"] = "ascending"

    def sources(self) -> dict[str, str]:
        """Return every kernel file by name, this one with the mistake."""
        headers = read_headers()
        text = headers[self.file]
        for old, new in self.edits:
            assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {self.file}: plant it anew"
            text = text.replace(old, new)
        return {**headers, self.file: text}


def control(source: str, caught_by: Callable[..., None], **arguments: Any) -> Planted:
    """Return no mistake at all: its test passes."""
    return Planted("nothing", source, source, (), caught_by, arguments)


class PlantedDevice:
    """The real device, except that kernels of one source file come with the mistake."""

    def __init__(self, device: Any, planted: Planted) -> None:
        self._device = device
        self._planted = planted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def load(self, spec: ModuleSpec) -> Any:
        """Load a module; it gives the changed kernels where it has the changed source."""
        module = self._device.load(spec)
        planted = self._planted
        if planted.source not in spec.sources:
            return module
        headers = {name: text for name, text in planted.sources().items() if name not in _COMPILED_ALREADY}
        text = flat_text(f'#include "kernels/runtime.cuh"\n#include "{planted.source}"\n', headers)
        name = f"planted_{re.sub('[^a-z0-9]+', '_', planted.what)}"
        changed = self._device.load(ModuleSpec(name, (), spec.defines, text))
        return _PlantedModule(module, changed, set(_EXPORT.findall(planted.sources()[planted.source])))


@dataclass(frozen=True)
class _PlantedModule:
    module: Any
    changed: Any
    names: set[str]

    def kernel(self, name: str) -> Any:
        return (self.changed if name in self.names else self.module).kernel(name)


APPEND, ATTENTION = "kernels/append.cu", "kernels/causal_attention.cu"
CONTEXT, TILES = "kernels/context_attention.cu", "kernels/attention_tiles.cuh"
MOVES = "kernels/page_moves.cu"
BYTES = test_append.test_an_append_across_a_page_writes_the_codec_bytes_and_no_other
STEP = test_causal_attention.test_a_decode_step_meets_the_criterion
COLUMNS = test_causal_attention.test_several_columns_meet_the_criterion
COPY = test_copy_columns.test_the_columns_arrive_and_no_other_byte_changes
SCALES = {"profile": "fp8-e4m3-row", "head_dim": 64, "order": "page-major"}
VERIFY = {"head_dim": 64, "route": "decode", "width": 6, "position": 17}

ORDER_OF_THREADS = (
    Planted(
        "lanes read their neighbours' maxima too early", "kernels/codec.cuh", APPEND,
        (("warp_words[lane] = value;\n    __syncwarp();", "warp_words[lane] = value;"),),
        BYTES, {"profile": "int8-g64", "head_dim": 64}, frozenset({"uninit-shared", "warp-hazard"}),
    ),
    Planted(
        "a rotation reads before its row is there", "kernels/codec.cuh", APPEND,
        (("row[piece * kLaneDims + i] = x[i];\n    __syncwarp();", "row[piece * kLaneDims + i] = x[i];"),),
        BYTES, {"profile": "fp8-e4m3-row", "head_dim": 64}, frozenset({"uninit-shared", "warp-hazard"}),
    ),
    Planted(
        "weights are used before all lanes stored theirs", TILES, ATTENTION,
        (("o[r] = multiply(o[r], rescale[r]);\n    __syncwarp();", "o[r] = multiply(o[r], rescale[r]);"),),
        STEP, {"profile": "bf16", "head_dim": 64, "position": 64}, frozenset({"uninit-shared", "warp-hazard"}),
    ),
    Planted(
        "streams are merged before they ended", ATTENTION, ATTENTION,
        (("        __syncthreads();\n        if (row < tile.live_rows) {", "        if (row < tile.live_rows) {"),),
        STEP, {"profile": "bf16", "head_dim": 64, "position": 64},
        frozenset({"uninit-shared", "race-read-after-write", "race-write-after-read"}),
    ),
    Planted(
        "queries are read before they are loaded", ATTENTION, ATTENTION,
        (("load_queries(op, tile, queries, row_positions);\n    __syncthreads();",
          "load_queries(op, tile, queries, row_positions);"),),
        STEP, {"profile": "bf16", "head_dim": 64, "position": 64},
        frozenset({"uninit-shared", "race-read-after-write", "race-write-after-read"}),
    ),
)  # fmt: skip

PLACES = (
    Planted(
        "rows are written one further", APPEND, APPEND,
        (("place.offset = position & kPageMask;", "place.offset = (position + 1) & kPageMask;"),),
        BYTES, {"profile": "bf16", "head_dim": 64},
    ),
    Planted(
        "a row without a table is looked up", APPEND, APPEND,
        (("if (table_row < 0) return place;", ""),),
        test_append.test_an_entry_without_a_table_row_writes_nothing, {}, frozenset({"oob-global", "uninit-global"}),
    ),
    Planted(
        "rejected columns are written", APPEND, APPEND,
        (("if (live_columns != nullptr && column >= live_columns[entry]) return place;", ""),),
        test_append.test_a_prefix_append_never_touches_the_rejected_tail, {"profile": "bf16", "order": "page-major"},
    ),
    Planted(
        "every entry reads the first table row", TILES, ATTENTION,
        (("op.table_rows[tile.entry]) * op.table_width", "op.table_rows[0]) * op.table_width"),),
        test_attention_invariance.test_a_batch_equals_its_rows_alone, {"profile": "bf16"},
    ),
    Planted(
        "a page offset has 32 bits", "kernels/page_address.cuh", ATTENTION,
        (("page * plane.page_bytes +", "static_cast<int>(page * plane.page_bytes) +"),),
        test_scenarios.test_pages_behind_4_gib_are_addressed, {"order": "page-major"},
    ),
    Planted(
        "a page offset of an append has 32 bits", "kernels/page_address.cuh", APPEND,
        (("page * plane.page_bytes +", "static_cast<int>(page * plane.page_bytes) +"),),
        test_scenarios.test_pages_behind_4_gib_are_addressed, {"order": "page-major"},
    ),
)  # fmt: skip

COPIES = (
    Planted(
        "a whole page is copied", MOVES, MOVES,
        (("at < word_bytes;", "at < head_bytes;"),), COPY, {**SCALES, "profile": "bf16"},
    ),
    Planted(
        "columns are rounded down to words", MOVES, MOVES,
        (("if (rest < column_bytes) target[rest] = from[rest];", ""),), COPY, SCALES,
    ),
    Planted(
        "columns are rounded up to words", MOVES, MOVES,
        (("word_bytes = column_bytes & ~15;", "word_bytes = (column_bytes + 15) & ~15;"),), COPY, SCALES,
    ),
    Planted(
        "the rest is one byte longer", MOVES, MOVES,
        (("if (rest < column_bytes)", "if (rest <= column_bytes)"),), COPY, SCALES,
    ),
    Planted(
        "heads of the destination stand as close as their columns", MOVES, MOVES,
        (("destination * page_bytes + blockIdx.x * head_bytes;",
          "destination * page_bytes + blockIdx.x * column_bytes;"),),
        COPY, SCALES,
    ),
    Planted(
        "every head copies the first", MOVES, MOVES,
        (("plane + source * page_bytes + blockIdx.x * head_bytes;", "plane + source * page_bytes;"),),
        COPY, {**SCALES, "order": "head-major"},
    ),
    Planted(
        "source and destination are exchanged", MOVES, MOVES,
        (("from = plane + source *", "from = plane + destination *"),
         ("target = plane + destination *", "target = plane + source *")),
        COPY, SCALES,
    ),
    Planted(
        "a copied page has a 32-bit offset", MOVES, MOVES,
        (("plane + source * page_bytes", "plane + static_cast<int32_t>(source * page_bytes)"),),
        test_copy_columns.test_columns_behind_4_gib_are_copied, {"order": "page-major"},
    ),
    Planted(
        "a copied head has a 32-bit offset", MOVES, MOVES,
        (("destination * page_bytes + blockIdx.x * head_bytes",
          "destination * page_bytes + static_cast<int32_t>(blockIdx.x * head_bytes)"),),
        test_copy_columns.test_columns_behind_4_gib_are_copied, {"order": "head-major"},
    ),
)  # fmt: skip

NUMBERS = (
    Planted(
        "a key is masked by a zero weight", TILES, ATTENTION,
        (("if (page_begin + key <= row_positions[r]) o[r] = fused(weights[key * kRows + r], value, o[r]);",
          "o[r] = fused(page_begin + key <= row_positions[r] ? weights[key * kRows + r] : 0.0f, value, o[r]);"),),
        test_causal_attention.test_nan_in_a_later_column_does_not_reach_an_earlier_one,
        {"profile": "bf16", "route": "decode"},
    ),
    Planted(
        "a column does not see itself", TILES, ATTENTION,
        (("if (page_begin + key > row_positions[r]) scores", "if (page_begin + key >= row_positions[r]) scores"),),
        COLUMNS, {**VERIFY, "profile": "bf16"},
    ),
    Planted(
        "the last key of a tile is left out", TILES, ATTENTION,
        (("tile.last_position - page_begin + 1;", "tile.last_position - page_begin;"),),
        STEP, {"profile": "bf16", "head_dim": 64, "position": 65},
    ),
    Planted(
        "one key too many is seen", TILES, ATTENTION,
        (("all_left = first_position - page_begin + 1;", "all_left = first_position - page_begin + 2;"),
         ("any_left = tile.last_position - page_begin + 1;", "any_left = tile.last_position - page_begin + 2;")),
        STEP, {"profile": "bf16", "head_dim": 64, "position": 65},
    ),
    Planted(
        "scales are shifted by one group", "kernels/codec.cuh", ATTENTION,
        (("scale_row[dim / 16]", "scale_row[(dim / 16 + 1) % (kHeadDim / 16)]"),),
        STEP, {"profile": "nvfp4-g16", "head_dim": 64, "position": 65},
    ),
    Planted(
        "nibbles are swapped", "kernels/codec.cuh", APPEND,
        (("words[i / 8] |= code << (4 * (i % 8));", "words[i / 8] |= code << (4 * ((i ^ 1) % 8));"),),
        BYTES, {"profile": "nvfp4-g16", "head_dim": 64},
    ),
    Planted(
        "a maximum drops nan", "kernels/codec.cuh", APPEND,
        (("largest_bits = magnitude > largest_bits ? magnitude : largest_bits;",
          "largest_bits = __float_as_uint(fmaxf(__uint_as_float(magnitude), __uint_as_float(largest_bits)));"),),
        test_append.test_encoding_without_rotation_equals_the_codec, {"side": QUANTIZED_SIDES[0], "head_dim": 64},
    ),
    Planted(
        "a reciprocal stands for a quotient", "kernels/codec.cuh", APPEND,
        (("float_to_e2m1(__fdiv_rn(x[i], scale))", "float_to_e2m1(__fmul_rn(x[i], __fdiv_rn(1.0f, scale)))"),),
        test_append.test_encoding_without_rotation_equals_the_codec, {"side": ("nvfp4-g16", "k"), "head_dim": 64},
    ),
    Planted(
        "groups are merged from the right", TILES, ATTENTION,
        (("for (int group = 0; group <= last_group; ++group) {", "for (int group = last_group; group >= 0; --group) {"),
         ("        if (group == 0) {\n            share = next;",
          "        if (group == last_group) {\n            share = next;")),
        test_attention_invariance.test_both_routes_have_one_arithmetic, {"profile": "bf16"},
    ),
    Planted(
        "rows of a tile share one maximum", TILES, ATTENTION,
        (("for (int r = 0; r < kRows; ++r) new_max[r] = page_max[r];",
          "for (int r = 0; r < kRows; ++r) new_max[r] = page_max[0];"),),
        test_attention_invariance.test_columns_of_one_call_equal_single_steps, {"profile": "bf16", "first": 60},
    ),
    Planted(
        "an empty group counts as a score of zero", TILES, ATTENTION,
        (("sums.m = same8(-infinity());", "sums.m = same8(0.0f);"),),
        test_scenarios.test_scores_far_below_zero_keep_their_softmax, {"route": "decode"},
    ),
)  # fmt: skip

CRITERION = test_context_attention.test_a_draft_block_meets_the_criterion
INERT = test_context_attention.test_inert_columns_are_zero_and_not_read
LONG = test_context_attention.test_contexts_of_several_key_groups_meet_the_criterion

CONTEXT_BLOCKS = (
    Planted(
        "the context's streams are merged before they ended", CONTEXT, CONTEXT,
        (("        __syncthreads();\n        if (row < tile.live_rows) share = merge_streams<kStreams>",
          "        if (row < tile.live_rows) share = merge_streams<kStreams>"),),
        CRITERION, {"head_dim": 64, "context": 65},
        frozenset({"uninit-shared", "race-read-after-write", "race-write-after-read"}),
    ),
    Planted(
        "temporary rows overwrite the context's sums", CONTEXT, CONTEXT,
        (("        __syncthreads();  // the temporary rows use the same shared floats\n", ""),),
        CRITERION, {"head_dim": 64, "context": 65}, frozenset({"race-read-after-write", "race-write-after-read"}),
        order="descending",
    ),
    Planted(
        "temporary rows are folded before they ended", CONTEXT, CONTEXT,
        (("        store_stream<kRows>(stream_sums, slice, sums, lane);\n    }\n    __syncthreads();",
          "        store_stream<kRows>(stream_sums, slice, sums, lane);\n    }"),),
        CRITERION, {"head_dim": 64, "context": 0},
        frozenset({"uninit-shared", "race-read-after-write", "race-write-after-read"}),
    ),
    Planted(
        "a block is causal", TILES, CONTEXT,
        (("result.column_step = kIsCausal ? 1 : 0;", "result.column_step = 1;"),),
        CRITERION, {"head_dim": 64, "context": 65},
    ),
    Planted(
        "the position at the frontier is seen", TILES, CONTEXT,
        (("op.positions[result.entry] - (kIsCausal ? 0 : 1)", "op.positions[result.entry]"),),
        test_context_attention.test_stale_bytes_behind_the_frontier_have_no_effect, {"context": 70},
    ),
    Planted(
        "dead temporary rows are seen", CONTEXT, CONTEXT,
        (("const int count = live_columns(op, tile.entry);", "const int count = op.width;"),), INERT,
    ),
    Planted(
        "temporary rows are masked as a causal block", CONTEXT, CONTEXT,
        (("row_positions, 0, count, count, op.scale_log2", "row_positions, 0, 0, count, op.scale_log2"),),
        CRITERION, {"head_dim": 64, "context": 1},
    ),
    Planted(
        "temporary rows of one entry serve all", CONTEXT, CONTEXT,
        (("static_cast<int64_t>(tile.entry) * op.width * op.kv_heads + tile.head", "tile.head"),),
        test_context_attention.test_rows_may_stand_in_any_order,
    ),
    Planted(
        "temporary rows of one head serve all", CONTEXT, CONTEXT,
        (("static_cast<int64_t>(tile.entry) * op.width * op.kv_heads + tile.head",
          "static_cast<int64_t>(tile.entry) * op.width * op.kv_heads"),),
        CRITERION, {"head_dim": 64, "context": 0},
    ),
    Planted(
        "temporary rows are left out behind a context", CONTEXT, CONTEXT,
        (("        fold(share, temporary);\n", ""),), CRITERION, {"head_dim": 64, "context": 64},
    ),
    Planted(
        "the context is left out behind temporary rows", CONTEXT, CONTEXT,
        (("        share = context;\n        fold(share, temporary);\n", ""),),
        CRITERION, {"head_dim": 64, "context": 64},
    ),
    Planted(
        "the last key group is left out", CONTEXT, CONTEXT,
        (("const int last_group = group_of(tile.last_position);",
          "const int last_group = group_of(tile.last_position) - 1;"),),
        LONG, {"context": 1025},
    ),
    Planted(
        "a context that ends with a key group loses it", CONTEXT, CONTEXT,
        (("op.positions[blockIdx.z] <= group_start(group)", "op.positions[blockIdx.z] <= group_start(group) + 1"),),
        LONG, {"context": 513},
    ),
    Planted(
        "inert rows are left as they are", CONTEXT, CONTEXT,
        (("    if (group == 0 && tile.live_rows < tile.rows) store_inert_rows(op, tile);\n", ""),), INERT,
    ),
    Planted(
        "a maximum is that of the context alone", TILES, CONTEXT,
        (("const float m = larger(next.m, share.m);", "const float m = share.m;"),),
        test_context_attention.test_far_apart_scores_keep_their_softmax, {"context_score": -100.0, "own_score": 100.0},
    ),
    Planted(
        "a head offset has 32 bits", "kernels/page_address.cuh", CONTEXT,
        (("+ head * plane.head_bytes", "+ static_cast<int>(head * plane.head_bytes)"),),
        test_context_attention.test_pages_and_heads_behind_4_gib_are_addressed,
    ),
)  # fmt: skip

PLANTED = (*ORDER_OF_THREADS, *PLACES, *COPIES, *NUMBERS, *CONTEXT_BLOCKS)
CONTROLS = (
    control(APPEND, BYTES, profile="nvfp4-g16", head_dim=64),
    control(ATTENTION, STEP, profile="bf16", head_dim=64, position=64),
    control(CONTEXT, CRITERION, head_dim=64, context=65),
    control(MOVES, COPY, **SCALES),
)
