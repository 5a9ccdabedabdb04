"""Host replicas: what a page may do that lies on the Host alone, and what is refused by name.  (C7.2, C7.3, C7.7)

The operations of a ledger move whole continuations (`test_demotions.py`).  The helpers below move single blocks: a Host
replica is noted, the Device replica is dropped, and its page group goes back to available.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.events import PageEvent
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.host_arena import ArenaPlan, HostArena
from pagedkv.ledger.inspect import inspect_ledger
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.transaction import ActivationTarget, PoolPlan, Refusal, Transaction
from tests.host.builders import ids
from tests.host.refusals import broken
from tests.host.sharing import MTP, SharedLedger


def store_with_host(**options: Any) -> SharedLedger:
    """Return a ledger with room for 32 Host pages of Main."""
    return SharedLedger(host_arena_bytes=32 * 32_768, **options)


def demote(store: SharedLedger, held: Continuation, *blocks: int, pool: str = "main") -> None:
    """Let blocks of a continuation lie on the Host alone."""
    spaces, logical = store.ledger.active[pool], store.space(held, pool).members[[*blocks]]
    spaces.pages.add_host(logical, records(spaces.pages, logical.size), spaces.pages.committed[logical])
    page_ids = spaces.pages.drop_device(logical)
    spaces.pool.release(page_ids, leased=page_ids.size)
    store.poison()


def records(pages: LogicalPages, count: int) -> Ids:
    """Take records of the arena."""
    plan = pages.arena.plan([(count, pages.record_units)])
    assert isinstance(plan, ArenaPlan)
    pages.arena.apply(plan)
    return plan.places[0]


def restore(store: SharedLedger, held: Continuation, *blocks: int) -> None:
    """Give blocks that lie on the Host alone Device replicas again."""
    spaces = store.ledger.active["main"]
    assert spaces.pool.try_reserve(len(blocks))
    page_ids = spaces.pool.bind(len(blocks))
    spaces.pool.materialize(len(blocks))
    spaces.pages.add_device(store.space(held).members[[*blocks]], page_ids)


def watched(store: SharedLedger) -> Callable[[], list[tuple[int | None, int, tuple[int, ...]]]]:
    """Return a function that gives (row, first block, page groups) of every release since its last call."""
    events: list[PageEvent] = []

    def hear(event: PageEvent) -> None:
        events.append(event)

    def released() -> list[tuple[int | None, int, tuple[int, ...]]]:
        events.clear()
        store.ledger.events.deliver()
        return [(event.row, event.first_block, event.page_ids) for event in events if event.kind == "release"]

    store.ledger.events.observe(hear)
    return released


# ---- placements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_a_page_on_the_host_alone_keeps_its_identity_and_breaks_no_law(blocks: tuple[int, ...]) -> None:
    """Serial, content epoch, frontier and protection stay; its page group serves others.  (C7.3, C16.5)"""
    store = store_with_host(backend=MTP)
    kept = store.retain({"main": 130, "mtp": 70})
    names = ("serial", "content", "committed", "protected", "references", "block")
    before, free = {name: store.column(name, kept) for name in names}, store.available()

    demote(store, kept, *blocks)
    store.check()

    assert before == {name: store.column(name, kept) for name in names}
    assert store.available() == free + len(blocks)
    assert [page < 0 for page in store.page_ids(kept)] == [block in blocks for block in range(3)]
    assert [page >= 0 for page in store.column("host", kept)] == [block in blocks for block in range(3)]
    units = store.ledger.active["main"].pages.record_units
    assert inspect_ledger(store.ledger).pools["main"].host.max() == (len(blocks) - 1) * units
    store.append(store.start(200), 200)


@pytest.mark.parametrize("keep_source", [True, False])
def test_a_restored_page_is_the_page_it_was(keep_source: bool) -> None:
    """Both replicas, then an activation; without the Host replica it is a page like any other.  (C7.3, C7.7)"""
    store = store_with_host()
    kept = store.retain(130)
    before = [store.column(name, kept) for name in ("serial", "content")]
    demote(store, kept, 0, 1, 2)
    restore(store, kept, 0, 1, 2)
    store.check()

    assert before == [store.column(name, kept) for name in ("serial", "content")]
    pages, members = store.ledger.active["main"].pages, store.space(kept).members
    pages.drop_host(members[:1])
    sequence = store.go_on(kept, 20, keep_source=keep_source)
    assert store.column("host", sequence)[:2] == [-1, pages.record_units]
    store.append(sequence, 20)


def test_there_are_descriptors_for_device_and_host_pages_together() -> None:
    """A pool of 4 pages holds 4 + 32 of them: eight full rounds, all on the Host, and one on the device.  (C7.3)"""
    store = store_with_host(tokens=256)
    assert store.ledger.active["main"].pages.capacity == 4 + 32
    for _ in range(8):
        demote(store, store.retain(256), 0, 1, 2, 3)
    store.retain(256)

    store.check()
    assert store.ledger.active["main"].pages.free_runs.id_count == 0


# ---- activation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep_source", "blocks", "plan"),
                         [(True, (0, 1), PoolPlan("main", 3, 130, 2, 2, claimed_pages=1 + 2, restored_pages=2)),
                          (True, (0,), PoolPlan("main", 3, 130, 2, 2, claimed_pages=1 + 1, restored_pages=1)),
                          (True, (2,), PoolPlan("main", 3, 130, 2, 2, claimed_pages=1)),
                          (False, (0, 1), PoolPlan("main", 3, 130, 3, 0, claimed_pages=0 + 2, restored_pages=2)),
                          (False, (1, 2), PoolPlan("main", 3, 130, 3, 0, claimed_pages=0 + 2, restored_pages=2))])
def test_a_plan_counts_the_pages_to_restore(keep_source: bool, blocks: tuple[int, ...], plan: PoolPlan) -> None:
    """`explain` says what it takes, and the activation takes that; a copied tail comes from its record.  (C10.3)"""
    store = store_with_host()
    kept = store.retain(130)
    demote(store, kept, *blocks)
    target = ActivationTarget(1, 0, kept, keep_source=keep_source)
    assert store.explain(target).pools == (plan,)
    free = store.available()

    transaction = store.ledger.prepare_activation(target)
    assert isinstance(transaction, Transaction)
    restored = [page for copy in transaction.restores for page in copy.logical.tolist()]
    assert restored == [store.logical(kept)[block] for block in blocks]
    store.check()
    sequence = store.ledger.commit_activation(transaction)

    assert store.available() == free - plan.claimed_pages
    store.check()
    store.end(sequence)


def test_scarcity_counts_restored_pages_before_anything_is_released() -> None:
    """A page to restore, and a tail to restore into a page of its own: what a Move releases comes too late.  (C10.2)"""
    store = store_with_host(tokens=384)
    kept = store.retain(250)
    other = store.finish(store.go_on(kept, frontier=128))
    demote(store, kept, 0, 1)
    blocker = store.start(192)
    assert store.available() == 1
    for keep_source in (True, False):
        target = ActivationTarget(1, 0, kept, 70, keep_source)
        assert store.refuse(target) == Refusal("main", 2, 1, forever=False)

    store.release(other)
    assert store.refuse(target) == Refusal("main", 2, 1, forever=False)
    store.end(blocker)
    assert store.explain(target).pools == (PoolPlan("main", 2, 70, 2, 0, 2, released_pages=2, restored_pages=2),)


@pytest.mark.parametrize("keep_source", [True, False])
def test_pages_beyond_the_frontier_may_lie_on_the_host(keep_source: bool) -> None:
    """A Move gives them up, and counts only page groups as released; a Fork does not look at them.  (C10.4, C10.7)"""
    store = store_with_host()
    kept = store.retain(250)
    demote(store, kept, 1, 2)
    released, gone = watched(store), store.page_ids(kept)[3]
    target = ActivationTarget(1, 0, kept, 64, keep_source)
    assert store.explain(target).pools[0].released_pages == (0 if keep_source else 1)
    free = store.available()

    sequence = store.activate(target)

    assert store.available() == free - 1 + (not keep_source)
    assert released() == ([] if keep_source else [(None, 3, (gone,))])
    store.check()
    store.end(sequence)


# ---- release, protect, truncate ------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "runs"),
                         [((), [(0, 4)]), ((0,), [(1, 3)]), ((3,), [(0, 3)]), ((1,), [(0, 1), (2, 2)]),
                          ((1, 2), [(0, 1), (3, 1)]), ((0, 2), [(1, 1), (3, 1)]), ((0, 1, 2, 3), [])])
def test_a_release_lists_only_page_groups_that_became_available(
    blocks: tuple[int, ...], runs: list[tuple[int, int]]
) -> None:
    """One event for each run of blocks between holes; the descriptors of all of them are free again.  (C9.8)"""
    store = store_with_host()
    kept = store.retain(250)
    ids_before = store.page_ids(kept)
    if blocks:
        demote(store, kept, *blocks)
    released = watched(store)

    store.release(kept)

    assert released() == [(None, first, tuple(ids_before[first : first + count])) for first, count in runs]
    spaces = store.ledger.active["main"]
    assert (spaces.pool.available, spaces.pages.host.max()) == (spaces.pool.capacity, -1)


def test_a_shared_page_on_the_host_goes_with_its_last_reference() -> None:
    """Two continuations hold it: the first release frees its own tail alone.  (C9.8)"""
    store = store_with_host()
    first = store.retain(130)
    second = store.finish(store.go_on(first, frontier=128))
    tail = store.page_ids(first)[2]
    demote(store, first, 0, 1)
    released = watched(store)

    store.release(first)
    assert released() == [(None, 2, (tail,))]
    store.check()
    store.release(second)
    assert released() == []


def test_protection_does_not_ask_where_a_page_lies() -> None:
    """Down, up and down again, inside pages on the Host.  (C7.8)"""
    store = store_with_host()
    kept = store.retain(130)
    demote(store, kept, 0, 2)
    for tokens, protected in ((10, [10, 0, 0]), (130, [64, 64, 2]), (64, [64, 0, 0]), (0, [0, 0, 0])):
        store.ledger.protect(kept, tokens, "main")
        assert store.column("protected", kept) == protected
        store.check()


def test_a_cut_inside_a_page_on_the_host_keeps_what_is_left() -> None:
    """Its record covers it, and the activation restores it; pages behind the cut give their records back.  (C9.10)"""
    store = store_with_host()
    kept = store.retain(250)
    content = store.read(kept)
    store.demote(kept)
    store.ledger.protect(kept, 0, "main")
    for tokens in (249, 193, 192, 65):
        store.ledger.truncate_continuation(kept, tokens, "main")
        store.check()
        assert store.read(kept) == content[:tokens]
    store.ledger.attach_state(kept, "complete")
    assert store.ledger.active["main"].pages.hosted == 2
    assert store.read(store.go_on(kept, 1)) == content[:65]


def test_a_cut_makes_the_host_replica_old() -> None:
    """Its content epoch is another: the Device replica is the last valid one then.  (C7.2, C7.6)"""
    store = store_with_host()
    kept = store.retain(130)
    demote(store, kept, 2)
    restore(store, kept, 2)
    store.ledger.protect(kept, 0, "main")
    store.ledger.truncate_continuation(kept, 129, "main")
    pages = store.ledger.active["main"].pages

    with broken(pages, match="dropping the last valid replica"):
        pages.drop_device(store.space(kept).members[2:])


# ---- preconditions -------------------------------------------------------------------------------------------

KINDS = ("device", "host", "both", "written", "running", "pinned", "short", "old")
"""Page i of `placed` is KINDS[i]: all but "written" are full; "written" to "old" have both replicas: one with a
writer, one of an active space, one pinned, one whose Host replica covers 63 columns, one of earlier content."""
DEVICE, HOST, BOTH, WRITTEN, RUNNING, PINNED, SHORT, OLD = (np.array([kind], np.int32) for kind in range(len(KINDS)))


def placed() -> LogicalPages:
    pages = LogicalPages(len(KINDS), HostArena(2048))
    records(pages, len(KINDS))
    everyone = pages.describe(np.arange(len(KINDS), dtype=np.int32), writer=0, first_block=0)
    for page in everyone[everyone != WRITTEN[0]]:
        pages.freeze(ids(page), 64)
        if page != RUNNING[0]:
            pages.deactivate(ids(page))
    pages.add_host(everyone[1:], everyone[1:], np.full(len(KINDS) - 1, 64, np.int32))
    pages.host_columns[SHORT] = 63
    pages.renew_content(OLD)
    pages.pin(PINNED)
    assert pages.drop_device(HOST).tolist() == [1]
    return pages


@pytest.mark.parametrize(("act", "message"), [
    (lambda p: p.add_device(np.concatenate((HOST, BOTH)), ids(8, 9)), "a second Device replica"),
    (lambda p: p.drop_host(np.concatenate((BOTH, DEVICE))), "dropping no Host replica"),
    (lambda p: p.drop_host(np.concatenate((BOTH, HOST))), "dropping the last replica, or one in use"),
    (lambda p: p.drop_host(np.concatenate((BOTH, RUNNING))), "or one in use"),
    (lambda p: p.drop_host(np.concatenate((BOTH, PINNED))), "or one in use"),
    (lambda p: p.drop_device(np.concatenate((BOTH, HOST))), "dropping no Device replica"),
    (lambda p: p.drop_device(np.concatenate((BOTH, DEVICE))), "dropping the last valid replica"),
    (lambda p: p.drop_device(np.concatenate((BOTH, SHORT))), "dropping the last valid replica"),
    (lambda p: p.drop_device(np.concatenate((BOTH, OLD))), "dropping the last valid replica"),
    (lambda p: p.drop_device(np.concatenate((BOTH, RUNNING))), "or one in use"),
    (lambda p: p.drop_device(np.concatenate((BOTH, WRITTEN))), "or one in use"),
    (lambda p: p.drop_device(np.concatenate((BOTH, PINNED))), "or one in use"),
    (lambda p: p.thaw(np.concatenate((BOTH, HOST)), 2), "a writer without a Device replica"),
    (lambda p: p.activate(np.concatenate((BOTH, HOST))), "activating pages without a Device replica"),
    (lambda p: p.share_active(np.concatenate((BOTH, HOST))), "activating pages without a Device replica"),
])
def test_a_broken_precondition_of_replicas_changes_no_page(act: Callable[[LogicalPages], object], message: str) -> None:
    """Also not the page named first, for which the operation is legal.  (C7.2, C7.7)"""
    pages = placed()

    with broken(pages, match=message):
        act(pages)


def test_pages_on_the_host_are_shared_and_released() -> None:
    """Another inactive space, one reference fewer, and the last: no page group comes back.  (C7.3)"""
    pages = placed()
    pages.share(HOST)
    assert pages.release(HOST).tolist() == []
    assert pages.release(np.concatenate((HOST, DEVICE))).tolist() == [-1, 0]
    assert pages.host[HOST].tolist() == [-1]
