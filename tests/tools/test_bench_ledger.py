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
    """One object on stdout, schema 1, says where it was measured; digits below what repeats are cut off."""
    result = invoke("--json", "--pages", "1", "--pages", "3")
    figures = json.loads(result.stdout)
    operations = figures["operations"]

    assert (0, 1, "packed") == (result.exit_code, figures["schema"], figures["layout"])
    assert [(name, pages) for pages in (1, 3) for name in NAMES] == [(f["operation"], f["pages"]) for f in operations]
    assert min(figure[key] for figure in operations for key in ("us", "us_mean", "us_p95")) > 0
    times = [f[key] for f in operations for key in ("us", "us_mean", "us_p95", "floor_us")]
    assert [] == [us for us in times if us is not None and us != round(us, 2)]
    assert (platform.python_version(), np.__version__) == (figures["python"], figures["numpy"])
    assert figures["machine"]["processor"]
    assert os.cpu_count() == figures["machine"]["cpus"]


def test_the_floor_stands_beside_fork_and_finish() -> None:
    """The bare NumPy work, in the same run."""
    figures = bench_ledger.bench_ledger(sizes_pages=(2,), samples=1)

    assert {"fork", "finish"} == {f.operation for f in figures if f.floor_us is not None}


def test_the_table_names_every_operation() -> None:
    """Figures on stdout, talk on stderr; no pages is usage, exit code 2 with nothing on stdout."""
    result, refused = invoke("--pages", "2", "--shredded"), invoke("--pages", "0")
    lines = result.stdout.splitlines()

    assert lines[0].split() == ["operation", "pages", "siblings", "us", "mean", "p95", "floor"]
    assert [line[:20].rstrip() for line in lines[1:]] == NAMES
    assert "of 2 calls each; floor" in result.stderr
    assert (2, "") == (refused.exit_code, refused.stdout)


@pytest.mark.parametrize("is_shredded", [False, True])
def test_shredded_means_that_no_two_pages_of_a_sequence_adjoin(is_shredded: bool) -> None:
    """Otherwise ids come in one run, which the ledgers take a shorter way with."""
    bench = bench_ledger.Bench(8, is_shredded=is_shredded)
    sequence = bench.written(bench.aligned)
    ids = bench.ledgers.active["main"].mapped_ids(sequence.row).tolist()

    assert 8 == len(ids)
    assert is_shredded == all(second - first != 1 for first, second in itertools.pairwise(ids))
    assert is_shredded != (ids == list(range(ids[0], ids[0] + 8)))


@pytest.mark.parametrize("siblings", [0, 1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_undoes_itself(name: str, siblings: int) -> None:
    """So sample follows sample on the same state: the third call has as many free pages as the second."""
    bench = bench_ledger.Bench(3, is_shredded=False, siblings=siblings)
    shared = set() if bench.shared is None else {*bench.ledgers.kept["main"].by_number[bench.shared.number].members}
    assert siblings == len(bench.ledgers.continuations.states)
    assert all({*kept.members} == shared for kept in bench.ledgers.kept["main"].by_number.values())
    pool = bench.ledgers.active["main"].pool
    operation = bench.operations()[name]
    available = []
    for _ in range(3):
        subject = operation.prepare()
        available.append(pool.available)
        operation.undo(operation.call(subject), subject)

    assert available[0] == available[1] == available[2]
