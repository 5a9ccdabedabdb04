// page_moves: kernels that move or fill bytes and know no profile.  (C14.4)
//
//   kernel          grid                        block   shared bytes   called from
//   fill_pages      (listed pages, heads, 1)    128     0              ops.zero_pages, ops.fill_pages, once per plane
//   pack_pages      (listed pages, planes, 1)   128     0              ops.pack_pages
//   unpack_pages    (listed pages, planes, 1)   128     0              ops.unpack_pages
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

// One plane of a table of planes, as ops.plane_table writes it.
struct PlaneWords {
    int64_t address;
    int64_t head_bytes;    // from one head of a page to the next
    int64_t page_bytes;    // from one page of a head to the next
    int64_t heads;
    int64_t block_bytes;   // of one head of a page, a multiple of 16
    int64_t record_bytes;  // where the plane's payload begins in a record; there its heads follow each other
};

// Copies one page of one plane between the plane and a record.  is_packing: into the record.
template <bool is_packing>
__device__ __forceinline__ void move_page(uint8_t* record, const PlaneWords* plane, int32_t page) {
    uint8_t* payload = record + plane->record_bytes;
    uint8_t* base = reinterpret_cast<uint8_t*>(plane->address) + page * plane->page_bytes;
    const int32_t block_words = static_cast<int32_t>(plane->block_bytes >> 4);
    const int32_t words = static_cast<int32_t>(plane->heads) * block_words;
    const int64_t head_bytes = plane->head_bytes;
    for (int32_t word = threadIdx.x; word < words; word += blockDim.x) {
        const int32_t head = word / block_words;
        uint8_t* inside = base + head * head_bytes + static_cast<int64_t>(word - head * block_words) * 16;
        uint8_t* outside = payload + static_cast<int64_t>(word) * 16;
        if (is_packing) store16(outside, load16(inside));
        else store16(inside, load16(outside));
    }
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

// Gathers the listed pages of every plane: listed page i becomes record i.  planes: (gridDim.y,); page_ids:
// (gridDim.x,).  Records and planes do not overlap.
extern "C" __global__ void pack_pages(uint8_t* records, const int64_t* __restrict__ planes,
                                      const int32_t* __restrict__ page_ids, int64_t record_bytes) {
    const pagedkv::PlaneWords* plane = reinterpret_cast<const pagedkv::PlaneWords*>(planes) + blockIdx.y;
    pagedkv::move_page<true>(records + blockIdx.x * record_bytes, plane, page_ids[blockIdx.x]);
}
PK_EXPORT(pack_pages)

// Scatters records: record i becomes listed page i of every plane.  The reverse of pack_pages.
extern "C" __global__ void unpack_pages(const uint8_t* __restrict__ records, const int64_t* __restrict__ planes,
                                        const int32_t* __restrict__ page_ids, int64_t record_bytes) {
    const pagedkv::PlaneWords* plane = reinterpret_cast<const pagedkv::PlaneWords*>(planes) + blockIdx.y;
    uint8_t* record = const_cast<uint8_t*>(records) + blockIdx.x * record_bytes;
    pagedkv::move_page<false>(record, plane, page_ids[blockIdx.x]);
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
