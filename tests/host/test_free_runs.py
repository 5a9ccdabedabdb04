"""Free ids: what is taken is free and distinct, what is given merges, and locality is only preferred.  (C3.6)"""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedkv.ledger.free_runs import FreeRuns
from tests.host.builders import assert_unchanged, runs_of, snapshot


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


def test_taking_from_a_fresh_pool_is_ascending_from_zero() -> None:
    """The first two pages are {0, 1}.  (C3.6)"""
    runs = FreeRuns(4)

    assert runs.take(2).tolist() == [0, 1]
    assert runs_of(runs) == [(2, 4)]


def test_taking_nothing_changes_nothing() -> None:
    """Zero ids are an empty int32 array, also from an empty set.  (C3.6)"""
    runs = with_free(4, [1, 2])
    before = snapshot(runs)

    assert runs.take(0).dtype == np.int32
    assert runs.take(0).size == 0
    assert_unchanged(before, runs)
    assert FreeRuns(0).take(0).size == 0


def test_a_fragmented_pool_is_drained_from_the_lowest_run_upward() -> None:
    """Free {0..2, 6, 7, 9}: five ids are {0, 1, 2, 6, 7}.  (C3.6)"""
    runs = with_free(10, [0, 1, 2, 6, 7, 9])

    assert runs.take(5).tolist() == [0, 1, 2, 6, 7]
    assert runs_of(runs) == [(9, 10)]


def test_draining_takes_the_front_of_the_last_run_it_needs() -> None:
    """Free {0, 2, 4..6}: four ids leave {6}.  (C3.6)"""
    runs = with_free(8, [0, 2, 4, 5, 6])

    assert runs.take(4).tolist() == [0, 2, 4, 5]
    assert runs_of(runs) == [(6, 7)]


def test_draining_everything_leaves_an_empty_set() -> None:
    """Every id of every run, then none.  (C3.6)"""
    runs = with_free(8, [0, 2, 4])

    assert runs.take(3).tolist() == [0, 2, 4]
    assert runs_of(runs) == []
    assert runs.id_count == 0


def test_the_run_that_continues_the_last_id_is_preferred() -> None:
    """Last id 4, run 5..9 free and id 2 free below: two ids are {5, 6}.  (C3.6)"""
    runs = with_free(10, [2, 5, 6, 7, 8, 9])

    assert runs.take(2, after=4).tolist() == [5, 6]
    assert runs_of(runs) == [(2, 3), (7, 10)]


def test_a_continuation_may_split_a_run() -> None:
    """After id 3 inside the run [0, 8): ids 4 and 5 leave two runs.  (C3.6)"""
    runs = FreeRuns(8)

    assert runs.take(2, after=3).tolist() == [4, 5]
    assert runs_of(runs) == [(0, 4), (6, 8)]


@pytest.mark.parametrize("after", [-1, 2, 6, 9])
def test_a_continuation_that_does_not_fit_is_only_a_preference(after: int) -> None:
    """No run of two continues ids -1, 2, 6 or 9: the smallest run that fits serves.  (C3.6)"""
    runs = with_free(10, [0, 1, 2, 4, 5, 7])

    assert runs.take(2, after=after).tolist() == [4, 5]


def test_the_smallest_run_that_fits_is_used() -> None:
    """Two ids come from the run of two, not from the lower run of four.  (C3.6)"""
    runs = with_free(12, [0, 1, 2, 3, 6, 7, 9, 10, 11])

    assert runs.take(2).tolist() == [6, 7]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([3], [(1, 2), (3, 4), (5, 6)]),
        ([2], [(1, 3), (5, 6)]),
        ([4], [(1, 2), (4, 6)]),
        ([2, 3, 4], [(1, 6)]),
        ([4, 0, 2], [(0, 3), (4, 6)]),
        ([7, 0], [(0, 2), (5, 6), (7, 8)]),
    ],
)
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
def test_any_number_of_ids_is_given_back_as_an_index(given: list[int]) -> None:
    """An index that is no run is int64: none, one and several of its ids come back.  (C3.6)"""
    runs = with_free(8, [])

    runs.give(np.array(given, np.int64))

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


def test_one_id_is_given_back_whatever_form_it_has() -> None:
    """An index of one id that is no slice, as the release of a page that others no longer hold makes.  (C9.8)"""
    runs = FreeRuns(8)
    runs.take(8)
    runs.give(np.array([5], np.int64))
    runs.give(np.array([2], np.int32))
    runs.give(slice(7, 8))

    assert runs_of(runs) == [(2, 3), (5, 6), (7, 8)]
