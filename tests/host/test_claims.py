"""Activations and snapshots between their preparation and their end: invisible, undone whole, ended once.  (C10.2)

The first half injects a failure before every single step of a preparation; the second holds prepared activations
and snapshots open beside other operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.errors import MisuseError, StaleHandle, UnitInFlight
from pagedkv.ledger.activation import ActivationTarget, PreparedActivation
from pagedkv.ledger.continuations import Continuation, Continuations
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.sequences import Sequence, Sequences
from pagedkv.ledger.snapshot import PreparedSnapshot
from pagedkv.values.config import Backend
from tests.host.builders import (
    activate,
    begin,
    counts,
    differences,
    observables,
    refused,
)
from tests.host.sharing import BACKENDS, MTP, SharedLedgers

STEPS: tuple[tuple[type, str], ...] = (
    (Continuations, "claim"), (PagePool, "try_reserve"), (PagePool, "bind"), (LogicalPages, "describe_copy"),
    (LogicalPages, "pin"), (Sequences, "lease_row"),
)  # fmt: skip
"""Every method by which a preparation takes something."""

ONE_POOL = ["try_reserve", "bind", "describe_copy", "pin"]
CLAIMS = {
    "fresh": ["try_reserve", "try_reserve", "lease_row"],
    "fork": ["claim", *ONE_POOL, *ONE_POOL, "lease_row"],
    "move": ["claim", *ONE_POOL, *ONE_POOL, "lease_row"],
    "snapshot": [*ONE_POOL, *ONE_POOL],
}
"""What each preparation takes, in order, in a store of two pools."""


class Injected(Exception):
    """What a step raises in these tests."""


def fail_before(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let the step of that number raise instead of happening; returns the list that the steps are noted in."""
    steps: list[str] = []

    def planted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            steps.append(name)
            if len(steps) == number:
                raise Injected(name)
            return original(*arguments, **named)

        return step

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, planted(getattr(owner, name), name))
    return steps


def in_use() -> tuple[SharedLedgers, Continuation, Sequence]:
    """Return two pools, a source whose pages another continuation shares, and a running sequence with tails."""
    store = SharedLedgers(backend=MTP, max_context=320)
    source = store.retain({"main": 130, "mtp": 130})
    store.finish(store.go_on(source, frontier={"main": 128, "mtp": 128}))
    running = store.go_on(source, 100)
    store.append(running, {"main": 20, "mtp": 10})
    return store, source, running


def preparation(kind: str, store: SharedLedgers, source: Continuation, running: Sequence) -> Callable[[], object]:
    """Return the preparation of one kind."""
    if kind == "snapshot":
        return lambda: store.ledgers.prepare_snapshot(running, "state")
    target = ActivationTarget(10, 5)
    if kind != "fresh":
        target = ActivationTarget(60, 5, source, {"main": 100, "mtp": 70}, kind == "fork")
    return lambda: store.ledgers.prepare_activation(target)


# ---- a failure before every step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, number) for kind, steps in CLAIMS.items() for number in range(1, len(steps) + 1)]
)
def test_a_preparation_that_breaks_off_leaves_no_claim(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters, references, pins, tables, rows and the source are as before; then it succeeds.  (C10.2, C6.3)"""
    store, source, running = in_use()
    prepare = preparation(kind, store, source, running)
    before, read = observables(store.ledgers), store.read(source)
    with monkeypatch.context() as patch:
        steps = fail_before(patch, number)
        with pytest.raises(Injected):
            prepare()

    assert steps == CLAIMS[kind][:number]
    assert differences(before, observables(store.ledgers)) == []
    store.check()
    prepared = prepare()
    if isinstance(prepared, PreparedSnapshot):
        store.ledgers.commit_snapshot(prepared)
    else:
        assert isinstance(prepared, PreparedActivation)
        store.copy(prepared.copies)
        assert store.read(store.ledgers.commit_activation(prepared)) == read[: 0 if kind == "fresh" else 100]
    store.check()


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_preparation_takes_these_things_in_this_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no step is missing from the cases above.  (C10.3)"""
    store, source, running = in_use()
    steps = fail_before(monkeypatch, 0)

    preparation(kind, store, source, running)()

    assert steps == CLAIMS[kind]


def test_an_interrupt_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt between two pools: no claim is left.  (C10.2)"""
    store, source, _ = in_use()
    before = observables(store.ledgers)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sequences, "lease_row", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.ledgers.try_activate(ActivationTarget(60, 5, source, {"main": 100, "mtp": 70}))

    assert differences(before, observables(store.ledgers)) == []
    store.check()


# ---- prepared, not committed -----------------------------------------------------------------------------


def prepared_pair(
    backend: Backend | None, *, keep_source: bool
) -> tuple[SharedLedgers, Continuation, ActivationTarget]:
    """Return a store, a source of 130 tokens whose pages another continuation shares, and a target with a tail copy."""
    store = SharedLedgers(backend=backend, max_context=320)
    source = store.retain(dict.fromkeys(store.ledgers.spaces, 130))
    store.finish(store.go_on(source, frontier=dict.fromkeys(store.ledgers.spaces, 128)))
    frontier = dict.fromkeys(store.ledgers.spaces, 100)
    return store, source, ActivationTarget(60, 5, source, frontier, keep_source)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep_source", [True, False])
def test_a_prepared_activation_is_invisible_and_an_aborted_one_never_was(
    backend: Backend | None, keep_source: bool
) -> None:
    """No sequence, no table entry, no reference; abort restores every observable.  (C10.2, C10.3; vectors 42, 52)"""
    store, source, target = prepared_pair(backend, keep_source=keep_source)
    ledgers = store.ledgers
    before = observables(ledgers)
    seen = (store.logical(source), store.column("references", source), store.column("active", source),
            [spaces.table.mirror.tolist() for spaces in ledgers.spaces.values()])  # fmt: skip
    prepared = store.prepare(target)
    assert ledgers.sequences.active_rows() == []
    assert seen == (store.logical(source), store.column("references", source), store.column("active", source),
                    [spaces.table.mirror.tolist() for spaces in ledgers.spaces.values()])  # fmt: skip

    ledgers.abort_activation(prepared)

    assert differences(before, observables(ledgers)) == []
    store.check()
    store.activate(target)
    store.check()


@pytest.mark.parametrize("keep_source", [True, False])
def test_a_source_of_a_prepared_activation_stays_as_it_is(keep_source: bool) -> None:
    """It is neither released, moved, truncated, protected anew nor given another state.  (C10.2, C7.4)"""
    store, source, target = prepared_pair(None, keep_source=keep_source)
    ledgers = store.ledgers
    prepared = store.prepare(target)

    with refused(MisuseError, "C10.2", ledgers):
        ledgers.release(source)
    with refused(MisuseError, "C10.2", ledgers):
        ledgers.truncate_continuation(source, 130, "main")
    with refused(MisuseError, "C10.2", ledgers):
        ledgers.protect(source, 0, "main")
    with refused(MisuseError, "C10.2", ledgers):
        ledgers.attach_state(source, None)
    with refused(MisuseError, "C10.2", ledgers):
        ledgers.prepare_activation(ActivationTarget(1, 0, source, None, keep_source=False))
    store.copy(prepared.copies)
    ledgers.commit_activation(prepared)
    if keep_source:
        store.release(source)
    store.check()


def test_a_source_that_is_being_moved_is_nobody_s_fork() -> None:
    """The Move would take the source away under the Fork.  (C10.4)"""
    store, source, target = prepared_pair(None, keep_source=False)
    ledgers = store.ledgers
    prepared = store.prepare(target)

    with refused(MisuseError, "C10.4", ledgers):
        ledgers.prepare_activation(ActivationTarget(1, 0, source))
    with refused(MisuseError, "C10.4", ledgers):
        ledgers.explain(ActivationTarget(1, 0, source))
    ledgers.abort_activation(prepared)
    store.go_on(source)
    store.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("ends", [("commit", "commit"), ("commit", "abort"), ("abort", "commit"), ("abort", "abort")])
def test_forks_of_one_source_are_prepared_together_and_end_in_any_order(
    order: tuple[int, int], ends: tuple[str, str]
) -> None:
    """Each pins the tail for itself; the source is free again with the last.  (C7.4, C10.5)"""
    store, source, target = prepared_pair(None, keep_source=True)
    ledgers = store.ledgers
    before = observables(ledgers)
    kept = store.read(source)
    both = [store.prepare(target), store.prepare(target)]
    for index, end in zip(order, ends, strict=True):
        with refused(MisuseError, "C10.2", ledgers):
            ledgers.release(source)
        if end == "commit":
            store.copy(both[index].copies)
            sequence = ledgers.commit_activation(both[index])
            assert store.read(sequence) == kept[:100]
        else:
            ledgers.abort_activation(both[index])

    store.check()
    for row in ledgers.sequences.active_rows():
        store.end(Sequence(1, row, int(ledgers.sequences.serials[row])))
    after = observables(ledgers)
    assert [line for line in differences(before, after) if "stamp" not in line] == []


@pytest.mark.parametrize("kind", ["fresh", "fork", "move"])
@pytest.mark.parametrize("first", ["commit", "abort"])
def test_a_prepared_activation_ends_once(kind: str, first: str) -> None:
    """A second commit or abort is refused and changes nothing.  (C10.2, S35)"""
    store, source, target = prepared_pair(None, keep_source=kind == "fork")
    ledgers = store.ledgers
    prepared = store.prepare(ActivationTarget(5, 5) if kind == "fresh" else target)
    end: dict[str, Callable[[Any], object]] = {
        "commit": ledgers.commit_activation, "abort": ledgers.abort_activation,
    }  # fmt: skip
    end[first](prepared)

    for again in end.values():
        with refused(MisuseError, "C10.2", ledgers):
            again(prepared)
        with refused(MisuseError, "C10.2", ledgers):
            again(None)
    assert (source in ledgers.continuations.handles()) == (kind != "move" or first == "abort")
    store.check()


def test_a_shared_page_that_a_prepared_fork_copies_may_lose_its_other_holders() -> None:
    """C is forked inside a page that A holds too: A is released, moved or finished meanwhile.  (C7.4, C10.2)"""
    for way in ("release", "move", "finish", "abort"):
        store = SharedLedgers(max_context=320)
        one = store.retain(130)
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
            store.ledgers.commit_activation(moving)
        elif way == "finish":
            assert running is not None
            store.finish(running)
        else:
            assert running is not None
            assert store.ledgers.abort(running)
        assert store.read(two) == kept
        store.copy(prepared.copies)
        fork = store.ledgers.commit_activation(prepared)
        assert store.read(fork) == kept[:100]
        assert store.read(two) == kept
        store.check()


def test_a_transfer_that_reads_the_source_refuses_its_move_before_and_after_the_preparation() -> None:
    """A commit that could fail half-way fails before it begins: nothing changed, and it goes through later.  (C7.4)"""
    store, source, target = prepared_pair(MTP, keep_source=False)
    ledgers = store.ledgers
    pool = ledgers.spaces["mtp"].pool
    ids = ledgers.spaces["mtp"].pages.device[store.space(source, "mtp").members[2:3]]
    pool.pin(ids)
    with refused(MisuseError, "C7.4", ledgers):
        ledgers.prepare_activation(target)
    with refused(MisuseError, "C7.4", ledgers):
        ledgers.explain(target)
    pool.unpin(ids)
    prepared = store.prepare(target)
    pool.pin(ids)
    with refused(MisuseError, "C7.4", ledgers):
        ledgers.commit_activation(prepared)
    pool.unpin(ids)
    store.copy(prepared.copies)
    ledgers.commit_activation(prepared)
    store.check()


def test_a_fresh_activation_holds_numbers_only_until_it_is_committed() -> None:
    """Vector 42, without a source: reservation and row, given back by abort.  (C10.3)"""
    store = SharedLedgers(backend=MTP)
    ledgers: StoreLedgers = store.ledgers
    before = observables(ledgers)
    prepared = store.prepare(ActivationTarget(100, 30))
    assert (counts(ledgers), prepared.copies, prepared.tables) == ((0, 3, 13), (), {})
    assert ledgers.sequences.active_count == 1
    assert ledgers.sequences.active_rows() == []
    ledgers.abort_activation(prepared)

    assert differences(before, observables(ledgers)) == []
    activate(ledgers, 100)
    store.check()


# ---- snapshots, prepared ---------------------------------------------------------------------------------


def prepare_snapshot(store: SharedLedgers, sequence: Sequence) -> PreparedSnapshot:
    """Prepare a snapshot that must fit."""
    prepared = store.ledgers.prepare_snapshot(sequence, "state")
    assert isinstance(prepared, PreparedSnapshot), prepared
    return prepared


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 64, 130, 192])
def test_a_prepared_snapshot_is_invisible_and_an_aborted_one_never_was(backend: Backend | None, tokens: int) -> None:
    """Counters, writer and active references as before.  (C10.6; vector 52)"""
    store = SharedLedgers(backend=backend)
    sequence = store.start(200)
    store.append(sequence, dict.fromkeys(store.ledgers.spaces, tokens))
    before = observables(store.ledgers)
    prepared = prepare_snapshot(store, sequence)
    assert store.ledgers.continuations.handles() == []
    assert store.column("writer", sequence) == [0] * -(-tokens // 64)

    store.ledgers.abort_snapshot(prepared)

    assert differences(before, observables(store.ledgers)) == []
    store.append(sequence, 2)
    assert store.frontier(store.snapshot(sequence)) == tokens + 2
    store.check()


@pytest.mark.parametrize("first", ["commit", "abort"])
@pytest.mark.parametrize("tokens", [64, 65])
def test_a_prepared_snapshot_ends_once(first: str, tokens: int) -> None:
    """A second commit or abort is refused and changes nothing.  (C10.6, S35)"""
    store = SharedLedgers()
    sequence = store.start(100)
    store.append(sequence, tokens)
    ledgers = store.ledgers
    prepared = prepare_snapshot(store, sequence)
    end: dict[str, Callable[[Any], object]] = {"commit": ledgers.commit_snapshot, "abort": ledgers.abort_snapshot}
    end[first](prepared)

    for again in end.values():
        with refused(MisuseError, "C10.6", ledgers):
            again(prepared)
        with refused(MisuseError, "C10.6", ledgers):
            again(None)
    assert len(ledgers.continuations.handles()) == (1 if first == "commit" else 0)
    store.check()


@pytest.mark.parametrize("tokens", [64, 100])
def test_a_snapshot_of_a_sequence_that_went_on_is_refused_and_can_be_aborted(tokens: int) -> None:
    """Its bytes would be those of another frontier.  (C10.6)"""
    store = SharedLedgers()
    sequence = store.start(200)
    store.append(sequence, tokens)
    ledgers = store.ledgers
    prepared = prepare_snapshot(store, sequence)
    unit, _ = begin(ledgers, sequence, 1)
    with refused(UnitInFlight, "C12.2", ledgers):
        ledgers.commit_snapshot(prepared)
    ledgers.commit_unit(unit)
    with refused(MisuseError, "C10.6", ledgers):
        ledgers.commit_snapshot(prepared)

    ledgers.abort_snapshot(prepared)

    assert int(ledgers.spaces["main"].pages.pins.sum()) == 0
    store.check()
    store.snapshot(sequence)
    store.check()


def test_a_snapshot_of_a_sequence_that_ended_is_refused() -> None:
    """An aligned frontier pins nothing, so the sequence may end first; also when its row serves another.  (C10.6)"""
    store = SharedLedgers()
    sequence = store.start(200)
    store.append(sequence, 64)
    ledgers = store.ledgers
    prepared = prepare_snapshot(store, sequence)
    store.end(sequence)
    assert store.start(200).row == sequence.row
    with refused(StaleHandle, "C10.1", ledgers):
        ledgers.commit_snapshot(prepared)

    ledgers.abort_snapshot(prepared)
    store.check()


def test_a_tail_that_a_snapshot_copies_is_neither_cut_nor_let_go() -> None:
    """Truncate inside or across it, finish, retain and abort are refused; a cut behind it is not.  (C7.4, C9.10)"""
    store = SharedLedgers()
    sequence = store.start(200)
    store.append(sequence, 130)
    ledgers = store.ledgers
    prepared = prepare_snapshot(store, sequence)

    for tokens in (0, 64, 127, 128, 129, 130):
        with refused(MisuseError, "C7.4", ledgers):
            ledgers.truncate(sequence, tokens, "main")
    with refused(MisuseError, "C7.4", ledgers):
        ledgers.finish(sequence)
    with refused(MisuseError, "C7.4", ledgers):
        ledgers.finish(sequence, retain=True)
    with refused(MisuseError, "C7.4", ledgers):
        ledgers.abort(sequence)
    ledgers.abort_snapshot(prepared)
    ledgers.truncate(sequence, 129, "main")
    store.check()


def test_two_snapshots_prepared_together_make_two_checkpoints() -> None:
    """Each copies the tail for itself and shares the full pages.  (C10.6)"""
    store = SharedLedgers()
    sequence = store.start(200)
    store.append(sequence, 130)
    both = [prepare_snapshot(store, sequence) for _ in range(2)]
    for prepared in both:
        store.copy(prepared.copies)
    checkpoints = [store.ledgers.commit_snapshot(prepared) for prepared in both]

    assert store.column("references", sequence) == [3, 3, 1]
    for checkpoint in checkpoints:
        assert store.read(checkpoint) == store.read(sequence)
    store.check()
