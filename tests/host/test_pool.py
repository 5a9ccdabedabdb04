"""PagePool: counters that always add up, and identities that go stale.  (C6)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import MisuseError
from pagedkv.ledger.pool import PagePool, try_reserve_bundle
from tests.host.builders import assert_unchanged, refused, runs_of, snapshot


def ids(*page_ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(page_ids, np.int32)


def pool_with_leases(capacity: int, leased: int) -> PagePool:
    """Return a pool whose lowest `leased` pages are leases."""
    pool = PagePool("main", capacity)
    assert pool.try_reserve(leased)
    pool.bind(leased)
    pool.materialize(leased)
    return pool


def state(pool: PagePool) -> tuple[int, int, int]:
    return pool.allocated, pool.reserved, pool.available


def test_a_reservation_leaves_less_for_others_and_materialize_does_not() -> None:
    """Pool of 4: reserve 3, then 2 fail; two leases later one page is still available.  (C6.2)"""
    pool = PagePool("main", 4)

    assert pool.try_reserve(3)
    assert state(pool) == (0, 3, 1)
    before = snapshot(pool)
    assert not pool.try_reserve(2)
    assert_unchanged(before, pool)
    pool.bind(2)
    assert state(pool) == (0, 3, 1)
    pool.materialize(2)
    assert state(pool) == (2, 1, 1)


def test_dematerialize_gives_back_to_the_reservation_not_to_available() -> None:
    """Allocated 1, reserved 2, available still 1.  (C6.2)"""
    pool = PagePool("main", 4)
    assert pool.try_reserve(3)
    bound = pool.bind(2)
    pool.materialize(2)

    pool.dematerialize(bound[1:])

    assert state(pool) == (1, 2, 1)
    assert pool.bound == 1


def test_a_reservation_grows_only_while_pages_are_available_and_shrinks_at_once() -> None:
    """Up past the free capacity fails without change; down returns pages.  (C6.2)"""
    pool = PagePool("main", 4)
    assert pool.try_reserve(2)
    before = snapshot(pool)

    assert not pool.try_reserve(3)
    assert_unchanged(before, pool)
    assert pool.try_reserve(2)
    assert state(pool) == (0, 4, 0)
    pool.shrink(3)
    assert state(pool) == (0, 1, 3)


@pytest.mark.parametrize(("pages", "is_granted"), [(0, True), (1, True), (64, True), (65, False)])
def test_a_reservation_is_granted_up_to_the_capacity(pages: int, is_granted: bool) -> None:
    """Boundaries 0, 1, capacity, capacity + 1.  (C6.2)"""
    assert PagePool("main", 64).try_reserve(pages) is is_granted


@pytest.mark.parametrize("pages", [-1, 1.0, True, np.int64(1), "1", None])
def test_pages_are_non_negative_integers(pages: int) -> None:
    """Another type is refused, not converted; a negative number is refused, not repaired.  (C6.2, S35)"""
    pool = PagePool("main", 4)
    assert pool.try_reserve(2)

    for call in (pool.try_reserve, pool.shrink, pool.bind):
        with refused(MisuseError, "C6.2", pool, match="non-negative integer"):
            call(pages)


def test_bound_ids_stay_reserved() -> None:
    """Binding names ids and takes nothing from anyone.  (C6.5)"""
    pool = PagePool("main", 4)
    assert pool.try_reserve(3)

    bound = pool.bind(2)

    assert bound.tolist() == [0, 1]
    assert state(pool) == (0, 3, 1)
    assert (pool.bound, pool.promised) == (2, 1)
    assert runs_of(pool.free_runs) == [(2, 4)]


def test_binding_continues_the_id_it_is_told() -> None:
    """Ids next to the caller's last one are preferred.  (C3.6, C6.5)"""
    pool = PagePool("main", 8)
    assert pool.try_reserve(3)

    assert pool.bind(3, after=3).tolist() == [4, 5, 6]


def test_no_page_leaves_a_state_that_it_did_not_enter() -> None:
    """One promised, one bound and one leased page: two of each kind are refused, unchanged.  (C6.2, S35)"""
    pool = pool_with_leases(4, 1)
    assert pool.try_reserve(2)
    bound = pool.bind(1)

    with refused(MisuseError, "C6.2", pool, match="at most 1 promised"):
        pool.shrink(2)
    with refused(MisuseError, "C6.2", pool, match="at most 1 promised"):
        pool.bind(2)
    with refused(MisuseError, "C6.2", pool, match="at most 1 bound"):
        pool.materialize(2)
    with refused(MisuseError, "C6.2", pool, match="at most 1 bound"):
        pool.materialize(-1)
    with refused(MisuseError, "C6.2", pool, match="at most 1 leased"):
        pool.dematerialize(ids(0, 1))
    with refused(MisuseError, "C6.2", pool, match="at most 1 leased"):
        pool.release(ids(0, 1), leased=2)
    with refused(MisuseError, "C6.2", pool, match="at most 1 bound"):
        pool.release(np.concatenate((ids(0), bound)), leased=0)
    with refused(MisuseError, "C6.2", pool):
        pool.release(ids(0), leased=2)
    with refused(MisuseError, "C6.2", pool):
        pool.release(ids(0), leased=-1)


def test_release_gives_leases_and_bound_ids_to_available() -> None:
    """Both kinds of held ids are free again, and only what was promised stays reserved.  (C6.2, C6.5)"""
    pool = pool_with_leases(6, 2)
    assert pool.try_reserve(3)
    bound = pool.bind(2)

    pool.release(np.concatenate((ids(1), bound)), leased=1)

    assert state(pool) == (1, 1, 4)
    assert pool.bound == 0
    assert runs_of(pool.free_runs) == [(1, 6)]
    assert pool.serials.tolist()[1:] == [0] * 5


@pytest.mark.parametrize("page_ids", [(3,), (0, 3), (0, 0), (2, 0, 2), (-1,), (6,), (0, 6)])
def test_a_page_that_is_not_held_or_listed_twice_is_not_released(page_ids: tuple[int, ...]) -> None:
    """Free, repeated and foreign ids are refused with the counters unchanged.  (C6.1, S25, S35)"""
    pool = pool_with_leases(6, 3)

    with refused(MisuseError, "C6.1", pool, match="once|held"):
        pool.release(ids(*page_ids), leased=len(page_ids))


def test_a_second_release_is_refused_and_ids_stay_distinct() -> None:
    """Release page 4 twice from two holders; allocating until exhaustion yields distinct ids.  (C6.1, S25)"""
    pool = pool_with_leases(6, 6)

    pool.release(ids(4), leased=1)
    with refused(MisuseError, "C6.1", pool):
        pool.release(ids(4), leased=1)
    with refused(MisuseError, "C6.1", pool):
        pool.release(ids(4, 4), leased=2)

    assert state(pool) == (5, 0, 1)
    assert pool.try_reserve(1)
    assert pool.bind(1).tolist() == [4]
    assert pool.free_runs.id_count == 0


def test_every_hold_of_an_id_has_its_own_serial() -> None:
    """Binding, dematerializing and binding again never repeat one; a free id has none.  (C6.1)"""
    pool = PagePool("main", 2)
    assert pool.try_reserve(1)
    seen = [int(pool.serials[0])]
    bound = pool.bind(1)
    seen.append(int(pool.serials[0]))
    pool.materialize(1)
    assert int(pool.serials[0]) == seen[-1], "a lease keeps the serial that its id was bound with"
    pool.dematerialize(bound)
    seen.append(int(pool.serials[0]))
    pool.release(bound, leased=0)
    assert int(pool.serials[0]) == 0
    assert pool.try_reserve(1)
    pool.bind(1)
    seen.append(int(pool.serials[0]))

    assert seen[0] == 0
    assert len(set(seen)) == 4


def test_an_empty_pool_grants_nothing_but_nothing() -> None:
    """Capacity 0 answers; it does not fail.  (C6.2)"""
    pool = PagePool("main", 0)

    assert pool.try_reserve(0)
    assert not pool.try_reserve(1)
    assert pool.bind(0).size == 0
    pool.release(ids(), leased=0)
    assert state(pool) == (0, 0, 0)


def test_a_bundle_reserves_in_every_pool() -> None:
    """Each pool grants its own pages.  (C6.3)"""
    main, draft = PagePool("main", 4), PagePool("draft", 2)

    assert try_reserve_bundle([(main, 3), (draft, 2)]) is None
    assert (state(main), state(draft)) == ((0, 3, 1), (0, 2, 0))


@pytest.mark.parametrize(("main_pages", "draft_pages", "lacking"), [(4, 3, "draft"), (5, 2, "main"), (5, 3, "main")])
def test_a_bundle_that_one_pool_lacks_changes_no_pool(main_pages: int, draft_pages: int, lacking: str) -> None:
    """The first pool without room is the answer, and no counter moved.  (C6.3)"""
    main, draft = PagePool("main", 4), PagePool("draft", 2)
    before = snapshot((main, draft))

    answer = try_reserve_bundle([(main, main_pages), (draft, draft_pages)])

    assert answer is not None
    assert answer.name == lacking
    assert_unchanged(before, (main, draft))


def test_a_bundle_names_each_pool_once_and_asks_for_pages() -> None:
    """The same pool twice, no pool, zero, negative and broken numbers of pages are misuse; nothing changed.  (C6.3)"""
    main, draft = PagePool("main", 4), PagePool("draft", 4)

    requests: tuple[list[tuple[PagePool, int]], ...] = (
        [(main, 1), (main, 1)], [], [(main, 0)], [(main, 1), (draft, 0)], [(main, 1), (draft, -1)],
        [(main, 1), (draft, 1.5)],  # type: ignore[list-item]
    )  # fmt: skip
    for request in requests:
        with refused(MisuseError, "C6.3", main, draft):
            try_reserve_bundle(request)


def test_the_conservation_law_holds_through_a_whole_life() -> None:
    """allocated + reserved + available = capacity after every transition.  (C6.2)"""
    pool = PagePool("main", 5)
    seen = [state(pool)]
    assert pool.try_reserve(4)
    seen.append(state(pool))
    bound = pool.bind(3)
    seen.append(state(pool))
    pool.materialize(2)
    seen.append(state(pool))
    pool.dematerialize(bound[1:2])
    seen.append(state(pool))
    pool.shrink(1)
    seen.append(state(pool))
    pool.release(bound, leased=1)
    seen.append(state(pool))

    assert seen == [(0, 0, 5), (0, 4, 1), (0, 4, 1), (2, 2, 1), (1, 3, 1), (1, 2, 2), (0, 0, 5)]
    assert {sum(counters) for counters in seen} == {5}


def test_unbinding_frees_the_ids_and_keeps_the_promise() -> None:
    """Bind, unbind and bind again: reserved stays, the ids' earlier handles are stale.  (C6.5, C10.2)"""
    pool = pool_with_leases(4, 1)
    assert pool.try_reserve(2)
    before = state(pool)
    bound = pool.bind(2)
    serials = pool.serials[bound].tolist()

    pool.unbind(bound)

    assert (state(pool), pool.bound, pool.promised) == (before, 0, 2)
    assert runs_of(pool.free_runs) == [(1, 4)]
    again = pool.bind(2)
    assert again.tolist() == bound.tolist()
    assert not set(pool.serials[again].tolist()) & set(serials)
    with refused(MisuseError, "C6.2", pool):
        pool.unbind(ids(0, *bound.tolist()))
