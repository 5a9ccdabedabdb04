"""`pagedkv bench step`: time the host's part of a decode step, beside the bare NumPy work that no engine can avoid.

    ledger      begin a unit, write its selectors, commit; with W > 1 also trim what a random acceptance left behind
    store       the same through a store: publish, launch, wait
    journaled   the same with a journal
    loop        DecodeLoop.step with a model that does nothing
    scheduler   Scheduler.step with that model; its ratio to the loop is printed too

`floor` is that bare work, with no check, no handle and no reservation.  Every subject alternates with the floor in one
process, in chunks of 32 steps; the ratio is that of the medians of their thread CPU time.  Wall times stand beside it.
Store and loop run on a device whose copies, launches and waits only count.
"""

from __future__ import annotations

import gc
import itertools
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from json import dumps
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, Request, Scheduler, Unit
from pagedkv.tools.console import json_option, positive, progress_line, say

Int32 = npt.NDArray[np.int32]

CHUNK_STEPS = 32
ROWS = (1, 8, 64, 256)
WIDTHS = (1, 4)
BLOCKS = 64
"""Table entries of a row: 4,096 tokens."""

ONE_TOKEN: Int32 = np.zeros(1, np.int32)

GEOMETRY = pk.KVGeometry(layers=1, query_heads=1, kv_heads=1, head_dim=16)


class Floor:
    """The bookkeeping of a decode step as bare NumPy: count, find the rows that cross a page, take pages, note them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.lens = np.zeros(rows, np.int32)
        self.mapped = np.zeros(rows, np.int32)
        self.table = np.zeros((rows, BLOCKS), np.int32)
        self.mirror = np.zeros((rows, BLOCKS), np.int32)
        self.free = np.arange(rows * BLOCKS, dtype=np.int32)
        self.delta = np.zeros((3, rows), np.int32)
        self.top = self.free.size
        self._times64 = np.zeros(rows, np.int32)
        self._crosses = np.zeros(rows, np.bool_)
        self._none = self._crosses.tobytes()

    def reset(self, first: int) -> None:
        """Start over with the row's lengths at `first` plus 0 to 63, so that rows cross pages at different steps."""
        self.lens[:] = first + np.arange(self.rows) * 7 % pk.PAGE_TOKENS
        self.mapped[:] = (self.lens + pk.PAGE_TOKENS - 1) // pk.PAGE_TOKENS
        self.top = self.free.size

    def step(self) -> None:
        """One step."""
        lens, mapped, table, free, top = self.lens, self.mapped, self.table, self.free, self.top
        delta, mirror = self.delta, self.mirror
        np.add(lens, 1, out=lens)
        rows = np.flatnonzero(lens > mapped * 64)
        if rows.size:
            pages = free[top - rows.size:top]; top -= rows.size  # noqa: E702 - another text is another floor
            cols = mapped[rows]; table[rows, cols] = pages; mapped[rows] += 1  # noqa: E702
            delta[0, :rows.size] = rows; delta[1, :rows.size] = cols; delta[2, :rows.size] = pages  # noqa: E702
            mirror[rows, cols] = pages
        self.top = top

    def preallocated_step(self) -> None:
        """The same step with preallocated outputs; no ratio uses it."""
        lens, mapped = self.lens, self.mapped
        np.add(lens, 1, out=lens)
        np.multiply(mapped, 64, out=self._times64)
        np.greater(lens, self._times64, out=self._crosses)
        if self._crosses.tobytes() == self._none:
            return
        rows = self._crosses.nonzero()[0]
        pages = self.free[self.top - rows.size : self.top]
        self.top -= rows.size
        cols = mapped[rows]
        self.table[rows, cols] = pages
        mapped[rows] += 1
        self.delta[0, : rows.size], self.delta[1, : rows.size], self.delta[2, : rows.size] = rows, cols, pages
        self.mirror[rows, cols] = pages


class Steps(ABC):
    """What is timed: steps of sequences that `restart` ends and begins anew when they are full."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.steps_left = 0

    def make_ready(self) -> None:
        """Have room for one more chunk."""
        if self.steps_left < CHUNK_STEPS:
            self.restart()
            self.steps_left = (BLOCKS - 2) * pk.PAGE_TOKENS // self.width
        self.steps_left -= CHUNK_STEPS

    @abstractmethod
    def restart(self) -> None:
        """End every sequence, begin others, and commit the prompt of each."""

    @abstractmethod
    def step(self) -> None:
        """One step."""


class Subject(Steps):
    """The steps of `rows` sequences of one store of ours.

    Args:
        rows, width: B and W of every unit.
        pools: 1, or 2 with an MTP backend whose pool every unit also writes.
        is_changing: every step leaves another one of `rows` + 1 sequences out.
    """

    def __init__(self, rows: int, width: int, *, pools: int, is_changing: bool) -> None:
        super().__init__(width)
        lanes = rows + is_changing
        self.config = pk.StoreConfig(
            GEOMETRY, profile="bf16", max_context=BLOCKS * pk.PAGE_TOKENS, max_concurrency=lanes,
            kv_capacity=pk.ExplicitCapacity(lanes * BLOCKS * pk.PAGE_TOKENS), decode_columns_max=max(width, 2),
            backend=pk.MTPBackend(max(width, 2)) if pools > 1 else None,
        )
        self.pools = [pool.name for pool in self.config.pools]
        self.columns = dict.fromkeys(self.pools, width)
        random = np.random.default_rng(1)
        self.accepted = [random.integers(1, width + 1, rows, dtype=np.int32) for _ in range(CHUNK_STEPS)]
        self.first_tokens = [1 + lane * 7 % pk.PAGE_TOKENS for lane in range(lanes)]
        self.is_changing = is_changing
        self.selectors = np.zeros((3, lanes), np.int32)
        self.selected: pk.Batch | None = None
        self.positions = self.selectors[1]
        self.turn = 0

    def choose(self, sequences: list[pk.Sequence]) -> list[pk.Sequence]:
        """Return the sequences of the next step when the composition changes."""
        self.turn = (self.turn + 1) % len(sequences)
        return sequences[: self.turn] + sequences[self.turn + 1 :]

    def write_selectors(self, batch: pk.Batch, unit: pk.Submission) -> None:
        """Write first positions, and for another batch rows and columns too, as a slot of a device's ingress."""
        if batch is not self.selected:
            self.selected, count = batch, len(batch)
            self.selectors[0, :count] = batch.rows
            self.selectors[2, :count] = self.width
            self.positions = self.selectors[1, :count]
        self.positions[:] = unit.first_positions["main"]


class LedgerSubject(Subject):
    """The ledger alone, as a store calls it."""

    def __init__(self, rows: int, width: int, *, pools: int, is_changing: bool) -> None:
        super().__init__(rows, width, pools=pools, is_changing=is_changing)
        self.ledger = pk.Ledger(self.config)
        self.sequences: list[pk.Sequence] = []

    def restart(self) -> None:
        """Activate sequences."""
        ledger = self.ledger
        for ended in self.sequences:
            ledger.finish(ended)
        self.sequences = []
        for tokens in self.first_tokens:
            sequence = ledger.try_activate(pk.ActivationTarget(tokens, self.config.max_context - tokens))
            assert isinstance(sequence, pk.Sequence), sequence
            unit, _ = ledger.begin_unit("prefill", ledger.batch([sequence]), dict.fromkeys(self.pools, tokens))
            ledger.commit_unit(unit)
            self.sequences.append(sequence)
        self.batch = ledger.batch(self.sequences)

    def step(self) -> None:
        """Begin, write the selectors, commit, trim."""
        ledger, batch = self.ledger, self.batch
        if self.is_changing:
            batch = ledger.batch(self.choose(self.sequences))
        unit, _ = ledger.begin_unit("decode", batch, self.columns)
        self.write_selectors(batch, unit)
        if self.width == 1:
            ledger.commit_unit(unit)
        else:
            accepted = next_of(self.accepted)
            ledger.commit_unit(unit, dict.fromkeys(self.pools, accepted))
            for pool in self.pools:
                ledger.trim(batch, pool)
        ledger.unsettled = ""


class StoreSubject(Subject):
    """A store on a device that only counts."""

    def __init__(self, rows: int, width: int, *, pools: int, is_changing: bool, journal: str | None = None) -> None:
        super().__init__(rows, width, pools=pools, is_changing=is_changing)
        self.device = pk.CountingDevice()
        self.store = pk.open_store(self.config, self.device, journal=journal)
        self.graph = self.device.end_capture(self.device.stream())
        self.sequences: list[pk.Sequence] = []

    def restart(self) -> None:
        """Activate sequences."""
        for sequence in self.store.sequences():
            self.store.finish(sequence)
        self.sequences = []
        for tokens in self.first_tokens:
            sequence = self.store.activate(prompt_tokens=tokens, output_tokens=self.config.max_context - tokens)
            self.begin(sequence, tokens)
            self.sequences.append(sequence)
        self.batch = self.store.batch(self.sequences)

    def begin(self, sequence: pk.Sequence, tokens: int) -> None:
        """Commit a prompt."""
        unit = self.store.begin_unit(self.store.batch([sequence]), dict.fromkeys(self.pools, tokens))
        self.store.wait(unit)
        self.store.commit(unit)

    def step(self) -> None:
        """Begin, write the selectors, launch, wait, commit, trim."""
        store, batch = self.store, self.batch
        if self.is_changing:
            batch = store.batch(self.choose(self.sequences))
        unit = store.begin_unit(batch, self.columns, name="decode")
        self.write_selectors(batch, unit)
        store.launch_graph(self.graph)
        store.wait(unit)
        if self.width == 1:
            store.commit(unit)
        else:
            accepted = next_of(self.accepted)
            store.commit(unit, dict.fromkeys(self.pools, accepted))
            for pool in self.pools:
                store.trim(batch, pool)


class JournaledSubject(StoreSubject):
    """The store with a journal, in a file that is deleted while it is open."""

    def __init__(self, rows: int, width: int, *, pools: int, is_changing: bool) -> None:
        with TemporaryDirectory() as folder:
            super().__init__(rows, width, pools=pools, is_changing=is_changing, journal=f"{folder}/run.jsonl")


class IdleModel:
    """A model that does nothing."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue nothing."""


class LoopSubject(StoreSubject):
    """A DecodeLoop over the same store, with a model that does nothing; W = 1."""

    def __init__(self, rows: int, width: int, *, pools: int, is_changing: bool) -> None:
        super().__init__(rows, width, pools=pools, is_changing=is_changing)
        self.loop = DecodeLoop(self.store, IdleModel())

    def begin(self, sequence: pk.Sequence, tokens: int) -> None:
        """Prefill a prompt."""
        self.loop.prefill(sequence, np.zeros(tokens, np.int32))

    def step(self) -> None:
        """One step of the loop."""
        self.loop.step(self.choose(self.sequences) if self.is_changing else self.sequences)


class SchedulerSubject(StoreSubject):
    """A Scheduler over the same store, with a model that does nothing; W = 1.

    With a changing batch every step cancels the oldest request, takes another one of one token in, and writes its
    prompt.
    """

    def __init__(self, rows: int, width: int, *, pools: int, is_changing: bool) -> None:
        super().__init__(rows, width, pools=pools, is_changing=is_changing)
        self.rows = rows
        self.scheduler = Scheduler(self.store, IdleModel(), step_tokens=1 << 20)
        self.requests: list[Request] = []

    def restart(self) -> None:
        """Submit requests, and take the step that writes their prompts."""
        for request in self.requests:
            self.scheduler.cancel(request)
        self.requests = [
            self.scheduler.submit(np.zeros(tokens, np.int32), self.config.max_context - tokens)
            for tokens in self.first_tokens[: self.rows]
        ]
        self.scheduler.step()

    def step(self) -> None:
        """One step of the scheduler."""
        if self.is_changing:
            self.scheduler.cancel(self.requests.pop(0))
            self.requests.append(self.scheduler.submit(ONE_TOKEN, self.config.max_context - 1))
        self.scheduler.step()


SUBJECTS: dict[str, Callable[..., Subject]] = {
    "ledger": LedgerSubject, "store": StoreSubject, "journaled": JournaledSubject, "loop": LoopSubject,
    "scheduler": SchedulerSubject,
}


def next_of(items: list[Int32]) -> Int32:
    """Return the items in turn."""
    items.append(items.pop(0))
    return items[-1]


@dataclass(frozen=True)
class StepFigure:
    """A subject's step beside the floor's; microseconds of thread CPU time, medians of chunks unless named else.

    `ratio` is us / floor_us; `loop_ratio` is the scheduler's us by the loop's, None for others.
    `preallocated_us` is the floor with preallocated outputs.  `wall_us` and
    `floor_wall_us` are by the clock.
    """

    subject: str
    rows: int
    width: int
    pools: int
    composition: str
    us: float
    us_mean: float
    us_p95: float
    floor_us: float
    ratio: float
    preallocated_us: float
    wall_us: float
    floor_wall_us: float
    loop_ratio: float | None = None


def chunk_us(step: Callable[[], None]) -> tuple[float, float]:
    """Return microseconds of thread CPU time and of wall time of one step, over one chunk."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in itertools.repeat(None, CHUNK_STEPS):
        step()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    return cpu / CHUNK_STEPS / 1000, wall / CHUNK_STEPS / 1000


def time_subject(
    name: str, rows: int, width: int = 1, *, pools: int = 1, is_changing: bool = False, chunks: int,
    subject: Steps | None = None,
) -> StepFigure:
    """Time a subject in chunks that alternate with the floor; the first tenth warms up.  The collector is off.

    Args:
        subject: what has that name; None makes the one of SUBJECTS.
    """
    subject = subject or SUBJECTS[name](rows, width, pools=pools, is_changing=is_changing)
    floor = Floor(rows)
    own, bare, preallocated = [], [], []
    gc.collect()
    gc.disable()
    try:
        for chunk in range(chunks + chunks // 10 + 1):
            if chunk % 100 == 0:
                floor.reset(1)
            subject.make_ready()
            own.append(chunk_us(subject.step))
            bare.append(chunk_us(floor.step))
            preallocated.append(chunk_us(floor.preallocated_step)[0])
            if floor.top < 3 * CHUNK_STEPS * rows or int(floor.mapped.max()) > BLOCKS - 4:
                floor.reset(1)
    finally:
        gc.enable()
    own, bare, preallocated = own[-chunks:], bare[-chunks:], preallocated[-chunks:]
    cpu, floor_us = [us for us, _ in own], statistics.median(us for us, _ in bare)
    return StepFigure(
        name, rows, width, pools, "changing" if is_changing else "fixed", statistics.median(cpu), statistics.fmean(cpu),
        float(np.quantile(cpu, 0.95)), floor_us, statistics.median(cpu) / floor_us, statistics.median(preallocated),
        statistics.median(us for _, us in own), statistics.median(us for _, us in bare),
    )


def bench_step(
    *, rows: tuple[int, ...] = ROWS, widths: tuple[int, ...] = WIDTHS, chunks: int = 100,
    progress: Callable[[str], None] = lambda _: None,
) -> list[StepFigure]:
    """Time every subject: one pool and two, with a fixed batch and with another batch at every step.

    Args:
        rows, widths: B and W of the units.
        chunks: of 32 steps, per figure.
        progress: called with the name of what is timed next.
    """
    figures = []
    for width, name, pools, is_changing, count in itertools.product(widths, SUBJECTS, (1, 2), (False, True), rows):
        if name in ("loop", "scheduler") and (width > 1 or pools > 1):
            continue  # a loop decodes one column of Main
        if name == "journaled" and (pools > 1 or is_changing):
            continue  # to compare with the steady store
        progress(f"{name}, {count} rows, W = {width}")
        figures.append(time_subject(name, count, width, pools=pools, is_changing=is_changing, chunks=chunks))
    return [_beside_the_loop(figure, figures) for figure in figures]


def _beside_the_loop(figure: StepFigure, figures: list[StepFigure]) -> StepFigure:
    """Return a figure of the scheduler with its ratio to the loop's; others as they are."""
    loops = [one.us for one in figures if one.subject == "loop" and one.rows == figure.rows
             and one.composition == figure.composition]
    return replace(figure, loop_ratio=figure.us / loops[0]) if figure.subject == "scheduler" and loops else figure


def report(figures: list[StepFigure]) -> dict[str, Any]:
    """Return the JSON object of the command."""
    return {
        "schema": 1,
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "chunk_steps": CHUNK_STEPS,
        "steps": [{name: round(value, 3) if isinstance(value, float) else value
                   for name, value in asdict(figure).items()} for figure in figures],
    }


def print_table(figures: list[StepFigure]) -> None:
    """Print one line per figure."""
    width = max((8, *(len(figure.subject) + 1 for figure in figures)))
    click.echo(f"{'subject':<{width}}{'rows':>5}{'W':>3}{'pools':>6} {'batch':<9}{'us':>8}{'mean':>8}{'p95':>8}"
               f"{'floor':>7}{'ratio':>7}{'prealloc':>9}{'wall':>8}{'x loop':>8}")
    for f in figures:
        click.echo(f"{f.subject:<{width}}{f.rows:>5}{f.width:>3}{f.pools:>6} {f.composition:<9}{f.us:>8.1f}"
                   f"{f.us_mean:>8.1f}{f.us_p95:>8.1f}{f.floor_us:>7.1f}{f.ratio:>7.2f}"
                   f"{f.preallocated_us:>9.1f}{f.wall_us:>8.1f}"
                   + ("" if f.loop_ratio is None else f"{f.loop_ratio:>8.2f}"))


def read_numbers(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:  # noqa: ARG001 - click
    """Read "1,8,64" as numbers of at least 1."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise click.BadParameter("pass numbers of at least 1, with commas between them")
    return numbers


@click.command()
@json_option
@click.option("--rows", default="1,8,64,256", show_default=True, callback=read_numbers, help="Rows of the batch.")
@click.option("--width", "widths", default="1,4", show_default=True, callback=read_numbers, help="Columns of each row.")
@click.option("--chunks", type=positive, default=100, show_default=True, help="Chunks of 32 steps per figure.")
def command(as_json: bool, rows: tuple[int, ...], widths: tuple[int, ...], chunks: int) -> None:
    """Time the host's part of a decode step, beside the bare NumPy work.

    Ledger, store, journaled store, decode loop and scheduler, each with its ratio to the floor, on a device that only
    counts: microseconds of thread CPU time, one pool and two, with a fixed batch and with a batch that changes at every
    step.  The floor is that NumPy work; prealloc is the floor with outputs that are allocated before; wall is elapsed
    time.
    """
    figures = bench_step(rows=rows, widths=widths, chunks=chunks, progress=progress_line)
    progress_line("")
    if as_json:
        click.echo(dumps(report(figures)))
    else:
        print_table(figures)
    say(f"microseconds of a step: medians of {chunks} chunks of {CHUNK_STEPS} steps that alternate with the floor's")
