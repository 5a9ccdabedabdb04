"""Mutants of kernel sources and of the wrappers that launch them.

The sanitizer of the emulator sees a missing barrier too, whatever the order of lanes and warps.
"""

from __future__ import annotations

from tests.mutants.mutant import GONE, Catcher, Mutant, emulated, tests

BYTES = "kernels/test_append.py::test_an_append_across_pages_writes_codec_bytes_only"
ENCODING = "kernels/test_append.py::test_unrotated_encoding_equals_the_codec"
STEP = "kernels/test_causal_attention.py::test_decode_steps_meet_the_criterion"
COPY = "kernels/test_copy_columns.py::test_columns_and_no_others_arrive"
BLOCK = "kernels/test_context_attention.py::test_a_draft_block_meets_the_criterion"
GROUPS = "kernels/test_context_attention.py::test_contexts_of_several_key_groups_meet_the_criterion"
INERT = "kernels/test_context_attention.py::test_inert_columns_are_zero_and_not_read"
HAZARDS = "uninit-shared|warp-hazard"
ORDER = "race-read-after-write|race-write-after-read"
RACES = f"uninit-shared|{ORDER}"
OUTSIDE = "oob-global|uninit-global"


def watched(arguments: str, kinds: str) -> tuple[Catcher, Catcher]:
    """Return a test on the cpu device, and the same one under the emulator, whose report must name one of `kinds`."""
    return tests(arguments), emulated(arguments, kinds)


MUTANTS: tuple[Mutant, ...] = (
    # ---- append.cu
    Mutant("C3.5", "an append takes the page of the next block", "cuda_src/kernels/append.cu",
           "* table_width + (position >> kPageShift)]", "* table_width + ((position + 1) >> kPageShift)]",
           f"{BYTES}[cpu-bf16-64]"),
    Mutant("C3.9", "the offset is taken modulo 32", "cuda_src/kernels/append.cu",
           "place.offset = position & kPageMask;", "place.offset = position & 31;", f"{BYTES}[cpu-bf16-64]"),
    Mutant("C14.4", "inert columns are written", "cuda_src/kernels/append.cu",
           "if (live_columns != nullptr && column >= live_columns[entry]) return place;", "",
           "kernels/test_append.py::test_a_prefix_append_leaves_the_rejected_tail[cpu-eager-bf16-page-major]"),
    Mutant("C3.9", "rows are written one further", "cuda_src/kernels/append.cu",
           "place.offset = position & kPageMask;", "place.offset = (position + 1) & kPageMask;",
           f"{BYTES}[cpu-bf16-64]"),
    Mutant("C14.4", "a row without a table is looked up", "cuda_src/kernels/append.cu",
           "if (table_row < 0) return place;", "",
           watched("kernels/test_append.py::test_an_entry_without_a_table_row_writes_nothing[cpu]", OUTSIDE)),
    # ---- attention_tiles.cuh
    Mutant("C14.5", "a query does not see its own key", "cuda_src/kernels/attention_tiles.cuh",
           "if (page_begin + key > row_positions[r]) scores", "if (page_begin + key >= row_positions[r]) scores",
           "kernels/test_causal_attention.py::test_several_columns_meet_the_criterion[cpu-bf16-64-decode-6-17]"),
    Mutant("C14.6", "masked keys weigh zero instead of being left out", "cuda_src/kernels/attention_tiles.cuh",
           "if (page_begin + key <= row_positions[r]) o[r] =", "o[r] =",
           "kernels/test_causal_attention.py::test_nan_of_a_later_column_reaches_no_earlier_one[cpu-bf16-decode]"),
    Mutant("C14.6", "weights are used before all lanes stored theirs", "cuda_src/kernels/attention_tiles.cuh",
           "o[r] = multiply(o[r], rescale[r]);\n    __syncwarp();", "o[r] = multiply(o[r], rescale[r]);",
           watched(f"{STEP}[cpu-bf16-64-64]", HAZARDS)),
    Mutant("C11.3", "every entry reads the first table row", "cuda_src/kernels/attention_tiles.cuh",
           "op.table_rows[tile.entry]) * op.table_width", "op.table_rows[0]) * op.table_width",
           "kernels/test_attention_invariance.py::test_a_batch_equals_its_rows_alone[cpu-bf16-decode]"),
    Mutant("C14.5", "the last key of a tile is left out", "cuda_src/kernels/attention_tiles.cuh",
           "tile.last_position - page_begin + 1;", "tile.last_position - page_begin;", f"{STEP}[cpu-bf16-64-65]"),
    Mutant("C14.5", "one key too many is seen", "cuda_src/kernels/attention_tiles.cuh",
           "all_left = first_position - page_begin + 1;", "all_left = first_position - page_begin + 2;",
           f"{STEP}[cpu-bf16-64-65]",
           (("cuda_src/kernels/attention_tiles.cuh",
             "any_left = tile.last_position - page_begin + 1;", "any_left = tile.last_position - page_begin + 2;"),)),
    Mutant("C14.6", "groups are merged from the right", "cuda_src/kernels/attention_tiles.cuh",
           "for (int group = 0; group <= last_group; ++group) {",
           "for (int group = last_group; group >= 0; --group) {",
           "kernels/test_attention_invariance.py::test_both_routes_have_one_arithmetic[cpu-bf16]",
           (("cuda_src/kernels/attention_tiles.cuh", "if (group == 0) {\n            share = next;",
             "if (group == last_group) {\n            share = next;"),)),
    Mutant("C14.6", "rows of a tile share one maximum", "cuda_src/kernels/attention_tiles.cuh",
           "for (int r = 0; r < kRows; ++r) new_max[r] = page_max[r];",
           "for (int r = 0; r < kRows; ++r) new_max[r] = page_max[0];",
           "kernels/test_attention_invariance.py::test_columns_of_one_call_equal_single_steps[cpu-bf16-60]"),
    Mutant("C14.6", "an empty group counts as a score of zero", "cuda_src/kernels/attention_tiles.cuh",
           "sums.m = same8(-infinity());", "sums.m = same8(0.0f);",
           "kernels/test_scenarios.py::test_scores_far_below_zero_keep_their_softmax[cpu-decode]"),
    Mutant("C14.5", "a block is causal", "cuda_src/kernels/attention_tiles.cuh",
           "result.column_step = kIsCausal ? 1 : 0;", "result.column_step = 1;", f"{BLOCK}[cpu-64-65]"),
    Mutant("C14.5", "the position at the frontier is seen", "cuda_src/kernels/attention_tiles.cuh",
           "op.positions[result.entry] - (kIsCausal ? 0 : 1)", "op.positions[result.entry]",
           "kernels/test_context_attention.py::test_stale_bytes_behind_the_frontier_have_no_effect[cpu-70]"),
    Mutant("C14.6", "a maximum is that of the context alone", "cuda_src/kernels/attention_tiles.cuh",
           "const float m = larger(next.m, share.m);", "const float m = share.m;",
           "kernels/test_context_attention.py::test_far_apart_scores_keep_their_softmax[cpu--100.0-100.0]"),
    # ---- causal_attention.cu
    Mutant("C14.6", "streams are merged before they ended", "cuda_src/kernels/causal_attention.cu",
           "        __syncthreads();\n        if (row < tile.live_rows) {", "        if (row < tile.live_rows) {",
           watched(f"{STEP}[cpu-bf16-64-64]", RACES)),
    Mutant("C14.6", "queries are read before they are loaded", "cuda_src/kernels/causal_attention.cu",
           "load_queries(op, tile, queries, row_positions);\n    __syncthreads();",
           "load_queries(op, tile, queries, row_positions);", watched(f"{STEP}[cpu-bf16-64-64]", RACES)),
    # ---- codec.cuh
    Mutant("C14.6", "lanes read their neighbours' maxima too early", "cuda_src/kernels/codec.cuh",
           "warp_words[lane] = value;\n    __syncwarp();", "warp_words[lane] = value;",
           watched(f"{BYTES}[cpu-int8-g64-64]", HAZARDS)),
    Mutant("C14.6", "a rotation reads before its row is there", "cuda_src/kernels/codec.cuh",
           "row[piece * kLaneDims + i] = x[i];\n    __syncwarp();", "row[piece * kLaneDims + i] = x[i];",
           watched(f"{BYTES}[cpu-fp8-e4m3-row-64]", HAZARDS)),
    Mutant("C4.4", "scales are shifted by one group", "cuda_src/kernels/codec.cuh",
           "scale_row[dim / 16]", "scale_row[(dim / 16 + 1) % (kHeadDim / 16)]", f"{STEP}[cpu-nvfp4-g16-64-65]"),
    Mutant("C4.4", "nibbles are swapped", "cuda_src/kernels/codec.cuh",
           "words[i / 8] |= code << (4 * (i % 8));", "words[i / 8] |= code << (4 * ((i ^ 1) % 8));",
           f"{BYTES}[cpu-nvfp4-g16-64]"),
    Mutant("C4.4", "a maximum drops nan", "cuda_src/kernels/codec.cuh",
           "largest_bits = magnitude > largest_bits ? magnitude : largest_bits;",
           "largest_bits = __float_as_uint(fmaxf(__uint_as_float(magnitude), __uint_as_float(largest_bits)));",
           f"{ENCODING}[cpu-int8-g64-k-64]"),
    Mutant("C4.4", "a reciprocal stands for a quotient", "cuda_src/kernels/codec.cuh",
           "float_to_e2m1(__fdiv_rn(x[i], scale))", "float_to_e2m1(__fmul_rn(x[i], __fdiv_rn(1.0f, scale)))",
           f"{ENCODING}[cpu-nvfp4-g16-k-64]"),
    # ---- context_attention.cu
    Mutant("C14.4", "a draft block sees its own dead columns", "cuda_src/kernels/context_attention.cu",
           "const int count = live_columns(op, tile.entry);", "const int count = op.width;", f"{INERT}[cpu-eager]"),
    Mutant("C14.6", "the context's streams are merged before they ended", "cuda_src/kernels/context_attention.cu",
           "        __syncthreads();\n        if (row < tile.live_rows) share = merge_streams<kStreams>",
           "        if (row < tile.live_rows) share = merge_streams<kStreams>", watched(f"{BLOCK}[cpu-64-65]", RACES)),
    Mutant("C14.6", "temporary rows overwrite the context's sums", "cuda_src/kernels/context_attention.cu",
           "__syncthreads();  // the temporary rows use the same shared floats", "",
           ("kernels/test_attention_invariance.py::test_no_result_depends_on_the_order_of_threads",
            emulated(f"{BLOCK}[cpu-64-65]", ORDER))),
    Mutant("C14.6", "temporary rows are folded before they ended", "cuda_src/kernels/context_attention.cu",
           "        store_stream<kRows>(stream_sums, slice, sums, lane);\n    }\n    __syncthreads();",
           "        store_stream<kRows>(stream_sums, slice, sums, lane);\n    }",
           watched(f"{BLOCK}[cpu-64-0]", RACES)),
    Mutant("C14.4", "temporary rows are masked as a causal block", "cuda_src/kernels/context_attention.cu",
           "row_positions, 0, count, count, op.scale_log2", "row_positions, 0, 0, count, op.scale_log2",
           f"{BLOCK}[cpu-64-1]"),
    Mutant("C14.4", "temporary rows of one entry serve all", "cuda_src/kernels/context_attention.cu",
           "static_cast<int64_t>(tile.entry) * op.width * op.kv_heads + tile.head", "tile.head",
           "kernels/test_context_attention.py::test_rows_may_stand_in_any_order[cpu-eager]"),
    Mutant("C14.4", "temporary rows of one head serve all", "cuda_src/kernels/context_attention.cu",
           "static_cast<int64_t>(tile.entry) * op.width * op.kv_heads + tile.head",
           "static_cast<int64_t>(tile.entry) * op.width * op.kv_heads", f"{BLOCK}[cpu-64-0]"),
    Mutant("C14.4", "temporary rows are left out behind a context", "cuda_src/kernels/context_attention.cu",
           "fold(share, temporary);", "", f"{BLOCK}[cpu-64-64]"),
    Mutant("C14.4", "the context is left out behind temporary rows", "cuda_src/kernels/context_attention.cu",
           "        share = context;\n        fold(share, temporary);\n", "", f"{BLOCK}[cpu-64-64]"),
    Mutant("C14.5", "the last key group is left out", "cuda_src/kernels/context_attention.cu",
           "const int last_group = group_of(tile.last_position);",
           "const int last_group = group_of(tile.last_position) - 1;", f"{GROUPS}[cpu-1025]"),
    Mutant("C14.5", "a context that ends with a key group loses it", "cuda_src/kernels/context_attention.cu",
           "op.positions[blockIdx.z] <= group_start(group)", "op.positions[blockIdx.z] <= group_start(group) + 1",
           f"{GROUPS}[cpu-513]"),
    Mutant("C14.4", "inert rows are left as they are", "cuda_src/kernels/context_attention.cu",
           "if (group == 0 && tile.live_rows < tile.rows) store_inert_rows(op, tile);", "", f"{INERT}[cpu-eager]"),
    # ---- page_address.cuh
    Mutant("C3.10", "page offsets are 32-bit", "cuda_src/kernels/page_address.cuh",
           "page * plane.page_bytes", "static_cast<int32_t>(page * plane.page_bytes)",
           "kernels/test_scenarios.py::test_pages_behind_4_gib_are_addressed[cpu-page-major]"),
    Mutant("C3.10", "a head offset has 32 bits", "cuda_src/kernels/page_address.cuh",
           "+ head * plane.head_bytes", "+ static_cast<int>(head * plane.head_bytes)",
           "kernels/test_context_attention.py::test_pages_and_heads_behind_4_gib_are_addressed[cpu]"),
    # ---- page_moves.cu
    Mutant("C10.5", "a tail's copy takes what lies behind the frontier", "cuda_src/kernels/page_moves.cu",
           "copy_words(target, from, word_bytes);", "copy_words(target, from, head_bytes);",
           f"{COPY}[cpu-bf16-64-page-major]"),
    Mutant("C10.5", "columns are rounded down to words", "cuda_src/kernels/page_moves.cu",
           "if (rest < column_bytes) target[rest] = from[rest];", "", f"{COPY}[cpu-fp8-e4m3-row-64-page-major]"),
    Mutant("C10.5", "columns are rounded up to words", "cuda_src/kernels/page_moves.cu",
           "word_bytes = column_bytes & ~15;", "word_bytes = (column_bytes + 15) & ~15;",
           f"{COPY}[cpu-fp8-e4m3-row-64-page-major]"),
    Mutant("C10.5", "the rest is one byte longer", "cuda_src/kernels/page_moves.cu",
           "if (rest < column_bytes)", "if (rest <= column_bytes)", f"{COPY}[cpu-fp8-e4m3-row-64-page-major]"),
    Mutant("C3.7", "heads of the destination stand as close as their columns", "cuda_src/kernels/page_moves.cu",
           "destination * page_bytes + blockIdx.x * head_bytes;",
           "destination * page_bytes + blockIdx.x * column_bytes;", f"{COPY}[cpu-fp8-e4m3-row-64-page-major]"),
    Mutant("C3.8", "every head copies the first", "cuda_src/kernels/page_moves.cu",
           "plane + source * page_bytes + blockIdx.x * head_bytes;", "plane + source * page_bytes;",
           f"{COPY}[cpu-fp8-e4m3-row-64-head-major]"),
    Mutant("C10.5", "source and destination are exchanged", "cuda_src/kernels/page_moves.cu",
           "from = plane + source *", "from = plane + destination *", f"{COPY}[cpu-fp8-e4m3-row-64-page-major]",
           (("cuda_src/kernels/page_moves.cu", "target = plane + destination *", "target = plane + source *"),)),
    Mutant("C3.10", "a copied page has a 32-bit offset", "cuda_src/kernels/page_moves.cu",
           "plane + source * page_bytes", "plane + static_cast<int32_t>(source * page_bytes)",
           "kernels/test_copy_columns.py::test_columns_behind_4_gib_are_copied[cpu-page-major]"),
    Mutant("C3.10", "a copied head has a 32-bit offset", "cuda_src/kernels/page_moves.cu",
           "destination * page_bytes + blockIdx.x * head_bytes",
           "destination * page_bytes + static_cast<int32_t>(blockIdx.x * head_bytes)",
           "kernels/test_copy_columns.py::test_columns_behind_4_gib_are_copied[cpu-head-major]"),
    # ---- ops.py
    Mutant("C14.2", "a workspace that is too small is accepted", "ops/attention.py",
           "if given_bytes < needed_bytes:", "if False:",
           "kernels/test_refused_calls.py::test_a_refused_call_changes_nothing"),
    Mutant("C10.5", "the last committed column of a tail is left behind", "ops/page_moves.py",
           "np.int32(columns * geometry.row_bytes)", "np.int32((columns - 1) * geometry.row_bytes)",
           f"{COPY}[cpu-bf16-64-page-major]"),
    # ---- views.py
    Mutant("C3.8", "context attention takes page strides for head strides", "ops/views.py",
           "return (*self.arguments[:2], *self.arguments[4:8])",
           "return (*self.arguments[:2], *(self.arguments[i] for i in (5, 4, 7, 6)))",
           f"{BLOCK}[cpu-64-1]"),
    Mutant("C14.1", "a plane of any form is accepted", "ops/views.py",
           "check_array(name, plane, geometry", GONE, "kernels/test_views.py"),
)  # fmt: skip
