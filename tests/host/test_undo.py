"""Claims are given back whole, the last first, whatever one of the calls does.  (C10.2)"""

from __future__ import annotations

import pytest

from pagedkv.undo import Undo, undo_all


def test_the_last_claim_goes_back_first_and_only_once() -> None:
    """A second undo finds nothing.  (C10.2)"""
    given: list[int] = []
    undo: Undo = [(given.append, 1), (given.append, 2), (given.append, 3)]

    undo_all(undo)
    undo_all(undo)

    assert [3, 2, 1] == given


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_call_that_raises_keeps_no_other_claim_from_going_back(failure: type[BaseException]) -> None:
    """What it raised comes out, after all others were called; of two, the later one, which tells of the first."""
    given: list[int] = []

    def fail(number: int) -> None:
        raise failure(number)

    undo: Undo = [(given.append, 1), (fail, 2), (given.append, 3), (fail, 4), (given.append, 5)]

    with pytest.raises(failure, match="2") as caught:
        undo_all(undo)
    assert ([5, 3, 1], []) == (given, undo)
    assert isinstance(caught.value.__context__, failure)
    assert (4,) == caught.value.__context__.args
