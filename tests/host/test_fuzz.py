"""A store against the model, at random.  (C5-C13, C16; S30, S31, S86)

A walk that finds nothing is evidence only if it would find something: that is shown by `tests/mutants`.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import pagedkv as pk
from pagedkv.ledger.pool import PagePool
from pagedkv.tools import command
from pagedkv.tools.fuzz.events import Event, WalkShape
from pagedkv.tools.fuzz.faulty_device import FaultyDevice
from pagedkv.tools.fuzz.finding import FuzzFound, shortest
from pagedkv.tools.fuzz.latched_store import ANSWERED, refused_calls
from pagedkv.tools.fuzz.run import SHORTEN_SECONDS, fuzz
from pagedkv.tools.fuzz.walk import Walk

HALVES = 2
EVENTS = 25_000
EVENTS_LONG = 100_000
SEEDS_LONG = 10

NEEDED = {
    "begin", "crossings", "commit", "fail", "trim", "trimmed pages", "truncate", "ensure", "finish", "abort",
    "retained", "aborts in flight", "snapshot", "release", "protect", "attach", "cut continuations", "fresh",
    "shared pages left by sequences", "shared pages left by continuations",
    "forks", "moves", "round", "extended rows", "rows not extended", "broken publications", "broken withdrawals",
    "demoted pages", "demotions beside other work", "restores", "restores beside other work", "aborted restores",
    "waits for other copies", "staged forks", "dropped on the device", "dropped on the host", "poll", "give_up",
    "demote", "drop", "refused for host", "refused for copying",
    "faults", "refused for pages", "refused for rows", "refused for context", "refused for provisional",
    "StaleHandle", "UnitInFlight", "MisuseError", "EntitlementExceeded",
}  # fmt: skip


@pytest.mark.parametrize("half", range(HALVES))
def test_a_random_walk_agrees_with_the_model(seed: int, half: int) -> None:
    """50,000 events in two halves: every observable, every refusal without a trace, committed bytes.  (S30, S86)"""
    counts = fuzz(seed + half, EVENTS)
    print(f"seed {seed + half}: {dict(counts.most_common())}")

    assert {name for name in NEEDED if counts[name] == 0} == set(), "a kind of event never happened"


@pytest.mark.long
@pytest.mark.parametrize("number", range(SEEDS_LONG))
def test_a_long_random_walk_agrees_with_the_model(seed: int, number: int) -> None:
    """1,000,000 events in all, over many seeds.  (C5-C13, S30, S31, S86)"""
    print(f"seed {seed + HALVES + number}")
    fuzz(seed + HALVES + number, EVENTS_LONG)


@pytest.fixture
def shrinks_too_little(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A pool whose reservations shrink by one page less than they should."""
    shrink = PagePool.shrink

    def broken(pool: PagePool, pages: int) -> None:
        shrink(pool, max(pages - 1, 0))

    monkeypatch.setattr(PagePool, "shrink", broken)
    return monkeypatch


def test_a_walk_is_repeated_by_its_seed(seed: int) -> None:
    """The same seed gives the same events, so a failure can be run again."""
    assert fuzz(seed, 500) == fuzz(seed, 500)


def test_a_finding_has_a_history_that_cannot_be_shorter(seed: int, shrinks_too_little: pytest.MonkeyPatch) -> None:
    """An activation and a finish show it, and no event of the rest is told."""
    with pytest.raises(FuzzFound) as found:
        fuzz(seed, 10_000, shorten_seconds=SHORTEN_SECONDS)
    finding = found.value.finding

    assert [event.kind for event in finding.shortest] == ["activate"]  # all is finished after the last event
    assert f"seed {seed}" in str(finding)
    assert all(str(event) in str(finding) for event in (*finding.last, *finding.shortest))
    assert all(line in str(finding) for line in finding.journal)
    shrinks_too_little.undo()
    report = pk.replay_journal(finding.journal)
    assert report.difference is not None, "the ledgers as they should be answer otherwise"


def test_every_call_of_a_latched_store_is_tried() -> None:
    """C12.4: the list follows the class, and what answers is a method of it."""
    calls = refused_calls()

    assert {name for name in ANSWERED if callable(getattr(pk.Store, name))} == ANSWERED
    assert {"try_activate", "begin_unit", "commit", "finish", "release", "sequences", "inspect"} <= calls.keys()
    assert calls["begin_unit"] == {"batch": None}


def test_a_call_that_had_to_be_refused_and_publishes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model refuses it before anything is published, so no publication can break off.  (C12.4)"""
    walk = Walk(WalkShape(256, 2, 8, "", 0, "k_code"), FaultyDevice(pk.open_device("cpu")))
    walk.perform(Event(1, "activate", {"prompt": 64, "output": 0}))
    monkeypatch.setattr(walk.model, "ensure_errors", lambda *_: {"MisuseError"})

    with pytest.raises(AssertionError, match="made to fail, model"):
        walk.perform(Event(2, "ensure", {"sequence": 1, "pool": "main", "tokens": 64, "fail_at": 1}))


def test_shortest_keeps_what_shows_a_finding() -> None:
    """Two of twenty items are needed, and nothing behind the second."""

    def find(items: list[int]) -> tuple[int, str] | None:
        return (items.index(13) + 1, "both") if 4 in items and 13 in items else None

    assert ([4, 13], "both") == shortest(list(range(20)), find, message="at first", seconds=10)


def test_shortest_stops_when_the_time_is_over() -> None:
    """The list so far is an answer too."""
    assert ([1, 2], "at first") == shortest([1, 2], lambda _: (1, "never"), message="at first", seconds=-1)


def test_an_event_is_printed_with_all_arguments() -> None:
    """Number, kind and arguments, as they are drawn."""
    assert "  12  activate   prompt=1 output=2" == str(Event(12, "activate", {"prompt": 1, "output": 2}))


def test_the_command_prints_counts() -> None:
    """Figures on stdout, exit code 0; nothing else on stdout."""
    result = CliRunner().invoke(command.main, ["fuzz", "--seed", "3", "--events", "300", "--json"])
    report = json.loads(result.stdout)
    counts = report.pop("counts")

    assert (0, {"schema": 1, "seed": 3, "events": 300, "finding": None}) == (result.exit_code, report)
    assert sum(counts.values()) > 300


@pytest.mark.usefixtures("shrinks_too_little")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_finding_of_the_command_is_exit_code_1(options: list[str]) -> None:
    """With the seed and the history, in both forms."""
    result = CliRunner().invoke(command.main, ["fuzz", "--seed", "3", "--events", "2000", *options])

    assert result.exit_code == 1
    if options:
        finding = json.loads(result.stdout)["finding"]
        assert [event["kind"] for event in finding["shortest"]] == ["activate"]
    else:
        assert result.stdout.startswith("seed 3, round ")
        assert "shortest history, 1 events" in result.stdout
