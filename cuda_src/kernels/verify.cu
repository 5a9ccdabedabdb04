// verify: how many columns of a verify unit are accepted.  (C13.1)
//
//   kernel         grid                   block   shared bytes   called from
//   accept_greedy  (ceil(B / 64), 1, 1)   64      0              ops.accept_greedy, through Unit.accept_greedy
//
// Column 0 of an entry is its last token, columns 1 and on are drafted.  Example: tokens 5 8 9 4, all live, and the model
// chose 8 9 7 1 after them: 8 and 9 are right, 4 is not (7 is), so 3 columns are accepted and 7 is the next token.

#include "kernels/runtime.cuh"

// Writes to accepted[b] 0 where no column is live, else 1 + the drafted tokens before the first wrong one: one thread an
// entry.  tokens, next_tokens: (B, W); accepted, valid_columns: (B,), 0 <= valid_columns[b] <= W.
extern "C" __global__ void accept_greedy(int32_t* accepted, const int32_t* __restrict__ tokens,
                                         const int32_t* __restrict__ next_tokens,
                                         const int32_t* __restrict__ valid_columns, int32_t batch, int32_t width) {
    const int32_t entry = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
    if (entry >= batch) return;
    const int64_t first = static_cast<int64_t>(entry) * width;
    const int32_t live = valid_columns[entry];
    int32_t count = live > 0 ? 1 : 0;
    while (count > 0 && count < live && tokens[first + count] == next_tokens[first + count - 1]) ++count;
    accepted[entry] = count;
}
PK_EXPORT(accept_greedy)
