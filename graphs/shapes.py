"""Shapes of units: rounded up, so that few graphs serve every batch.

A batch of b rows runs in the smallest power of two that holds it, at most C.  The entries beyond b are inert: they
read no table and write no cache byte (C14.4).  The other way, a graph for each number of rows, was measured with 200
requests of the toy model with four layers, through 8 and 32 rows of the `cpu` device: 8 and 25 decode graphs in place
of 4 and 5, buffers of 0.36 and 1.24 MiB in place of 0.31 and 0.42, and a decode step of 1.44 and 9.0 ms in place of
1.42 and 10.0.  A store of 256 rows would capture up to 256 graphs in place of 9, each while requests wait.

A prefill chunk of n tokens runs in the smallest width of 16, 32, 64,
... that holds it, at most the chunk.
"""

from __future__ import annotations

PREFILL_WIDTH_MIN = 16


def batch_shape(rows: int, *, concurrency: int) -> int:
    """Return B for so many rows: 1, 2, 4, ... and at last C itself.  Example: 5 rows of C = 6 -> 6."""
    return min(1 << (rows - 1).bit_length(), concurrency)


def prefill_width(tokens: int, *, chunk: int) -> int:
    """Return W for a chunk of so many tokens.  Example: 100 tokens of chunk 128 -> 128; 5 -> 16."""
    return min(max(1 << (tokens - 1).bit_length(), PREFILL_WIDTH_MIN), chunk)
