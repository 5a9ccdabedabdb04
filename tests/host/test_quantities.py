"""Constants and page arithmetic at their boundaries.  (C2, C3.9)"""

from __future__ import annotations

import pytest

from pagedkv.values import quantities
from pagedkv.values.quantities import align_up, ceil_div, pages_for_tokens


def test_a_page_is_64_tokens_and_a_position_is_a_shift_and_a_mask() -> None:
    """P is a constant of every pool.  (C2.3, C3.9)"""
    assert (quantities.PAGE_TOKENS, quantities.PAGE_SHIFT, quantities.PAGE_MASK) == (64, 6, 63)
    assert (70 >> quantities.PAGE_SHIFT, 70 & quantities.PAGE_MASK) == (1, 6)


def test_alignments_are_those_of_the_contract() -> None:
    """Plane bases 256 bytes, rows 16 bytes.  (C3.10)"""
    assert (quantities.SLAB_ALIGN_BYTES, quantities.ROW_ALIGN_BYTES) == (256, 16)


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3), (1000, 16), (262_144, 4096)]
)
def test_pages_hold_whole_tokens(tokens: int, pages: int) -> None:
    """Rounded up, never down.  (C2, C5.1)"""
    assert pages_for_tokens(tokens) == pages


def test_division_and_alignment_round_up() -> None:
    """Exact multiples stay; anything above goes to the next.  (C5.2)"""
    assert [ceil_div(n, 64) for n in (0, 1, 63, 64, 65)] == [0, 1, 1, 1, 2]
    assert [align_up(n, 256) for n in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]


def test_the_largest_context_and_one_more_of_it_still_fit_the_device() -> None:
    """Positions are int32: page rounding of the largest context cannot wrap.  (C3.10)"""
    assert quantities.CONTEXT_TOKENS_MAX + quantities.PAGE_MASK < 2**31
