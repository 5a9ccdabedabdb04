"""Demotions and restores on the ledger: claims, replicas, the staged fork, and what is refused.  (C7, C8, C10.8)"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pagedkv.errors import MisuseError, StaleHandle
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.demotions import Demotion, ReleasePlan
from pagedkv.ledger.events import PageEvent
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget, PoolPlan, Refusal, Transaction
from pagedkv.values.config import Backend
from tests.host.builders import leave_broken
from tests.host.refusals import differences, observables, refused
from tests.host.sharing import BACKENDS, MTP, SharedLedger

RECORD = 32_768
"""Bytes of a Host page of Main in these stores."""


def store_with_host(records: int = 32, **options: Any) -> SharedLedger:
    """Return a ledger whose arena takes so many Host pages of Main."""
    return SharedLedger(host_arena_bytes=records * RECORD, **options)


def prepared(store: SharedLedger, held: Continuation) -> Demotion:
    """Prepare a demotion that must fit."""
    demotion = store.ledger.prepare_demotion(held)
    assert isinstance(demotion, Demotion)
    return demotion


def events_of(store: SharedLedger) -> list[PageEvent]:
    """Return a list that every later event is appended to when `deliver` is called."""
    heard: list[PageEvent] = []
    store.ledger.events.observe(heard.append)
    return heard


# ---- there and back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep_source", [True, False])
@pytest.mark.parametrize("frontier", [None, 128, 100, 64, 1])
def test_what_goes_to_the_host_comes_back_the_same(
    backend: Backend | None, keep_source: bool, frontier: int | None
) -> None:
    """Bytes, identity and frontiers, of every pool, in both ways and at any frontier; nothing leaks.  (C7.2, C10.2)"""
    store = store_with_host(backend=backend)
    free = {pool: store.available(pool) for pool in store.ledger.active}
    kept = store.retain(dict.fromkeys(store.ledger.active, 130))
    pools = list(store.ledger.active)
    before = {pool: (store.read(kept, pool), store.column("serial", kept, pool)) for pool in pools}

    assert store.demote(kept) == 3 * len(pools)
    store.check()
    assert {pool: store.available(pool) for pool in pools} == free
    assert {pool: (store.read(kept, pool), store.column("serial", kept, pool)) for pool in pools} == before

    named = None if frontier is None else dict.fromkeys(pools, frontier)
    sequence = store.go_on(kept, 10, frontier=named, keep_source=keep_source)
    store.check()
    assert [store.read(sequence, pool) for pool in pools] == [before[pool][0][: frontier or 130] for pool in pools]
    store.append(sequence, dict.fromkeys(pools, 5))
    store.end(sequence)
    if keep_source:
        assert [store.read(kept, pool) for pool in pools] == [before[pool][0] for pool in pools]
        store.release(kept)
    store.check()
    assert {pool: store.available(pool) for pool in pools} == free
    assert store.ledger.arena.free_units == store.ledger.arena.units


def test_a_demotion_counts_and_tells_its_page_groups() -> None:
    """One event for each run of blocks, without a row; a restore likewise, before the row maps them.  (C13.3)"""
    store = store_with_host()
    kept = store.retain(250)
    store.ledger.events.deliver()
    running = store.go_on(kept, 1, frontier=64)
    page_ids, heard = tuple(store.page_ids(kept)), events_of(store)

    assert store.demote(kept) == 3
    store.ledger.events.deliver()
    assert heard == [PageEvent("demote", "main", None, 1, page_ids[1:])]
    store.end(running)
    store.ledger.events.deliver()
    heard.clear()
    store.go_on(kept, frontier=192)
    store.ledger.events.deliver()
    restored = tuple(store.page_ids(kept)[1:3])
    assert heard[0] == PageEvent("restore", "main", None, 1, restored)
    assert [event.kind for event in heard] == ["restore", "publish"]
    assert store.ledger.active["main"].events.pages["demote"] == 3
    assert store.ledger.active["main"].events.pages["restore"] == 2


def test_pages_in_use_stay_and_the_others_go() -> None:
    """Those of an active fork keep their Device replica; its end lets the next demotion take them.  (C7.7)"""
    store = store_with_host()
    kept = store.retain(200)
    running = store.go_on(kept, 10, frontier=128)
    assert store.demote(kept) == 2
    assert [page >= 0 for page in store.page_ids(kept)] == [True, True, False, False]
    store.append(running, 10)
    store.end(running)

    assert store.demote(kept) == 2
    assert store.demote(kept) == 0
    store.check()


def test_a_second_demotion_copies_only_what_the_host_does_not_hold() -> None:
    """After a restore both replicas are there, so they are dropped without a copy; a page that grew is not.  (C7.7)"""
    store = store_with_host()
    kept = store.retain(130)
    store.demote(kept)
    moved = store.go_on(kept, 20, keep_source=False)
    store.append(moved, 20)
    kept = store.finish(moved)

    demotion = prepared(store, kept)
    (copy,) = demotion.copies
    assert copy.columns.tolist() == [22]
    assert demotion.page_count == 3
    store.copy_out(demotion.copies)
    assert store.ledger.commit_demotion(demotion) == 3
    store.check()
    assert store.read(store.go_on(kept)) == store.read(kept)


def test_drop_device_and_drop_host_leave_one_replica() -> None:
    """The first needs a valid Host replica, the second a Device replica; neither takes the last one.  (C7.7)"""
    store = store_with_host()
    kept = store.retain(130)
    ledger = store.ledger
    assert (ledger.drop_device(kept), ledger.drop_host(kept)) == (0, 0)
    store.demote(kept)
    assert (ledger.drop_device(kept), ledger.drop_host(kept)) == (0, 0)
    fork = store.go_on(kept, 1)
    assert ledger.drop_host(kept) == 0  # pages of an active space stay as they are
    store.end(fork)
    assert store.column("device", kept)[2] == -1  # a copied tail comes from its record, and the source stays there
    assert ledger.drop_device(kept) == 2
    store.end(store.go_on(kept, 1))

    assert ledger.drop_host(kept) == 2 * RECORD
    store.check()
    assert store.read(kept) == store.read(store.go_on(kept))


# ---- claims --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_aborted_demotion_never_was(backend: Backend | None) -> None:
    """Records and pins are given back; the next one takes the same.  (C10.2)"""
    store = store_with_host(backend=backend)
    kept = store.retain(dict.fromkeys(store.ledger.active, 130))
    before = observables(store.ledger)
    demotion = prepared(store, kept)
    store.check()
    assert store.ledger.arena.free_units < store.ledger.arena.units
    assert store.column("pins", kept) == [1, 1, 1]

    store.ledger.abort_demotion(demotion)

    assert [line for line in differences(before, observables(store.ledger)) if "revision" not in line] == []
    for again in (store.ledger.abort_demotion, store.ledger.commit_demotion):
        with refused(MisuseError, "C7.4", store.ledger):
            again(demotion)


def test_a_demotion_in_flight_is_invisible_and_holds_its_pages() -> None:
    """Forks go on from the Device; a Move waits; release, cut and a second demotion do not touch it.  (C7.4, S58)"""
    store = store_with_host()
    kept = store.retain(130)
    content = store.read(kept)
    demotion = prepared(store, kept)
    for change in (store.ledger.release, lambda held: store.ledger.truncate_continuation(held, 130, "main")):
        with refused(MisuseError, "C7.4", store.ledger):
            change(kept)
    assert store.refuse(ActivationTarget(1, 0, kept, None, False)).reason == "copying"
    second = prepared(store, kept)
    assert (second.copies, second.page_count) == ((), 0)
    fork = store.go_on(kept, 10)
    store.append(fork, 10)

    store.copy_out(demotion.copies)
    assert store.ledger.commit_demotion(demotion) == 1  # the fork uses the full pages now
    assert store.ledger.commit_demotion(second) == 0
    store.check()
    assert (store.read(kept), store.read(fork)[:130]) == (content, content)


def test_a_continuation_that_is_demoted_holds_shared_pages_too() -> None:
    """A Move beside it lets go of them; without this nobody would hold pages that a copy reads.  (C7.4, C7.7)"""
    store = store_with_host()
    one = store.retain(250)
    two = store.finish(store.go_on(one, frontier=192))
    three = store.finish(store.go_on(one, frontier=64))
    store.ledger.protect(two, 0, "main")
    content = store.read(two)
    assert store.demote(three) == 1
    moving, _ = announced(store, ActivationTarget(1, 0, one, 64, False))
    demotion = prepared(store, two)
    assert [page.tolist() for page in demotion.pinned.values()] == [store.logical(one)[1:3]]
    for change in (store.ledger.release, lambda held: store.ledger.truncate_continuation(held, 128, "main")):
        with refused(MisuseError, "C7.4", store.ledger):
            change(two)
    assert store.refuse(ActivationTarget(1, 0, two, 1, False)).reason == "copying"

    store.publish(moving)
    store.check()
    store.copy_out(demotion.copies)
    assert store.ledger.commit_demotion(demotion) == 2
    store.check()
    assert store.read(two) == content
    assert not store.ledger.continuations.demotions
    store.release(two)


@pytest.mark.parametrize("ends", [*itertools.permutations(("first", "second"))])
def test_two_continuations_with_one_prefix_go_to_the_host_together(ends: tuple[str, str]) -> None:
    """The second copies only what the first does not; either may end first.  (C7.4, S26)"""
    store = store_with_host()
    one = store.retain(130)
    two = store.finish(store.go_on(one, frontier=128))
    open_ = {"first": prepared(store, one), "second": prepared(store, two)}
    assert open_["second"].copies == ()
    for name in ends:
        store.copy_out(open_[name].copies)
        store.ledger.commit_demotion(open_[name])
        store.check()
    assert store.column("device", one) == [-1, -1, -1]
    store.release(one)
    assert store.column("references", two) == [1, 1]
    store.release(two)
    assert store.ledger.arena.free_units == store.ledger.arena.units


def test_content_that_changed_under_a_copy_is_not_published() -> None:
    """Nothing of the ledger does that, because the page is pinned; it is compared nevertheless.  (C7.6, C16.9)"""
    store = store_with_host()
    kept = store.retain(130)
    leave_broken(store.ledger)
    demotion = prepared(store, kept)
    store.ledger.active["main"].pages.renew_content(store.space(kept).members[1:2])

    with refused(StaleHandle, "C7.6", store.ledger):
        store.ledger.commit_demotion(demotion)
    store.ledger.abort_demotion(demotion)
    store.check()
    store.demote(kept)
    restoring = store.prepare(ActivationTarget(1, 0, kept))
    store.ledger.active["main"].pages.renew_content(store.space(kept).members[:1])
    with refused(StaleHandle, "C7.6", store.ledger):
        store.ledger.commit_activation(restoring)


def test_an_arena_without_room_refuses_in_all_pools_or_none() -> None:
    """Three records of Main fit, those of MTP do not: a value, and nothing is claimed.  (C8.2, S52)"""
    store = store_with_host(3, backend=MTP)
    kept = store.retain({"main": 130, "mtp": 130})
    store.ledger.unsettled = ""
    before = observables(store.ledger)
    answer = store.ledger.prepare_demotion(kept)
    assert (isinstance(answer, Refusal), store.ledger.unsettled) == (True, "")
    assert isinstance(answer, Refusal)
    assert (answer.pool, answer.needed, answer.reason) == ("mtp", 3, "host")
    assert differences(before, observables(store.ledger)) == []

    small = SharedLedger(host_arena_bytes=2 * RECORD)
    assert small.ledger.prepare_demotion(small.retain(130)) == Refusal("main", 3, 2, forever=True, reason="host")
    plain = SharedLedger()
    kept = plain.retain(130)
    with refused(MisuseError, "C5.7", plain.ledger):
        plain.ledger.prepare_demotion(kept)


# ---- restoring beside decode ---------------------------------------------------------------------------------


def announced(store: SharedLedger, target: ActivationTarget) -> tuple[Transaction, Sequence]:
    """Prepare an activation whose handle exists from now on."""
    transaction = store.ledger.prepare_activation(target, is_announced=True)
    assert isinstance(transaction, Transaction)
    assert transaction.handle is not None
    return transaction, transaction.handle


@pytest.mark.parametrize("keep_source", [True, False])
def test_a_restoring_sequence_is_refused_by_name_until_it_is_published(keep_source: bool) -> None:
    """It is in no table; its handle is the one that the commit answers with.  (C10.10)"""
    store = store_with_host()
    kept = store.retain(130)
    content = store.read(kept)
    store.demote(kept)
    transaction, handle = announced(store, ActivationTarget(1, 0, kept, None, keep_source))
    store.check()
    assert store.ledger.active["main"].table[handle.row].max() == -1
    for use in (store.ledger.finish, store.ledger.abort, lambda held: store.ledger.batch([held])):
        with refused(MisuseError, "C10.10", store.ledger):
            use(handle)

    assert store.publish(transaction) is not None
    assert store.read(handle) == content
    store.append(handle, 1)


def test_a_page_is_restored_once_at_a_time() -> None:
    """Two continuations share pages on the Host: the second waits for the first, as a value.  (C10.10, S42)"""
    store = store_with_host()
    one = store.retain(130)
    two = store.finish(store.go_on(one, frontier=128))
    content = store.read(two)
    store.demote(one)
    store.demote(two)
    transaction, _ = announced(store, ActivationTarget(1, 0, one))
    assert store.refuse(ActivationTarget(1, 0, two)) == Refusal("main", 2, 0, forever=False, reason="copying")
    assert prepared(store, two).page_count == 0

    store.publish(transaction)
    fork = store.go_on(two)
    assert store.read(fork) == content
    store.check()


@pytest.mark.parametrize("keep_source", [True, False])
@pytest.mark.parametrize("frontier", [None, 100])
def test_an_aborted_restore_never_was(keep_source: bool, frontier: int | None) -> None:
    """Page groups, pins, row and handle are given back; the source is on the Host as before.  (C10.2, S28)"""
    store = store_with_host()
    kept = store.retain(130)
    store.demote(kept)
    before = observables(store.ledger)
    for _ in range(100):
        transaction, handle = announced(store, ActivationTarget(1, 0, kept, frontier, keep_source))
        store.ledger.abort_transaction(transaction)
        with refused(StaleHandle, "C10.1", store.ledger):
            store.ledger.abort(handle)

    assert [line for line in differences(before, observables(store.ledger)) if "serial" not in line] == []
    store.check()


@pytest.mark.parametrize("places", ["both", "host"])
def test_a_prefix_that_is_claimed_and_not_used_keeps_no_pin(places: str) -> None:
    """S33: claimed 50 times by a Fork, a Move and a demotion, none of which is published.  (C7.4, C10.2)"""
    store = store_with_host()
    kept = store.retain(192)
    store.demote(kept)
    if places == "both":
        store.end(store.go_on(kept, 1))
    before = observables(store.ledger)
    for _ in range(50):
        for keep_source in (True, False):
            store.ledger.abort_transaction(store.prepare(ActivationTarget(1, 0, kept, 130, keep_source)))
        store.ledger.abort_demotion(prepared(store, kept))

    assert store.column("pins", kept) == [0, 0, 0]
    assert [line for line in differences(before, observables(store.ledger)) if "serial" not in line] == []
    store.check()


def test_pages_of_a_restoring_sequence_stay_on_the_device() -> None:
    """One of its pages was there already, and another continuation that holds it is demoted meanwhile.  (C7.4, S42)"""
    store = store_with_host()
    one = store.retain(130)
    two = store.finish(store.go_on(one, frontier=64))
    content = store.read(one)
    running = store.go_on(two, 1)
    store.demote(one)
    store.end(running)
    assert [page >= 0 for page in store.page_ids(one)] == [True, False, False]

    transaction, handle = announced(store, ActivationTarget(1, 0, one))
    assert store.demote(two) == 0
    store.publish(transaction)
    assert store.read(handle) == content


# ---- the staged fork -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entitlement", "free"), [(3, 2), (1, 0)])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_fork_that_lacks_one_page_takes_the_page_group_of_the_tail(
    entitlement: int, free: int, on_host: bool
) -> None:
    """Both cases of C10.8: some pages are free, or none is.  The source keeps its tail on the Host.  (vector 53)"""
    store = store_with_host(tokens=512, max_context=512)
    kept = store.retain(130)
    content = store.read(kept)
    if on_host:  # a tail in both places needs no backup
        store.demote(kept)
        kept = store.finish(store.go_on(kept, keep_source=False))
    store.start((5 - free) * 64)
    tokens = (entitlement - 1) * 64 + 1
    plain = store.refuse(ActivationTarget(tokens, 0, kept))
    assert plain == Refusal("main", entitlement, free, forever=False)
    assert plain.move_fits
    staged = ActivationTarget(tokens, 0, kept, allow_demote_source=True)
    before, tail = observables(store.ledger), store.page_ids(kept)[2]
    transaction = store.prepare(staged)
    assert len(transaction.backups) == (not on_host)
    store.check()
    store.ledger.abort_transaction(transaction)
    assert [line for line in differences(before, observables(store.ledger)) if "revision" not in line] == []
    assert store.explain(staged).pools == (PoolPlan("main", entitlement + 2, 130, 2, 2, free, takes_tail=True),)

    fork = store.activate(staged)

    store.check()
    assert store.page_ids(fork) == [*store.page_ids(kept)[:2], tail]
    assert store.page_ids(kept)[2] == -1
    assert (store.read(fork), store.read(kept)) == (content, content)
    assert store.available() == 0
    store.append(fork, tokens)
    assert store.read(kept) == content


def test_a_staged_fork_is_asked_for_and_possible() -> None:
    """Not for an aligned frontier, a tail in use, two pages too few, or an arena without room.  (C10.8)"""
    store = store_with_host(1, tokens=512, max_context=512)
    aligned, kept = store.retain(128), store.retain(130)
    store.start(100)
    staged = ActivationTarget(100, 0, kept, allow_demote_source=True)
    assert store.explain(staged).pools[0].takes_tail
    for target in (ActivationTarget(100, 0, aligned, allow_demote_source=True),
                   ActivationTarget(200, 0, kept, allow_demote_source=True)):
        assert store.refuse(target).reason == "pages"
    pages, tail = store.ledger.active["main"].pages, store.space(kept).members[2:]
    pages.pin(tail)
    assert store.refuse(staged).reason == "pages"
    pages.unpin(tail)
    assert store.demote(store.retain(64)) == 1
    answer = store.refuse(staged)
    assert (answer, answer.move_fits) == (Refusal("main", 1, 0, forever=False, reason="host"), True)
    for source, keep_source in ((None, True), (kept, False)):
        with pytest.raises(MisuseError, match=r"C10\.8"):
            ActivationTarget(1, 0, source, None, keep_source, allow_demote_source=True)


# ---- what a policy asks --------------------------------------------------------------------------------------


def test_explain_release_says_what_would_come_back() -> None:
    """And what would not, because others hold it; nothing changes, and the figures come true.  (C9.8)"""
    store = store_with_host()
    one = store.retain(130)
    two = store.finish(store.go_on(one, frontier=64))
    store.demote(two)

    def plan(held: Continuation) -> ReleasePlan:
        return store.ledger.demotions.explain_release(held.number)["main"]

    assert plan(two) == ReleasePlan(1, 1, 1, 0, 0, 0, 0)
    assert plan(one) == ReleasePlan(3, 1, 1, 2, 0, 2, 2 * RECORD)
    free = store.available()
    assert store.demote(one) == 2
    assert plan(one) == ReleasePlan(3, 1, 3, 0, 2 * RECORD, 0, 0)
    store.release(two)
    assert plan(one) == ReleasePlan(3, 0, 3, 0, 3 * RECORD, 0, 0)
    assert store.available() == free + 2
