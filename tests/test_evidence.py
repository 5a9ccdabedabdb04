"""What a store tells about itself: events in order, counters, and a journal of what it decided.  (C6.5, C9.6, C13.3)"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagedkv as pk
from pagedkv.record.journal import Journal
from tests.host.picture import Picture

CONFIG = pk.StoreConfig(pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="int8-g64",
                        max_context=256, max_concurrency=3, kv_capacity=pk.ExplicitCapacity(768),
                        backend=pk.MTPBackend(draft_window=3))


@pytest.fixture
def store(device: pk.Device) -> Iterator[pk.Store]:
    with pk.open_store(CONFIG, device=device) as opened:
        yield opened


def step(store: pk.Store, sequence: pk.Sequence, columns: dict[str, int], accepted: dict[str, int]) -> None:
    unit = store.begin_unit(store.batch([sequence]), columns)
    store.wait(unit)
    store.commit(unit, accepted)


def test_an_observer_hears_a_page_come_and_go(store: pk.Store, caplog: pytest.LogCaptureFixture) -> None:
    """S56, C13.3: 126, a draft of 5 maps page 2, one accepted and trimmed: [0, 1]; at 129 page 2 is published again."""
    picture = Picture()
    frontiers: list[tuple[str, int]] = []
    stop = store.observe(picture)
    store.observe(lambda event: frontiers.append((event.kind, store.committed_tokens(sequence))))
    sequence = store.activate(prompt_tokens=126, output_tokens=100)
    step(store, sequence, {"main": 126}, {"main": 126})
    step(store, sequence, {"main": 5}, {"main": 1})
    assert picture.row(sequence.row) == [0, 1, 2]
    picture.events.clear()

    store.trim(store.batch([sequence]))
    assert picture.row(sequence.row) == store.page_ids(sequence) == [0, 1]
    step(store, sequence, {"main": 2}, {"main": 2})
    assert picture.row(sequence.row) == store.page_ids(sequence) == [0, 1, 2]
    assert picture.events == [
        pk.PageEvent("trim", "main", sequence.row, 2, (2,)), pk.PageEvent("materialize", "main", sequence.row, 2, (2,)),
        pk.PageEvent("publish", "main", sequence.row, 2, (2,)),
    ]
    assert ("trim", 127) in frontiers, "the commit is visible to whoever hears the trim"

    with caplog.at_level(logging.ERROR, logger="pagedkv"):
        store.finish(sequence)  # a finished sequence has no frontier: the second observer fails
    assert "StaleHandle" in caplog.text
    assert picture.row(sequence.row) == []
    picture.events.clear()
    stop()
    step(store, store.activate(prompt_tokens=1, output_tokens=1), {"main": 1}, {"main": 1})
    assert picture.events == []


def test_an_abort_in_flight_is_told_at_its_boundary(store: pk.Store) -> None:
    """C12.4: nothing is released while the unit runs."""
    picture = Picture()
    store.observe(picture)
    sequence = store.activate(prompt_tokens=100, output_tokens=100)
    unit = store.begin_unit(store.batch([sequence]), 70)
    assert store.abort(sequence) is False
    assert picture.kinds["release"] == 0

    store.wait(unit)
    store.commit(unit)
    assert picture.kinds["release"] == 2, "one of each pool"
    assert picture.row(sequence.row) == []


def test_counters_count_without_an_observer(store: pk.Store) -> None:
    """S88: pages and bytes of every kind in one answer; what nobody emits yet is 0; the summary has them not."""
    sequence = store.activate(prompt_tokens=100, output_tokens=100)
    step(store, sequence, {"main": 130, "mtp": 64}, {"main": 60, "mtp": 60})
    store.trim(store.batch([sequence]))
    store.finish(sequence)
    counts = store.event_counts()

    page_bytes = {pool.name: pool.page_bytes for pool in CONFIG.pools}
    pages = {name: {kind: count["pages"] for kind, count in kinds.items()} for name, kinds in counts.items()}
    assert pages == {
        "main": {"materialize": 3, "publish": 3, "trim": 2, "demote": 0, "restore": 0, "release": 1},
        "mtp": {"materialize": 1, "publish": 1, "trim": 0, "demote": 0, "restore": 0, "release": 1},
    }
    assert all(count["bytes"] == count["pages"] * page_bytes[name]
               for name, kinds in counts.items() for count in kinds.values())  # fmt: skip
    assert set(store.memory_summary()["main"]) == {
        "capacity_pages", "allocated_pages", "reserved_pages", "available_pages", "page_bytes", "slab_bytes",
    }  # fmt: skip


def test_a_fork_whose_copy_fails_is_in_no_event(store: pk.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """C10.2: every claim was given back, so nothing happened."""
    sequence = store.activate(prompt_tokens=100, output_tokens=50)
    step(store, sequence, {"main": 100}, {"main": 100})
    kept = store.finish(sequence, retain=True, state="state")
    picture = Picture()
    store.observe(picture)
    counts = store.event_counts()

    def fail(*arguments: object, **named: object) -> None:
        raise OSError("the copy")

    monkeypatch.setattr(store.ops, "copy_columns", fail)
    with pytest.raises(OSError, match="the copy"):
        store.activate(prompt_tokens=0, output_tokens=20, source=kept)
    assert (picture.events, store.event_counts()) == ([], counts)


def test_a_closed_store_has_no_observers() -> None:
    """C12.4: as every method; its counters still answer."""
    with pk.open_store(CONFIG, device="cpu") as store:
        pass

    with pytest.raises(pk.MisuseError, match="an open store"):
        store.observe(Picture())
    assert store.event_counts()["main"]["release"] == {"pages": 0, "bytes": 0}


# ---- the journal of a store ------------------------------------------------------------------------
def use(store: pk.Store) -> None:
    """Activate, decode, snapshot, fork, and finish; one refusal."""
    sequence = store.activate(prompt_tokens=100, output_tokens=100)
    step(store, sequence, {"main": 100, "mtp": 100}, {"main": 100, "mtp": 90})
    checkpoint = store.snapshot(sequence, state="state")
    fork = store.activate(prompt_tokens=5, output_tokens=20, source=checkpoint)
    step(store, fork, {"main": 25}, {"main": 20})
    with pytest.raises(pk.MisuseError):
        store.truncate(checkpoint, 10)
    store.finish(fork, retain=True)
    store.finish(sequence)


def test_a_run_is_repeated_from_its_journal(device: pk.Device, tmp_path: Path) -> None:
    """Without the device; the path's file is closed with the store."""
    path = tmp_path / "run.jsonl"
    with pk.open_store(CONFIG, device=device, journal=path) as store:
        use(store)
        store.check()

    with path.open(encoding="utf-8") as file:
        report = pk.replay_journal(file, name="run.jsonl")
    assert (report.operations, report.is_truncated, report.difference) == (13, False, None)


def test_an_open_file_stays_open() -> None:
    """Who opened it closes it."""
    file = io.StringIO()
    with pk.open_store(CONFIG, device="cpu", journal=file) as store:
        use(store)

    assert not file.closed
    assert pk.replay_journal(file.getvalue().splitlines()).difference is None


def test_a_store_without_a_journal_has_plain_ledger() -> None:
    """What is not asked for is not passed through."""
    with pk.open_store(CONFIG, device="cpu") as store:
        assert type(store._ledger).__name__ == "Ledger"


class FullDisk(io.StringIO):
    """Takes four lines."""

    def write(self, text: str, /) -> int:
        if self.getvalue().count("\n") == 4:
            raise OSError(28, "no space left")
        return super().write(text)


def test_a_full_disk_ends_the_journal_and_close_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on and is right; the store is closed, and closing again is harmless."""
    file = FullDisk()
    store = pk.open_store(CONFIG, device="cpu", journal=file)
    with caplog.at_level(logging.ERROR, logger="pagedkv"):
        use(store)
    store.check()
    assert "no space left" in caplog.text

    with pytest.raises(pk.JournalFailed, match="no space left"):
        store.close()
    with pytest.raises(pk.MisuseError, match="an open store"):
        store.continuations()
    store.close()
    assert pk.replay_journal(file.getvalue().splitlines()) == pk.ReplayReport(3, is_truncated=False, difference=None)


def test_a_failed_journal_is_a_note_to_the_first_error() -> None:
    """Cleaning up never hides what went wrong."""

    def fail() -> None:
        with pk.open_store(CONFIG, device="cpu", journal=FullDisk()) as store:
            use(store)
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own") as first:
        fail()

    assert any("no space left" in note for note in first.value.__notes__)


def test_a_journal_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """Before anything is allocated."""
    with pytest.raises(pk.MisuseError, match="a journal was refused"):
        pk.open_store(CONFIG, device="cpu", journal=tmp_path / "absent" / "run.jsonl")


def test_a_store_that_cannot_be_built_closes_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not left open; the header says what was wanted."""
    closed: list[Journal] = []

    def close(self: Journal) -> None:
        closed.append(self)

    monkeypatch.setattr(Journal, "close", close)

    def fail(*arguments: object, **named: object) -> None:
        raise MemoryError("slabs")

    monkeypatch.setattr(pk.Ops, "prepare", fail)
    with pytest.raises(MemoryError, match="slabs"):
        pk.open_store(CONFIG, device="cpu", journal=tmp_path / "run.jsonl")
    assert len(closed) == 1
    monkeypatch.undo()
    closed[0].close()
    assert (tmp_path / "run.jsonl").read_text(encoding="utf-8").startswith('{"schema":2,')
