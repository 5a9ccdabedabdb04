"""`pagedkv bench ledger`: what it prints, and that it measures what it says; never how fast."""

from __future__ import annotations

import itertools
import json
import os
import platform

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pagedkv.tools import bench_ledger, command

NAMES = ["admit", "fork", "fork unaligned", "finish", "finish forked", "snapshot", "snapshot unaligned", "retain",
         "release", "move"]  # fmt: skip


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, ["bench", "ledger", "--samples", "2", *arguments], prog_name="pagedkv")


def test_json_has_every_operation_at_every_size() -> None:
    """One object on stdout, schema 1; what others rely on is operation, pages and us."""
    result = invoke("--json", "--pages", "1", "--pages", "3")
    figures = json.loads(result.stdout)

    assert (0, 1, "packed") == (result.exit_code, figures["schema"], figures["layout"])
    assert [(name, pages) for pages in (1, 3) for name in NAMES] == [
        (f["operation"], f["pages"]) for f in figures["operations"]
    ]
    for figure in figures["operations"]:
        assert min(figure["us"], figure["us_mean"], figure["us_p95"]) > 0


def test_json_says_where_it_was_measured_and_to_what_digit() -> None:
    """A figure alone is of no machine; hundredths of a microsecond are below what repeats."""
    figures = json.loads(invoke("--json", "--pages", "1").stdout)
    times = [f[key] for f in figures["operations"] for key in ("us", "us_mean", "us_p95", "floor_us")]

    assert platform.python_version() == figures["python"]
    assert np.__version__ == figures["numpy"]
    assert figures["machine"]["processor"]
    assert os.cpu_count() == figures["machine"]["cpus"]
    assert [] == [us for us in times if us is not None and us != round(us, 2)]


def test_the_floor_stands_beside_fork_and_finish() -> None:
    """The bare NumPy work, in the same run."""
    figures = bench_ledger.bench_ledger(sizes_pages=(2,), samples=1)

    assert {"fork", "finish"} == {f.operation for f in figures if f.floor_us is not None}


def test_the_table_names_every_operation() -> None:
    """Figures on stdout, talk on stderr."""
    result = invoke("--pages", "2", "--shredded")
    lines = result.stdout.splitlines()

    assert lines[0].split() == ["operation", "pages", "us", "mean", "p95", "floor"]
    assert [line[:20].rstrip() for line in lines[1:]] == NAMES
    assert "of 2 calls each; floor" in result.stderr


def test_no_pages_is_usage() -> None:
    """Exit code 2, nothing on stdout."""
    result = invoke("--pages", "0")

    assert (2, "") == (result.exit_code, result.stdout)


@pytest.mark.parametrize("is_shredded", [False, True])
def test_shredded_means_that_no_two_pages_of_a_sequence_adjoin(is_shredded: bool) -> None:
    """Otherwise ids come in one run, which the ledgers take a shorter way with."""
    bench = bench_ledger.Bench(8, is_shredded=is_shredded)
    sequence = bench.written(bench.aligned)
    ids = bench.ledgers.active["main"].mapped_ids(sequence.row).tolist()

    assert 8 == len(ids)
    assert is_shredded == all(second - first != 1 for first, second in itertools.pairwise(ids))
    assert is_shredded != (ids == list(range(ids[0], ids[0] + 8)))


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_undoes_itself(name: str) -> None:
    """So sample follows sample on the same state: the third call has as many free pages as the second."""
    bench = bench_ledger.Bench(3, is_shredded=False)
    pool = bench.ledgers.active["main"].pool
    operation = bench.operations()[name]
    available = []
    for _ in range(3):
        subject = operation.prepare()
        available.append(pool.available)
        operation.undo(operation.call(subject), subject)

    assert available[0] == available[1] == available[2]
