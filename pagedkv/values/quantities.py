"""Constants and integer arithmetic that every other module shares.

Letters as in the contract: P page tokens, S max_context, C max_concurrency, L = ceil(S / P) blocks
of one table row, M Main page groups, B batch rows, W query columns, D head_dim.  (C2, C5)
"""

from __future__ import annotations

PAGE_TOKENS = 64
PAGE_SHIFT = 6
PAGE_MASK = 63
WINDOW_PAGES = 64
"""Ids of pages that are bound at once: 4096 tokens, so that a row asks for ids once in 4096 steps (C6.5)."""
SLAB_ALIGN_BYTES = 256
ROW_ALIGN_BYTES = 16
CONTEXT_TOKENS_MAX = 1 << 30
"""Positions are int32 on the device: a position and a count, both below this, add up below 2^31."""

assert PAGE_TOKENS == 1 << PAGE_SHIFT, "a position's block is a shift (C3.9)"
assert PAGE_MASK == PAGE_TOKENS - 1, "a position's offset is a mask (C3.9)"
assert SLAB_ALIGN_BYTES % ROW_ALIGN_BYTES == 0, "an aligned plane starts with an aligned row (C3.10)"


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the smallest integer not below numerator / denominator (both non-negative)."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` not below `value`."""
    return ceil_div(value, alignment) * alignment


def pages_for_tokens(tokens: int) -> int:
    """Return how many pages hold positions [0, tokens): 0 -> 0, 64 -> 1, 65 -> 2.  (C2)"""
    return (tokens + PAGE_MASK) >> PAGE_SHIFT
