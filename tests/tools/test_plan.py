"""`pagedkv plan`: figures on stdout, refusals with a way out, and advice that gives the same plan again.  (C5)"""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pagedkv as pk
from pagedkv.tools import command
from pagedkv.tools.byte_count import byte_count, readable
from pagedkv.tools.plan import MODELS, parse_backend

TINY = ("--layers", "2", "--query-heads", "6", "--kv-heads", "3", "--head-dim", "64",
        "--max-context", "1024", "--max-concurrency", "4")  # fmt: skip


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, ["plan", *arguments], prog_name="pagedkv")


def planned(*arguments: str) -> dict[str, Any]:
    """Plan for another machine and return the JSON object."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_json_has_the_figures_that_others_rely_on() -> None:
    """Schema 1; the owners sum to the bytes, which are on the line.  (C5.3)"""
    report = planned(*TINY, "--free-bytes", "80MiB", "--headroom", "1MiB")

    assert report["schema"] == 1
    assert report["tokens"] == report["pages"] * 64
    assert report["bytes"] == report["b_min"] + (report["pages"] - 16) * report["b_step"]
    assert sum(report["owners"].values()) == report["bytes"]
    assert report["slack"] == 80 * 2**20 - report["bytes"]
    assert 2**20 <= report["slack"] or report["pages"] == report["pages_max"]


def test_the_plan_is_what_the_library_plans() -> None:
    """The command adds nothing of its own.  (C1.2)"""
    config = pk.StoreConfig(pk.KVGeometry(2, 6, 3, 64), profile="k8v4", max_context=1024, max_concurrency=4,
                            kv_capacity=pk.AutoCapacity(5), backend=pk.MTPBackend(3, layers=2), state_bytes_per_lane=7,
                            state_bytes_fixed=11, graph_allowance_bytes=13, sanitizer=True, host_arena_bytes=1 << 20,
                            decode_columns_max=9, prefill_columns_max=32, codec_events=True, caller_words=5,
                            retained_tokens=65)
    made = pk.plan(config, 4_500_000)
    report = planned(*TINY, "--profile", "K8V4", "--free-bytes", "4.5MB", "--headroom", "5", "--backend", "mtp:3:2",
                     "--state-per-lane", "7", "--state-fixed", "11", "--graph-allowance", "13", "--sanitizer",
                     "--host-arena", "1MiB", "--decode-columns", "9", "--prefill-columns", "32", "--codec-events",
                     "--caller-words", "5", "--retained-tokens", "65")

    assert made.is_clamped
    assert report["pages_max"] == made.pages_max == 4 * 16 + 2
    assert (report["pages"], report["owners"], report["slack"]) == (made.pages, made.owners, made.slack)
    assert (report["host_arena_bytes"], report["host_pages"]) == (1 << 20, made.host_pages)


@pytest.mark.parametrize("backend", [(), ("--backend", "mtp:4"), ("--backend", "draft:2x8x4x128")])
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_the_printed_advice_gives_the_same_plan(profile: str, backend: tuple[str, ...]) -> None:
    """S76: what the last line says, given back, takes the same pages and the same bytes of every owner.  (C5.5)"""
    options = (*TINY, "--profile", profile, "--free-bytes", "60MiB", *backend)
    automatic = ("--headroom", "3MiB")
    first = planned(*options, *automatic)
    last_line = invoke(*options, *automatic).stdout.splitlines()[-1]
    again = planned(*options, *last_line.removeprefix("the same plan: ").split())

    assert last_line == f"the same plan: --capacity {first['tokens']}"
    assert first | {"headroom_bytes": 0} == again


def test_the_table_shows_every_owner_and_the_total() -> None:
    """Bytes are exact; a rounded size stands beside them.  (C5.3)"""
    options = (*TINY, "--free-bytes", "60MiB", "--headroom", "0", "--host-arena", "1MiB")
    report = planned(*options)
    rows = [line.rsplit(maxsplit=3) for line in invoke(*options).stdout.splitlines() if line.startswith("  ")]
    table = {row[0].strip(): int(row[1]) for row in rows}

    assert report["owners"].items() <= table.items()
    assert table["B(M), all of it"] == report["bytes"]
    assert (table["slack"], table["free"]) == (report["slack"], report["free_bytes"])
    assert table["held by this process's caches"] == report["cache_bytes"] == 0
    assert table["pinned arena"] == 1 << 20


def test_too_little_memory_is_a_finding_with_numbers_and_a_way_out() -> None:
    """Exit code 1, nothing on stdout; each figure of the message is a plan that fits.  (C5.3, S77, S81)"""
    result = invoke(*TINY, "--free-bytes", "50MiB", "--headroom", "10MiB")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "52428800 free bytes" in result.stderr
    assert "which hold 0 pages" in result.stderr
    headroom = result.stderr.partition("lower the headroom to ")[2].split()[0]
    lanes = result.stderr.partition("lower max_concurrency to ")[2].split(".")[0].split()[0]
    assert planned(*TINY, "--free-bytes", "50MiB", "--headroom", headroom)["pages"] == 16
    assert planned(*TINY, "--free-bytes", "50MiB", "--headroom", "10MiB", "--max-concurrency", lanes)["pages"] >= 16
    least = invoke(*TINY, "--free-bytes", "51MiB", "--headroom", "0", "--min-tokens", "4000")
    assert least.exit_code == 1
    assert "a plan of 64 Main pages, at least 63, was refused" in least.stderr


@pytest.mark.parametrize("arguments", [
    ("--free-bytes", "1GiB"),
    ("--layers", "2", "--free-bytes", "1GiB"),
    ("--model", "smollm2", "--layers", "2", "--free-bytes", "1GiB"),
    (*TINY, "--free-bytes", "much"),
    (*TINY, "--free-bytes", "1GiB", "--capacity", "all"),
    (*TINY, "--free-bytes", "1GiB", "--capacity", "1023"),
    (*TINY, "--free-bytes", "1GiB", "--capacity", "2048", "--headroom", "1"),
    (*TINY, "--free-bytes", "1GiB", "--capacity", "2048", "--min-tokens", "1"),
    (*TINY, "--free-bytes", "1GiB", "--backend", "mtp"),
    (*TINY, "--free-bytes", "1GiB", "--backend", "mtp:16"),
    (*TINY, "--free-bytes", "1GiB", "--backend", "draft:2x8x4"),
    (*TINY, "--free-bytes", "1GiB", "--profile", "fp16"),
    (*TINY, "--free-bytes", "9" * 5000),
    (*TINY, "--free-bytes", "1GiB", "--capacity", "9" * 5000),
    (*TINY, "--free-bytes", "1GiB", "--backend", f"mtp:{'9' * 5000}"),
    (*TINY, "--free-bytes", "1GiB", "--backend", f"draft:1x1x1x{'9' * 5000}"),
], ids=lambda arguments: " ".join(arguments[-2:])[:40])
def test_arguments_that_make_no_plan_are_usage(arguments: tuple[str, ...]) -> None:
    """Exit code 2, a message on stderr, nothing on stdout.  (C5.2)"""
    result = invoke(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


def test_this_machine_is_asked_when_no_memory_is_named() -> None:
    """The device says what is free, and its name goes to stderr.  (C5.3)"""
    result = invoke(*TINY, "--device", "cpu", "--headroom", "0", "--json")
    report = json.loads(result.stdout)

    assert "cpu device" in result.stderr
    assert 0 < report["free_bytes"] <= report["total_bytes"]


@pytest.mark.parametrize(("text", "count"), [
    ("0", 0), ("1073741824", 1 << 30), ("1GiB", 1 << 30), ("1.5 gib", 3 << 29), ("800MB", 800_000_000), ("2kB", 2000),
    ("3KiB", 3072), ("1TiB", 1 << 40), ("0.3KiB", 307), ("7b", 7)
])  # fmt: skip
def test_counts_of_bytes_are_read_exactly(text: str, count: int) -> None:
    """Binary and decimal units; no floating point in between."""
    assert byte_count(text) == count


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (5 << 39, "2.5 TiB")]
)
def test_counts_of_bytes_are_shown_for_people(count: int, text: str) -> None:
    """Beside the exact figure, never instead of it."""
    assert readable(count) == text


def test_a_backend_is_named_in_one_word() -> None:
    """mtp:K, mtp:K:LAYERS, draft:LAYERSxQUERYxKVxDIM.  (C3.3)"""
    assert parse_backend(None) is None
    assert parse_backend("mtp:3") == pk.MTPBackend(3)
    assert parse_backend("mtp:3:2") == pk.MTPBackend(3, layers=2)
    assert parse_backend("draft:2x8x4x128") == pk.DraftFullBackend(pk.KVGeometry(2, 8, 4, 128))


@pytest.mark.model
def test_known_models_have_the_geometry_of_their_files() -> None:
    """What the command knows by name is what the model's own file says."""
    from pagedkv.tools.llama.weights import load_model

    try:
        weights, _ = load_model()
    except pk.MissingRequirement as missing:
        pytest.skip(str(missing))
    found = weights.config

    assert MODELS["smollm2"] == pk.KVGeometry(found.layers, found.query_heads, found.kv_heads, found.head_dim)
