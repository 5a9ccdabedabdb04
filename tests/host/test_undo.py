"""Claims are given back whole, the last first, whatever one of the calls does.  (C10.2)"""

from __future__ import annotations

import pytest

from pagedkv.ledger.undo import Undo, undo_all


def test_the_last_claim_goes_back_first_and_only_once() -> None:
    """A second undo finds nothing.  (C10.2)"""
    given: list[int] = []
    undo: Undo = [(given.append, 1), (given.append, 2), (given.append, 3)]

    undo_all(undo)
    undo_all(undo)

    assert [3, 2, 1] == given


def test_a_call_that_raises_keeps_no_other_claim_from_going_back() -> None:
    """What it raised comes out, after all others were called, and tells of what another one raised."""
    given: list[int] = []

    def fail(number: int) -> None:
        raise ValueError(number)

    undo: Undo = [(given.append, 1), (fail, 2), (given.append, 3), (fail, 4), (given.append, 5)]

    with pytest.raises(ValueError, match="4") as caught:
        undo_all(undo)
    assert ([5, 3, 1], []) == (given, undo)
    assert ["and a claim could not be given back: 2"] == caught.value.__notes__


def test_an_interrupt_comes_out_when_everything_has_gone_back() -> None:
    """Also where an error made the undoing necessary."""
    given: list[int] = []

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    undo: Undo = [(given.append, 1), (interrupt, 2), (given.append, 3)]

    with pytest.raises(KeyboardInterrupt):
        undo_all(undo, ValueError("first"))
    assert ([3, 1], []) == (given, undo)


def test_the_error_that_made_it_necessary_is_not_hidden() -> None:
    """It is raised by whoever caught it, and tells what else went wrong."""
    error = ValueError("first")

    def fail(_: int) -> None:
        raise KeyError("second")

    undo_all([(fail, 1)], error)

    assert ["and a claim could not be given back: 'second'"] == error.__notes__
