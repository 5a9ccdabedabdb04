"""Events at ledger level: kinds, order, counters, and a picture that events alone keep right.  (C6.5, C9.6, C13.3)"""

from __future__ import annotations

import asyncio
import linecache
import logging

import pytest

import pagedkv as pk
from pagedkv.ledger.events import EVENT_KINDS, PageEvent, PageEvents
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget
from tests.host.builders import activate, begin, make_ledger, running, trim, write
from tests.host.picture import Picture
from tests.host.refusals import refused
from tests.host.walking import walk_events
from tests.hostile.interrupt import Interrupt

ROUNDS, EVENTS = 12, 250


def watched(ledger: Ledger) -> Picture:
    picture = Picture()
    ledger.events.observe(picture)
    return picture


def retained_in(ledger: Ledger, tokens: int) -> pk.Continuation:
    """Return a continuation of so many tokens of a budget of 200."""
    kept = ledger.finish(activate(ledger, 200, written=tokens), retain=True, state="state")
    assert kept is not None
    return kept


def went_on(ledger: Ledger, *target: object, **options: object) -> Sequence:
    """Activate a sequence from a continuation, with 20 tokens of output; it must fit."""
    sequence = ledger.try_activate(ActivationTarget(0, 20, *target, **options))  # type: ignore[arg-type]
    assert isinstance(sequence, Sequence)
    return sequence


def delivered(ledger: Ledger, picture: Picture) -> list[tuple[str, int | None, int, tuple[int, ...]]]:
    """Deliver, and return what came since the last time without the pool."""
    picture.events.clear()
    ledger.events.deliver()
    return [(event.kind, event.row, event.first_block, event.page_ids) for event in picture.events]


def test_a_trim_is_an_event_and_the_page_may_come_back() -> None:
    """S56: 126, a draft of 5 maps page 2, one accepted: the observer holds [0, 1]; at 129 page 2 is back.  (C9.6)"""
    ledger = make_ledger()
    picture = watched(ledger)
    sequence = activate(ledger, 200, written=126)
    write(ledger, sequence, 5, accepted=1)
    ledger.events.deliver()
    assert picture.row(sequence.row) == [0, 1, 2]

    trim(ledger, sequence)
    assert delivered(ledger, picture) == [("trim", sequence.row, 2, (2,))]
    assert picture.row(sequence.row) == [0, 1]

    write(ledger, sequence, 2)
    assert delivered(ledger, picture) == [("materialize", sequence.row, 2, (2,))]
    picture.compare(ledger)


@pytest.mark.parametrize("retains", [False, True])
def test_terminal_settlement_is_told_as_trim_then_release(retains: bool) -> None:
    """C13.3, C9.8: a rejected tail first; what is retained stays leased, and its release has no row.  (C6.5)"""
    ledger = make_ledger()
    picture = watched(ledger)
    sequence = activate(ledger, 250)
    write(ledger, sequence, 140, accepted=70)
    delivered(ledger, picture)
    kept = ledger.finish(sequence, retain=retains, state="state" if retains else None)

    end = ("release", sequence.row, 2, ()) if retains else ("release", sequence.row, 0, (0, 1))
    assert delivered(ledger, picture) == [("trim", sequence.row, 2, (2,)), end]
    picture.compare(ledger)
    if kept is not None:
        ledger.release(kept)
        assert delivered(ledger, picture) == [("release", None, 0, (0, 1))]
        picture.compare(ledger)


@pytest.mark.parametrize("released", [
    [("fork", 2, (3,)), ("source", 0, (0, 1, 2))], [("source", 2, (2,)), ("fork", 0, (0, 1, 3))],
])
def test_a_fork_publishes_its_membership_and_shared_pages_go_with_their_last_reference(
    released: list[tuple[str, int, tuple[int, ...]]]
) -> None:
    """C9.8, C10.3, C10.5: two shared pages and a copied tail; whoever ends first gives up its own tail alone."""
    ledger = make_ledger()
    picture = watched(ledger)
    kept = retained_in(ledger, 150)
    delivered(ledger, picture)
    fork = went_on(ledger, kept)

    assert delivered(ledger, picture) == [("materialize", fork.row, 2, (3,)), ("publish", fork.row, 0, (0, 1, 3))]
    for holder, first_block, page_ids in released:
        if holder == "fork":
            ledger.finish(fork)
        else:
            ledger.release(kept)
        row = fork.row if holder == "fork" else None
        assert delivered(ledger, picture) == [("release", row, first_block, page_ids)]
    picture.compare(ledger)


def test_a_move_releases_what_lies_beyond_its_frontier() -> None:
    """C10.4: three pages, moved at 70: two are published, the third returned to available."""
    ledger = make_ledger()
    picture = watched(ledger)
    kept = retained_in(ledger, 150)
    delivered(ledger, picture)
    moved = went_on(ledger, kept, 70, keep_source=False)

    assert delivered(ledger, picture) == [("release", None, 2, (2,)), ("publish", moved.row, 0, (0, 1))]
    picture.compare(ledger)


def test_a_checkpoints_copied_tail_has_no_row() -> None:
    """C10.6: one page is materialized for the checkpoint; cutting it gives that page back.  (C9.10)"""
    ledger = make_ledger()
    picture = watched(ledger)
    sequence = activate(ledger, 200, written=100)
    delivered(ledger, picture)
    checkpoint = ledger.try_snapshot(sequence, "state")
    assert isinstance(checkpoint, pk.Continuation)

    assert delivered(ledger, picture) == [("materialize", None, 1, (4,))]
    ledger.protect(checkpoint, 0, "main")
    ledger.truncate_continuation(checkpoint, 64, "main")
    assert delivered(ledger, picture) == [("release", None, 1, (4,))]
    picture.compare(ledger)


def test_what_is_aborted_or_refused_is_in_no_event() -> None:
    """C10.2: claims of an activation and of a snapshot that were given back, a unit beyond the entitlement."""
    ledger, sequence = running(100, written=100)
    kept = ledger.try_snapshot(sequence, "state")
    assert isinstance(kept, pk.Continuation)
    picture = watched(ledger)
    counts = dict(ledger.active["main"].events.pages)

    prepared = ledger.prepare_activation(ActivationTarget(0, 20, kept))
    assert not isinstance(prepared, pk.Refusal)
    ledger.abort_transaction(prepared)
    snapshot = ledger.prepare_snapshot(sequence, "state")
    assert not isinstance(snapshot, pk.Refusal)
    ledger.abort_transaction(snapshot)
    with refused(pk.EntitlementExceeded, "C9.3"):
        begin(ledger, sequence, 100)

    assert delivered(ledger, picture) == []
    assert dict(ledger.active["main"].events.pages) == counts


def test_a_picture_from_events_alone_is_what_the_store_holds(seed: int) -> None:
    """After every event of a random walk: rows, leases, and counters that add up to what is leased.  (C9.6, C13.3)"""
    picture, backends = Picture(), set()
    for round_seed in range(seed, seed + ROUNDS):
        picture = Picture(kinds=picture.kinds)
        for number, walk in enumerate(walk_events(round_seed, EVENTS)):
            if number == 0:
                walk.store.observe(picture)
                backends.add(tuple(walk.store.views))
            picture.compare(walk.store._ledger)
            for pool, counts in walk.store.event_counts().items():
                pages = {kind: count["pages"] for kind, count in counts.items()}
                leased = walk.store.memory_summary()[pool]["allocated_pages"]
                came, left = pages["materialize"] + pages["restore"], pages["trim"] + pages["release"] + pages["demote"]
                assert came - left == leased

    assert set(picture.kinds) == set(EVENT_KINDS)
    assert backends == {("main",), ("main", "mtp"), ("main", "draft")}


def test_kinds_are_a_closed_set() -> None:
    """All of them count from 0.  (S88)"""
    assert EVENT_KINDS == ("materialize", "publish", "trim", "demote", "restore", "release")
    assert set(make_ledger().active["main"].events.pages.values()) == {0}


# ---- observers -------------------------------------------------------------------------------------

EVENT = PageEvent("trim", "main", 0, 2, (7,))


def test_an_observer_that_raises_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the error's own text."""
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
    assert not events.pending


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interrupt_in_an_observer_comes_out_after_every_delivery(error: type[BaseException]) -> None:
    """C12.4: every observer has every event first, and nothing is delivered twice."""
    events, heard = PageEvents(), list[PageEvent]()

    def interrupt(event: PageEvent) -> None:
        raise error

    events.observe(interrupt)
    events.observe(heard.append)
    later = PageEvent("trim", "main", 0, 1, (6,))
    events.pending += [EVENT, later]
    with pytest.raises(error):
        events.deliver()
    events.deliver()

    assert heard == [EVENT, later]


def test_an_interrupt_at_any_line_of_a_delivery_loses_no_event() -> None:
    """C12.4: the next delivery goes on, and an event may come twice; an observer's call that is cut off has ended."""
    is_of_observer = False
    given, at, has_ended = [PageEvent("trim", "main", 0, block, (block,)) for block in range(4)], 0, False
    while not has_ended:
        at += 1
        events, heard = PageEvents(), list[PageEvent]()
        events.observe(heard.append)
        events.pending += given[:2]
        try:
            with Interrupt(at, KeyboardInterrupt):
                events.deliver()
            has_ended = True
        except KeyboardInterrupt as error:
            file, _, line = str(error).rpartition(": ")[2].rpartition(":")
            is_of_observer = linecache.getline(file, int(line)).strip() == "observer(event)"
        events.pending += given[2:]
        events.deliver()

        assert given == list(dict.fromkeys(heard)) or (is_of_observer and len(heard) == 3), f"interrupted at line {at}"
    assert at > 10


def test_unsubscribing_ends_the_events_of_one_observer() -> None:
    """Twice is harmless, also after another subscription; nobody left means nobody is told."""
    events, first, second = PageEvents(), list[PageEvent](), list[PageEvent]()
    stop_first = events.observe(first.append)
    stop_first()
    stop_second = events.observe(second.append)
    stop_first()
    events.pending.append(EVENT)
    events.deliver()

    assert (first, second, events.is_observed) == ([], [EVENT], True)
    stop_second()
    assert not events.is_observed


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
    assert not events.is_observed
