"""Time the bulk operations of the ledgers: what a sequence costs at its beginning and end, without a device.

    admit    a fresh sequence                  snapshot, retain    a checkpoint while running, at the end
    fork     from a kept continuation          move, release       what becomes of a continuation

Every sample is one call on a store of its own kind of state: set up, timed alone, undone.  `floor_us` is what the
bare NumPy work of the same bookkeeping costs on this machine in the same run, without a check, a handle or a pool:
for orientation, not a bound.

With `--shredded` no two free pages adjoin, so that every list of ids is scattered: the worst that churn can do.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import pagedkv as pk

SIZES_PAGES = (1, 64, 67, 512, 4096)
"""67 pages are 4.3k tokens, 4096 pages 262,144 tokens."""

TAIL_TOKENS = 40
"""Committed columns of an unaligned source's last page: those are copied, by whoever has the bytes."""

ROOM_TOKENS = 128
"""What a sequence may add to its source; two pages."""

ROWS = 8
WARM_UP = 5


@dataclass(frozen=True)
class Figure:
    """One operation over sequences of `pages` pages, in microseconds."""

    operation: str
    pages: int
    us: float
    us_mean: float
    us_p95: float
    floor_us: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the figure as it stands in `operations`, to a hundredth of a microsecond."""
        return {
            "operation": self.operation, "pages": self.pages, "us": round(self.us, 2),
            "us_mean": round(self.us_mean, 2), "us_p95": round(self.us_p95, 2),
            "floor_us": None if self.floor_us is None else round(self.floor_us, 2),
        }  # fmt: skip


Call = Callable[[], object]
"""One run of the timed operation."""

Case = Iterator[Call]
"""Prepares a call, yields it to be timed once, undoes it, and so on."""


class Bench:
    """The ledgers of one store that holds three sequences of `pages` pages, and calls on them to be timed."""

    def __init__(self, pages: int, *, is_shredded: bool) -> None:
        self.pages = pages
        blocks = pages + ROOM_TOKENS // pk.PAGE_TOKENS
        spare = 3 * blocks
        config = pk.StoreConfig(
            pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64),
            profile="bf16",
            max_context=blocks * pk.PAGE_TOKENS,
            max_concurrency=ROWS,
            kv_capacity=pk.ExplicitCapacity((2 if is_shredded else 1) * spare * pk.PAGE_TOKENS),
        )
        self.ledgers = pk.StoreLedgers(config)
        if is_shredded:
            kept = [self.ledgers.finish(self.written(1), retain=True, state=True) for _ in range(2 * spare)]
            for continuation in kept[::2]:
                assert continuation is not None
                self.ledgers.release(continuation)

    def activate(self, target: pk.ActivationTarget) -> pk.Sequence:
        """Activate what must fit."""
        answer = self.ledgers.try_activate(target)
        assert isinstance(answer, pk.Sequence), answer
        return answer

    def written(self, tokens: int) -> pk.Sequence:
        """Return a sequence that has committed its whole prompt."""
        sequence = self.activate(pk.ActivationTarget(tokens, 0))
        unit, _ = self.ledgers.begin_unit("prefill", self.ledgers.batch([sequence]), {"main": tokens})
        self.ledgers.commit_unit(unit)
        return sequence

    def retained(self, tokens: int) -> pk.Continuation:
        """Return a continuation of its own pages."""
        continuation = self.ledgers.finish(self.written(tokens), retain=True, state=True)
        assert continuation is not None, "a retained sequence has a continuation"
        return continuation

    @property
    def aligned(self) -> int:
        """Tokens that fill every page."""
        return self.pages * pk.PAGE_TOKENS

    @property
    def unaligned(self) -> int:
        """Tokens that need as many pages and leave the last one partly filled."""
        return self.aligned - pk.PAGE_TOKENS + TAIL_TOKENS

    # ---- the operations ---------------------------------------------------------------------------

    def admit(self) -> Case:
        """A fresh sequence of that many pages; it reserves them."""
        made: list[Any] = []
        while True:
            yield lambda: made.append(self.ledgers.try_activate(pk.ActivationTarget(self.pages * pk.PAGE_TOKENS, 0)))
            self.ledgers.finish(made.pop())

    def fork(self, tokens: int) -> Case:
        """A sequence from a continuation that is kept."""
        source = self.retained(tokens)
        made: list[Any] = []
        while True:
            yield lambda: made.append(self.ledgers.try_activate(pk.ActivationTarget(64, 0, source=source)))
            self.ledgers.finish(made.pop())

    def finish_fresh(self) -> Case:
        """The end of a sequence that owns every page."""
        while True:
            sequence = self.written(self.unaligned)
            yield lambda sequence=sequence: self.ledgers.finish(sequence)  # type: ignore[misc]

    def finish_forked(self) -> Case:
        """The end of a sequence whose pages all belong to a continuation too."""
        source = self.retained(self.aligned)
        while True:
            sequence = self.activate(pk.ActivationTarget(64, 0, source=source))
            yield lambda sequence=sequence: self.ledgers.finish(sequence)  # type: ignore[misc]

    def snapshot(self, tokens: int) -> Case:
        """A checkpoint of a sequence that owned every page until then."""
        made: list[Any] = []
        while True:
            sequence = self.written(tokens)
            yield lambda sequence=sequence: made.append(  # type: ignore[misc]
                self.ledgers.try_snapshot(sequence, state=True)
            )
            self.ledgers.release(made.pop())
            self.ledgers.finish(sequence)

    def retain(self) -> Case:
        """The end of a sequence that becomes a continuation."""
        made: list[Any] = []
        while True:
            sequence = self.written(self.unaligned)
            yield lambda sequence=sequence: made.append(  # type: ignore[misc]
                self.ledgers.finish(sequence, retain=True, state=True)
            )
            self.ledgers.release(made.pop())

    def release(self) -> Case:
        """The end of a continuation that owns every page."""
        while True:
            continuation = self.retained(self.unaligned)
            yield lambda continuation=continuation: self.ledgers.release(continuation)  # type: ignore[misc]

    def move(self) -> Case:
        """A continuation becomes a sequence."""
        made: list[Any] = []
        while True:
            source = self.retained(self.unaligned)
            yield lambda source=source: made.append(  # type: ignore[misc]
                self.ledgers.try_activate(pk.ActivationTarget(64, 0, source=source, keep_source=False))
            )
            self.ledgers.finish(made.pop())


OPERATIONS: dict[str, Callable[[Bench], Case]] = {
    "admit": Bench.admit,
    "fork": lambda bench: bench.fork(bench.aligned),
    "fork unaligned": lambda bench: bench.fork(bench.unaligned),
    "finish": Bench.finish_fresh,
    "finish forked": Bench.finish_forked,
    "snapshot": lambda bench: bench.snapshot(bench.aligned),
    "snapshot unaligned": lambda bench: bench.snapshot(bench.unaligned),
    "retain": Bench.retain,
    "release": Bench.release,
    "move": Bench.move,
}


def floor_cases(pages: int) -> dict[str, Case]:
    """Return the bare work of the operations that other engines publish: references, a table row, a free stack."""
    references, free = np.ones(2 * pages, np.int32), np.arange(2 * pages, dtype=np.int32)
    table = np.full((ROWS, pages + 1), -1, np.int32)
    ids = np.arange(pages, dtype=np.int32)

    def fork() -> None:
        references[ids] += 1
        table[1, :pages] = ids

    def finish() -> None:
        held = table[1, :pages]
        references[held] -= 1
        gone = held[references[held] == 0]
        free[: gone.size] = gone
        table[1, :pages] = -1

    def case(call: Call) -> Case:
        while True:
            references[ids], table[1, :pages] = 1, ids
            yield call

    return {"fork": case(fork), "finish": case(finish)}


def times_us(case: Case, samples: int) -> list[float]:
    """Return the time of each sample; the collector of cycles is off, because its pauses are not the ledgers'."""
    elapsed = []
    gc.collect()
    gc.disable()
    try:
        for index in range(WARM_UP + samples):
            call = next(case)
            begin = time.perf_counter_ns()
            call()
            end = time.perf_counter_ns()
            if index >= WARM_UP:
                elapsed.append((end - begin) / 1000)
    finally:
        gc.enable()
    return elapsed


def bench_ledger(
    *,
    sizes_pages: tuple[int, ...] = SIZES_PAGES,
    samples: int = 200,
    is_shredded: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Figure]:
    """Time every operation at every size.

    Args:
        sizes_pages: pages of the sequences; one figure of each operation for each.
        samples: calls per figure, at least 1; warming up is not counted.
        is_shredded: let no two free pages adjoin.
        progress: is told what is being timed.
    """
    figures = []
    for pages in sizes_pages:
        floors = floor_cases(pages)
        for operation, case in OPERATIONS.items():
            progress(f"{operation}, {pages} pages")
            us = times_us(case(Bench(pages, is_shredded=is_shredded)), samples)
            floor = statistics.median(times_us(floors[operation], samples)) if operation in floors else None
            figures.append(
                Figure(operation, pages, statistics.median(us), statistics.fmean(us), float(np.quantile(us, 0.95)),
                       floor)
            )  # fmt: skip
    return figures


def report(figures: list[Figure], *, is_shredded: bool) -> dict[str, Any]:
    """Return the JSON object of `pagedkv bench ledger`."""
    return {
        "schema": 1,
        "layout": "shredded" if is_shredded else "packed",
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "operations": [figure.as_json() for figure in figures],
    }
