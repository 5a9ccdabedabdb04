"""The journal: every decision is a line, and the lines alone repeat the run.  (C6.2, C10, C16)"""

from __future__ import annotations

import array
import enum
import inspect
import io
import itertools
import json
import logging
import os
import random
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import ConfigError
from pagedkv.ledger.active_spaces import ActiveSpaces
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.free_runs import FreeRuns
from pagedkv.ledger.ledger import RECORDED, Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget
from pagedkv.record.journal import Journal, JournalRecorder
from pagedkv.values.config import Backend, StoreConfig, config_as_json, config_from_json
from tests.host.builders import GEOMETRY, activate, begin, make_config, make_ledger, trim, write
from tests.host.sharing import BACKENDS
from tests.host.walking import walk_events

QUERIES = {"batch", "covered_columns", "active_in", "kept_in", "record_in", "end_record"}
"""Public methods of Ledger that decide nothing: they need no line."""
WALKS_MIN, WALKS_MAX = 6, 40
"""Random walks of 250 events: so many at least, and more until every operation was answered and refused."""
ENDED_TWICE = {f"{end} refused" for end in ("fail_unit", "commit_activation", "commit_snapshot", "abort_transaction",
                                            "commit_demotion", "abort_demotion")}
"""Refusals that a store never causes: it asks no ledger to end twice what it began."""
PARTS = {"try_activate", "try_snapshot"}
"""Those that are made of recorded ones."""


def journaled(*, lease_window_tokens: int | None = None, **options: Any) -> tuple[Ledger, io.StringIO]:
    file, config = io.StringIO(), make_config(**options)
    if lease_window_tokens is not None:
        config = replace(config, kv_lease_growth=True, lease_window_tokens=lease_window_tokens)
    return recorded_in(Journal(file), config), file


def recorded_in(journal: Journal, config: StoreConfig | None = None) -> Ledger:
    """Return a ledger whose operations are written to a journal."""
    ledger = Ledger(make_config() if config is None else config, 1)
    ledger.record_in(JournalRecorder(ledger, journal))
    return ledger


def lines_of(file: io.StringIO) -> list[str]:
    return file.getvalue().splitlines(keepends=True)


@cache
def walked(seed: int) -> list[str]:
    """Return the journal of a random walk over a store."""
    file = io.StringIO()
    for _ in walk_events(seed, 250, file):
        pass
    return lines_of(file)


def altered(lines: list[str], revision: int, **changes: object) -> list[str]:
    """Return the lines with fields of one revision replaced."""
    return [json.dumps({**json.loads(line), **changes}) + "\n" if number == revision else line
            for number, line in enumerate(lines)]


def short_run() -> list[str]:
    ledger, file = journaled()
    sequence = activate(ledger, 200, written=130)
    trim(ledger, sequence)
    ledger.finish(sequence)
    return lines_of(file)


# ---- round trips -----------------------------------------------------------------------------------


def test_a_random_run_repeats_exactly(seed: int) -> None:
    """Every operation, answered and refused, with lease growth too: the same answers, states and invariants."""
    missing = {name + end for name in RECORDED for end in ("", " refused")} - ENDED_TWICE | {"move", "fork", "fresh"}
    for round_seed in range(seed, seed + WALKS_MAX):
        lines = walked(round_seed)
        for line in map(json.loads, lines[1:]):
            missing.discard(line["operation"] + (" refused" if "refused" in line else ""))
            if line["operation"] == "prepare_activation" and "answer" in line:
                target = line["arguments"]["target"]["target"]
                missing.discard("fresh" if not target["source"] else "fork" if target["keep_source"] else "move")

        assert pk.replay_journal(lines) == pk.ReplayReport(len(lines) - 1, is_truncated=False, difference=None)
        if not missing and round_seed - seed >= WALKS_MIN:
            break
    assert missing == set()


class Pool(enum.StrEnum):
    """Names of pools as an embedder keeps them."""

    MAIN = "main"


def test_what_a_store_accepts_or_refuses_a_replay_does_too() -> None:
    """C12.4: columns in any form that NumPy reads, names in any str, forged handles, huge ints."""
    file = io.StringIO()
    with pk.open_store(make_config(), "cpu", journal=file) as store:
        sequence = store.activate(prompt_tokens=200, output_tokens=0)
        batch = store.batch([sequence])
        forms: tuple[Any, ...] = (range(3, 4), array.array("i", [3]), {Pool.MAIN: deque([3])}, [np.int8(3)], 3)
        for columns in forms:
            unit = store.begin_unit(batch, columns, name=Pool.MAIN)
            store.wait(unit)
            store.commit(unit, columns)
            store.ensure_mapped_to_tokens(sequence, 200, Pool.MAIN)
            store.trim(batch, Pool.MAIN, columns if columns != {Pool.MAIN: deque([3])} else 0)
        kept = store.snapshot(sequence, state=1)
        ended = store.activate(prompt_tokens=2, output_tokens=0)
        gone = store.batch([ended])
        store.finish(ended)
        wrong: tuple[tuple[Callable[..., object], Any], ...] = (
            (store.finish, gone), (store.release, batch), (store.begin_round, gone), (store.begin_unit, sequence),
            (store.finish, pk.Sequence(sequence.store_id, np.int64(0), 1)),  # type: ignore[arg-type]
            (store.finish, pk.Sequence(sequence.store_id, True, sequence.serial)),
            (store.release, pk.Continuation(sequence.store_id, 1 << 70)),
            (lambda tokens: store.truncate(sequence, tokens), 10**5000),
            (lambda n: store.begin_unit(batch, n), 10**5000),
            (lambda n: store.activate(prompt_tokens=1, output_tokens=0, source=kept, frontier=n), 10**5000),
            (lambda n: store.activate(prompt_tokens=1, output_tokens=0, source=kept, frontier={"main": n}), 10**5000),
        )
        for call, argument in wrong:
            with pytest.raises(pk.PagedKVError):
                call(argument)

    report = pk.replay_journal(lines_of(file))
    assert (report.difference, report.operations) == (None, len(lines_of(file)) - 1)
    assert json.loads(lines_of(file)[-1])["arguments"]["target"]["target"]["frontier"] is not None


def test_an_operation_that_ends_before_its_first_write_leaves_no_line() -> None:
    """C12.4: nothing has happened, so the journal goes on, and its next line has the next number."""
    ledger, file = journaled()
    sequence = activate(ledger, 100)

    class Unreadable(dict[str, int]):
        def items(self) -> Any:
            if self.pop("again", None) is None:
                raise LookupError("read once")
            return {"main": 3}.items()

    ledger.unsettled = ""  # as a store does at the end of its call
    with pytest.raises(LookupError):
        ledger.begin_unit("unit", ledger.batch([sequence]), Unreadable(main=3, again=1))
    ledger.finish(sequence)

    assert "finish" in lines_of(file)[-1]
    assert pk.replay_journal(lines_of(file)).difference is None


def test_what_ended_already_is_refused_in_a_replay_too() -> None:
    """C10.2, C12.4: prepared operations and units; no random run of a store ends one twice."""
    ledger, file = journaled(host_arena_bytes=1 << 20)
    sequence = activate(ledger, 100, 50)
    unit, _ = begin(ledger, sequence, 100)
    ledger.commit_unit(unit)
    snapshot = ledger.prepare_snapshot(sequence, "state")
    assert not isinstance(snapshot, pk.Refusal)
    checkpoint = ledger.commit_snapshot(snapshot)
    demotion = ledger.prepare_demotion(checkpoint)
    assert not isinstance(demotion, pk.Refusal)
    ledger.commit_demotion(demotion)
    activation = ledger.prepare_activation(ActivationTarget(1, 0, checkpoint))
    assert not isinstance(activation, pk.Refusal)
    ledger.abort_transaction(activation)
    ends: tuple[tuple[Callable[[Any], object], object], ...] = (
        (ledger.commit_activation, activation), (ledger.abort_transaction, activation),
        (ledger.commit_snapshot, snapshot), (ledger.abort_transaction, snapshot), (ledger.fail_unit, unit),
        (ledger.commit_demotion, demotion), (ledger.abort_demotion, demotion),
    )
    for end, ended in ends:
        with pytest.raises(pk.MisuseError):
            end(ended)

    lines = lines_of(file)
    refused = {f"{line['operation']} refused" for line in map(json.loads, lines[1:]) if "refused" in line}
    assert refused == ENDED_TWICE
    assert pk.replay_journal(lines).difference is None


def test_every_operation_that_decides_is_recorded() -> None:
    """A public method of Ledger has a line, or is named here as one that needs none."""
    public = {name for name, member in vars(Ledger).items() if inspect.isfunction(member) and not name.startswith("_")}

    assert public == RECORDED | QUERIES | PARTS


def test_rows_that_could_not_grow_are_in_the_journal() -> None:
    """C9.2: two rows fill the pool; which of them are short is an answer, and repeats."""
    ledger, file = journaled(max_context=512, tokens=512, lease_window_tokens=64)
    rows = [activate(ledger, 10, 400) for _ in range(2)]
    short: list[Sequence] = []
    while not short:
        write(ledger, rows, 20)
        short = ledger.begin_round(ledger.batch(rows))

    assert json.loads(lines_of(file)[-1])["answer"] == {"short": [[each.row, each.serial] for each in short]}
    assert pk.replay_journal(lines_of(file)).difference is None


def test_a_line_says_what_was_decided() -> None:
    """Revision, arguments, answer, counters of pages; of the caller's state only that it exists or follows.  (C2.2)"""
    begin = json.loads(short_run()[3])

    assert begin == {"revision": 3, "operation": "begin_unit",
                     "arguments": {"name": "step", "batch": {"batch": [[0, 1]]}, "columns": {"columns": {"main": 130}}},
                     "answer": {"unit": 1, "first_positions": crc32(bytes(4)),
                                "slices": crc32(np.array([0, 1, 2, 3], np.int32).tobytes(),
                                                crc32(np.array([3], np.int32).tobytes(), crc32(bytes(8 + 4))))},
                     "state": {"main": [3, 1, 4]}}
    ledger, file = journaled()
    ledger.finish(activate(ledger, 100, written=10), retain=True, state="a secret")
    assert "secret" not in file.getvalue()
    assert '"state":{"state":true}' in file.getvalue()
    kept = ledger.finish(activate(ledger, 100, written=10), retain=True, state=pk.STATE_FOLLOWS)
    assert kept is not None
    ledger.attach_state(kept, "s", {"main": 9})
    follows, attach = map(json.loads, lines_of(file)[-2:])
    assert follows["arguments"]["state"] == {"state": "follows"}
    assert attach["arguments"]["state_frontier"] == {"columns": {"main": 9}}
    assert attach["answer"] == {"frontiers": {"main": 10}, "protected": {"main": 10}, "state_frontier": {"main": 9}}
    assert pk.replay_journal(lines_of(file)).difference is None


def test_a_refusal_is_a_line() -> None:
    """As a value with its fields, and as an error with its class and clause."""
    ledger, file = journaled()
    sequence = activate(ledger, 100)
    ledger.try_activate(ActivationTarget(1000, 0))
    with pytest.raises(pk.MisuseError):
        ledger.truncate(sequence, 1, "main")

    refusals = [json.loads(line).get("refused") for line in lines_of(file)]
    assert refusals[-2:] == [{"pool": "main", "needed": 16, "available": 4, "forever": True, "reason": "context",
                              "move_fits": False},
                             {"error": "MisuseError", "clause": "C9.10"}]
    assert pk.replay_journal(lines_of(file)).difference is None


def test_handles_of_another_store_stay_foreign() -> None:
    """C10.1: refused when recorded and when repeated, whatever their numbers."""
    ledger, file = journaled()
    other = make_ledger(store_id=2)
    activate(ledger, 100)
    foreign = activate(other, 100)
    batch, (unit, _) = other.batch([foreign]), other.begin_unit("step", other.batch([foreign]), {"main": 1})
    for call in (lambda: ledger.finish(foreign), lambda: ledger.trim(batch, "main"), lambda: ledger.fail_unit(unit),
                 lambda: ledger.release(pk.Continuation(2, 1))):
        with pytest.raises(pk.PagedKVError):
            call()

    assert sum("refused" in line for line in lines_of(file)) == 4
    assert pk.replay_journal(lines_of(file)).difference is None


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
def test_an_operation_that_breaks_off_ends_the_journal(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C12.4: nobody can repeat an interrupt; the lines before it are whole and repeat, and none comes after it."""
    ledger, file = journaled()
    sequence = activate(ledger, 100)

    def broken(self: ActiveSpaces, row: int) -> None:
        raise error(f"row {row} broke")

    with monkeypatch.context() as patch:
        patch.setattr(ActiveSpaces, "close", broken)
        with pytest.raises(error, match="broke"), caplog.at_level(logging.ERROR, logger="pagedkv"):
            ledger.finish(sequence)
    activate(ledger, 100)

    assert "the journal ends after 3 lines: finish broke off" in caplog.text
    assert pk.replay_journal(lines_of(file)) == pk.ReplayReport(2, is_truncated=False, difference=None)


# ---- differences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("revision", "changes", "what"), [
    (2, {"answer": {"row": 0, "serial": 2, "frontiers": {"main": 0}, "pages": {"main": []}}}, "answer"),
    (3, {"state": {"main": [2, 2, 4]}}, "state"), (4, {"answer": {"frontiers": 129}}, "answer"),
    (5, {"answer": 1}, "answer"),
    (5, {"arguments": {"batch": {"batch": [[0, 2]]}, "pool": "main", "provisional": {"counts": 0}}}, "refused"),
])
def test_an_altered_line_stops_the_replay_there(revision: int, changes: dict[str, object], what: str) -> None:
    """The report names the revision, what was expected and what came."""
    lines = altered(short_run(), revision, **changes)
    report = pk.replay_journal(lines)

    assert report.difference is not None
    assert (report.operations, report.difference.revision, report.difference.what) == (revision - 1, revision, what)
    if what in changes:
        assert report.difference.expected == changes[what]
        assert report.difference.got == json.loads(short_run()[revision])[what]
    other_windows = pk.replay_journal(altered(short_run(), 0, window_pages=2))  # C6.5: other ids are bound then
    assert other_windows.difference == pk.JournalDifference(0, "header", "window_pages", 2, 64)


def one_page_more_is_kept(trim: Callable[..., Any], spaces: ActiveSpaces, index: Any, provisional: Any = 0) -> Any:
    return trim(spaces, index, np.full(spaces.committed_end[index].size, 64, np.int32) + (provisional or 0))


def full_pages_are_not_frozen(freeze: Callable[..., Any], spaces: ActiveSpaces, row: int) -> Any:
    shared_end = int(spaces.shared_end[row])
    answer = freeze(spaces, row)
    spaces.shared_end[row] = shared_end
    return answer


def ids_come_in_another_order(take: Callable[..., Any], runs: FreeRuns, *arguments: int) -> Any:
    return take(runs, *arguments)[::-1].copy()


@pytest.mark.parametrize(("owner", "method", "change"), [
    (ActiveSpaces, "trim", one_page_more_is_kept), (ActiveSpaces, "freeze", full_pages_are_not_frozen),
    (FreeRuns, "take", ids_come_in_another_order),
])
def test_a_changed_ledger_is_found_by_an_old_journal(
    owner: type, method: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The journals were written before the change, and repeat without it (above)."""
    journals = [walked(round_seed) for round_seed in range(seed, seed + WALKS_MIN)]

    original = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *arguments: change(original, self, *arguments))
    assert any(pk.replay_journal(lines).difference is not None for lines in journals)


def test_invariants_are_checked_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """C16: after each operation, or each so many; a violation is a difference at its operation, with its message."""
    lines = short_run()
    checked: list[Ledger] = []
    monkeypatch.setattr("pagedkv.record.replay.check_ledger", checked.append)
    for check_every, checks in ((1, 6), (4, 2), (100, 1), (None, 1)):
        replay_with_checks = pk.replay_journal(lines, check_every=check_every)
        assert (replay_with_checks.operations, len(checked)) == (6, checks)
        checked.clear()

    def violated(ledger: Ledger) -> None:
        check_ledger(ledger)
        if ledger.active["main"].events.pages["materialize"]:
            raise AssertionError("pool main: planted")

    monkeypatch.setattr("pagedkv.record.replay.check_ledger", violated)
    wrong_state = altered(lines, 5, state={"main": [0, 0, 0]})
    for check_every, journal in itertools.product((1, 2, 4, None), (lines, wrong_state)):
        report = pk.replay_journal(iter(journal), check_every=check_every)
        assert report == pk.replay_journal(journal, check_every=check_every)
        assert report.difference is not None
        found = report.operations, report.difference.revision, report.difference.what, report.difference.got
        assert found == (2, 3, "invariant", "pool main: planted")
    with pytest.raises(pk.MisuseError, match="check_every"):
        pk.replay_journal(lines, check_every=0)


def test_the_cost_of_checks_does_not_follow_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """C16: the more pages a check reads, the more operations lie between two of them."""
    checked: list[Ledger] = []
    monkeypatch.setattr("pagedkv.record.replay.check_ledger", checked.append)
    for tokens, checks in ((1 << 12, 38), (1 << 20, 8), (1 << 24, 1)):
        ledger, file = journaled(max_context=1 << 12, max_concurrency=tokens >> 12, tokens=tokens)
        sequence = activate(ledger, 10)
        for _ in range(300):
            trim(ledger, sequence)
        assert pk.replay_journal(lines_of(file)).difference is None
        assert len(checked) == checks
        checked.clear()


# ---- what is no journal ----------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "text"), [
    (1, ""), (1, "{}\n"), (1, '{"schema":5,"store_id":1,"window_pages":64,"config":{}}\n'),
    (1, '{"schema":5,"store_id":1,"window_pages":64,"config":{"max_context":3}}\n'),
    (1, '{"schema":5,"store_id":1,"window_pages":64,"config":[1]}\n'),
    (1, '{"schema":3,"store_id":1,"window_pages":64,"config":' + json.dumps(config_as_json(make_config())) + "}\n"),
    (3, "not JSON\n"), (3, "[1]\n"), (3, '{"revision":2}\n'),
    (3, '{"revision":7,"operation":"trim","arguments":{},"answer":1,"state":{}}\n'),
    (3, '{"revision":2,"operation":"__init__","arguments":{},"answer":1,"state":{}}\n'),
    (3, '{"revision":2,"operation":"trim","arguments":{},"state":{}}\n'),
    (3, '{"revision":2,"operation":"abort","arguments":{"x":{"transaction":9}},"answer":1,"state":{}}\n'),
    (3, '{"revision":2,"operation":"trim","arguments":{},"answer":1,"state":[]}\n'),
    (3, '{"revision":2,"like":1,"answer":{"unit":1,"first_positions":0}}\n'), (3, '{"revision":2,"like":1}\n'),
    (3, '{"revision":2,"like":1,"operation":"begin_unit","arguments":{},"answer":1}\n'),
    (3, '{"revision":2,"operation":"trim","arguments":{"batch":{"batch":1},"pool":"main"},"answer":1}\n'),
    (3, '{"revision":2,"operation":"fail_unit","arguments":{"unit":{"unit":9}},"answer":1,"state":{}}\n'),
    (3, '{"revision":2,"operation":"abort","arguments":{"sequence":{"thing":1}},"answer":1,"state":{}}\n'),
    (3, '{"revision":2,"operation":"abort","arguments":{"sequence":{}},"answer":1,"state":{}}\n'), (6, "\x00\n"),
    (3, altered(short_run(), 2, arguments={"x": {"counts": {"array": [1], "dtype": "M8[s]"}}})[2]),
    (3, '{"revision":2,"operation":"trim","arguments":{},"answer":1,"state":{},"answer":1}\n'),
    (3, '{"revision":2,"operation":"trim","arguments":{},"answer":' + "[" * 250 + "]" * 250 + ',"state":{}}\n'),
])
def test_a_line_of_no_journal_is_refused_with_its_number(number: int, text: str) -> None:
    """C12.4: the file, the line, what a journal has there."""
    lines = [*short_run()[: number - 1], text, *short_run()[number:]] if text else []

    with pytest.raises(pk.MisuseError, match=rf"^line {number} of run\.jsonl was refused") as refusal:
        pk.replay_journal(lines, name="run.jsonl")
    assert refusal.value.clause == "C12.4"


# ---- the configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("profile", ["bf16", "k8v4"])
def test_a_configuration_survives_json(backend: Backend | None, profile: str) -> None:
    """C5.2: equal after a round trip through text, automatic capacity too."""
    for capacity in (pk.ExplicitCapacity(512), pk.AutoCapacity(headroom_bytes=5, min_tokens=300)):
        config = StoreConfig(GEOMETRY, profile=profile, max_context=256, max_concurrency=2, kv_capacity=capacity,
                             backend=backend, sanitizer=True, state_bytes_fixed=7)

        assert config_from_json(json.loads(json.dumps(config_as_json(config)))) == config


@pytest.mark.parametrize(
    "given", [{"unknown": 1}, {}, {"geometry": {"type": "Path"}}, {"geometry": {"type": "KVGeometry", "depth": 1}}]
)
def test_a_configuration_of_another_form_is_refused(given: dict[str, object]) -> None:
    """Nothing is guessed."""
    with pytest.raises(ConfigError, match="a configuration in JSON"):
        config_from_json(given)


# ---- where it is written ---------------------------------------------------------------------------


class TornFile(io.StringIO):
    """Takes so many lines, then half of one with an error, and then everything again."""

    def __init__(self, lines: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = lines, error

    def write(self, text: str, /) -> int:
        self.left -= 1
        if self.left == -1:
            super().write(text[: len(text) // 2])
            raise self.error
        return super().write(text)


def test_an_interrupt_inside_a_line_ends_the_journal() -> None:
    """C12.4: no further line follows half a line, and what is whole repeats."""
    file = TornFile(1, KeyboardInterrupt())
    ledger = recorded_in(Journal(file))
    with pytest.raises(KeyboardInterrupt):
        ledger.try_activate(ActivationTarget(10, 0))
    half = file.getvalue()
    ledger.try_activate(ActivationTarget(10, 0))

    assert half == file.getvalue()
    assert pk.replay_journal(lines_of(file)).is_truncated


def test_a_line_that_cannot_be_written_ends_the_journal_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """The operation is valid and answered; the log says so at once, `close` raises, and what is there repeats."""
    file = TornFile(3, OSError(28, "no space left"))
    journal = Journal(file)
    ledger = recorded_in(journal)
    with caplog.at_level(logging.ERROR, logger="pagedkv"):
        sequence = activate(ledger, 200, written=130)
        ledger.finish(sequence)

    assert caplog.text.count("the journal ends after 3 lines") == 1
    check_ledger(ledger)
    with pytest.raises(pk.JournalFailed, match="no space left") as failed:
        journal.close()
    assert failed.value.lines == 3
    journal.close()
    assert pk.replay_journal(lines_of(file)) == pk.ReplayReport(2, is_truncated=True, difference=None)


@pytest.mark.parametrize("is_own", [True, False])
def test_every_line_is_flushed(is_own: bool, tmp_path: Path) -> None:
    """A crash leaves what happened: the file is read while the journal is open."""
    path = tmp_path / "run.jsonl"
    with path.open("w", encoding="utf-8") as passed:
        journal = Journal(path if is_own else passed)
        ledger = recorded_in(journal)
        for count in (3, 5):
            assert isinstance(ledger.try_activate(ActivationTarget(10, 0)), Sequence)
            assert len(path.read_text(encoding="utf-8").splitlines()) == count
        journal.close()


class Stage:
    """A journaled store whose last commit waits to be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = pk.open_store(make_config(max_context=4096), pk.CountingDevice(), journal=path)
        self.batch = self.store.batch([self.store.activate(prompt_tokens=1, output_tokens=4000)])
        for _ in range(3):
            self.step()
        self.before = path.read_bytes()

    def step(self) -> None:
        """One decode step."""
        unit = self.store.begin_unit(self.batch, 1)
        self.store.wait(unit)
        self.store.commit(unit)

    def refused(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make a call that is refused, or that the caller's own code ends."""
        with pytest.raises((pk.PagedKVError, LookupError)):
            call(*arguments)

    def elsewhere(self, call: Callable[..., object]) -> None:
        """Make a call in another thread, then in another process."""
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            self.refused(self.store.close)
            self.refused(self.store.inspect)
            call()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class Unreadable(dict[str, int]):
    """Columns that raise."""

    def items(self) -> Any:
        raise LookupError


@pytest.mark.parametrize("call", [
    lambda on: on.store.begin_unit(on.batch, 1), lambda on: on.store.committed_tokens(on.batch.sequences[0]),
    lambda on: on.store.memory_summary(), lambda on: on.store.event_counts(), lambda on: on.store.evidence,
    lambda on: on.store.graph_bytes, lambda on: on.store.published_slices, lambda on: on.refused(on.store.latch, 1),
    lambda on: on.refused(on.store.begin_unit, on.batch, Unreadable(main=1)),
    lambda on: on.refused(on.store.begin_unit, 7), lambda on: on.refused(on.store.commit, 7),
    lambda on: on.store.close(),
])  # fmt: skip
def test_the_next_call_writes_the_line_that_waits(call: Callable[[Stage], object], tmp_path: Path) -> None:
    """C12.4: whatever call it is, refused or not; but none of another thread or process."""
    on = Stage(tmp_path / "run.jsonl")
    on.elsewhere(on.store.memory_summary)
    assert '"commit_unit"' not in on.before.splitlines()[-1].decode()
    assert on.path.read_bytes() == on.before
    call(on)

    written = on.path.read_bytes()[len(on.before) :].splitlines()
    assert json.loads(written[0])["operation"] == "commit_unit"
    on.store.close()
    report = pk.replay_journal(on.path)
    assert (report.difference, report.is_truncated) == (None, False)


def test_a_killed_process_leaves_whole_lines(tmp_path: Path, seed: int) -> None:
    """C12.4: killed at any moment, the file ends with a line, and all of it repeats."""
    path, steps = tmp_path / "run.jsonl", random.Random(seed)
    for _ in range(8):
        from_child, to_parent = os.pipe()
        child = os.fork()
        if child == 0:
            on = Stage(path)
            while True:
                on.step()
                os.write(to_parent, b".")
        for _ in range(steps.randrange(40)):
            os.read(from_child, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(from_child)
        os.close(to_parent)
        content = path.read_bytes()
        if content:
            assert content.endswith(b"}\n")
            report = pk.replay_journal(path)
            assert (report.operations, report.difference) == (content.count(b"\n") - 1, None)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """C12.4: at each byte at which the disk can be full, a whole number of lines remains, and `close` says how many."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    on = Stage(tmp_path / "run.jsonl")
    size = len(on.before)
    on.store.close()
    for room in range(size - 200, size + 200, 7):
        on = Stage(tmp_path / f"{room}.jsonl") if room >= size else Stage(tmp_path / "run.jsonl")
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(room, len(on.before) + room % 100), limits[1]))
        try:
            for _ in range(4):
                on.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(pk.JournalFailed) as failed:
            on.store.close()
        content = on.path.read_bytes()
        assert content.endswith(b"}\n")
        assert content.count(b"\n") == failed.value.lines
        assert pk.replay_journal(on.path).operations == failed.value.lines - 1


def test_a_unit_that_is_like_another_repeats(tmp_path: Path) -> None:
    """Refused and other units in between, crossings, other columns and names, batches by the dozen."""
    path = tmp_path / "run.jsonl"
    with pk.open_store(make_config(max_context=4096, max_concurrency=3), pk.CountingDevice(), journal=path) as store:
        rows = [store.activate(prompt_tokens=1, output_tokens=3000) for _ in range(3)]
        batch, other = store.batch(rows[:2]), store.batch(rows[2:])
        for columns, name in ((1, "unit"), (3, "unit"), (3, "100% %d"), ([3, 3], "100% %d"), ([1, 2], "a"), (1, "a")):
            for number in range(30):
                unit = store.begin_unit(batch, columns, name=name)
                if number % 5 == 2:
                    with pytest.raises(pk.UnitInFlight):
                        store.begin_unit(batch, columns, name=name)
                    beside = store.begin_unit(other, 40)
                    store.wait(beside)
                    store.commit(beside)
                store.wait(unit)
                store.commit(unit)
            for _ in range(20):
                store.trim(store.batch(rows))
            store.trim(batch)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    report = pk.replay_journal(lines)

    assert (report.operations, report.difference) == (len(lines) - 1, None)
    assert sum('"like"' in line for line in lines) > 30
    longest = max(len(line) for line in lines if '"like"' in line and '"slices"' not in line)
    assert longest < 100
    like = next(number for number, line in enumerate(lines) if '"like"' in line)
    for change in ({"answer": {"unit": 1, "first_positions": 1}}, {"state": {"main": [1, 1, 1]}}):
        found = pk.replay_journal(altered(lines, like, **change)).difference
        assert found is not None
        assert (found.revision, found.operation) == (like, "begin_unit")
    with pytest.raises(pk.MisuseError, match="last begin_unit in full"):
        pk.replay_journal(altered(lines, like, like=1))
    first = next(number for number, line in enumerate(lines) if '"batch"' in line)
    with pytest.raises(pk.MisuseError, match="arguments of trim"):  # forgotten long ago
        pk.replay_journal(altered(lines, len(lines) - 1, arguments={"batch": {"batch": first}, "pool": "main"}))


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """C12.4: an absent folder, an object that is no file, a path that another open journal writes."""
    with pytest.raises(pk.MisuseError, match="a journal was refused"):
        Journal(tmp_path / "absent" / "run.jsonl")
    with pytest.raises(pk.MisuseError, match="a path or an open text file"):
        Journal(17)  # type: ignore[arg-type]
    path = tmp_path / "run.jsonl"
    first = Journal(path)
    first.write({"line": 1})
    with pytest.raises(pk.MisuseError, match="no other store writes"):
        Journal(path)
    child = os.fork()
    if child == 0:
        with pytest.raises(pk.MisuseError, match="no other store writes"):
            Journal(path)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    first.close()

    assert os.waitstatus_to_exitcode(status) == 7, "another process is refused too"
    assert path.read_text(encoding="utf-8") == '{"line":1}\n'
    Journal(path).close()
    assert not path.read_text(encoding="utf-8")
