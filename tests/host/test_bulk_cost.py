"""The cost per page of a bulk operation is constant: what Python and NumPy are asked does not grow with the pages.

Counted, not timed: every call of a Python function, a C function or a method, as a profile hook sees them.  Free
pages lie in one run or all apart, so both ways of looking pages up are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget
from tests.host.builders import activate, make_ledger

SIZES = (64, 192)
"""Many more pages would show nothing more: one call a page is 128 calls apart here."""


def calls_of(operation: Callable[[], object]) -> int:
    """Return how many calls an operation makes, at any depth."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        operation()
    finally:
        sys.setprofile(before)
    return counted


def written(ledger: Ledger, tokens: int) -> Sequence:
    return activate(ledger, tokens, written=tokens)


def retained(ledger: Ledger, tokens: int) -> Continuation:
    continuation = ledger.finish(written(ledger, tokens), retain=True, state="complete")
    assert continuation is not None
    return continuation


def make(pages: int, layout: str) -> Ledger:
    """Return a ledger with room for three sequences; `apart`: every second page is held by a continuation."""
    total = 3 * (pages + 2)
    ledger = make_ledger(max_context=(pages + 2) * 64, max_concurrency=6, tokens=2 * total * 64)
    kept = [retained(ledger, 1) for _ in range(2 * total)] if layout == "apart" else []
    for continuation in kept[::2]:
        ledger.release(continuation)
    return ledger


def forked(ledger: Ledger, tokens: int) -> Sequence:
    sequence = ledger.try_activate(ActivationTarget(64, 0, source=retained(ledger, tokens)))
    assert isinstance(sequence, Sequence)
    return sequence


OPERATIONS: dict[str, tuple[Callable[[Ledger, int], Any], Callable[[Ledger, Any], object]]] = {
    "admit": (lambda ledger, tokens: tokens, lambda ledger, tokens: ledger.try_activate(ActivationTarget(tokens, 0))),
    "fork": (retained, lambda ledger, source: ledger.try_activate(ActivationTarget(64, 0, source))),
    "move": (retained, lambda ledger, source: ledger.try_activate(ActivationTarget(64, 0, source, keep_source=False))),
    "finish": (written, lambda ledger, sequence: ledger.finish(sequence)),
    "finish a fork": (forked, lambda ledger, sequence: ledger.finish(sequence)),
    "snapshot": (written, lambda ledger, sequence: ledger.try_snapshot(sequence, "complete")),
    "retain": (written, lambda ledger, sequence: ledger.finish(sequence, retain=True, state="complete")),
    "release": (retained, lambda ledger, source: ledger.release(source)),
}
"""What an operation begins with, of so many tokens, and the operation."""


@pytest.mark.parametrize("layout", ["adjoining", "apart"])
@pytest.mark.parametrize("tail", [0, 40], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("begin", "act"), OPERATIONS.values(), ids=OPERATIONS)
def test_a_bulk_operation_makes_as_many_calls_for_many_pages_as_for_few(
    begin: Callable[[Ledger, int], Any], act: Callable[[Ledger, Any], object], tail: int, layout: str
) -> None:
    """Cost per page is constant: only the vectors grow (design: bulk operations)."""
    counts = []
    for pages in SIZES:
        ledger = make(pages, layout)
        subject = begin(ledger, (pages - 1) * 64 + (tail or 64))
        counts.append(calls_of(partial(act, ledger, subject)))

    assert counts[0] == counts[1]
