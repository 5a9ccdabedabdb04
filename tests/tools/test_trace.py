"""`pagedkv trace`: small traces with known reuse, pressure on both tiers, hostile files, and the report."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pagedkv as pk
from pagedkv.graphs import LeastRecent, RetainedPrefix
from pagedkv.tools.command import main
from pagedkv.tools.trace.replay import ReplayOptions, config_of, lost_of, replay
from pagedkv.tools.trace.trace_file import read_trace

TWO_PAGES = '{"input_length": 128, "output_length": 1, "hash_ids": [1'


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments], catch_exceptions=False)


def written(folder: Path, lines: list[dict[str, Any]], name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def conversations(sessions: int, turns: int) -> list[dict[str, Any]]:
    """Return turns of which each begins with the one before: 3, 6, 9, ... full pages of 64 tokens and 10 more."""
    lines, next_id = [], 0
    ids: dict[int, list[int]] = {session: [] for session in range(sessions)}
    for _ in range(turns):
        for session in range(sessions):
            ids[session] += range(next_id, next_id + 3)
            next_id += 3
            lines.append({"session": f"s{session}", "input_length": len(ids[session]) * 64 + 10, "output_length": 20,
                          "hash_ids": list(ids[session])})
    return lines


def report(path: Path, *options: str) -> dict[str, Any]:
    result = invoke(str(path), "--json", *options)
    assert result.exit_code == 0, result.stderr
    figures: dict[str, Any] = json.loads(result.stdout)
    assert (figures["schema"], figures["lost"]) == (1, "")
    return figures


def test_a_turn_reuses_what_the_turn_before_shares(tmp_path: Path) -> None:
    """Exact arithmetic on the hashes: 2 sessions of 4 turns share 3, 6 and 9 pages with the turn before."""
    figures = report(written(tmp_path, conversations(2, 4)))
    assert figures["requests"] == figures["kept"] == 8
    assert figures["reused_tokens"] == 2 * (3 + 6 + 9) * 64
    assert figures["hits"] == figures["forks"] == 6
    assert figures["bounded_completions"] == figures["evictions"] == 0


def test_a_pool_that_rows_outgrow_ends_outputs_early_and_loses_nothing(tmp_path: Path) -> None:
    """C9.2: long outputs on few pages, with lease growth: evictions first, then bounded completions."""
    lines = [{**line, "output_length": 900} for line in conversations(4, 3)]
    path = written(tmp_path, lines)
    least = ("--device-pages", "40", "--concurrency", "4")
    assert report(path, *least)["bounded_completions"] == 0
    figures = report(path, *least, "--kv-lease-growth")
    assert figures["bounded_completions"] > 0
    assert figures["evictions"] > 0


def test_hashes_of_512_tokens_share_blocks_in_part_too(tmp_path: Path) -> None:
    """The last id of such a trace may stand for a part of a block; equal ids are equal tokens as far as both go."""
    lines = [{"input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
             {"input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
             {"input_length": 600, "output_length": 0, "hash_ids": [7, 10]}]
    path = written(tmp_path, lines)
    assert read_trace(path).turns_before() == [-1, 0, -1]
    assert report(path, "--concurrency", "1")["reused_tokens"] == 1000 + 512


@pytest.mark.parametrize("growth", [(), ("--kv-lease-growth",)])
def test_pressure_moves_texts_to_the_host_and_reuse_stays(tmp_path: Path, growth: tuple[str, ...]) -> None:
    """A pool for less than all texts: with a Host everything is reused, without one some texts are given up."""
    path = written(tmp_path, conversations(8, 4))
    least = ("--device-pages", "40", "--concurrency", "2", *growth)
    everything = 8 * (3 + 6 + 9) * 64
    with_host = report(path, *least, "--host-bytes", "1MiB")
    assert with_host["reused_tokens"] == everything
    assert with_host["demotions"] > 0 < with_host["restored_pages"]
    assert with_host["evictions"] == 0
    assert 0 < with_host["host_used_bytes"] <= with_host["host_peak_bytes"] <= 1 << 20
    assert with_host["host_copied_pages"] > with_host["restored_pages"]
    without = report(path, *least)
    assert without["evictions"] > 0
    assert without["reused_tokens"] < everything
    assert (without["host_peak_bytes"], without["refused_steps"]) == (0, 0)
    small = report(path, *least, "--host-bytes", "64KiB")
    assert small["demotions"] > 0 < small["evictions"]


def test_turns_wait_for_the_turn_before_and_few_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session after the other: the last ones begin once the file is read up to them, and all is reused."""
    monkeypatch.setattr("pagedkv.tools.trace.replay.HELD_MAX", 2)
    lines = sorted(conversations(4, 5), key=lambda line: str(line["session"]))
    figures = report(written(tmp_path, lines), "--concurrency", "3")
    assert figures["requests"] == 20
    assert figures["reused_tokens"] == 4 * (3 + 6 + 9 + 12) * 64


def test_a_request_that_finds_no_pages_is_counted(tmp_path: Path) -> None:
    """Two requests of 8 pages in a pool of 10: the second one waits through the steps of the first."""
    lines = [{"input_length": 480, "output_length": 20}] * 2
    path = written(tmp_path, lines)
    assert report(path, "--concurrency", "2", "--device-pages", "16")["refused_steps"] == 0
    figures = report(path, "--concurrency", "2", "--device-pages", "10")
    assert figures["refused_steps"] * 2 == figures["steps"] == 38


def test_what_is_not_free_at_the_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, pages, descriptors, continuations and records, each alone; the command ends with exit code 1."""
    path = written(tmp_path, conversations(2, 2))
    trace = read_trace(path)
    with pk.open_store(config_of(trace, ReplayOptions(2, host_bytes=1 << 20)), "none") as store:
        assert lost_of(store) == ""
        sequence = store.activate(prompt_tokens=100, output_tokens=0)
        assert lost_of(store) == "1 rows, 2 pages of main"
        unit = store.begin_unit(store.batch([sequence]), 100)
        assert "1 units" in lost_of(store)
        store.wait(unit)
        store.commit(unit)
        kept = store.finish(sequence, retain=True, state="state")
        assert kept is not None
        assert lost_of(store) == "1 continuations, 2 pages of main, 2 descriptors of main"
        store.demote(kept)
        assert lost_of(store) == (
            f"1 continuations, {store.host_summary()['used_bytes']} bytes on the Host, 2 descriptors of main"
        )
        store.release(kept)
        assert lost_of(store) == ""
    monkeypatch.setattr(LeastRecent, "release_all", lambda policy, store: None)
    result = invoke(str(path), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["lost"] == result.stderr.strip().removeprefix("not free at the end: ")
    assert result.stderr.startswith("not free at the end: 4 continuations, ")


def test_an_output_that_differs_from_the_request_alone_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1: a prompt goes on from a prefix that is one token longer than what the texts share."""
    found = LeastRecent.find

    def longer(*arguments: Any) -> RetainedPrefix | None:
        prefix = found(*arguments)
        return None if prefix is None else prefix._replace(tokens=prefix.tokens + 1)

    monkeypatch.setattr(LeastRecent, "find", longer)
    result = invoke(str(written(tmp_path, conversations(5, 4))), "--kernels", "on", "--concurrency", "2")
    assert result.exit_code == 1
    assert result.stderr == "1 of 1 outputs differ from the request alone\n"


def test_kernels_give_the_tokens_of_requests_alone(tmp_path: Path) -> None:
    """Restored, forked and moved pages: sampled outputs are computed again in a store that shares nothing."""
    trace = read_trace(written(tmp_path, conversations(5, 3)))
    result = replay(trace, ReplayOptions(2, device_pages=24, host_bytes=1 << 20, device="cpu", check_every=1))
    assert (result.figures["checked_outputs"], result.figures["different_outputs"]) == (15, 0)
    assert result.figures["restored_pages"] > 0
    assert result.lost == ""


def test_a_picture_has_three_panels_and_every_capacity(tmp_path: Path) -> None:
    """It is XML, and its labels are the figures of the report."""
    svg = tmp_path / "pool.svg"
    figures = report(written(tmp_path, conversations(8, 4)), "--device-pages", "40", "--concurrency", "2",
                     "--host-bytes", "1MiB", "--svg", str(svg))
    root = ET.fromstring(svg.read_text(encoding="utf-8"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"40", "1,048,576", "32 requests submitted"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polygon"))) == 4
    assert figures["peak_pages"] == 40


def test_a_picture_that_cannot_be_written_is_refused_before_the_replay(tmp_path: Path) -> None:
    """Exit code 2; a picture of before stays when the trace is refused."""
    path = written(tmp_path, conversations(1, 1))
    result = invoke(str(path), "--svg", str(tmp_path / "no folder" / "pool.svg"))
    assert (result.exit_code, result.stdout, "--svg" in result.stderr) == (2, "", True)
    svg = tmp_path / "pool.svg"
    svg.write_text("before", encoding="utf-8")
    path.write_text("", encoding="utf-8")
    assert invoke(str(path), "--svg", str(svg)).exit_code == 2
    assert svg.read_text(encoding="utf-8") == "before"


def test_lengths_alone_share_nothing(tmp_path: Path) -> None:
    """A CSV file; requests without a prompt are counted and left out."""
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,100,7\n2023,0,3\n2023,70,1\n", encoding="utf-8")
    figures = report(path)
    assert (figures["requests"], figures["skipped"], figures["reused_share"]) == (2, 1, 0)
    assert invoke(str(path)).stdout.splitlines()[0].split() == ["requests", "2"]
    assert report(path, "--limit", "1")["requests"] == 1


@pytest.mark.parametrize(("text", "named"), [
    ("", "at least one request"), ("{}\n", "line 1"), ("[]\n", "line 1"), ("{\n", "line 1"),
    ('{"input_length": 5, "output_length": 1}\n{"input_length": -1, "output_length": 1}\n', "line 2"),
    ('{"input_length": 5, "output_length": true}\n', "line 1"),
    ('{"input_length": 1e9, "output_length": 1}\n', "line 1"),
    ('{"input_length": 128, "output_length": 1, "hash_ids": [1, 2, 3]}\n', "line 1"),
    (f"{TWO_PAGES}, 2]}}\n" + '{"input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n', "line 2"),
    ('{"input_length": 64, "output_length": 1, "hash_ids": [-3]}\n', "line 1"),
    ('{"input_length": 64, "output_length": 1, "hash_ids": 3}\n', "line 1"),
    ('{"input_length": 64, "output_length": 1, "session": 3}\n', "line 1"),
    ('{"input_length": 64, "output_length": 1, "hash_ids": [2147483647]}\n', "line 1"),
    (f"{TWO_PAGES}, 33550000]}}\n" + '{"input_length": 4000000, "output_length": 1}\n', "line 2"),
    ("\x00\xff\n", "line 1"), ('{"a": ' + "[" * 100_000 + "\n", "line 1"),
])
def test_a_file_that_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, named: str) -> None:
    """Exit code 2 with a message, and nothing on stdout."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    result = invoke(str(path))
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""


def test_a_csv_of_other_columns_is_refused(tmp_path: Path) -> None:
    """The line is named, also where a cell is no count; a folder and a missing file are usage errors."""
    path = tmp_path / "bad.csv"
    for text in ("a,b\n1,2\n", "ContextTokens,GeneratedTokens\n1,x\n",
                 "ContextTokens,GeneratedTokens\n99999999999999,1\n"):
        path.write_text(text, encoding="utf-8")
        result = invoke(str(path))
        assert (result.exit_code, "line 2" in result.stderr) == (2, True)
    assert invoke(str(tmp_path)).exit_code == 2
    assert invoke(str(tmp_path / "none.jsonl")).exit_code == 2
    path.write_text("ContextTokens,GeneratedTokens\n5000,1\n", encoding="utf-8")
    assert invoke(str(path), "--device-pages", "3").exit_code == 0  # one request must fit, so the pool is larger
