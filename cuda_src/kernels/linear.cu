// linear: out = x @ w.T in FP32, every element by itself and in one fixed order.  (C14.6)
//
//   x (R, K)   w (N, K)   out (R, N)   FP32, C-contiguous
//
// An element is 32 running sums and a tree: lane l of a warp takes k = l, l + 32, l + 64, ... with one fused
// multiply-add each, then the xor tree 16, 8, 4, 2, 1.  Nothing depends on R, on N or on other rows, so a row has the
// same bits alone and in any batch, on both devices.  K = 70: lane 0 adds k = 0, 32, 64; lane 6 adds k = 6, 38.
//
// A warp takes one column n for kLinearRows rows and reads each weight once for them: reading weights bounds decode.
//
//   kernel        grid                              block   shared bytes   called from
//   linear_rows   (ceil(N / 4), ceil(R / 16), 1)    128     0              tools/llama/model.py: its products on a GPU

#include "kernels/runtime.cuh"

namespace pagedkv {

constexpr int kLinearRows = 16;    // rows of x that share a weight
constexpr int kLinearColumns = 4;  // warps of a block, a column each
static_assert(kLinearRows <= 32, "lane r writes row r");

}  // namespace pagedkv

extern "C" __global__ void __launch_bounds__(128) linear_rows(const float* __restrict__ x, const float* __restrict__ w,
                                                              float* __restrict__ out, int32_t rows, int32_t columns,
                                                              int32_t depth) {
    using namespace pagedkv;
    const int lane = threadIdx.x & 31;
    const int column = blockIdx.x * kLinearColumns + (threadIdx.x >> 5);
    if (column >= columns) return;  // whole warps leave
    const int first_row = blockIdx.y * kLinearRows;
    const int row_count = min(kLinearRows, rows - first_row);
    const float* weights = w + static_cast<int64_t>(column) * depth;
    const float* inputs = x + static_cast<int64_t>(first_row) * depth;
    float sums[kLinearRows];
#pragma unroll
    for (int r = 0; r < kLinearRows; ++r) sums[r] = 0.0f;
    for (int k = lane; k < depth; k += 32) {
        const float weight = weights[k];
#pragma unroll
        for (int r = 0; r < kLinearRows; ++r)
            if (r < row_count) sums[r] = fmaf(inputs[static_cast<int64_t>(r) * depth + k], weight, sums[r]);
    }
    pk_warp_sum(sums);
#pragma unroll
    for (int r = 0; r < kLinearRows; ++r)
        if (r < row_count && lane == r) out[static_cast<int64_t>(first_row + r) * columns + column] = sums[r];
}
PK_EXPORT(linear_rows)
