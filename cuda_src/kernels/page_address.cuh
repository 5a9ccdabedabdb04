// Where a cache position lives: planes, pages and rows.  (C3.7-C3.10)
//
//   position p -> block p >> 6, offset p & 63, page = table[row][block]
//   byte(p, h) = base + page * page_bytes + h * head_bytes + (p & 63) * row_bytes
//
//   page-major (N, H, P, X): head_bytes = 64 * row_bytes         page_bytes = H * head_bytes
//   head-major (H, N, P, X): head_bytes = N * 64 * row_bytes     page_bytes = 64 * row_bytes
//
// Example, page-major BF16, D = 128, H = 8: row 256, head 16,384, page 131,072 bytes; position 70 of head 2 in
// page 5 starts at 5*131072 + 2*16384 + 6*256 = 689,664.
//
// row_bytes is a compile-time constant of (profile, head_dim); the two strides are run-time arguments, so one
// kernel serves both page orders.  Offsets are 64-bit: page 100,000 of the plane above starts beyond 2^33.
// Page ids are trusted: the caller guarantees mapped blocks (C14.2).
#pragma once

namespace pagedkv {

constexpr int kPageShift = 6;
constexpr int kPageTokens = 1 << kPageShift;
constexpr int kPageMask = kPageTokens - 1;
static_assert(kPageTokens == 64, "P is a constant of the contract (C2.3); a lane of a warp owns two keys of a page");

// One plane of one layer: its bytes and the two strides that differ between page orders.
struct Plane {
    uint8_t* base;       // 256-byte aligned
    int64_t head_bytes;  // between two KV heads of one page
    int64_t page_bytes;  // between two pages of one KV head
};

// Returns the table row of a batch entry; a table of one row comes without `table_rows`.  (C14.1)
__device__ __forceinline__ int table_row_of(const int32_t* table_rows, int entry) {
    return table_rows == nullptr ? 0 : table_rows[entry];
}

// Returns the first byte of row `offset` of KV head `head` in page `page`; rows are row_bytes apart.
__device__ __forceinline__ uint8_t* row_address(const Plane& plane, int page, int head, int offset, int row_bytes) {
    return plane.base + page * plane.page_bytes + head * plane.head_bytes + offset * row_bytes;
}

}  // namespace pagedkv
