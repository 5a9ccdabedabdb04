"""The cost per page of a bulk operation is constant: what Python and NumPy are asked does not grow with the pages.

Counted, not timed: every call of a Python function, a C function or a method, as a profile hook sees them.  Free
pages lie in one run or all apart, so both ways of looking pages up are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from pagedkv.ledger.activation import ActivationTarget
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.ledger.sequences import Sequence
from tests.host.builders import activate, boundary_checked, make_ledgers, write

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


def written(ledgers: StoreLedgers, tokens: int) -> Sequence:
    sequence = activate(ledgers, tokens)
    write(ledgers, sequence, tokens)
    return sequence


def retained(ledgers: StoreLedgers, tokens: int) -> Continuation:
    continuation = ledgers.finish(written(ledgers, tokens), retain=True, state="complete")
    assert continuation is not None
    return continuation


def make(pages: int, layout: str) -> StoreLedgers:
    """Return ledgers with room for three sequences; `apart`: every second page is held by a continuation."""
    total = 3 * (pages + 2)
    ledgers = make_ledgers(max_context=(pages + 2) * 64, max_concurrency=6, tokens=2 * total * 64)
    kept = [retained(ledgers, 1) for _ in range(2 * total)] if layout == "apart" else []
    for continuation in kept[::2]:
        ledgers.release(continuation)
    return ledgers


def admit(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    yield lambda: ledgers.try_activate(ActivationTarget(tokens, 0))


def fork(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    source = retained(ledgers, tokens)
    yield lambda: ledgers.try_activate(ActivationTarget(64, 0, source=source))


def move(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    source = retained(ledgers, tokens)
    yield lambda: ledgers.try_activate(ActivationTarget(64, 0, source=source, keep_source=False))


def finish(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    sequence = written(ledgers, tokens)
    yield lambda: ledgers.finish(sequence)


def finish_forked(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    source = retained(ledgers, tokens)
    sequence = ledgers.try_activate(ActivationTarget(64, 0, source=source))
    assert isinstance(sequence, Sequence)
    yield lambda: ledgers.finish(sequence)


def snapshot(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    sequence = written(ledgers, tokens)
    yield lambda: ledgers.try_snapshot(sequence, "complete")


def retain(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    sequence = written(ledgers, tokens)
    yield lambda: ledgers.finish(sequence, retain=True, state="complete")


def release(ledgers: StoreLedgers, tokens: int) -> Iterator[Callable[[], object]]:
    source = retained(ledgers, tokens)
    yield lambda: ledgers.release(source)


@pytest.mark.parametrize("layout", ["adjoining", "apart"])
@pytest.mark.parametrize("tail", [0, 40], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("operation", [admit, fork, move, finish, finish_forked, snapshot, retain, release])
def test_a_bulk_operation_makes_as_many_calls_for_many_pages_as_for_few(
    operation: Callable[[StoreLedgers, int], Iterator[Callable[[], object]]], tail: int, layout: str
) -> None:
    """Cost per page is constant: only the vectors grow (design: bulk operations)."""
    counts = []
    for pages in SIZES:
        with boundary_checked(make(pages, layout)) as ledgers:
            counts.append(calls_of(next(operation(ledgers, (pages - 1) * 64 + (tail or 64)))))

    assert counts[0] == counts[1]
