"""Verify: the accepted columns of a unit that drafted tokens went through.  (C13.1, C14.6)"""

from __future__ import annotations

import numpy as np

from pagedkv.devices.protocol import Array, Stream
from pagedkv.ops.checks import check_array, check_memory
from pagedkv.ops.modules import HasKernels
from pagedkv.values.quantities import ceil_div

ACCEPT_THREADS = 64


def accept_greedy(
    ops: HasKernels, tokens: Array, next_tokens: Array, valid_columns: Array, accepted: Array, *, stream: Stream
) -> None:
    """Count the columns of each entry up to its first wrong draft: what greedy decoding would have written.  (C13.1)

    accepted[b] is 0 where valid_columns[b] is 0, else 1 + the number of leading j with j + 1 < valid_columns[b] and
    tokens[b, j + 1] == next_tokens[b, j].  Launches: 1.

    Args:
        tokens, next_tokens: (B, W) int32; valid_columns: (B,) int32, 0 to W; accepted: (B,) int32, all of it written;
            all on the device.

    Raises:
        MisuseError: arrays of another form, that overlap, or that the device may not use (C14.2).
    """
    check_array("tokens", tokens, np.int32, (None, None), "C14.2")
    batch, width = tokens.shape
    read = (("tokens", tokens), ("next_tokens", next_tokens), ("valid_columns", valid_columns))
    check_array("next_tokens", next_tokens, np.int32, (batch, width), "C14.2")
    check_array("valid_columns", valid_columns, np.int32, (batch,), "C14.2")
    check_array("accepted", accepted, np.int32, (batch,), "C14.2")
    check_memory(ops, (*read, ("accepted", accepted)), writes=("accepted",))
    if batch:
        arguments = (accepted, tokens, next_tokens, valid_columns, np.int32(batch), np.int32(width))
        grid = (ceil_div(batch, ACCEPT_THREADS), 1, 1)
        ops.kernels.verify()["accept_greedy"].launch(grid, (ACCEPT_THREADS, 1, 1), arguments, stream)
