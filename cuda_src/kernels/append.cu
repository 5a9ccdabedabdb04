// append: write K and V rows into the paged cache, each through its codec, once.  (C4.4, C14.4)
//
//   for each batch entry b, column w < live columns of b, KV head h:
//       p = first_positions[b] + w;  page = block_table[table_rows[b]][p >> 6]
//       code and scale of k[b, w, h] -> row (page, h, p & 63) of the K planes;  the same for v
//
// With PK_CODEC_EVENTS every kernel counts the groups that codecs 8 names into `event_counts` (codec.cuh).
//
// The kernels read nothing back and change no byte outside the addressed rows.  They do not read rows of dead columns:
// NaN in a rejected tail, or a table row of -1 for an entry without live columns, has no effect.  A live column at a
// negative position names no row of the cache and writes nothing.
//
//   kernel             grid                              block   shared bytes        called from
//   append_rows        (ceil(B*W*H / rows a warp), 1, 1) 64      2 * (2048 + 128)    ops.append, ops.causal_attention
//   append_prefix      the same                          64      2 * (2048 + 128)    ops.append_prefix
//   encode_unrotated   (ceil(N / rows a warp), 1, 1)     32      128                 ops.encode_unrotated
//
// Warp 0 of a block writes K rows, warp 1 the V rows of the same tokens.  A lane takes 16 dims (bf16: 8, so that 32
// lanes copy 512 consecutive bytes); rows a warp = 32 / lanes a row, whole rows only.

#include "kernels/runtime.cuh"

#include "kernels/codec.cuh"
#include "kernels/page_address.cuh"

namespace pagedkv {

constexpr int kAppendLaneDims = kCodecK == Codec::kBf16 ? 8 : kLaneDims;
constexpr int kAppendRowLanes = kHeadDim / kAppendLaneDims;
constexpr int kAppendWarpRows = 32 / kAppendRowLanes;
static_assert(kAppendRowLanes <= 32 && kAppendWarpRows >= 1, "a row lies within one warp");
static_assert((kCodecK == Codec::kBf16) == (kCodecV == Codec::kBf16), "lanes of K and V rows are divided alike");

// The row that a lane writes, and its part of the row.
struct AppendPlace {
    const uint16_t* source;  // the lane's dims of k or v, or null when the row is dead
    int page, head, offset;
    int piece;  // position of the lane among the lanes of the row
};

// rows: (B, W, Hkv, D) BF16; live_columns: (B,) or null when all W columns are live.
__device__ __forceinline__ AppendPlace append_place(const uint16_t* rows, const int32_t* block_table, int table_width,
                                                    const int32_t* first_positions, const int32_t* table_rows,
                                                    const int32_t* live_columns, int batch, int width, int kv_heads,
                                                    int lane) {
    AppendPlace place{nullptr, 0, 0, 0, lane % kAppendRowLanes};
    const int row_in_warp = lane / kAppendRowLanes;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kAppendWarpRows + row_in_warp;
    if (row_in_warp >= kAppendWarpRows || row >= static_cast<int64_t>(batch) * width * kv_heads) return place;
    const int64_t token = row / kv_heads;
    const int entry = static_cast<int>(token / width);
    const int column = static_cast<int>(token - static_cast<int64_t>(entry) * width);
    if (live_columns != nullptr && column >= live_columns[entry]) return place;
    const int table_row = table_row_of(table_rows, entry);
    if (table_row < 0) return place;
    const int position = first_positions[entry] + column;
    if (position < 0) return place;
    place.page = block_table[static_cast<int64_t>(table_row) * table_width + (position >> kPageShift)];
    place.head = static_cast<int>(row - token * kv_heads);
    place.offset = position & kPageMask;
    place.source = rows + row * kHeadDim + place.piece * kAppendLaneDims;
    return place;
}

template <Codec kCodec, bool kRotates>
__device__ __forceinline__ void append_row(const AppendPlace& place, const Plane& codes, const Plane& scales,
                                           float* warp_rows, uint32_t* warp_words, int lane PK_EVENT_PARAMETER) {
    const bool is_live = place.source != nullptr;
    uint8_t* code_row = row_address(codes, place.page, place.head, place.offset, code_row_bytes(kCodec));
    if constexpr (kCodec == Codec::kBf16) {
        if (is_live) store16(code_row + place.piece * 16, load16(place.source));
    } else {
        float x[kLaneDims] = {};
        if (is_live) {
            spread16(x, bf16_decode8(load16(place.source)), bf16_decode8(load16(place.source + 8)));
        }
        if constexpr (kRotates) rotate_row(x, warp_rows + lane / kRowLanes * kHeadDim, place.piece);
        uint8_t* scale_row = row_address(scales, place.page, place.head, place.offset, scale_row_bytes(kCodec));
        encode_row<kCodec>(x, code_row, scale_row, warp_words, lane, place.piece, is_live PK_EVENT_ARGUMENT);
    }
}

}  // namespace pagedkv

// ---- kernels -------------------------------------------------------------------------------------------------------

#define PK_APPEND_PARAMETERS(live)                                                                                     \
    const uint16_t *__restrict__ k, const uint16_t *__restrict__ v, uint8_t *k_pages, uint8_t *v_pages,                \
        uint8_t *k_scales, uint8_t *v_scales, int64_t k_head_bytes, int64_t k_page_bytes, int64_t v_head_bytes,        \
        int64_t v_page_bytes, int64_t k_scale_head_bytes, int64_t k_scale_page_bytes, int64_t v_scale_head_bytes,      \
        int64_t v_scale_page_bytes, const int32_t *__restrict__ block_table, int32_t table_width,                      \
        const int32_t *__restrict__ first_positions, const int32_t *__restrict__ table_rows,                           \
        const int32_t *__restrict__ live, int32_t batch, int32_t width, int32_t kv_heads PK_EVENT_PARAMETER

#define PK_APPEND_BODY(live)                                                                                           \
    using namespace pagedkv;                                                                                           \
    PK_SHARED(float, rows, 2 * 32 * kLaneDims);                                                                        \
    PK_SHARED(uint32_t, words, 2 * 32);                                                                                \
    const int lane = threadIdx.x & 31;                                                                                 \
    const bool writes_v = threadIdx.x >= 32;                                                                           \
    const AppendPlace place = append_place(writes_v ? v : k, block_table, table_width, first_positions, table_rows,    \
                                           live, batch, width, kv_heads, lane);                                        \
    if (writes_v) {                                                                                                    \
        append_row<kCodecV, kRotatesV>(place, Plane{v_pages, v_head_bytes, v_page_bytes},                              \
                                       Plane{v_scales, v_scale_head_bytes, v_scale_page_bytes}, rows + 32 * kLaneDims, \
                                       words + 32, lane PK_EVENT_ARGUMENT);                                            \
    } else {                                                                                                           \
        append_row<kCodecK, kRotatesK>(place, Plane{k_pages, k_head_bytes, k_page_bytes},                              \
                                       Plane{k_scales, k_scale_head_bytes, k_scale_page_bytes}, rows, words,           \
                                       lane PK_EVENT_ARGUMENT);                                                        \
    }

// k, v: (B, W, Hkv, D) BF16; planes of one layer; block_table: (C, table_width); first_positions, table_rows: (B,),
// table_rows null = row 0; valid_columns: (B,) or null = W everywhere.
extern "C" __global__ void append_rows(PK_APPEND_PARAMETERS(valid_columns)) { PK_APPEND_BODY(valid_columns) }
PK_EXPORT(append_rows)

// The same with counts: (B,), columns [0, counts[b]) of row b are written.
extern "C" __global__ void append_prefix(PK_APPEND_PARAMETERS(counts)) { PK_APPEND_BODY(counts) }
PK_EXPORT(append_prefix)

// values: (N, D) FP32, rotated already; codes: (N, code bytes); scales: (N, scale bytes); role: 0 = K, 1 = V.
// (codecs 6)
extern "C" __global__ void encode_unrotated(const float* __restrict__ values, uint8_t* codes, uint8_t* scales,
                                            int64_t rows, int32_t role PK_EVENT_PARAMETER) {
    using namespace pagedkv;
    if constexpr (kCodecK != Codec::kBf16) {
        PK_SHARED(uint32_t, words, 32);
        const int lane = threadIdx.x & 31;
        const int piece = lane % kRowLanes;
        const int64_t row = static_cast<int64_t>(blockIdx.x) * kAppendWarpRows + lane / kRowLanes;
        const bool is_live = row < rows;
        float x[kLaneDims] = {};
        if (is_live) {
            const float* source = values + row * kHeadDim + piece * kLaneDims;
            spread16(x, load8(source), load8(source + 8));
        }
        if (role == 0) {
            encode_row<kCodecK>(x, codes + row * code_row_bytes(kCodecK), scales + row * scale_row_bytes(kCodecK),
                                words, lane, piece, is_live PK_EVENT_ARGUMENT);
        } else {
            encode_row<kCodecV>(x, codes + row * code_row_bytes(kCodecV), scales + row * scale_row_bytes(kCodecV),
                                words, lane, piece, is_live PK_EVENT_ARGUMENT);
        }
    }
}
PK_EXPORT(encode_unrotated)
