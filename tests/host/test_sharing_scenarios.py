"""Failures that other systems shipped, where pages are shared: in the half that the ledger decides.  (S8 to S59)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import StaleHandle
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget, Refusal
from tests.host.builders import counts, leave_broken, trim
from tests.host.refusals import refused
from tests.host.sharing import Held, retained


def test_s24_a_refused_admission_remembers_no_prefix() -> None:
    """S24: A does not fit, its prefix is released, the retry with the old handle is refused.  (C10.9)"""
    store, source = retained(192, tokens=320)
    blocker = store.start(64)
    answer = store.refuse(ActivationTarget(1, 63, source, 130))
    assert answer == Refusal("main", 2, 1, forever=False)  # 4 pages of entitlement, 2 shared, 1 available
    store.release(source)
    store.end(blocker)

    with refused(StaleHandle, "C9.8", store.ledger):
        store.ledger.try_activate(ActivationTarget(1, 63, source, 130))
    assert store.frontier(store.start(194)) == 0
    assert counts(store.ledger) == (0, 4, 1)


def test_s39_four_forks_of_100_tokens_and_a_fork_of_the_second_equal_unshared_runs() -> None:
    """S39: each reads what an unshared run of the same writes would read.  (C10.5)"""
    store, source = retained(100, max_context=256, max_concurrency=6)
    prefix = store.read(source)
    expected: dict[Sequence, list[int]] = {}
    forks = [store.go_on(source, 100) for _ in range(4)]
    for fork in forks:
        first = int(store.bytes["main"].max()) + 1
        store.append(fork, 60)
        expected[fork] = prefix + list(range(first, first + 60))
    checkpoint = store.snapshot(forks[1])
    again = store.go_on(checkpoint, 40)
    first = int(store.bytes["main"].max()) + 1
    store.append(again, 40)
    expected[again] = expected[forks[1]] + list(range(first, first + 40))

    assert {sequence: store.read(sequence) for sequence in expected} == expected
    assert store.read(source) == prefix


def test_s8_no_operation_replaces_a_page_of_an_active_row() -> None:
    """S8: there is no dedup; what a row's table names stays, whatever is forked, moved, retained or released.  (C9.7)

    A publishes two pages, B wrote the same two privately: B's row goes on naming its own.
    """
    store, first = retained(128, max_context=256, max_concurrency=4)
    row_b = store.start(256, written=128)
    ids, read = store.page_ids(row_b), store.read(row_b)

    checkpoint = store.snapshot(row_b)
    store.end(store.go_on(first, 10))
    store.go_on(first, 10, keep_source=False)
    store.ledger.protect(checkpoint, 0, "main")
    fork = store.go_on(checkpoint, 64)
    store.release(checkpoint)
    store.end(fork)
    store.append(row_b, 100)
    trim(store.ledger, row_b)

    assert store.page_ids(row_b)[:2] == ids
    assert store.read(row_b)[:128] == read


def test_s59_a_source_that_is_its_own_cheapest_victim_is_never_listed_twice() -> None:
    """S59: five sessions share one prefix; a Fork that does not fit names no victim and changes nothing.  (C1.2)"""
    store, source = retained(320, max_context=320, max_concurrency=8, tokens=640)
    sessions = [store.finish(store.go_on(source, frontier=256)) for _ in range(4)]
    assert store.available() == 5
    blocker = store.start(320)

    assert store.refuse(ActivationTarget(60, 0, source, 260)) == Refusal("main", 1, 0, forever=False)
    store.release(sessions[0])  # only references: nothing becomes available
    assert store.refuse(ActivationTarget(60, 0, source, 260)) == Refusal("main", 1, 0, forever=False)
    store.end(blocker)
    store.go_on(source, 60, frontier=260)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_s25_shared_pages_come_back_with_the_last_reference_and_once(order: tuple[int, ...]) -> None:
    """S25: three holders of the same pages let go in any order; then every id is granted once.  (C9.8; vector 56)"""
    store, source = retained(130, max_context=256, max_concurrency=4, tokens=512)
    second = store.finish(store.go_on(source))
    holders: list[Held] = [source, second, store.go_on(source)]
    capacity = store.ledger.active["main"].pool.capacity
    assert store.available() == capacity - 5
    for count, index in enumerate(order):
        holder = holders[index]
        if isinstance(holder, Sequence):
            store.end(holder)
        else:
            store.release(holder)
        assert store.available() == capacity - (4, 3, 0)[count]
        store.check()

    sequences = [store.start(256) for _ in range(2)]
    for sequence in sequences:
        store.append(sequence, 256)
    ids = [page for sequence in sequences for page in store.page_ids(sequence)]
    assert sorted(ids) == list(range(capacity))


def test_the_poison_is_seen() -> None:
    """A space that names a free page group reads -1, so what the tests of sharing read would show it.  (S7)"""
    store, kept = retained(130)
    page = store.page_ids(kept)[1]
    leave_broken(store.ledger).active["main"].pool.free_runs.give(np.array([page], np.int32))
    store.poison()

    assert store.read(kept)[64:128] == [-1] * 64
