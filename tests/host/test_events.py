"""Events at ledger level: kinds, order, counters, and a picture that events alone keep right.  (C6.5, C9.6, C13.3)"""

from __future__ import annotations

import logging

import pytest

import pagedkv as pk
from pagedkv.ledger.activation import ActivationTarget
from pagedkv.ledger.events import EVENT_KINDS, PageEvent, PageEvents
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.ledger.sequences import Sequence
from tests.host.builders import activate, begin, make_ledgers, refused, trim, write
from tests.host.picture import Picture
from tests.host.walking import walk_events

ROUNDS, EVENTS = 12, 250


def watched(ledgers: StoreLedgers) -> Picture:
    picture = Picture()
    ledgers.events.observe(picture)
    return picture


def told(ledgers: StoreLedgers, picture: Picture) -> list[tuple[str, int | None, int, tuple[int, ...]]]:
    """Deliver, and return what came since the last time without the pool."""
    picture.events.clear()
    ledgers.events.deliver()
    return [(event.kind, event.row, event.first_block, event.page_ids) for event in picture.events]


def test_a_trim_is_an_event_and_the_page_may_come_back() -> None:
    """S56: 126, a draft of 5 maps page 2, one accepted: the observer holds [0, 1]; at 129 page 2 is back.  (C9.6)"""
    ledgers = make_ledgers()
    picture = watched(ledgers)
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 126)
    write(ledgers, sequence, 5, accepted=1)
    ledgers.events.deliver()
    assert picture.row(sequence.row) == [0, 1, 2]

    trim(ledgers, sequence)
    assert told(ledgers, picture) == [("trim", sequence.row, 2, (2,))]
    assert picture.row(sequence.row) == [0, 1]

    write(ledgers, sequence, 2)
    assert told(ledgers, picture) == [("materialize", sequence.row, 2, (2,))]
    picture.compare(ledgers)


def test_terminal_settlement_is_told_as_trim_then_release() -> None:
    """C13.3, C9.8: a finish with a rejected tail; bound pages are in no event.  (C6.5)"""
    ledgers = make_ledgers()
    picture = watched(ledgers)
    sequence = activate(ledgers, 250)
    write(ledgers, sequence, 140, accepted=70)
    told(ledgers, picture)
    ledgers.finish(sequence)

    assert told(ledgers, picture) == [("trim", sequence.row, 2, (2,)), ("release", sequence.row, 0, (0, 1))]
    picture.compare(ledgers)


def test_a_retained_sequence_trims_and_then_holds_nothing() -> None:
    """C9.8: its pages stay leased by the continuation; their release has no row."""
    ledgers = make_ledgers()
    picture = watched(ledgers)
    sequence = activate(ledgers, 250)
    write(ledgers, sequence, 140, accepted=70)
    told(ledgers, picture)
    kept = ledgers.finish(sequence, retain=True, state="state")
    assert kept is not None

    assert told(ledgers, picture) == [("trim", sequence.row, 2, (2,)), ("release", sequence.row, 2, ())]
    picture.compare(ledgers)
    ledgers.release(kept)
    assert told(ledgers, picture) == [("release", None, 0, (0, 1))]
    picture.compare(ledgers)


def test_a_fork_materializes_its_tail_and_publishes_its_membership() -> None:
    """C10.3, C10.5: two shared pages and a copied tail; finishing it gives its tail back, and releasing the rest."""
    ledgers = make_ledgers()
    picture = watched(ledgers)
    source = activate(ledgers, 200)
    write(ledgers, source, 150)
    kept = ledgers.finish(source, retain=True, state="state")
    told(ledgers, picture)
    fork = ledgers.try_activate(ActivationTarget(0, 20, kept))
    assert isinstance(fork, Sequence)

    assert told(ledgers, picture) == [("materialize", fork.row, 2, (3,)), ("publish", fork.row, 0, (0, 1, 3))]
    ledgers.finish(fork)
    assert told(ledgers, picture) == [("release", fork.row, 2, (3,))]
    assert kept is not None
    ledgers.release(kept)
    assert told(ledgers, picture) == [("release", None, 0, (0, 1, 2))]
    picture.compare(ledgers)


def test_a_shared_page_is_released_with_its_last_reference_only() -> None:
    """C9.8: the continuation goes first; what the fork still holds goes with the fork, shared pages before its own."""
    ledgers = make_ledgers()
    picture = watched(ledgers)
    source = activate(ledgers, 200)
    write(ledgers, source, 150)
    kept = ledgers.finish(source, retain=True, state="state")
    fork = ledgers.try_activate(ActivationTarget(0, 20, kept))
    assert isinstance(fork, Sequence)
    assert kept is not None
    told(ledgers, picture)

    ledgers.release(kept)
    assert told(ledgers, picture) == [("release", None, 2, (2,))]
    ledgers.finish(fork)
    assert told(ledgers, picture) == [("release", fork.row, 0, (0, 1, 3))]
    picture.compare(ledgers)


def test_a_move_releases_what_lies_beyond_its_frontier() -> None:
    """C10.4: three pages, moved at 70: two are published, the third returned to available."""
    ledgers = make_ledgers()
    picture = watched(ledgers)
    source = activate(ledgers, 200)
    write(ledgers, source, 150)
    kept = ledgers.finish(source, retain=True, state="state")
    told(ledgers, picture)
    moved = ledgers.try_activate(ActivationTarget(0, 20, kept, 70, keep_source=False))
    assert isinstance(moved, Sequence)

    assert told(ledgers, picture) == [("release", None, 2, (2,)), ("publish", moved.row, 0, (0, 1))]
    picture.compare(ledgers)


def test_a_checkpoints_copied_tail_has_no_row() -> None:
    """C10.6: one page is materialized for the checkpoint; cutting it gives that page back.  (C9.10)"""
    ledgers = make_ledgers()
    picture = watched(ledgers)
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 100)
    told(ledgers, picture)
    checkpoint = ledgers.try_snapshot(sequence, "state")
    assert isinstance(checkpoint, pk.Continuation)

    assert told(ledgers, picture) == [("materialize", None, 1, (4,))]
    ledgers.protect(checkpoint, 0, "main")
    ledgers.truncate_continuation(checkpoint, 64, "main")
    assert told(ledgers, picture) == [("release", None, 1, (4,))]
    picture.compare(ledgers)


def test_what_is_aborted_or_refused_is_in_no_event() -> None:
    """C10.2: claims of an activation and of a snapshot that were given back, a unit beyond the entitlement."""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 100)
    write(ledgers, sequence, 100)
    kept = ledgers.try_snapshot(sequence, "state")
    assert isinstance(kept, pk.Continuation)
    picture = watched(ledgers)
    counts = dict(ledgers.spaces["main"].events.pages)

    prepared = ledgers.prepare_activation(ActivationTarget(0, 20, kept))
    assert not isinstance(prepared, pk.Refusal)
    ledgers.abort_activation(prepared)
    snapshot = ledgers.prepare_snapshot(sequence)
    assert not isinstance(snapshot, pk.Refusal)
    ledgers.abort_snapshot(snapshot)
    with refused(pk.EntitlementExceeded, "C9.3"):
        begin(ledgers, sequence, 100)

    assert told(ledgers, picture) == []
    assert dict(ledgers.spaces["main"].events.pages) == counts


def test_a_picture_from_events_alone_is_what_the_store_holds(seed: int) -> None:
    """After every event of a random walk: rows, leases, and counters that add up to what is leased.  (C9.6, C13.3)"""
    picture, backends = Picture(), set()
    for round_seed in range(seed, seed + ROUNDS):
        picture = Picture(kinds=picture.kinds)
        for number, walk in enumerate(walk_events(round_seed, EVENTS)):
            if number == 0:
                walk.store.observe(picture)
                backends.add(walk.shape.backend)
            picture.compare(walk.store._ledgers)
            for pool, counts in walk.store.event_counts().items():
                pages = {kind: count["pages"] for kind, count in counts.items()}
                leased = walk.store.memory_summary()[pool]["allocated_pages"]
                assert pages["materialize"] - pages["trim"] - pages["release"] == leased

    assert set(picture.kinds) == {"materialize", "publish", "trim", "release"}
    assert backends == {"", "mtp", "draft"}


def test_kinds_are_a_closed_set() -> None:
    """Demote and restore are reserved for host replicas, and count 0 until there are any.  (S88)"""
    assert EVENT_KINDS == ("materialize", "publish", "trim", "demote", "restore", "release")
    assert set(make_ledgers().spaces["main"].events.pages.values()) == {0}


# ---- observers -------------------------------------------------------------------------------------

EVENT = PageEvent("trim", "main", 0, 2, (7,))


def test_an_observer_that_raises_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The error's own text stands in the log."""
    events, heard = PageEvents(), list[PageEvent]()

    def fail(event: PageEvent) -> None:
        raise KeyError("observer's own mistake")

    events.observe(fail)
    events.observe(heard.append)
    events.pending.append(EVENT)
    with caplog.at_level(logging.ERROR, logger="pagedkv"):
        events.deliver()

    assert heard == [EVENT]
    assert "observer's own mistake" in caplog.text
    assert events.pending == []


def test_an_interrupt_in_an_observer_goes_on() -> None:
    """What is no Exception is not held back, and the next delivery goes on behind it."""
    events, heard = PageEvents(), list[PageEvent]()

    def interrupt(event: PageEvent) -> None:
        raise KeyboardInterrupt

    stop = events.observe(interrupt)
    events.observe(heard.append)
    later = PageEvent("trim", "main", 0, 1, (6,))
    events.pending += [EVENT, later]
    with pytest.raises(KeyboardInterrupt):
        events.deliver()
    stop()
    events.deliver()

    assert heard == [later]


def test_unsubscribing_ends_the_events_of_one_observer() -> None:
    """Twice is harmless, also after another subscription; nobody left means nobody is told."""
    events, first, second = PageEvents(), list[PageEvent](), list[PageEvent]()
    stop_first = events.observe(first.append)
    stop_first()
    stop_second = events.observe(second.append)
    stop_first()
    events.pending.append(EVENT)
    events.deliver()

    assert (first, second, events.is_heard) == ([], [EVENT], True)
    stop_second()
    assert not events.is_heard


def test_an_observer_that_uses_the_store_keeps_the_order() -> None:
    """What it causes is told after what is pending, to everybody in the same order."""
    events, first, second = PageEvents(), list[PageEvent](), list[PageEvent]()
    caused = PageEvent("release", "main", 0, 0, (1,))

    def act(event: PageEvent) -> None:
        first.append(event)
        if event == EVENT:
            events.pending.append(caused)
            events.deliver()

    events.observe(act)
    events.observe(second.append)
    events.pending.append(EVENT)
    events.deliver()

    assert first == second == [EVENT, caused]


def test_an_observer_that_cannot_be_called_is_refused() -> None:
    """C9.6: and nobody observes."""
    events = PageEvents()

    with refused(pk.MisuseError, "C9.6"):
        events.observe("no function")  # type: ignore[arg-type]
    assert not events.is_heard
