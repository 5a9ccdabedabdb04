// page_moves: kernels that move or fill bytes and know no profile.  (C14.4)
//
//   kernel          grid                        block   called from
//   fill_pages      (listed pages, heads, 1)    128     ops.zero_pages, ops.fill_pages, once per plane
//   pack_pages      (listed pages, heads, 1)    128     ops.pack_pages, once per plane
//   unpack_pages    (listed pages, heads, 1)    128     ops.unpack_pages, once per plane
//   bf16_from_f32   (ceil(count / 256), 1, 1)   256     ops.bf16_from_f32
//   f32_from_bf16   (ceil(count / 256), 1, 1)   256     ops.f32_from_bf16
//
// One page of one head is 64 rows, contiguous in both page orders and a multiple of 64 bytes for every plane.
// Read next: `append.cu`.

#include "runtime.cuh"

#include "page_address.cuh"
#include "number_formats.cuh"

// Writes `word` over every byte of the listed pages of one plane.  page_ids: (gridDim.x,); block_bytes: bytes of one
// (page, head).
extern "C" __global__ void fill_pages(uint8_t* plane, const int32_t* __restrict__ page_ids, int64_t head_bytes,
                                      int64_t page_bytes, int32_t block_bytes, uint32_t word) {
    uint8_t* target = plane + page_ids[blockIdx.x] * page_bytes + blockIdx.y * head_bytes;
    const uint4 words = make_uint4(word, word, word, word);
    for (int32_t at = threadIdx.x * 16; at < block_bytes; at += blockDim.x * 16) pagedkv::store16(target + at, words);
}
PK_EXPORT(fill_pages)

// Gathers the listed pages of one plane: listed page i becomes page i of `packed`, which has strides of its own.
// page_ids: (gridDim.x,); block_bytes: bytes of one (page, head).  The two planes do not overlap.
extern "C" __global__ void pack_pages(uint8_t* packed, const uint8_t* __restrict__ plane,
                                      const int32_t* __restrict__ page_ids, int64_t packed_head_bytes,
                                      int64_t packed_page_bytes, int64_t head_bytes, int64_t page_bytes,
                                      int32_t block_bytes) {
    uint8_t* target = packed + blockIdx.x * packed_page_bytes + blockIdx.y * packed_head_bytes;
    const uint8_t* source = plane + page_ids[blockIdx.x] * page_bytes + blockIdx.y * head_bytes;
    for (int32_t at = threadIdx.x * 16; at < block_bytes; at += blockDim.x * 16) {
        pagedkv::store16(target + at, pagedkv::load16(source + at));
    }
}
PK_EXPORT(pack_pages)

// Scatters packed pages: page i of `packed` becomes listed page i of the plane.  The reverse of pack_pages.
extern "C" __global__ void unpack_pages(uint8_t* plane, const uint8_t* __restrict__ packed,
                                        const int32_t* __restrict__ page_ids, int64_t packed_head_bytes,
                                        int64_t packed_page_bytes, int64_t head_bytes, int64_t page_bytes,
                                        int32_t block_bytes) {
    const uint8_t* source = packed + blockIdx.x * packed_page_bytes + blockIdx.y * packed_head_bytes;
    uint8_t* target = plane + page_ids[blockIdx.x] * page_bytes + blockIdx.y * head_bytes;
    for (int32_t at = threadIdx.x * 16; at < block_bytes; at += blockDim.x * 16) {
        pagedkv::store16(target + at, pagedkv::load16(source + at));
    }
}
PK_EXPORT(unpack_pages)

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
