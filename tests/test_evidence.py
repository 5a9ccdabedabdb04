"""What a store tells about itself: events in order, counters, and a journal of what it decided.  (C6.5, C9.6, C13.3)"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagedkv as pk
from pagedkv.record.journal import Journal
from tests.host.picture import Picture
from tests.toy_model import run_unit

CONFIG = pk.StoreConfig(pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="int8-g64",
                        max_context=256, max_concurrency=3, kv_capacity=pk.ExplicitCapacity(768),
                        backend=pk.MTPBackend(draft_window=3))


@pytest.fixture
def store(device: pk.Device) -> Iterator[pk.Store]:
    with pk.open_store(CONFIG, device=device) as opened:
        yield opened


def test_an_observer_hears_a_page_come_and_go(store: pk.Store, caplog: pytest.LogCaptureFixture) -> None:
    """S56, C13.3: 126, a draft of 5 maps page 2, one accepted and trimmed: [0, 1]; the commit is visible by then."""
    picture, frontiers = Picture(), list[tuple[str, int]]()
    stop = store.observe(picture)
    store.observe(lambda event: frontiers.append((event.kind, store.committed_tokens(sequence))))
    sequence = store.activate(prompt_tokens=126, output_tokens=100)
    run_unit(store, sequence, 126)
    run_unit(store, sequence, 5, 1)
    picture.events.clear()

    store.trim(store.batch([sequence]))
    assert picture.row(sequence.row) == store.page_ids(sequence) == [0, 1]
    assert picture.events == [pk.PageEvent("trim", "main", sequence.row, 2, (2,))]
    assert frontiers[-1] == ("trim", 127)
    with caplog.at_level(logging.ERROR, logger="pagedkv"):
        store.finish(sequence)  # a finished sequence has no frontier: the second observer fails
    assert "StaleHandle" in caplog.text
    assert picture.row(sequence.row) == []
    picture.events.clear()
    stop()
    run_unit(store, store.activate(prompt_tokens=1, output_tokens=1), 1)
    assert picture.events == []


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_an_observer_that_is_cancelled_leaves_no_row_frozen(error: type[BaseException], store: pk.Store) -> None:
    """C12.4: each operation completes first, then lets the exception out; no handle is lost for good."""
    sequence = store.activate(prompt_tokens=70, output_tokens=10)

    def cancel(event: pk.PageEvent) -> None:
        raise error

    stop = store.observe(cancel)
    with pytest.raises(error):
        store.begin_unit(store.batch([sequence]), {"main": 70, "mtp": 70})
    (unit,) = store.units()
    store.wait(unit)
    store.commit(unit, {"main": 3, "mtp": 3})
    with pytest.raises(error):
        store.trim(store.batch([sequence]))
    assert (store.units(), store.evidence, store.page_ids(sequence)) == ([], None, [0])
    with pytest.raises(error):
        store.finish(sequence)
    stop()

    assert store.sequences() == []
    store.check()


def test_counters_count_without_an_observer(store: pk.Store) -> None:
    """S88: pages and bytes of every kind in one answer; what nobody emits yet is 0; the summary has them not."""
    sequence = store.activate(prompt_tokens=100, output_tokens=100)
    run_unit(store, sequence, {"main": 130, "mtp": 64}, {"main": 60, "mtp": 60})
    store.trim(store.batch([sequence]))
    store.finish(sequence)

    page_bytes = {pool.name: pool.page_bytes for pool in CONFIG.pools}
    pages = {"main": {"materialize": 3, "publish": 3, "trim": 2, "demote": 0, "restore": 0, "release": 1},
             "mtp": {"materialize": 1, "publish": 1, "trim": 0, "demote": 0, "restore": 0, "release": 1}}
    assert store.event_counts() == {
        name: {kind: {"pages": count, "bytes": count * page_bytes[name]} for kind, count in kinds.items()}
        for name, kinds in pages.items()
    }
    assert set(store.memory_summary()["main"]) == {
        "capacity_pages", "allocated_pages", "reserved_pages", "available_pages", "page_bytes", "slab_bytes",
    }  # fmt: skip


# ---- the journal of a store ------------------------------------------------------------------------
def use(store: pk.Store) -> None:
    """Activate, decode, snapshot, fork, and finish; one refusal."""
    sequence = store.activate(prompt_tokens=100, output_tokens=100)
    run_unit(store, sequence, {"main": 100, "mtp": 100}, {"main": 100, "mtp": 90})
    checkpoint = store.snapshot(sequence, state="state", state_frontier={"main": 100, "mtp": 90})
    fork = store.activate(prompt_tokens=5, output_tokens=20, source=checkpoint)
    run_unit(store, fork, 25, 20)
    with pytest.raises(pk.MisuseError):
        store.truncate(checkpoint, 10)
    store.finish(fork, retain=True, state=pk.STATE_FOLLOWS)
    store.finish(sequence)


def test_a_run_is_repeated_from_its_journal(device: pk.Device, tmp_path: Path) -> None:
    """Without the device; the path's file is closed with the store, and a file that was passed stays open."""
    path, passed = tmp_path / "run.jsonl", io.StringIO()
    for journal in (path, passed):
        with pk.open_store(CONFIG, device=device, journal=journal) as store:
            use(store)
            store.check()

    for lines in (path.read_text(encoding="utf-8"), passed.getvalue()):
        report = pk.replay_journal(lines.splitlines(keepends=True), name="run.jsonl")
        assert (report.operations, report.is_truncated, report.difference) == (13, False, None)


class FullDisk(io.StringIO):
    """Takes four lines."""

    def write(self, text: str, /) -> int:
        if self.getvalue().count("\n") == 4:
            raise OSError(28, "no space left")
        return super().write(text)


def test_a_full_disk_ends_the_journal_and_close_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on and is right; closing again is harmless, and leaving by an error makes a note on that error."""
    file, first = FullDisk(), RuntimeError("the caller's own")
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
    store = pk.open_store(CONFIG, device="cpu", journal=FullDisk())
    use(store)
    store.__exit__(RuntimeError, first, None)
    assert "no space left" in first.__notes__[0]


def test_a_store_that_cannot_be_built_closes_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not left open; the header says what was wanted.  A journal that cannot be opened is refused."""
    closed: list[Journal] = []
    original = Journal.close

    def close(self: Journal) -> None:
        closed.append(self)
        original(self)

    def fail(*arguments: object, **named: object) -> None:
        raise MemoryError("slabs")

    monkeypatch.setattr(Journal, "close", close)
    monkeypatch.setattr(pk.Ops, "prepare", fail)
    with pytest.raises(MemoryError, match="slabs"):
        pk.open_store(CONFIG, device="cpu", journal=tmp_path / "run.jsonl")
    assert len(closed) == 1
    assert (tmp_path / "run.jsonl").read_text(encoding="utf-8").startswith('{"schema":5,')
    with pytest.raises(pk.MisuseError, match="a journal was refused"):
        pk.open_store(CONFIG, device="cpu", journal=tmp_path / "absent" / "run.jsonl")
