"""Errors say four things and carry them; they survive a copy and a process boundary."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

import pagedkv as pk
from tests.hostile.interrupt import Interrupt


def refusal() -> pk.UnitInFlight:
    return pk.UnitInFlight("trim of row 3", expected="a boundary", got="unit decode#812", remedy="wait",
                           clause="C12.2", row=3)


def test_the_message_says_what_was_refused_expected_got_what_to_do_and_the_clause() -> None:
    """One sentence, and the same facts as attributes."""
    error = refusal()

    assert str(error) == "trim of row 3 was refused: expected a boundary, got unit decode#812; wait. (C12.2)"
    assert (error.row, error.clause, error.remedy) == (3, "C12.2", "wait")
    with pytest.raises(AttributeError):
        _ = error.pool


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_a_copy(duplicate: object) -> None:
    """Worker processes hand errors to their parent by pickle."""
    error = refusal()
    again = duplicate(error)  # type: ignore[operator]

    assert (type(again), str(again), again.fields) == (type(error), str(error), error.fields)


@pytest.mark.parametrize("check", [
    lambda value: pk.checks.checked_items("a step", [value], expected="items", remedy="pass a list", clause="C11.3"),
    lambda value: pk.checks.checked_counts("columns", [value], remedy="pass a count", clause="C14.4"),
    lambda value: pk.checks.array_form((value,), "u1"), lambda value: pk.checks.has_method([value], "enqueue"),
], ids=["items", "counts", "form", "method"])
def test_a_lack_of_memory_in_a_check_is_not_blamed_on_the_value(check: Callable[[object], object]) -> None:
    """Every line of a check may fail to allocate; the value is legal, so nothing refuses it."""
    with Interrupt(0, MemoryError) as count:
        check(1)
    for at in range(1, count.lines + 1):
        with pytest.raises(MemoryError), Interrupt(at, MemoryError):
            check(1)
