// context_attention: a draft block attends to its paged context and to itself, non-causally.  (C14.4)
//
// Every live query column of batch entry b sees positions [0, n_b) of the cache, and all V_b temporary rows, which are
// inputs and are not stored.  Head-major BF16, D 64 or 128.
//
//   context positions   0 ............ n_b - 1   through the block table: groups, streams and pages (softmax.cuh)
//   temporary rows      0 .. V_b - 1             one partial result, folded as one page by one stream, in column order
//   merge               key groups from the left, the temporary rows last
//
// The place of a temporary row in the fold depends on its column alone, never on n_b.  So the bits of an output row
// depend on its query, the context's content and the V_b temporary rows, not on W, B or its tile (C14.6).  For n_b = 0
// the table is not read.  For V_b = 0, or table row -1, every column is inert: exact +0 and lse -infinity.  Inputs of
// inert columns are not read.
//
//   kernel                     grid (x, y, z)                 block   shared bytes        called from
//   context_attention          (key groups * tiles, Hkv, B)   128     32 * D + 33,056     ops.context_attention
//   context_attention_merge    (tiles, Hkv, B)                128     32 * D + 8,288      after it, if > 1 group
//
// The first kernel finishes a context of one key group.  Of a longer one each group stores (O, m, l) in the workspace,
// and the merge folds them and the temporary rows.  The grid depends on shapes only (C15.3).

#include "kernels/runtime.cuh"

#include "kernels/attention_tiles.cuh"

namespace pagedkv {

static_assert(kProfile == 0 && (kHeadDim == 64 || kHeadDim == 128), "drafts are BF16 with D 64 or 128 (C14.4)");

// Returns the temporary rows of one KV head of one batch entry; column j is key j.
__device__ __forceinline__ KeyRows temporary_rows(const Attention& op, const Tile& tile, const uint16_t* k,
                                                  const uint16_t* v) {
    const int64_t first_row = static_cast<int64_t>(tile.entry) * op.width * op.kv_heads + tile.head;
    const int stride = op.kv_heads * code_row_bytes(Codec::kBf16);
    return {reinterpret_cast<const uint8_t*>(k + first_row * kHeadDim),
            reinterpret_cast<const uint8_t*>(v + first_row * kHeadDim), nullptr, nullptr, stride, stride};
}

// Folds the temporary rows into the tile's context and writes its live rows.  `context` is a thread's share of the
// context, valid if the tile has one.  All threads of the block call it; slice and sums: those of one stream.
__device__ __forceinline__ void finish_with_temporary_rows(const Attention& op, const Tile& tile, const Share& context,
                                                           const KeyRows& rows, float* q,
                                                           const int* row_positions, float* slice, float* sums) {
    // The last warp folds them, because the first ones may still be busy with their shares of the context.
    if (threadIdx.x / 32 == kStreams - 1) {
        const int lane = threadIdx.x % 32;
        const int count = live_columns(op, tile.entry);
        StreamSums<kRows> stream_sums = no_keys<kRows>();
        fold_page<kRows>(stream_sums, rows, q, row_positions, 0, count, count, op.scale_log2, slice, lane);
        store_stream<kRows>(stream_sums, slice, sums, lane);
    }
    __syncthreads();
    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    if (row >= tile.live_rows) return;
    Share share = merge_streams<1>(slice, sums, row, piece);
    if (tile.last_position >= 0) {
        const Share temporary = share;
        share = context;
        fold(share, temporary);
    }
    finish(op, tile, share, q, row, piece, true);
}

__device__ __forceinline__ void attend_context(const Attention& op, const uint16_t* k, const uint16_t* v) {
    const int tiles = gridDim.x / op.groups;
    const int group = blockIdx.x / tiles;
    // Most groups of a long max_context lie beyond the context: return before anything costs time.
    if (group > 0 && op.positions[blockIdx.z] <= group_start(group)) return;
    const Tile tile = tile_of<false>(op, blockIdx.x - group * tiles);
    if (group == 0 && tile.live_rows < tile.rows) store_inert_rows(op, tile);
    if (tile.live_rows == 0) return;

    PK_SHARED(float, queries, kRows * kHeadDim);
    PK_SHARED(float, slices, kStreams * kSliceFloats);
    PK_SHARED(float, stream_sums, kStreams * kRows * 2);
    PK_SHARED(int32_t, row_positions, kRows);
    load_queries(op, tile, queries, row_positions);
    __syncthreads();

    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    const bool is_split = tile.last_position >= 0 && group_of(tile.last_position) > 0;
    Share share = {};
    if (tile.last_position >= 0) {
        if (tile.live_rows <= kFewRows) {
            fold_stream<kFewRows>(op, tile, queries, row_positions, slices, stream_sums, group);
        } else {
            fold_stream<kRows>(op, tile, queries, row_positions, slices, stream_sums, group);
        }
        __syncthreads();
        if (row < tile.live_rows) share = merge_streams<kStreams>(slices, stream_sums, row, piece);
        __syncthreads();  // the temporary rows use the same shared floats
    }
    if (is_split) {
        if (row < tile.live_rows) store_partial(op, tile, share, row, piece, group);
        return;
    }
    finish_with_temporary_rows(op, tile, share, temporary_rows(op, tile, k, v), queries, row_positions, slices,
                               stream_sums);
}

// Folds the key groups of every context that has more than one, and then the temporary rows.
__device__ __forceinline__ void merge_context(const Attention& op, const uint16_t* k, const uint16_t* v) {
    const Tile tile = tile_of<false>(op, blockIdx.x);
    if (tile.live_rows == 0 || tile.last_position < 0) return;
    const int last_group = group_of(tile.last_position);
    if (last_group == 0) return;

    PK_SHARED(float, queries, kRows * kHeadDim);
    PK_SHARED(float, slice, kSliceFloats);
    PK_SHARED(float, sums, kRows * 2);
    PK_SHARED(int32_t, row_positions, kRows);
    load_queries(op, tile, queries, row_positions);
    __syncthreads();

    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    Share share = {};
    if (row < tile.live_rows) share = fold_partials(op, tile, row, piece, last_group);
    finish_with_temporary_rows(op, tile, share, temporary_rows(op, tile, k, v), queries, row_positions, slice, sums);
}

}  // namespace pagedkv

// ---- kernels -------------------------------------------------------------------------------------------------------
//
// q, out: (B, W, Hq, D) BF16; k, v: (B, W, Hkv, D) BF16, the temporary rows; lse: (B, W, Hq) FP32 or null; code planes
// of one layer with their head and page strides in bytes; block_table: (C, table_width); context_lengths, table_rows,
// valid_columns: (B,), table_rows null for a table of one row, valid_columns null when every column is live; workspace:
// attention_tiles.cuh, null when groups == 1.  All rows 16-byte aligned.

#define PK_CONTEXT_PARAMETERS                                                                                          \
    const uint16_t *__restrict__ q, const uint16_t *__restrict__ k, const uint16_t *__restrict__ v,                    \
        uint16_t *__restrict__ out, float *__restrict__ lse, const uint8_t *__restrict__ k_pages,                      \
        const uint8_t *__restrict__ v_pages, int64_t k_head_bytes, int64_t k_page_bytes, int64_t v_head_bytes,         \
        int64_t v_page_bytes, const int32_t *__restrict__ block_table, int32_t table_width,                            \
        const int32_t *__restrict__ context_lengths, const int32_t *__restrict__ table_rows,                           \
        const int32_t *__restrict__ valid_columns, int32_t width, int32_t kv_heads, int32_t group_size,                \
        float scale_log2, float *__restrict__ workspace, int32_t groups

#define PK_CONTEXT                                                                                                     \
    pagedkv::Attention {                                                                                               \
        q, out, lse, {const_cast<uint8_t*>(k_pages), k_head_bytes, k_page_bytes},                                      \
            {const_cast<uint8_t*>(v_pages), v_head_bytes, v_page_bytes}, {nullptr, 0, 0}, {nullptr, 0, 0},             \
            block_table, table_width, context_lengths, table_rows, valid_columns, width, kv_heads, group_size,         \
            scale_log2, workspace, groups                                                                              \
    }

extern "C" __global__ void __launch_bounds__(128) context_attention(PK_CONTEXT_PARAMETERS) {
    pagedkv::attend_context(PK_CONTEXT, k, v);
}
PK_EXPORT(context_attention)

extern "C" __global__ void __launch_bounds__(128) context_attention_merge(PK_CONTEXT_PARAMETERS) {
    pagedkv::merge_context(PK_CONTEXT, k, v);
}
PK_EXPORT(context_attention_merge)
