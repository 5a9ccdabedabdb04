"""Journals that no store wrote are refused, or replay to a report: no raw error, no hang, no gigabytes.  (C12.4)"""

from __future__ import annotations

import io
import itertools
import json
import resource
from pathlib import Path

import pytest

import pagedkv as pk
from tests.hostile.journals import SEEDS, hostile, valid

QUICK = 1200
RESIDENT_GROWTH_MAX_KIB = 256 << 10


def replayed(path: Path) -> pk.ReplayReport | pk.MisuseError:
    """Return the report, or the refusal."""
    try:
        return pk.replay_journal(path)
    except pk.MisuseError as refusal:
        return refusal


@pytest.mark.parametrize("quick", [QUICK, pytest.param(0, marks=pytest.mark.long)])
def test_hostile_journals_are_refused_or_reported(quick: int, tmp_path: Path) -> None:
    """Every one of the corpus, or some of each kind: the caller gets a MisuseError with a line, or a report."""
    path = tmp_path / "run.jsonl"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = [0, 0, 0]
    for seed in SEEDS[:1] if quick else SEEDS:
        every = sum(1 for _ in hostile(seed)) // quick if quick else 1
        for kind, content in itertools.islice(hostile(seed), 0, None, every):
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.write_text(content, encoding="utf-8", errors="surrogatepass", newline="")
            answer = replayed(path)
            if isinstance(answer, pk.MisuseError):
                assert answer.clause == "C12.4", kind
                assert len(str(answer)) < 2000, kind
                found[0] += 1
            else:
                json.dumps(answer.as_json())
                found[1 if answer.difference is None else 2] += 1
    print(f"{found[0]} refused, {found[1]} repeated, {found[2]} with a difference")
    assert min(found) > 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < RESIDENT_GROWTH_MAX_KIB


def test_a_replay_takes_a_path_a_file_or_lines(tmp_path: Path) -> None:
    """A str is a path and never a line; what cannot be read is refused."""
    lines = list(valid(SEEDS[0]))
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    expected = pk.ReplayReport(len(lines) - 1, is_truncated=False, difference=None)
    with path.open(encoding="utf-8") as file:
        for journal in (path, str(path), file, lines, tuple(lines), iter(lines), io.StringIO("".join(lines))):
            assert pk.replay_journal(journal) == expected
    with path.open("rb") as binary, path.open(encoding="utf-8") as closed:
        closed.close()
        for wrong in ("".join(lines), lines[0], tmp_path, tmp_path / "absent", "a\0b", "", b"run.jsonl", None, 7,
                      [b"{}"], [7], closed, binary):
            with pytest.raises(pk.MisuseError, match="was refused"):
                pk.replay_journal(wrong)  # type: ignore[arg-type]
    with pytest.raises(pk.MisuseError, match=r"line 1 of .*absent.jsonl"):
        pk.replay_journal(["{}\n"], name="absent.jsonl")


def test_a_store_too_large_to_repeat_is_refused_before_memory_is_taken() -> None:
    """C12.4: a header may name any pool; the caller raises the limit for a store of its own."""
    config = pk.StoreConfig(pk.KVGeometry(layers=1, query_heads=1, kv_heads=1, head_dim=64), profile="bf16",
                            max_context=6400, max_concurrency=3, kv_capacity=pk.ExplicitCapacity(12_800))
    file = io.StringIO()
    with pk.open_store(config, "cpu", journal=file):
        pass
    lines = file.getvalue().splitlines(keepends=True)
    with pytest.raises(pk.MisuseError, match="at most 499 page groups and table entries, got 500"):
        pk.replay_journal(lines, pages_max=499)
    assert pk.replay_journal(lines, pages_max=500).operations == 0
    for wrong in (0, -1, True, 1.5, None, "many"):
        with pytest.raises(pk.MisuseError, match="pages_max"):
            pk.replay_journal(lines, pages_max=wrong)  # type: ignore[arg-type]
