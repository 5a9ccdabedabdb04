// What the attention kernels share: tiles of query rows, streams over pages, partial results.  (C14.3-C14.6)
//
// The W * group query rows of one (batch entry, KV head), column by column, are cut into tiles of kRows rows.  A block
// computes one tile.  Within a key group (softmax.cuh) its four warps are the four streams, each over its own pages:
//
//   QK      lane owns keys `lane` and `lane + 32` of the page; a score is eight fused running sums (one per dim mod 8)
//           over D / 8 steps, then a fixed tree
//   softmax page maximum by one warp collective; each lane sums the weights of its own keys
//   P       (64 keys, kRows) floats in shared memory, two buffers in turn, so one __syncwarp a page
//   PV      lane owns 8 dims of O for every row of the tile, over every S-th key (S = 32 / (D / 8) sub-streams)
//
//   warp:   lane 0 .. D/8-1         D/8 .. 2D/8-1      ...             keys of sub-stream s: s, s + S, s + 2S, ...
//           dims 0-7, 8-15, ...     dims 0-7, ...
//           sub-stream 0            sub-stream 1
//
// At the end of a group the partial O of all sub-streams and streams meet in shared memory, in order.  The results of a
// row depend on its own query, last position and cache content only: its tile, and what other rows of the tile see,
// decide only which loads happen (C14.6).  Stale bytes behind a row's last position are not loaded, or a select leaves
// them out.
//
// Workspace of a split launch: O (B, Hkv, W*group, groups, D) FP32, not divided by l; then (m, l)
// (B, Hkv, W*group, groups, 2) FP32.
#pragma once

#include "kernels/codec.cuh"
#include "kernels/page_address.cuh"
#include "kernels/softmax.cuh"

namespace pagedkv {

constexpr int kRows = 8;                        // query rows of a tile: one number per row is one Float8
constexpr int kFewRows = 4;                     // a decode tile with at most this many live rows computes no others
constexpr int kThreads = 32 * kStreams;
constexpr int kChunks = kHeadDim / 8;           // lanes across a V row
constexpr int kSubStreams = 32 / kChunks;       // V rows a warp reads side by side
constexpr int kSliceFloats = 32 * 8 * kRows;    // one stream's partial O, all sub-streams
constexpr int kPieces = kHeadDim / kLaneDims;   // 16-dim pieces of an output row, one thread each
static_assert(kChunks <= 32 && kSubStreams >= 1, "a V row lies within one warp");
static_assert(2 * kPageTokens * kRows <= kSliceFloats, "both P buffers fit into the stream's own slice");
static_assert(kRows * kPieces <= kThreads, "one thread per 16 dims of a tile's output");
static_assert(!kRotatesK || kRows * kPieces % 32 == 0, "rotate_row is called by whole warps");

// The arguments of one launch; the kernels document the pointers.
struct Attention {
    const uint16_t* q;
    uint16_t* out;
    float* lse;
    Plane k_codes, v_codes, k_scales, v_scales;
    const int32_t* block_table;
    int table_width;
    const int32_t* positions;  // causal: position of column 0; context: number of positions that every column sees
    const int32_t* table_rows;  // null: every entry has row 0
    const int32_t* valid_columns;
    int width, kv_heads, group_size;
    float scale_log2;  // scale * log2(e)
    float* workspace;
    int groups;        // key groups of max_context
};

// One tile of query rows of one (batch entry, KV head).
struct Tile {
    int entry, head;
    int row_begin;       // first row of the tile among the W * group rows
    int rows;            // rows that exist, at most kRows
    int live_rows;       // rows of live columns: a prefix
    int first_position;  // last position that the tile's first row sees
    int last_position;   // last position that any live row sees, -1 if none is live
    int column_step;     // causal: 1, the next column sees one position more; context: 0

    __device__ __forceinline__ int position_of(const Attention& op, int row) const {
        return first_position + column_step * ((row_begin + row) / op.group_size);
    }

    // Is the row's column inert?  It is not live, or a causal one lies before position 0 and sees nothing.  The latter
    // rows are a prefix of the tile: if there are any, row 0 is one.
    __device__ __forceinline__ bool is_inert(const Attention& op, int row) const {
        return row >= live_rows || (column_step > 0 && position_of(op, row) < 0);
    }

    // Row of (B, W, Hq) that holds row `row` of the tile.
    __device__ __forceinline__ int64_t output_row(const Attention& op, int row) const {
        const int column = (row_begin + row) / op.group_size;
        const int head_in_group = row_begin + row - column * op.group_size;
        const int64_t token = static_cast<int64_t>(entry) * op.width + column;
        return token * (op.kv_heads * op.group_size) + head * op.group_size + head_in_group;
    }

    // Row of the workspace that holds key group `group` of row `row`.
    __device__ __forceinline__ int64_t partial_row(const Attention& op, int row, int group) const {
        const int64_t entry_head = static_cast<int64_t>(entry) * op.kv_heads + head;
        return (entry_head * (op.width * op.group_size) + row_begin + row) * op.groups + group;
    }
};

// Returns how many columns of a batch entry are live: a prefix.
__device__ __forceinline__ int live_columns(const Attention& op, int entry) {
    const int valid = op.valid_columns != nullptr ? op.valid_columns[entry] : op.width;
    return table_row_of(op.table_rows, entry) < 0 ? 0 : valid < op.width ? valid : op.width;
}

template <bool kIsCausal>
__device__ __forceinline__ Tile tile_of(const Attention& op, int tile) {
    Tile result;
    result.entry = blockIdx.z;
    result.head = blockIdx.y;
    result.row_begin = tile * kRows;
    result.column_step = kIsCausal ? 1 : 0;
    const int rows_left = op.width * op.group_size - result.row_begin;
    result.rows = rows_left < kRows ? rows_left : kRows;
    const int live_left = live_columns(op, result.entry) * op.group_size - result.row_begin;
    result.live_rows = live_left < 0 ? 0 : live_left < result.rows ? live_left : result.rows;
    result.first_position = result.live_rows > 0 ? op.positions[result.entry] - (kIsCausal ? 0 : 1) : 0;
    result.last_position = result.live_rows > 0 ? result.position_of(op, result.live_rows - 1) : -1;
    return result;
}

// A thread's share of a tile's output: 16 dims of one row, their partial result (m, l, O).
struct Share {
    float m, l;
    Float8 o[2];
};

// Folds `next`, the partial result of later keys, into `share`.
__device__ __forceinline__ void fold(Share& share, const Share& next) {
    const float m = larger(next.m, share.m);
    const float reference = reference_of(m);
    const float share_factor = exp2_fixed(subtract(share.m, reference));
    const float next_factor = exp2_fixed(subtract(next.m, reference));
    share.m = m;
    share.l = fused(next.l, next_factor, multiply(share.l, share_factor));
    PK_UNROLL
    for (int i = 0; i < 2; ++i) share.o[i] = fused(next_factor, next.o[i], multiply(share.o[i], share_factor));
}

// ---- output --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_output(const Attention& op, const Tile& tile, int row, int piece,
                                             const uint32_t (&words)[8]) {
    uint16_t* target = op.out + tile.output_row(op, row) * kHeadDim + piece * kLaneDims;
    store16(target, make_uint4(words[0], words[1], words[2], words[3]));
    store16(target + 8, make_uint4(words[4], words[5], words[6], words[7]));
}

// Writes exact +0 and lse -infinity for rows of inert columns.
__device__ __forceinline__ void store_inert_rows(const Attention& op, const Tile& tile) {
    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    if (row >= tile.rows || !tile.is_inert(op, row)) return;
    const uint32_t zeros[8] = {};
    store_output(op, tile, row, piece, zeros);
    if (op.lse != nullptr && piece == 0) op.lse[tile.output_row(op, row)] = -infinity();
}

// Divides by l, rotates back where V is rotated, rounds and writes.  Whole warps of a tile's threads call it; scratch:
// (kRows, D) shared floats.  l is zero for a live row only if all its scores are -infinity; then 0 / 0 is the NaN that
// the softmax itself gives.  No guard replaces it, so that a NaN scale reaches the output.
__device__ __forceinline__ void finish(const Attention& op, const Tile& tile, const Share& share, float* scratch,
                                       int row, int piece, bool is_live) {
    float y[kLaneDims];
    spread16(y, share.o[0], share.o[1]);
    PK_UNROLL for (int i = 0; i < kLaneDims; ++i) y[i] = __fdiv_rn(y[i], share.l);
    if constexpr (kRotatesV) rotate_row(y, scratch + row * kHeadDim, piece);
    if (!is_live) return;
    uint32_t words[8];
    PK_UNROLL for (int i = 0; i < 8; ++i) words[i] = bf16_result(y[2 * i]) | (bf16_result(y[2 * i + 1]) << 16);
    store_output(op, tile, row, piece, words);
    if (op.lse != nullptr && piece == 0) {
        // log2 to the natural logarithm; m is in base 2 because the scores carry log2(e).
        op.lse[tile.output_row(op, row)] = multiply(add(share.m, log2_fixed(share.l)), 0x1.62e430p-1f);
    }
}

// ---- one stream over the pages of one key group --------------------------------------------------------------------

// Adds the products of 8 dims to the running sums of kUsed rows; `q` is (kRows, D) shared, at the first of these dims.
template <int kUsed>
__device__ __forceinline__ void add_products(Float8 (&sums)[kRows], const Float8& key, const float* q) {
    PK_UNROLL for (int r = 0; r < kUsed; ++r) sums[r] = fused(key, load8(q + r * kHeadDim), sums[r]);
}

// Returns scale_log2 * dot(q[r], K) of one key for every row r below kUsed, and zeros.
template <int kUsed>
__device__ __forceinline__ Float8 score_key(const uint8_t* code_row, const uint8_t* scale_row, const float* q,
                                            float scale_log2) {
    constexpr int kLoadDims = kCodecK == Codec::kBf16 ? 8 : kCodecK == Codec::kFp4 ? 32 : 16;  // dims in 16 bytes
    Float8 sums[kRows] = {};
    PK_KEEP_LOOP for (int dim = 0; dim < kHeadDim; dim += kLoadDims) {
        const uint4 codes = load16(code_row + dim / kLoadDims * 16);
        if constexpr (kCodecK == Codec::kBf16) {
            add_products<kUsed>(sums, bf16_decode8(codes), q + dim);
        } else if constexpr (kCodecK == Codec::kFp4) {
            PK_KEEP_LOOP  // several decoded vectors at a time would cost spills
            for (int i = 0; i < 4; ++i) {
                const uint32_t word = i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
                const float scale = group_scale<kCodecK>(scale_row, dim + 8 * i);
                add_products<kUsed>(sums, multiply(e2m1_decode8_doubled(word), scale), q + dim + 8 * i);
            }
        } else {
            PK_KEEP_LOOP for (int i = 0; i < 2; ++i) {
                const uint2 half = i == 0 ? make_uint2(codes.x, codes.y) : make_uint2(codes.z, codes.w);
                if constexpr (kCodecK == Codec::kInt8) {
                    const float scale = group_scale<kCodecK>(scale_row, dim);
                    add_products<kUsed>(sums, multiply(int8_decode8(half), scale), q + dim + 8 * i);
                } else {
                    add_products<kUsed>(sums, e4m3_decode8(half), q + dim + 8 * i);
                }
            }
        }
    }
    Float8 scores = row_sums(sums);
    if constexpr (kCodecK == Codec::kFp8) {
        scores = multiply(scores, half_to_float(*reinterpret_cast<const uint16_t*>(scale_row)));
    }
    return multiply(scores, scale_log2);
}

// Up to 64 keys of one KV head: the rows of a page, or the temporary rows of context_attention.cu.
struct KeyRows {
    const uint8_t *k_codes, *v_codes, *k_scales, *v_scales;  // of key 0
    int k_stride, v_stride;                                  // bytes from the codes of one key to those of the next
};

__device__ __forceinline__ KeyRows page_rows(const Attention& op, int page, int head) {
    return {row_address(op.k_codes, page, head, 0, 0),  row_address(op.v_codes, page, head, 0, 0),
            row_address(op.k_scales, page, head, 0, 0), row_address(op.v_scales, page, head, 0, 0),
            code_row_bytes(kCodecK), code_row_bytes(kCodecV)};
}

// The partial result of a stream, in one lane: the rows' maxima, the weight sums over the lane's own keys, and O of the
// lane's dims and sub-stream.
template <int kUsed>
struct StreamSums {
    Float8 m, l;
    Float8 o[kUsed];
};

template <int kUsed>
__device__ __forceinline__ StreamSums<kUsed> no_keys() {
    StreamSums<kUsed> sums = {};
    sums.m = same8(-infinity());
    return sums;
}

// Folds keys [0, any_end) of `rows`; key 0 has position `page_begin`.  Every live row of the tile sees the keys below
// all_end; of the others each row sees those up to its own position.  weights: (64, kRows) shared floats.
template <int kUsed>
__device__ __forceinline__ void fold_page(StreamSums<kUsed>& stream_sums, const KeyRows& rows, const float* q,
                                          const int* row_positions, int page_begin, int all_end, int any_end,
                                          float scale_log2, float* weights, int lane) {
    const int chunk = lane % kChunks;
    const int sub = lane / kChunks;
    Float8& m = stream_sums.m;
    Float8& l = stream_sums.l;
    Float8(&o)[kUsed] = stream_sums.o;
    Float8 scores[2];
    float v_scales[2] = {1.0f, 1.0f};  // fp8 V: the row's scale joins the weight
    PK_UNROLL for (int half = 0; half < 2; ++half) {
        const int key = lane + 32 * half;
        scores[half] = same8(-infinity());
        if (key < any_end) {
            scores[half] = score_key<kUsed>(rows.k_codes + key * rows.k_stride,
                                            rows.k_scales + key * scale_row_bytes(kCodecK), q, scale_log2);
            if (key >= all_end) {
                PK_UNROLL for (int r = 0; r < kUsed; ++r) {
                    if (page_begin + key > row_positions[r]) scores[half][r] = -infinity();
                }
            }
            if constexpr (kCodecV == Codec::kFp8) {
                v_scales[half] = half_to_float(reinterpret_cast<const uint16_t*>(rows.v_scales)[key]);
            }
        }
    }

    // A maximum ignores NaN scores: they reach the output through their weights.
    const Float8 lane_max = larger(scores[1], larger(scores[0], same8(-infinity())));
    float page_max[kRows];
    PK_UNROLL for (int r = 0; r < kRows; ++r) page_max[r] = lane_max[r];
    pk_warp_max(page_max);

    Float8 new_max;
    PK_UNROLL for (int r = 0; r < kRows; ++r) new_max[r] = page_max[r];
    new_max = larger(new_max, m);
    const Float8 reference = reference_of(new_max);
    const Float8 rescale = exp2_fixed(subtract(m, reference));
    m = new_max;
    Float8 weight[2];
    PK_UNROLL for (int half = 0; half < 2; ++half) weight[half] = exp2_fixed(subtract(scores[half], reference));
    l = fused(l, rescale, add(weight[0], weight[1]));
    PK_UNROLL for (int half = 0; half < 2; ++half) {
        if constexpr (kCodecV == Codec::kFp8) weight[half] = multiply(weight[half], v_scales[half]);
        store8(weights + (lane + 32 * half) * kRows, weight[half]);
    }
    PK_UNROLL for (int r = 0; r < kUsed; ++r) o[r] = multiply(o[r], rescale[r]);
    __syncwarp();

    int key = sub < kSubStreams ? sub : kPageTokens;
    const uint8_t* code_row = rows.v_codes + key * rows.v_stride;
    const uint8_t* scale_row = rows.v_scales + key * scale_row_bytes(kCodecV);
    PK_KEEP_LOOP for (; key < all_end; key += kSubStreams) {
        const Float8 value = decode8<kCodecV>(code_row, scale_row, chunk * 8);
        code_row += kSubStreams * rows.v_stride;
        scale_row += kSubStreams * scale_row_bytes(kCodecV);
        const Float8 weight_of = load8(weights + key * kRows);
        PK_UNROLL for (int r = 0; r < kUsed; ++r) o[r] = fused(weight_of[r], value, o[r]);
    }
    PK_KEEP_LOOP for (; key < any_end; key += kSubStreams) {
        const Float8 value = decode8<kCodecV>(code_row, scale_row, chunk * 8);
        code_row += kSubStreams * rows.v_stride;
        scale_row += kSubStreams * scale_row_bytes(kCodecV);
        PK_UNROLL for (int r = 0; r < kUsed; ++r) {
            if (page_begin + key <= row_positions[r]) o[r] = fused(weights[key * kRows + r], value, o[r]);
        }
    }
}

// Stores a stream's O by sub-stream in slice: (kSubStreams, kRows, D), and m, l of the rows in sums: (2, kRows).
template <int kUsed>
__device__ __forceinline__ void store_stream(const StreamSums<kUsed>& stream_sums, float* slice, float* sums,
                                             int lane) {
    const int chunk = lane % kChunks;
    const int sub = lane / kChunks;
    float row_sum[kRows];
    PK_UNROLL for (int r = 0; r < kRows; ++r) row_sum[r] = stream_sums.l[r];
    pk_warp_sum(row_sum);
    __syncwarp();  // the slice overlaps the weights that other lanes may still read
    if (sub < kSubStreams) {
        PK_UNROLL
        for (int r = 0; r < kUsed; ++r) store8(slice + (sub * kRows + r) * kHeadDim + chunk * 8, stream_sums.o[r]);
    }
    if (lane == 0) {
        store8(sums, stream_sums.m);
        PK_UNROLL for (int r = 0; r < kRows; ++r) sums[kRows + r] = row_sum[r];
    }
}

// Folds the pages of the warp's own stream in key group `group`, as far as the tile sees them, and stores the result
// (store_stream).  q: (kRows, D) shared; row_positions: (kRows) shared, -1 for dead rows; slices: (kStreams,
// kSliceFloats) shared; sums: (kStreams, 2, kRows) shared.  Rows from kUsed on are not computed.
template <int kUsed>
__device__ __forceinline__ void fold_stream(const Attention& op, const Tile& tile, const float* q,
                                            const int* row_positions, float* slices, float* sums, int group) {
    const int stream = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int32_t* table_row =
        op.block_table + static_cast<int64_t>(table_row_of(op.table_rows, tile.entry)) * op.table_width;
    const int first_position = row_positions[0];  // the smallest of the live rows
    const int group_end = group_start(group + 1);
    const int page_end = (group_end - 1 < tile.last_position ? group_end - 1 : tile.last_position) >> kPageShift;

    StreamSums<kUsed> stream_sums = no_keys<kUsed>();
    float* slice = slices + stream * kSliceFloats;
    float* weights = slice;
    PK_KEEP_LOOP for (int block = (group_start(group) >> kPageShift) + stream; block <= page_end; block += kStreams) {
        const int page = table_row[block];
        const int page_begin = block << kPageShift;
        // Keys of this page that every live row sees, and that any row sees.
        const int all_left = first_position - page_begin + 1;
        const int any_left = tile.last_position - page_begin + 1;
        const int all_end = all_left < 0 ? 0 : all_left < kPageTokens ? all_left : kPageTokens;
        const int any_end = any_left < kPageTokens ? any_left : kPageTokens;
        fold_page<kUsed>(stream_sums, page_rows(op, page, tile.head), q, row_positions, page_begin, all_end, any_end,
                         op.scale_log2, weights, lane);
        // The next page writes its weights to the other buffer.  Its __syncwarp separates the reads of this page from
        // the writes of the page after next, which uses this buffer again.
        weights = slice + (weights == slice ? kPageTokens * kRows : 0);
    }
    store_stream<kUsed>(stream_sums, slice, sums + stream * kRows * 2, lane);
}

// Returns the partial result of kFoldedStreams streams for a thread's 16 dims: streams in order, and in each its
// sub-streams in order.  slices: (streams, kSliceFloats), sums: (streams, 2, kRows), both shared.
template <int kFoldedStreams>
__device__ __forceinline__ Share merge_streams(const float* slices, const float* sums, int row, int piece) {
    Share share = {};
    share.m = -infinity();
    PK_UNROLL
    for (int stream = 0; stream < kFoldedStreams; ++stream) share.m = larger(sums[2 * stream * kRows + row], share.m);
    const float reference = reference_of(share.m);
    PK_KEEP_LOOP for (int stream = 0; stream < kFoldedStreams; ++stream) {
        const float factor = exp2_fixed(subtract(sums[2 * stream * kRows + row], reference));
        share.l = fused(sums[(2 * stream + 1) * kRows + row], factor, share.l);
        const float* part = slices + stream * kSliceFloats + row * kHeadDim + piece * kLaneDims;
        PK_KEEP_LOOP for (int sub = 0; sub < kSubStreams; ++sub, part += kRows * kHeadDim) {
            share.o[0] = fused(factor, load8(part), share.o[0]);
            share.o[1] = fused(factor, load8(part + 8), share.o[1]);
        }
    }
    return share;
}

// Loads the tile's query rows as FP32, rotated where K is; dead rows are zero.  q: (kRows, D) shared.
__device__ __forceinline__ void load_queries(const Attention& op, const Tile& tile, float* q, int* row_positions) {
    const int row = threadIdx.x / kPieces;
    const int piece = threadIdx.x % kPieces;
    const int index = threadIdx.x;
    if (index < kRows) row_positions[index] = index < tile.live_rows ? tile.position_of(op, index) : -1;
    if (row >= kRows) return;
    float x[kLaneDims] = {};
    if (row < tile.live_rows) {
        const uint16_t* source = op.q + tile.output_row(op, row) * kHeadDim + piece * kLaneDims;
        spread16(x, bf16_decode8(load16(source)), bf16_decode8(load16(source + 8)));
    }
    if constexpr (kRotatesK) rotate_row(x, q + row * kHeadDim, piece);
    PK_UNROLL for (int i = 0; i < kLaneDims; i += 8) store8(q + row * kHeadDim + piece * kLaneDims + i, collect8(x, i));
}

// ---- partial results of a split launch ------------------------------------------------------------------------------

// Returns where (m, l) of all partial results begin: behind all of their O.  gridDim.z is B.
__device__ __forceinline__ int64_t partial_sums_begin(const Attention& op) {
    return static_cast<int64_t>(gridDim.z) * op.kv_heads * (op.width * op.group_size) * op.groups * kHeadDim;
}

// Stores a thread's share of key group `group` in the workspace.
__device__ __forceinline__ void store_partial(const Attention& op, const Tile& tile, const Share& share, int row,
                                              int piece, int group) {
    const int64_t partial = tile.partial_row(op, row, group);
    float* target = op.workspace + partial * kHeadDim + piece * kLaneDims;
    store8(target, share.o[0]);
    store8(target + 8, share.o[1]);
    if (piece == 0) {
        float2* sums = reinterpret_cast<float2*>(op.workspace + partial_sums_begin(op)) + partial;
        *sums = make_float2(share.m, share.l);
    }
}

// Folds key groups 0 to last_group of a row from the left.
__device__ __forceinline__ Share fold_partials(const Attention& op, const Tile& tile, int row, int piece,
                                               int last_group) {
    const float2* all_sums = reinterpret_cast<const float2*>(op.workspace + partial_sums_begin(op));
    Share share = {};
    PK_KEEP_LOOP for (int group = 0; group <= last_group; ++group) {
        const int64_t partial = tile.partial_row(op, row, group);
        const float* source = op.workspace + partial * kHeadDim + piece * kLaneDims;
        const float2 sums = all_sums[partial];
        const Share next = {sums.x, sums.y, {load8(source), load8(source + 8)}};
        if (group == 0) {
            share = next;
        } else {
            fold(share, next);
        }
    }
    return share;
}

}  // namespace pagedkv
