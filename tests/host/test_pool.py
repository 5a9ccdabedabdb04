"""PagePool: counters that always add up, and identities that go stale.  (C6)"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedkv.ledger.pool import NOTED_MAX, PagePool, try_reserve_bundle
from tests.host.builders import ids
from tests.host.refusals import assert_unchanged, broken, runs_of, snapshot


def pool_with(*, capacity: int, leased: int = 0, bound: int = 0, promised: int = 0) -> PagePool:
    """Return a pool whose lowest pages are leases, and the next ones bound."""
    pool = PagePool("main", capacity)
    assert pool.try_reserve(leased + bound + promised)
    pool.bind(leased + bound)
    pool.materialize(leased)
    return pool


def state(pool: PagePool) -> tuple[int, int, int]:
    return pool.allocated, pool.reserved, pool.available


@pytest.mark.parametrize(("pages", "is_granted"), [(0, True), (1, True), (64, True), (65, False)])
def test_a_reservation_is_granted_up_to_the_capacity(pages: int, is_granted: bool) -> None:
    """Boundaries 0, 1, capacity, capacity + 1.  (C6.2)"""
    assert PagePool("main", 64).try_reserve(pages) is is_granted


def test_a_reservation_grows_only_while_pages_are_available_and_shrinks_at_once() -> None:
    """Up past the free capacity fails without change; down returns pages.  (C6.2)"""
    pool = pool_with(capacity=4, promised=2)
    before = snapshot(pool)

    assert not pool.try_reserve(3)
    assert_unchanged(before, pool)
    assert pool.try_reserve(2)
    assert state(pool) == (0, 4, 0)
    pool.shrink(3)
    assert state(pool) == (0, 1, 3)


def test_the_conservation_law_holds_through_a_whole_life() -> None:
    """allocated + reserved + available = capacity; materialize and dematerialize leave available as it is.  (C6.2)"""
    pool = PagePool("main", 5)
    bound = ids(0, 1, 2)
    steps: list[tuple[Callable[[], object], tuple[int, int, int]]] = [
        (lambda: pool.try_reserve(4), (0, 4, 1)), (lambda: pool.bind(3), (0, 4, 1)),
        (lambda: pool.materialize(2), (2, 2, 1)), (lambda: pool.dematerialize(bound[1:2]), (1, 3, 1)),
        (lambda: pool.shrink(1), (1, 2, 2)), (lambda: pool.release(bound, leased=1), (0, 0, 5)),
    ]
    for step, expected in steps:
        step()
        assert state(pool) == expected
        assert sum(expected) == pool.capacity


def test_bound_ids_stay_reserved() -> None:
    """Binding names ids, next to the caller's last one if it can, and takes nothing from anyone.  (C3.6, C6.5)"""
    pool = pool_with(capacity=4, promised=3)

    assert pool.bind(2).tolist() == [0, 1]
    assert (state(pool), pool.bound, pool.promised) == ((0, 3, 1), 2, 1)
    assert runs_of(pool.free_runs) == [(2, 4)]
    assert pool_with(capacity=8, promised=3).bind(3, after=3).tolist() == [4, 5, 6]


@pytest.mark.parametrize(("act", "message"), [
    (lambda pool: pool.try_reserve(-1), "a reservation of -1"), (lambda pool: pool.shrink(-1), "a shrink by -1"),
    (lambda pool: pool.shrink(2), "a shrink by 2 of 1 promised"), (lambda pool: pool.bind(-1), "-1 bound"),
    (lambda pool: pool.bind(2), "2 bound of 1 promised"),
    (lambda pool: pool.materialize(2), "2 materialized of 1 bound"),
    (lambda pool: pool.materialize(-1), "-1 materialized"),
    (lambda pool: pool.dematerialize(ids(0, 1)), "2 dematerialized of 1 leases"),
    (lambda pool: pool.release(ids(0, 1), leased=2), "2 released of 1 leases"),
    (lambda pool: pool.release(ids(0, 1), leased=0), "2 released of 1 bound"),
    (lambda pool: pool.release(ids(0), leased=2), "2 released of 1 leases"),
    (lambda pool: pool.release(ids(0), leased=-1), "-1 released"),
    (lambda pool: pool.unbind(ids(0, 1)), "2 released of 1 bound"),
    (lambda pool: try_reserve_bundle([(pool, 1), (pool, 1)]), "names each pool once"),
    (lambda pool: try_reserve_bundle([]), "names each pool once"),
])
def test_no_page_leaves_a_state_that_it_did_not_enter(act: Callable[[PagePool], object], message: str) -> None:
    """One leased, one bound and one promised page: two of a kind, or -1, change nothing.  (C6.2, C6.3, S30, S35)"""
    pool = pool_with(capacity=4, leased=1, bound=1, promised=1)

    with broken(pool, match=message):
        act(pool)


@pytest.mark.parametrize("page_ids", [(3,), (0, 3), (0, 0), (2, 0, 2), (-1,), (6,), (0, 6)])
def test_a_page_that_is_not_held_or_listed_twice_is_not_released(page_ids: tuple[int, ...]) -> None:
    """Free, repeated and foreign ids leave the counters unchanged.  (C6.1, S25, S35)"""
    pool = pool_with(capacity=6, leased=3)

    with broken(pool, match="not distinct|not all held"):
        pool.release(ids(*page_ids), leased=len(page_ids))


def test_a_second_release_changes_nothing_and_ids_stay_distinct() -> None:
    """Release page 4 twice from two holders; allocating until exhaustion yields distinct ids.  (C6.1, S25)"""
    pool = pool_with(capacity=6, leased=6)

    pool.release(ids(4), leased=1)
    for again in (ids(4), ids(4, 4)):
        with broken(pool):
            pool.release(again, leased=again.size)

    assert state(pool) == (5, 0, 1)
    assert pool.try_reserve(1)
    assert pool.bind(1).tolist() == [4]
    assert pool.free_runs.id_count == 0


def test_release_gives_leases_and_bound_ids_to_available() -> None:
    """Both kinds of held ids are free again, and only what was promised stays reserved.  (C6.2, C6.5)"""
    pool = pool_with(capacity=6, leased=2, bound=2, promised=1)

    pool.release(ids(1, 2, 3), leased=1)

    assert (state(pool), pool.bound) == ((1, 1, 4), 0)
    assert runs_of(pool.free_runs) == [(1, 6)]
    assert pool.serials.tolist()[1:] == [0] * 5


def test_every_hold_of_an_id_has_its_own_serial() -> None:
    """Binding, dematerializing and binding again never repeat one; a free id has none.  (C6.1)"""
    pool = pool_with(capacity=2, promised=1)
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


@pytest.mark.parametrize("trims", [1, 2, 255, 256, 257, 513])
@pytest.mark.parametrize("trimmed", [[[1]], [[1], [1, 2], [4]], [[2, 1], [4, 2]]], ids=str)
def test_every_trim_makes_its_leases_stale_and_no_other(trimmed: list[list[int]], trims: int) -> None:
    """Read once after all of them: 1, 2, 2, 4 are no run, and id 3 keeps its lease.  (C6.1)"""
    pool = pool_with(capacity=6, leased=6)
    before = pool.serials.tolist()
    for number in range(trims):
        pool.dematerialize(ids(*trimmed[number % len(trimmed)]))
        pool.materialize(len(trimmed[number % len(trimmed)]))
        assert len(pool._stale) < NOTED_MAX
    after = pool.serials.tolist()

    gone = {page_id for part in trimmed[:trims] for page_id in part}
    assert [page_id for page_id in range(6) if before[page_id] != after[page_id]] == sorted(gone)
    assert len({*before, *after}) == 6 + len(gone)
    assert pool.serials.tolist() == after, "a second read renews nothing"


def test_unbinding_frees_the_ids_and_keeps_the_promise() -> None:
    """Bind, unbind and bind again: reserved stays, the ids' earlier handles are stale.  (C6.5, C10.2)"""
    pool = pool_with(capacity=4, leased=1, promised=2)
    before = state(pool)
    bound = pool.bind(2)
    serials = pool.serials[bound].tolist()

    pool.unbind(bound)

    assert (state(pool), pool.bound, pool.promised) == (before, 0, 2)
    assert runs_of(pool.free_runs) == [(1, 4)]
    again = pool.bind(2)
    assert again.tolist() == bound.tolist()
    assert not set(pool.serials[again].tolist()) & set(serials)


def test_an_empty_pool_grants_nothing_but_nothing() -> None:
    """Capacity 0 answers; it does not fail.  (C6.2)"""
    pool = PagePool("main", 0)

    assert pool.try_reserve(0)
    assert not pool.try_reserve(1)
    assert pool.bind(0).size == 0
    pool.release(ids(), leased=0)
    assert state(pool) == (0, 0, 0)


@pytest.mark.parametrize(("main_pages", "draft_pages", "lacking"),
                         [(3, 2, None), (4, 3, "draft"), (5, 2, "main"), (5, 3, "main")])
def test_a_bundle_reserves_in_every_pool_or_in_none(main_pages: int, draft_pages: int, lacking: str | None) -> None:
    """The first pool without room is the answer, and no counter moved.  (C6.3)"""
    main, draft = PagePool("main", 4), PagePool("draft", 2)
    before = snapshot((main, draft))

    answer = try_reserve_bundle([(main, main_pages), (draft, draft_pages)])

    assert lacking == (None if answer is None else answer.name)
    if answer is None:
        assert (state(main), state(draft)) == ((0, 3, 1), (0, 2, 0))
    else:
        assert_unchanged(before, (main, draft))
