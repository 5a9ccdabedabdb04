"""Activations and snapshots between their preparation and their end: invisible, undone whole, ended once.  (C10.2)

The first half injects a failure before every single step of a preparation; the second holds prepared activations
and snapshots open beside other operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.errors import MisuseError, StaleHandle, UnitInFlight
from pagedkv.ledger.continuations import Continuation, Continuations
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.sequences import Sequence, Sequences
from pagedkv.ledger.transaction import ActivationTarget, Refusal, Transaction
from pagedkv.values.config import Backend
from tests.host.builders import activate, begin, counts, leave_broken
from tests.host.refusals import differences, observables, refused
from tests.host.sharing import BACKENDS, MTP, SharedLedger, retained, started

STEPS: tuple[tuple[type, str], ...] = ((Continuations, "claim"), (PagePool, "try_reserve"), (PagePool, "bind"),
                                       (LogicalPages, "describe_copy"), (LogicalPages, "pin"), (Sequences, "lease_row"))
"""Every method by which a preparation takes something."""

ONE_POOL = ["try_reserve", "bind", "describe_copy", "pin"]
FROM_SOURCE = ["claim", *ONE_POOL, *ONE_POOL, "lease_row"]
CLAIMS = {"fresh": ["try_reserve", "try_reserve", "lease_row"], "fork": FROM_SOURCE, "move": FROM_SOURCE,
          "snapshot": [*ONE_POOL, *ONE_POOL]}
"""What each preparation takes, in order, in a store of two pools."""


class Injected(Exception):
    """What a step raises in these tests."""


def fail_before(monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]) -> list[str]:
    """Let the step of that number raise instead of happening; returns the list that the steps are noted in."""
    steps: list[str] = []

    def planted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            steps.append(name)
            if len(steps) == number:
                raise error(name)
            return original(*arguments, **named)

        return step

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, planted(getattr(owner, name), name))
    return steps


def in_use() -> tuple[SharedLedger, Continuation, Sequence]:
    """Return two pools, a source whose pages another continuation shares, and a running sequence with tails."""
    store, source = retained({"main": 130, "mtp": 130}, backend=MTP, max_context=320)
    store.finish(store.go_on(source, frontier={"main": 128, "mtp": 128}))
    running = store.go_on(source, 100)
    store.append(running, {"main": 20, "mtp": 10})
    return store, source, running


def preparation(kind: str, store: SharedLedger, source: Continuation, running: Sequence) -> Callable[[], object]:
    """Return the preparation of one kind."""
    if kind == "snapshot":
        return lambda: store.ledger.prepare_snapshot(running, "state", store.state_frontier(running, "state"))
    target = ActivationTarget(10, 5)
    if kind != "fresh":
        target = ActivationTarget(60, 5, source, {"main": 100, "mtp": 70}, kind == "fork")
    return lambda: store.ledger.prepare_activation(target)


# ---- a failure before every step -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
@pytest.mark.parametrize(("kind", "number"),
                         [(kind, number) for kind, steps in CLAIMS.items() for number in range(1, len(steps) + 1)])
def test_a_preparation_that_breaks_off_leaves_the_ledger_unsettled_by_name(
    kind: str, number: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step between the first write and the last can break off unseen; a store stops then.  (C10.2, C12.4)"""
    store, source, running = in_use()
    prepare = preparation(kind, store, source, running)
    store.ledger.unsettled = ""
    steps = fail_before(monkeypatch, number, error)
    leave_broken(store.ledger)
    with pytest.raises(error):
        prepare()

    assert steps == CLAIMS[kind][:number]
    assert store.ledger.unsettled == ("snapshot" if kind == "snapshot" else "activate")


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_preparation_takes_these_things_in_this_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no step is missing from the cases above.  (C10.3)"""
    store, source, running = in_use()
    steps = fail_before(monkeypatch, 0, Injected)

    prepared = preparation(kind, store, source, running)()

    assert steps == CLAIMS[kind]
    assert isinstance(prepared, Transaction)
    store.ledger.abort_transaction(prepared)


def test_a_refused_preparation_leaves_the_ledger_settled() -> None:
    """Scarcity is met by `explain`, before the first write: as a value, and with nothing to undo.  (C10.9)"""
    store, source, running = in_use()
    store.ledger.unsettled = ""
    available = store.available("mtp")
    assert store.ledger.active["mtp"].pool.try_reserve(available)

    for kind in CLAIMS:
        assert isinstance(preparation(kind, store, source, running)(), Refusal)
        assert store.ledger.unsettled == ""
    store.ledger.active["mtp"].pool.shrink(available)


# ---- prepared, not committed -----------------------------------------------------------------------------


def prepared_pair(backend: Backend | None, *, keep_source: bool) -> tuple[SharedLedger, Continuation, ActivationTarget]:
    """Return a store, a source of 130 tokens whose pages another continuation shares, and a target with a tail copy."""
    store = SharedLedger(backend=backend, max_context=320)
    source = store.retain(dict.fromkeys(store.ledger.active, 130))
    store.finish(store.go_on(source, frontier=dict.fromkeys(store.ledger.active, 128)))
    frontier = dict.fromkeys(store.ledger.active, 100)
    return store, source, ActivationTarget(60, 5, source, frontier, keep_source)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep_source", [True, False])
def test_a_prepared_activation_is_invisible_and_an_aborted_one_never_was(
    backend: Backend | None, keep_source: bool
) -> None:
    """No sequence, no table entry, no reference; abort restores every observable.  (C10.2, C10.3; vectors 42, 52)"""
    store, source, target = prepared_pair(backend, keep_source=keep_source)
    ledger = store.ledger
    before = observables(ledger)

    def visible() -> object:
        return (store.logical(source), store.column("references", source), store.column("active", source),
                [spaces.table.tolist() for spaces in ledger.active.values()], ledger.sequences.active_rows())

    seen = visible()
    prepared = store.prepare(target)
    assert visible() == seen

    ledger.abort_transaction(prepared)

    assert differences(before, observables(ledger)) == []
    store.check()
    store.activate(target)


@pytest.mark.parametrize("keep_source", [True, False])
def test_a_source_of_a_prepared_activation_stays_as_it_is(keep_source: bool) -> None:
    """It is neither released, moved, truncated, protected anew nor given another state.  (C10.2, C7.4)"""
    store, source, target = prepared_pair(None, keep_source=keep_source)
    ledger = store.ledger
    prepared = store.prepare(target)

    for change in (lambda: ledger.release(source), lambda: ledger.truncate_continuation(source, 130, "main"),
                   lambda: ledger.protect(source, 0, "main"), lambda: ledger.attach_state(source, None),
                   lambda: ledger.prepare_activation(ActivationTarget(1, 0, source, None, keep_source=False))):
        with refused(MisuseError, "C10.2", ledger):
            change()
    store.copy(prepared.copies)
    ledger.commit_activation(prepared)
    if keep_source:
        store.release(source)


def test_a_source_that_is_being_moved_is_nobody_s_fork() -> None:
    """The Move would take the source away under the Fork.  (C10.4)"""
    store, source, target = prepared_pair(None, keep_source=False)
    ledger = store.ledger
    prepared = store.prepare(target)

    with refused(MisuseError, "C10.4", ledger):
        ledger.prepare_activation(ActivationTarget(1, 0, source))
    with refused(MisuseError, "C10.4", ledger):
        ledger.transactions.explain(ActivationTarget(1, 0, source))
    ledger.abort_transaction(prepared)
    store.go_on(source)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("ends", [("commit", "commit"), ("commit", "abort"), ("abort", "commit"), ("abort", "abort")])
def test_forks_of_one_source_are_prepared_together_and_end_in_any_order(
    order: tuple[int, int], ends: tuple[str, str]
) -> None:
    """Each pins the tail for itself; the source is free again with the last.  (C7.4, C10.5)"""
    store, source, target = prepared_pair(None, keep_source=True)
    ledger = store.ledger
    before = observables(ledger)
    kept = store.read(source)
    both = [store.prepare(target), store.prepare(target)]
    for index, end in zip(order, ends, strict=True):
        with refused(MisuseError, "C10.2", ledger):
            ledger.release(source)
        if end == "commit":
            store.copy(both[index].copies)
            sequence = ledger.commit_activation(both[index])
            assert store.read(sequence) == kept[:100]
        else:
            ledger.abort_transaction(both[index])

    store.check()
    for row in ledger.sequences.active_rows():
        store.end(Sequence(1, row, int(ledger.sequences.serials[row])))
    after = observables(ledger)
    assert [line for line in differences(before, after) if "stamp" not in line] == []


@pytest.mark.parametrize("kind", ["fresh", "fork", "move", 64, 65])
@pytest.mark.parametrize("first", ["commit", "abort"])
def test_a_prepared_activation_ends_once(kind: str | int, first: str) -> None:
    """A second end is refused and changes nothing; a snapshot of 64 or 65 tokens too.  (C10.2, C10.6, S35)"""
    store, source, target = prepared_pair(None, keep_source=kind == "fork")
    ledger = store.ledger
    commit: Callable[[Any], object] = ledger.commit_activation
    if isinstance(kind, int):
        commit, prepared = ledger.commit_snapshot, prepare_snapshot(store, store.start(130, written=kind))
    else:
        prepared = store.prepare(ActivationTarget(5, 5) if kind == "fresh" else target)
    end: dict[str, Callable[[Any], object]] = {"commit": commit, "abort": ledger.abort_transaction}
    handles = len(ledger.continuations.handles())
    end[first](prepared)

    for again in end.values():
        for ended in (prepared, None):
            with refused(MisuseError, "C10.2", ledger):
                again(ended)
    assert (source in ledger.continuations.handles()) == (kind != "move" or first == "abort")
    change = 0 if first == "abort" or kind in ("fresh", "fork") else -1 if kind == "move" else 1
    assert len(ledger.continuations.handles()) == handles + change


def test_a_shared_page_that_a_prepared_fork_copies_may_lose_its_other_holders() -> None:
    """C is forked inside a page that A holds too: A is released, moved or finished meanwhile.  (C7.4, C10.2)"""
    for way in ("release", "move", "finish", "abort"):
        store, one = retained(130, max_context=320)
        two = store.finish(store.go_on(one, frontier=128))
        running = store.go_on(one, 1, frontier=128) if way in ("finish", "abort") else None
        kept = store.read(two)
        if way == "move":
            moving = store.prepare(ActivationTarget(1, 0, one, 100, keep_source=False))
        prepared = store.prepare(ActivationTarget(1, 0, two, 100))
        assert store.column("pins", two) == [0, 2 if way == "move" else 1]
        if way == "release":
            store.release(one)
        elif way == "move":
            store.copy(moving.copies)
            store.ledger.commit_activation(moving)
        elif way == "finish":
            assert running is not None
            store.finish(running)
        else:
            assert running is not None
            assert store.ledger.abort(running)
        assert store.read(two) == kept
        store.copy(prepared.copies)
        fork = store.ledger.commit_activation(prepared)
        assert store.read(fork) == kept[:100]
        assert store.read(two) == kept
        store.check()


def test_a_page_that_a_copy_uses_refuses_a_move_as_a_value() -> None:
    """Scarcity of another kind: it ends by itself.  A shared page does not matter, and a Fork neither.  (C7.4)"""
    store, source, target = prepared_pair(MTP, keep_source=False)
    pages, members = store.ledger.active["mtp"].pages, store.space(source, "mtp").members
    pages.pin(members[2:])
    assert store.refuse(target) == Refusal("mtp", 1, 0, forever=False, reason="copying")
    store.end(store.activate(dataclasses.replace(target, keep_source=True)))
    pages.unpin(members[2:])
    pages.pin(members[:1])
    store.activate(target)
    pages.unpin(members[:1])


def test_a_fresh_activation_holds_numbers_only_until_it_is_committed() -> None:
    """Vector 42, without a source: reservation and row, given back by abort.  (C10.3)"""
    store = SharedLedger(backend=MTP)
    ledger: Ledger = store.ledger
    before = observables(ledger)
    prepared = store.prepare(ActivationTarget(100, 30))
    assert (counts(ledger), prepared.copies, prepared.tables) == ((0, 3, 13), (), {})
    assert ledger.sequences.free_rows() == [1, 2, 3]
    assert ledger.sequences.active_rows() == []
    ledger.abort_transaction(prepared)

    assert differences(before, observables(ledger)) == []
    activate(ledger, 100)


# ---- snapshots, prepared ---------------------------------------------------------------------------------


def prepare_snapshot(store: SharedLedger, sequence: Sequence) -> Transaction:
    """Prepare a snapshot that must fit."""
    prepared = store.ledger.prepare_snapshot(sequence, "state", store.state_frontier(sequence, "state"))
    assert isinstance(prepared, Transaction), prepared
    return prepared


def prepared_checkpoint(tokens: int) -> tuple[SharedLedger, Sequence, Transaction]:
    """Return a store, a sequence with committed tokens, and the transaction of its snapshot."""
    store, sequence = started(200, written=tokens)
    return store, sequence, prepare_snapshot(store, sequence)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 64, 130, 192])
def test_a_prepared_snapshot_is_invisible_and_an_aborted_one_never_was(backend: Backend | None, tokens: int) -> None:
    """Counters, writer and active references as before.  (C10.6; vector 52)"""
    store = SharedLedger(backend=backend)
    sequence = store.start(200, written=dict.fromkeys(store.ledger.active, tokens))
    before = observables(store.ledger)
    prepared = prepare_snapshot(store, sequence)
    assert store.ledger.continuations.handles() == []
    assert store.column("writer", sequence) == [0] * -(-tokens // 64)

    store.ledger.abort_transaction(prepared)

    assert differences(before, observables(store.ledger)) == []
    store.append(sequence, 2)
    assert store.frontier(store.snapshot(sequence)) == tokens + 2


@pytest.mark.parametrize("tokens", [64, 100])
def test_a_snapshot_of_a_sequence_that_went_on_is_refused_and_can_be_aborted(tokens: int) -> None:
    """Its bytes would be those of another frontier.  (C10.6)"""
    store, sequence, prepared = prepared_checkpoint(tokens)
    ledger = store.ledger
    unit, _ = begin(ledger, sequence, 1)
    with refused(UnitInFlight, "C12.2", ledger):
        ledger.commit_snapshot(prepared)
    ledger.commit_unit(unit)
    with refused(MisuseError, "C10.6", ledger):
        ledger.commit_snapshot(prepared)

    ledger.abort_transaction(prepared)

    assert int(ledger.active["main"].pages.pins.sum()) == 0
    store.check()
    store.snapshot(sequence)


def test_a_snapshot_of_a_sequence_that_ended_is_refused() -> None:
    """An aligned frontier pins nothing, so the sequence may end first; also when its row serves another.  (C10.6)"""
    store, sequence, prepared = prepared_checkpoint(64)
    ledger = store.ledger
    store.end(sequence)
    assert store.start(200).row == sequence.row
    with refused(StaleHandle, "C10.1", ledger):
        ledger.commit_snapshot(prepared)

    ledger.abort_transaction(prepared)


def test_a_tail_that_a_snapshot_copies_is_neither_cut_nor_let_go() -> None:
    """Truncate inside or across it, finish, retain and abort are refused; a cut behind it is not.  (C7.4, C9.10)"""
    store, sequence, prepared = prepared_checkpoint(130)
    ledger = store.ledger

    for tokens in (0, 64, 127, 128, 129, 130):
        with refused(MisuseError, "C7.4", ledger):
            ledger.truncate(sequence, tokens, "main")
    for end in (ledger.finish, lambda held: ledger.finish(held, retain=True), ledger.abort):
        with refused(MisuseError, "C7.4", ledger):
            end(sequence)
    ledger.abort_transaction(prepared)
    ledger.truncate(sequence, 129, "main")


def test_two_snapshots_prepared_together_make_two_checkpoints() -> None:
    """Each copies the tail for itself and shares the full pages.  (C10.6)"""
    store, sequence, first = prepared_checkpoint(130)
    both = [first, prepare_snapshot(store, sequence)]
    for prepared in both:
        store.copy(prepared.copies)
    checkpoints = [store.ledger.commit_snapshot(prepared) for prepared in both]

    assert store.column("references", sequence) == [3, 3, 1]
    for checkpoint in checkpoints:
        assert store.read(checkpoint) == store.read(sequence)
