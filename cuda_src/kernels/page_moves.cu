// page_moves: kernels that move or fill bytes and know no profile.  (C14.4)
//
//   kernel          grid                        block   shared bytes   called from
//   fill_pages      (listed pages, heads, 1)    128     0              ops.zero_pages, ops.fill_pages, once per plane
//   pack_pages      (listed pages, heads, 1)    128     0              ops.pack_pages, once per plane
//   unpack_pages    (listed pages, heads, 1)    128     0              ops.unpack_pages, once per plane
//   copy_columns    (heads, 1, 1)               128     0              ops.copy_columns, once per plane
//   set_entries     (ceil(count / 256), 1, 1)   256     0              the store, through ops.page_moves
//   bf16_from_f32   (ceil(count / 256), 1, 1)   256     0              ops.bf16_from_f32
//   f32_from_bf16   (ceil(count / 256), 1, 1)   256     0              ops.f32_from_bf16
//
// One page of one head is 64 rows, contiguous in both page orders and a multiple of 64 bytes for every plane.  Its
// first n rows need not fill 16-byte words: 33 rows of a 2-byte scale are 4 words and 2 bytes.

#include "kernels/runtime.cuh"

#include "kernels/page_address.cuh"
#include "kernels/number_formats.cuh"

namespace pagedkv {

// Copies `bytes`, a multiple of 16, by the threads of the block.
__device__ __forceinline__ void copy_words(uint8_t* target, const uint8_t* source, int32_t bytes) {
    for (int32_t at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) store16(target + at, load16(source + at));
}

}  // namespace pagedkv

// ---- kernels -------------------------------------------------------------------------------------------------------

// Writes `word` over every byte of the listed pages of one plane.  page_ids: (gridDim.x,); block_bytes: bytes of one
// (page, head).
extern "C" __global__ void fill_pages(uint8_t* plane, const int32_t* __restrict__ page_ids, int64_t head_bytes,
                                      int64_t page_bytes, int32_t block_bytes, uint32_t word) {
    uint8_t* target = plane + page_ids[blockIdx.x] * page_bytes + blockIdx.y * head_bytes;
    const uint4 words = make_uint4(word, word, word, word);
    for (int32_t at = threadIdx.x * 16; at < block_bytes; at += blockDim.x * 16) pagedkv::store16(target + at, words);
}
PK_EXPORT(fill_pages)

// Gathers the listed pages of one plane: listed page i becomes page i of `packed`, which has its own strides.
// page_ids: (gridDim.x,); block_bytes: bytes of one (page, head).  The two planes do not overlap.
extern "C" __global__ void pack_pages(uint8_t* packed, const uint8_t* __restrict__ plane,
                                      const int32_t* __restrict__ page_ids, int64_t packed_head_bytes,
                                      int64_t packed_page_bytes, int64_t head_bytes, int64_t page_bytes,
                                      int32_t block_bytes) {
    uint8_t* target = packed + blockIdx.x * packed_page_bytes + blockIdx.y * packed_head_bytes;
    const uint8_t* source = plane + page_ids[blockIdx.x] * page_bytes + blockIdx.y * head_bytes;
    pagedkv::copy_words(target, source, block_bytes);
}
PK_EXPORT(pack_pages)

// Scatters packed pages: page i of `packed` becomes listed page i of the plane.  The reverse of pack_pages.
extern "C" __global__ void unpack_pages(uint8_t* plane, const uint8_t* __restrict__ packed,
                                        const int32_t* __restrict__ page_ids, int64_t packed_head_bytes,
                                        int64_t packed_page_bytes, int64_t head_bytes, int64_t page_bytes,
                                        int32_t block_bytes) {
    const uint8_t* source = packed + blockIdx.x * packed_page_bytes + blockIdx.y * packed_head_bytes;
    uint8_t* target = plane + page_ids[blockIdx.x] * page_bytes + blockIdx.y * head_bytes;
    pagedkv::copy_words(target, source, block_bytes);
}
PK_EXPORT(unpack_pages)

// Copies the first column_bytes bytes of every head of page `source` to page `destination` of the same plane: a
// partial tail's committed rows; nothing behind them is read or written.  (C10.5)  The two pages differ.  Words of 16
// bytes first, then one byte per thread for a rest of 0 to 15 bytes.
extern "C" __global__ void copy_columns(uint8_t* plane, int32_t source, int32_t destination, int64_t head_bytes,
                                        int64_t page_bytes, int32_t column_bytes) {
    const uint8_t* from = plane + source * page_bytes + blockIdx.x * head_bytes;
    uint8_t* target = plane + destination * page_bytes + blockIdx.x * head_bytes;
    const int32_t word_bytes = column_bytes & ~15;
    pagedkv::copy_words(target, from, word_bytes);
    const int32_t rest = word_bytes + static_cast<int32_t>(threadIdx.x);
    if (rest < column_bytes) target[rest] = from[rest];
}
PK_EXPORT(copy_columns)

// Sets single entries of a block table.  entries (2, count): indices of the flat table, and page ids.  (C11.2)
extern "C" __global__ void set_entries(int32_t* table, const int64_t* __restrict__ entries, int32_t count) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) table[entries[at]] = static_cast<int32_t>(entries[count + at]);
}
PK_EXPORT(set_entries)

// RNE; a NaN keeps its sign and upper payload and becomes quiet, as in pagedkv.codecs.f32_to_bf16.
extern "C" __global__ void bf16_from_f32(uint16_t* destination, const float* __restrict__ source, int64_t count) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) destination[at] = static_cast<uint16_t>(pagedkv::bf16_keep_nan(source[at]));
}
PK_EXPORT(bf16_from_f32)

// Exact; NaN payloads survive.
extern "C" __global__ void f32_from_bf16(float* destination, const uint16_t* __restrict__ source, int64_t count) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) destination[at] = pagedkv::bf16_to_float(source[at]);
}
PK_EXPORT(f32_from_bf16)
