"""`pagedkv bench ledger`: time the bulk operations of the ledgers at the beginning and end of a sequence; no device.

    admit    a fresh sequence                  snapshot, retain    a checkpoint while running, at the end
    fork     from a continuation that stays    move, release       a continuation becomes a sequence, or ends

Every sample is one call: it is prepared, timed alone and undone.  `floor_us` is the time of the bare NumPy work of the
same bookkeeping on this machine in the same run, without a check, a handle or a pool: for orientation, not a bound.

With `--shredded` no two free pages adjoin, so that every list of ids is scattered, as after the worst churn.  With
`--siblings n` every subject but `admit` is a fork of one prefix that n other continuations share too.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from json import dumps
from typing import Any

import click
import numpy as np

import pagedkv as pk
from pagedkv.tools.console import json_option, positive, progress_line, say

SIZES_PAGES = (1, 64, 67, 512, 4096)
"""67 pages are 4.3k tokens, 4096 pages 262,144 tokens."""

SHARED_PAGES, SIBLINGS = 64, (1, 1000, 10_000)
"""Shown without options too: no operation takes longer when more continuations share the pages."""

TAIL_TOKENS = 40
"""Committed columns of an unaligned source's last page; a copy of that page is planned and not made."""

ROOM_TOKENS = 128
"""What a sequence may add to its source; two pages."""

ROWS = 8
WARM_UP = 5


@dataclass(frozen=True)
class Figure:
    """One operation over sequences of `pages` pages, shared with `siblings` continuations; in microseconds."""

    operation: str
    pages: int
    siblings: int
    us: float
    us_mean: float
    us_p95: float
    floor_us: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the figure as an entry of `operations`, to a hundredth of a microsecond."""
        return {name: round(value, 2) if isinstance(value, float) else value for name, value in vars(self).items()}


def nothing(*_: object) -> None:
    """Prepare or undo nothing."""


@dataclass(frozen=True)
class Operation:
    """`prepare` returns the subject of `call`, which is timed; `undo` takes the answer and the subject."""

    call: Callable[[Any], Any]
    prepare: Callable[[], Any] = nothing
    undo: Callable[[Any, Any], object] = nothing


class Bench:
    """The ledgers of one store with room for three sequences of `pages` pages, and the operations on them.

    No other part of the tools calls ledgers.
    """

    def __init__(self, pages: int, *, is_shredded: bool, siblings: int = 0) -> None:
        blocks = pages + ROOM_TOKENS // pk.PAGE_TOKENS
        spare = 3 * blocks
        config = pk.StoreConfig(
            pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64),
            profile="bf16",
            max_context=blocks * pk.PAGE_TOKENS,
            max_concurrency=ROWS,
            kv_capacity=pk.ExplicitCapacity((2 if is_shredded else 1) * spare * pk.PAGE_TOKENS),
        )
        self.ledgers = pk.Ledger(config)
        self.aligned = pages * pk.PAGE_TOKENS
        self.unaligned = self.aligned - pk.PAGE_TOKENS + TAIL_TOKENS
        self.shared: pk.Continuation | None = None
        if is_shredded:
            continuations = [self.retained(1) for _ in range(2 * spare)]
            for continuation in continuations[::2]:
                self.ledgers.release(continuation)
        if siblings:
            self.shared = self.retained(self.aligned)
            for _ in range(siblings - 1):
                self.retained(self.aligned)

    def activated(
        self, tokens: int, source: pk.Continuation | None = None, frontier: int | None = None
    ) -> pk.Sequence:
        """Return a sequence with room for so many tokens behind its source."""
        sequence = self.ledgers.try_activate(pk.ActivationTarget(tokens, 0, source=source, frontier=frontier))
        assert isinstance(sequence, pk.Sequence), sequence
        return sequence

    def written(self, tokens: int) -> pk.Sequence:
        """Return a sequence that has committed its whole prompt, or a fork of the shared prefix."""
        if self.shared is not None:
            return self.activated(ROOM_TOKENS // 2, self.shared, tokens)
        sequence = self.activated(tokens)
        unit, _ = self.ledgers.begin_unit("prefill", self.ledgers.batch([sequence]), {"main": tokens})
        self.ledgers.commit_unit(unit)
        return sequence

    def retained(self, tokens: int) -> pk.Continuation:
        """Return a continuation of its own pages."""
        continuation = self.ledgers.finish(self.written(tokens), retain=True, state=True)
        assert continuation is not None, "a retained sequence has a continuation"
        return continuation

    def operations(self) -> dict[str, Operation]:
        """Return every operation by name; those on a source that stays write the source when first prepared."""
        ledgers, target = self.ledgers, pk.ActivationTarget
        aligned, unaligned = self.aligned, self.unaligned
        source = functools.cache(self.retained)

        def finish(answer: pk.Sequence, _: object) -> None:
            ledgers.finish(answer)

        def release(answer: pk.Continuation, _: object) -> None:
            ledgers.release(answer)

        def end_both(answer: pk.Continuation, subject: pk.Sequence) -> None:
            ledgers.release(answer)
            ledgers.finish(subject)

        def fork(subject: pk.Continuation) -> object:
            return ledgers.try_activate(target(64, 0, source=subject))

        def move(subject: pk.Continuation) -> object:
            return ledgers.try_activate(target(64, 0, source=subject, keep_source=False))

        def snapshot(subject: pk.Sequence) -> object:
            return ledgers.try_snapshot(subject, state=True)

        def retain(subject: pk.Sequence) -> object:
            return ledgers.finish(subject, retain=True, state=True)

        return {
            "admit": Operation(lambda _: ledgers.try_activate(target(aligned, 0)), undo=finish),
            "fork": Operation(fork, lambda: source(aligned), finish),
            "fork unaligned": Operation(fork, lambda: source(unaligned), finish),
            "finish": Operation(ledgers.finish, lambda: self.written(unaligned)),
            "finish forked": Operation(ledgers.finish, lambda: self.activated(64, source(aligned))),
            "snapshot": Operation(snapshot, lambda: self.written(aligned), end_both),
            "snapshot unaligned": Operation(snapshot, lambda: self.written(unaligned), end_both),
            "retain": Operation(retain, lambda: self.written(unaligned), release),
            "release": Operation(ledgers.release, lambda: self.retained(unaligned)),
            "move": Operation(move, lambda: self.retained(unaligned), finish),
        }


def floor_operations(pages: int) -> dict[str, Operation]:
    """Return the bare work of the operations that other engines publish: references, a table row, a free stack."""
    references, free = np.ones(2 * pages, np.int32), np.arange(2 * pages, dtype=np.int32)
    table = np.full((ROWS, pages + 1), -1, np.int32)
    ids = np.arange(pages, dtype=np.int32)

    def prepare() -> None:
        references[ids], table[1, :pages] = 1, ids

    def fork(_: object) -> None:
        references[ids] += 1
        table[1, :pages] = ids

    def finish(_: object) -> None:
        held = table[1, :pages]
        references[held] -= 1
        freed = held[references[held] == 0]
        free[: freed.size] = freed
        table[1, :pages] = -1

    return {"fork": Operation(fork, prepare), "finish": Operation(finish, prepare)}


def times_us(operation: Operation, samples: int) -> list[float]:
    """Return the time of each sample; the collector of cycles is off, because its pauses are not the ledgers'."""
    elapsed = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(WARM_UP + samples):
            subject = operation.prepare()
            begin = time.perf_counter_ns()
            answer = operation.call(subject)
            end = time.perf_counter_ns()
            operation.undo(answer, subject)
            elapsed.append((end - begin) / 1000)
    finally:
        gc.enable()
    return elapsed[WARM_UP:]


def bench_ledger(
    *,
    sizes_pages: tuple[int, ...] = SIZES_PAGES,
    samples: int = 200,
    siblings: tuple[int, ...] = (0,),
    is_shredded: bool = False,
    progress: Callable[[str], None] = nothing,
) -> list[Figure]:
    """Time every operation at every size.

    Args:
        sizes_pages: pages of the sequences; one figure of each operation for each.
        samples: calls per figure, at least 1; warming up is not counted.
        siblings: continuations that share the subject's pages; one figure of each operation for each.
        is_shredded: let no two free pages adjoin.
        progress: called with the name of what is timed next.
    """
    figures = []
    names = list(Bench(1, is_shredded=False).operations())
    for pages, count, name in itertools.product(sizes_pages, siblings, names):
        progress(f"{name}, {pages} pages, {count} siblings")
        floors = floor_operations(pages)
        us = times_us(Bench(pages, is_shredded=is_shredded, siblings=count).operations()[name], samples)
        floor = statistics.median(times_us(floors[name], samples)) if name in floors else None
        p95 = float(np.quantile(us, 0.95))
        figures.append(Figure(name, pages, count, statistics.median(us), statistics.fmean(us), p95, floor))
    return figures


def report(figures: list[Figure], *, is_shredded: bool) -> dict[str, Any]:
    """Return the JSON object of the command."""
    return {
        "schema": 1,
        "layout": "shredded" if is_shredded else "packed",
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "operations": [figure.as_json() for figure in figures],
    }


@click.command()
@json_option
@click.option("--pages", "sizes", type=click.IntRange(1, 1 << 20), multiple=True, help="Pages; repeatable.")
@click.option("--siblings", type=click.IntRange(0, 1 << 20), multiple=True,
              help="Continuations that share the pages; repeatable.")
@click.option("--samples", type=positive, default=200, show_default=True, help="Calls per figure.")
@click.option("--shredded", is_flag=True, help="Let no two free pages adjoin.")
def command(
    as_json: bool, sizes: tuple[int, ...], siblings: tuple[int, ...], samples: int, shredded: bool
) -> None:
    """Time the bulk operations of the ledgers, by pages.

    Admission, fork, finish, snapshot, retain, release and move, in microseconds, without a device; and the time of the
    bare NumPy work beside them. With --json also the machine, and the versions of Python and NumPy.
    """
    shapes = [(sizes or SIZES_PAGES, siblings or (0,))]
    if not sizes and not siblings:
        shapes.append(((SHARED_PAGES,), SIBLINGS))
    figures = [
        figure for pages, counts in shapes for figure in
        bench_ledger(sizes_pages=pages, samples=samples, siblings=counts, is_shredded=shredded, progress=progress_line)
    ]
    progress_line("")
    if as_json:
        click.echo(dumps(report(figures, is_shredded=shredded)))
    else:
        click.echo(f"{'operation':<20}{'pages':>7}{'siblings':>10}{'us':>10}{'mean':>10}{'p95':>10}{'floor':>10}")
        for f in figures:
            floor = "-" if f.floor_us is None else f"{f.floor_us:.1f}"
            click.echo(f"{f.operation:<20}{f.pages:>7}{f.siblings:>10}{f.us:>10.1f}{f.us_mean:>10.1f}{f.us_p95:>10.1f}"
                       f"{floor:>10}")
    say(f"microseconds: median, mean and 95th percentile of {samples} calls each; floor: the bare NumPy work alone")
