"""Errors say four things and carry them; they survive a copy and a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

import pagedkv as pk


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
