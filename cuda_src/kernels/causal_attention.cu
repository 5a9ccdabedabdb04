// causal_attention: softmax attention of query rows over the paged cache, read in place.  (C14.3-C14.6)
//
// Query row r of a tile sees the positions up to its own (attention_tiles.cuh).
//
//   kernel                     grid (x, y, z)                 block   shared bytes              called from
//   causal_attention_decode    (key groups * tiles, Hkv, B)   128     32 * D + 33,056           ops, route "decode"
//   causal_attention_merge     (tiles, Hkv, B)                128     32 * D where V rotates    after it, if > 1 group
//   causal_attention_prefill   (tiles, Hkv, 1)                128     as decode                 ops, route "prefill"
//
// decode: one block per key group.  It finishes the rows whose context is one group; of other rows it stores (O, m, l)
// in the workspace, and the merge folds the groups from the left.  The grid depends on shapes only; blocks of groups
// beyond the tile's last position return at once (C15.3).  prefill: one block folds all groups in turn, with the same
// arithmetic.  Inert columns, all columns of an entry with table row -1, and columns before position 0, which see
// nothing, give exact +0 and lse -infinity.

#include "kernels/runtime.cuh"

#include "kernels/attention_tiles.cuh"

namespace pagedkv {

template <bool kIsPrefill>
__device__ __forceinline__ void attend(const Attention& op) {
    const int tiles = kIsPrefill ? gridDim.x : gridDim.x / op.groups;
    // prefill: the longest contexts start first, so that the last blocks are short.
    const int group = kIsPrefill ? 0 : blockIdx.x / tiles;
    // Most groups of a long max_context lie beyond the row: return before anything costs time.
    if (group > 0 && op.positions[blockIdx.z] + op.width - 1 < group_start(group)) return;
    const Tile tile = tile_of<true>(op, kIsPrefill ? tiles - 1 - blockIdx.x : blockIdx.x - group * tiles);
    if (group == 0 && (tile.live_rows < tile.rows || tile.is_inert(op, 0))) store_inert_rows(op, tile);
    if (tile.live_rows == 0 || group_start(group) > tile.last_position) return;

    PK_SHARED(float, queries, kRows * kHeadDim);
    PK_SHARED(float, slices, kStreams * kSliceFloats);
    PK_SHARED(float, stream_sums, kStreams * kRows * 2);
    PK_SHARED(int32_t, row_positions, kRows);
    load_queries(op, tile, queries, row_positions);
    __syncthreads();

    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    const int last_group = kIsPrefill ? group_of(tile.last_position) : group;
    Share share = {};
    PK_KEEP_LOOP for (int current = group; current <= last_group; ++current) {
        if (!kIsPrefill && tile.live_rows <= kFewRows) {
            fold_stream<kFewRows>(op, tile, queries, row_positions, slices, stream_sums, current);
        } else {
            fold_stream<kRows>(op, tile, queries, row_positions, slices, stream_sums, current);
        }
        __syncthreads();
        if (row < tile.live_rows) {
            const Share next = merge_streams<kStreams>(slices, stream_sums, row, piece);
            if (current == group) {
                share = next;
            } else if (row_positions[row] >= group_start(current)) {
                fold(share, next);
            }
        }
        if (current < last_group) __syncthreads();
    }
    if (row >= kRows) return;

    const bool is_live = row < tile.live_rows && row_positions[row] >= group_start(group);
    bool is_whole = is_live;
    if constexpr (!kIsPrefill) {
        is_whole = is_live && group_of(row_positions[row]) == 0;
        if (is_live && !is_whole) store_partial(op, tile, share, row, piece, group);
        // The merge finishes rows of several groups; all others have group 0 only.
        if (group != 0) return;
    }
    finish(op, tile, share, queries, row, piece, is_whole);
}

// Folds the key groups of every row that has more than one.
__device__ __forceinline__ void merge_groups(const Attention& op) {
    const Tile tile = tile_of<true>(op, blockIdx.x);
    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    if (row >= kRows || group_of(tile.last_position < 0 ? 0 : tile.last_position) == 0) return;
    PK_SHARED(float, scratch, kRows * kHeadDim);
    const int last_group = row < tile.live_rows ? group_of(tile.position_of(op, row)) : 0;
    const bool is_live = last_group > 0;
    Share share = {};
    if (is_live) share = fold_partials(op, tile, row, piece, last_group);
    finish(op, tile, share, scratch, row, piece, is_live);
}

}  // namespace pagedkv

// ---- kernels -------------------------------------------------------------------------------------------------------
//
// q, out: (B, W, Hq, D) BF16; lse: (B, W, Hq) FP32 or null; planes of one layer with their head and page strides in
// bytes; block_table: (C, table_width); first_positions, table_rows, valid_columns: (B,), table_rows null for a table
// of one row, valid_columns null when every column is live; workspace: attention_tiles.cuh, null when groups == 1 or
// for prefill.  All rows 16-byte aligned.

#define PK_ATTENTION_PARAMETERS                                                                                        \
    const uint16_t *__restrict__ q, uint16_t *__restrict__ out, float *__restrict__ lse,                               \
        const uint8_t *__restrict__ k_pages, const uint8_t *__restrict__ v_pages,                                      \
        const uint8_t *__restrict__ k_scales, const uint8_t *__restrict__ v_scales, int64_t k_head_bytes,              \
        int64_t k_page_bytes, int64_t v_head_bytes, int64_t v_page_bytes, int64_t k_scale_head_bytes,                  \
        int64_t k_scale_page_bytes, int64_t v_scale_head_bytes, int64_t v_scale_page_bytes,                            \
        const int32_t *__restrict__ block_table, int32_t table_width, const int32_t *__restrict__ first_positions,     \
        const int32_t *__restrict__ table_rows, const int32_t *__restrict__ valid_columns, int32_t width,              \
        int32_t kv_heads, int32_t group_size, float scale_log2, float *__restrict__ workspace, int32_t groups

#define PK_ATTENTION                                                                                                   \
    pagedkv::Attention {                                                                                               \
        q, out, lse, {const_cast<uint8_t*>(k_pages), k_head_bytes, k_page_bytes},                                      \
            {const_cast<uint8_t*>(v_pages), v_head_bytes, v_page_bytes},                                               \
            {const_cast<uint8_t*>(k_scales), k_scale_head_bytes, k_scale_page_bytes},                                  \
            {const_cast<uint8_t*>(v_scales), v_scale_head_bytes, v_scale_page_bytes}, block_table, table_width,        \
            first_positions, table_rows, valid_columns, width, kv_heads, group_size, scale_log2, workspace, groups     \
    }

extern "C" __global__ void __launch_bounds__(128) causal_attention_decode(PK_ATTENTION_PARAMETERS) {
    pagedkv::attend<false>(PK_ATTENTION);
}
PK_EXPORT(causal_attention_decode)

extern "C" __global__ void __launch_bounds__(128) causal_attention_prefill(PK_ATTENTION_PARAMETERS) {
    pagedkv::attend<true>(PK_ATTENTION);
}
PK_EXPORT(causal_attention_prefill)

extern "C" __global__ void __launch_bounds__(128) causal_attention_merge(PK_ATTENTION_PARAMETERS) {
    pagedkv::merge_groups(PK_ATTENTION);
}
PK_EXPORT(causal_attention_merge)
