"""`pagedkv bench step`: what it prints, and that it measures what it says; never how fast."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner, Result

import pagedkv as pk
from pagedkv.ledger.check import check_ledger
from pagedkv.tools import bench_step, command


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, ["bench", "step", *arguments], prog_name="pagedkv")


def test_every_subject_stands_beside_the_floor() -> None:
    """Ledger and store with one pool and two, loop and scheduler with W = 1.

    A journaled store has one pool and a fixed batch.  The ratio is the quotient of two medians.
    """
    result = invoke("--json", "--rows", "1,3", "--width", "1,2", "--chunks", "1")
    figures = json.loads(result.stdout)
    shapes = [(f["subject"], f["rows"], f["width"], f["pools"], f["composition"]) for f in figures["steps"]]

    assert (0, 1, 32) == (result.exit_code, figures["schema"], figures["chunk_steps"])
    assert len(set(shapes)) == len(shapes) == 2 * (2 * 2 * 2 * 2) + 2 * 2 + 2 * (2 * 2)
    assert {(name, width) for name, _, width, _, _ in shapes} == {
        ("ledger", 1), ("store", 1), ("journaled", 1), ("loop", 1), ("scheduler", 1), ("ledger", 2),
        ("store", 2), ("journaled", 2),
    }
    assert all((f["loop_ratio"] is None) == (f["subject"] != "scheduler") for f in figures["steps"])
    assert all(abs(f["ratio"] - f["us"] / f["floor_us"]) < 0.01 * f["ratio"] + 0.01 for f in figures["steps"])
    assert "32 steps" in result.stderr


@pytest.mark.parametrize("rows", ["0", "1,", "a"])
def test_rows_that_are_no_numbers_are_usage(rows: str) -> None:
    """Exit code 2, and nothing on stdout."""
    result = invoke("--rows", rows)

    assert (2, "") == (result.exit_code, result.stdout)


@pytest.mark.parametrize("is_changing", [False, True])
@pytest.mark.parametrize(("name", "width"), [
    ("ledger", 1), ("ledger", 4), ("store", 1), ("store", 4), ("journaled", 1), ("journaled", 4), ("loop", 1),
    ("scheduler", 1),
])
def test_a_chunk_of_a_subject_takes_as_many_steps_as_it_says(name: str, width: int, is_changing: bool) -> None:
    """Each step commits in every row of its batch, and the ledger is in order behind it; rows start over when full."""
    subject = bench_step.SUBJECTS[name](3, width, pools=1, is_changing=is_changing)
    ledger = subject.ledger if isinstance(subject, bench_step.LedgerSubject) else subject.store._ledger  # type: ignore[attr-defined]
    for _ in range(2 * 62 * 64 // 32):
        subject.make_ready()
        before = ledger.active["main"].committed_end.sum()
        bench_step.chunk_us(subject.step)
        moved = ledger.active["main"].committed_end.sum() - before
        if name != "scheduler" or not is_changing:  # there a request leaves with its tokens at each step
            assert 3 * 32 <= moved <= 3 * 32 * width
    check_ledger(ledger)


@pytest.mark.parametrize("rows", [1, 8, 65])
def test_both_forms_of_the_floor_do_the_same_work(rows: int) -> None:
    """Every page that a row reaches comes from the stack, into both tables."""
    plain, preallocated = bench_step.Floor(rows), bench_step.Floor(rows)
    plain.reset(1)
    preallocated.reset(1)
    for _ in range(200):
        plain.step()
        preallocated.preallocated_step()

    assert plain.top == preallocated.top < plain.free.size
    assert (plain.lens <= plain.mapped * 64).all()
    for name in ("lens", "mapped", "table", "mirror", "delta"):
        assert np.array_equal(getattr(plain, name), getattr(preallocated, name)), name


def test_a_counting_device_counts_what_a_device_would_do() -> None:
    """A store runs on it, and every word that is read back is 0."""
    device = pk.CountingDevice()
    config = bench_step.LedgerSubject(2, 1, pools=1, is_changing=False).config
    with pk.open_store(config, device) as store:
        sequence = store.activate(prompt_tokens=5, output_tokens=5)
        before = device.driver_calls
        unit = store.begin_unit(store.batch([sequence]), 5)
        store.submit(unit)
        assert (store.poll(), device.driver_calls - before) == ([unit], 3)  # a table slice, a record, a query
        store.wait(unit)
        store.commit(unit)
        assert store.committed_tokens(sequence) == 5
