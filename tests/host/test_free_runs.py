"""Free ids: what is taken is free and distinct, what is given merges, and locality is only preferred.  (C3.6)"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pagedkv.ledger.free_runs import FreeRuns
from tests.host.refusals import assert_unchanged, runs_of, snapshot


def with_free(capacity: int, free: list[int]) -> FreeRuns:
    """Return runs in which exactly `free` is free."""
    runs = FreeRuns(capacity)
    runs.take(capacity)
    runs.give(np.array(free, np.int32))
    return runs


@pytest.mark.parametrize(("capacity", "expected"), [(0, []), (1, [(0, 1)]), (2, [(0, 2)]), (65, [(0, 65)])])
def test_every_id_is_free_at_first(capacity: int, expected: list[tuple[int, int]]) -> None:
    """One run holds the whole pool.  (C3.1)"""
    runs = FreeRuns(capacity)

    assert runs_of(runs) == expected
    assert runs.id_count == capacity
    assert runs.mask().tolist() == [True] * capacity


def test_taking_nothing_changes_nothing() -> None:
    """Zero ids are an empty int32 array, also from an empty set.  (C3.6)"""
    runs = with_free(4, [1, 2])
    before = snapshot(runs)

    assert runs.take(0).dtype == np.int32
    assert runs.take(0).size == 0
    assert_unchanged(before, runs)
    assert FreeRuns(0).take(0).size == 0


@pytest.mark.parametrize(("free", "count", "after", "taken", "left"), [
    ([0, 1, 2, 3], 2, -1, [0, 1], [(2, 4)]),  # ascending from 0
    ([0, 1, 2, 6, 7, 9], 5, -1, [0, 1, 2, 6, 7], [(9, 10)]),  # no run holds five: from the lowest upward
    ([0, 2, 4, 5, 6], 4, -1, [0, 2, 4, 5], [(6, 7)]),  # the front of the last run that it needs
    ([0, 2, 4], 3, -1, [0, 2, 4], []),  # everything
    ([0, 1, 2, 3, 6, 7, 9, 10, 11], 2, -1, [6, 7], [(0, 4), (9, 12)]),  # the smallest run that fits
    ([2, 5, 6, 7, 8, 9], 2, 4, [5, 6], [(2, 3), (7, 10)]),  # the run that continues the last id
    (list(range(8)), 2, 3, [4, 5], [(0, 4), (6, 8)]),  # which may split a run
    *(([0, 1, 2, 4, 5, 7], 2, after, [4, 5], [(0, 3), (7, 8)]) for after in (-1, 2, 6, 9)),  # only a preference
])
def test_ids_are_taken_where_they_lie_together(
    free: list[int], count: int, after: int, taken: list[int], left: list[tuple[int, int]]
) -> None:
    """Behind the last id if they fit, else from the smallest run that fits, else from the lowest runs.  (C3.6)"""
    runs = with_free(12, free)

    assert runs.take(count, after=after).tolist() == taken
    assert runs_of(runs) == left
    assert runs.id_count == len(free) - count


@pytest.mark.parametrize(("given", "expected"),
                         [([3], [(1, 2), (3, 4), (5, 6)]), ([2], [(1, 3), (5, 6)]), ([4], [(1, 2), (4, 6)]),
                          ([2, 3, 4], [(1, 6)]), ([4, 0, 2], [(0, 3), (4, 6)]), ([7, 0], [(0, 2), (5, 6), (7, 8)])])
def test_given_ids_merge_with_both_neighbours(given: list[int], expected: list[tuple[int, int]]) -> None:
    """Runs stay sorted and coalesced in whatever order ids come back.  (C3.6)"""
    runs = with_free(8, [1, 5])

    runs.give(np.array(given, np.int32))

    assert runs_of(runs) == expected
    assert runs.id_count == 2 + len(given)


def test_many_runs_given_at_once_merge_like_single_ones() -> None:
    """Every second id of 40, more runs than are inserted one by one, then the others.  (C3.6)"""
    runs = with_free(40, [])

    runs.give(np.arange(0, 40, 2, dtype=np.int32))
    alternating = runs_of(runs)
    runs.give(np.arange(39, 0, -2, dtype=np.int32))

    assert alternating == [(start, start + 1) for start in range(0, 40, 2)]
    assert runs_of(runs) == [(0, 40)]
    assert runs.id_count == 40


@pytest.mark.parametrize("given", [[4], [3, 4], [4, 5], [6, 6], list(range(0, 40, 2))])
def test_an_id_that_is_free_already_is_an_internal_error(given: list[int]) -> None:
    """The pool refuses such a release before; here it cannot pass silently.  (C6.1, S25)"""
    runs = with_free(40, [4])

    with pytest.raises(AssertionError, match="free already"):
        runs.give(np.array(given, np.int32))


def test_more_ids_than_are_free_is_an_internal_error() -> None:
    """Reservations are promised before ids are bound, so this cannot happen to a caller.  (C6.2)"""
    runs = with_free(8, [1, 2, 3])

    with pytest.raises(AssertionError, match="4 ids asked of 3 free ones"):
        runs.take(4)


@pytest.mark.parametrize("given", [[], [2], [5, 2], [2, 3, 7]])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_any_number_of_ids_is_given_back_in_any_form(given: list[int], dtype: type[np.signedinteger[Any]]) -> None:
    """An array of ids or an index: none, one and several come back; a slice of one id too.  (C3.6, C9.8)"""
    runs = with_free(8, [])
    runs.give(slice(4, 5))
    assert runs_of(runs) == [(4, 5)]
    assert runs.take(1).tolist() == [4]

    runs.give(np.array(given, dtype))

    assert sorted(given) == np.flatnonzero(runs.mask()).tolist()
    assert runs.id_count == len(given)


def test_runs_agree_with_a_plain_set_through_random_use(seed: int) -> None:
    """Taken ids are free and distinct, and mask, count and runs follow.  (C3.6)"""
    rng = random.Random(seed)
    for capacity in (1, 2, 3, 17, 96):
        runs, free, held = FreeRuns(capacity), set(range(capacity)), list[int]()
        for _ in range(400):
            if free and rng.random() < 0.55:
                after = rng.randrange(-1, capacity)
                taken = runs.take(rng.randint(0, min(len(free), rng.choice((1, 2, 9, 40)))), after).tolist()
                assert len(set(taken)) == len(taken)
                assert set(taken) <= free
                free -= set(taken)
                held += taken
            else:
                rng.shuffle(held)
                given = [held.pop() for _ in range(rng.randint(0, min(len(held), rng.choice((1, 3, 40)))))]
                runs.give(np.array(given, np.int32) if rng.random() < 0.5 else np.array(given, np.int64))
                free |= set(given)

            expected = [i in free for i in range(capacity)]
            assert runs.mask().tolist() == expected
            assert runs.id_count == len(free)
            assert all(end < start for (_, end), (start, _) in zip(runs_of(runs), runs_of(runs)[1:], strict=False))
