"""Replay of a trace: requests in the order of the file, so many at a time, through a scheduler with `LeastRecent`.

A turn of a conversation waits until the turn before has ended; others come meanwhile.

Without kernels the store is on no device: ledgers, tables and policy run at full speed, and every output is zeros.
With kernels a small model appends and attends on a real device; its tokens depend on every bit that its attention read,
and some outputs are computed again alone, in a store that shares nothing.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import pagedkv as pk
from pagedkv.graphs import LeastRecent, Output, Request, Scheduler, Unit
from pagedkv.tools.trace.trace_file import TOKENS_END, Int32, Trace, TraceRequest

SAMPLES = 512
"""Points of a picture; where there are more, every second one goes."""

HELD_MAX = 4096
"""Most turns that wait for the turn before."""

LEASE_WINDOW_TOKENS = 64
"""With lease growth; a window is a page."""

CHUNK_TOKENS = 8192
HASH_ROWS = 257


@dataclass(frozen=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes:
        concurrency: rows.
        device_pages: of the pool, or None: for every row and the retained tokens.
        retained_tokens: beyond what the rows can use, or None: every text of the trace.
        host_bytes: of the Host arena.
        grows: lease growth.
        device: "none", or a device on which kernels run.
        check_every: with kernels, every so many requests are computed again alone.
    """

    concurrency: int
    device_pages: int | None = None
    retained_tokens: int | None = None
    host_bytes: int = 0
    grows: bool = False
    device: str = "none"
    check_every: int = 20


@dataclass
class Sample:
    """The state of a moment: requests that were submitted, and what is in use."""

    requests: int
    pages: int
    active_pages: int
    host_bytes: int
    waiting: int


@dataclass
class Replay:
    """The result of a replay; `figures` is the report without its schema."""

    figures: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    lost: str = ""


class NoModel:
    """A model that enqueues nothing."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue nothing: on no device every token is 0."""


class HashModel:
    """One layer of attention over rows that a hash of token and position picks; the token is a hash of its bits."""

    def __init__(self, store: pk.Store) -> None:
        self._geometry = geometry = store.config.geometry
        random = np.random.default_rng(7)
        self._tables = []
        for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads):
            bits = pk.codecs.f32_to_bf16(random.standard_normal((HASH_ROWS, heads, geometry.head_dim), np.float32))
            table = store.device.empty(bits.shape, np.uint16)
            store.device.copy(table, bits, store.stream)
            self._tables.append(table)
        store.stream.synchronize()

    def enqueue(self, unit: Unit) -> None:
        """Enqueue append and attention."""
        rows, geometry = (unit.batch, unit.width), self._geometry
        q, out = (unit.empty((*rows, geometry.query_heads, geometry.head_dim), np.uint16) for _ in range(2))
        k, v = (unit.empty((*rows, geometry.kv_heads, geometry.head_dim), np.uint16) for _ in range(2))
        unit.call(pick_rows, unit.tokens, unit.first_positions, *self._tables, q, k, v)
        unit.attend(0, q, k, v, out)
        unit.call(pick_tokens, out, unit.next_tokens)


def pick_rows(
    tokens: Any, first_positions: Any, q_table: Any, k_table: Any, v_table: Any, q: Any, k: Any, v: Any
) -> None:
    """Fill q, k and v with the rows of a hash of token and position."""
    positions = first_positions[:, None] + np.arange(tokens.shape[1], like=tokens)
    index = (tokens.astype(np.int64) * 7919 + positions * 104729) % HASH_ROWS
    q[...] = q_table[index]
    k[...] = k_table[(index * 3 + 1) % HASH_ROWS]
    v[...] = v_table[(index * 5 + 2) % HASH_ROWS]


def pick_tokens(out: Any, next_tokens: Any) -> None:
    """Sample a hash of the bits of the attention output, from `TOKENS_END` on: no prompt has such a token."""
    bits = out.reshape(*out.shape[:2], -1).astype(np.int64)
    weights = np.arange(bits.shape[-1], like=bits) * 2 + 1
    next_tokens[...] = TOKENS_END + (bits * weights).sum(axis=-1) % 1009


def replay(trace: Trace, options: ReplayOptions, *, progress: Callable[[int], None] = lambda _: None) -> Replay:
    """Replay a trace; `progress` gets the number of requests that have ended.

    Raises:
        ConfigError: pages or bytes outside their range.
    """
    config = config_of(trace, options)
    has_kernels, retention = options.device != "none", LeastRecent()
    columns = None if has_kernels else CHUNK_TOKENS  # without kernels a wide unit costs what a narrow one does
    result = Replay({})
    with pk.open_store(config, options.device) as store:
        scheduler = Scheduler(store, HashModel(store) if has_kernels else NoModel(), retention=retention,
                              step_tokens=columns, prefill_chunk=columns, overcommits=options.grows)
        run = _Run(scheduler, trace, options, result)
        run.serve(progress)
        events = store.event_counts()["main"]
        result.figures = {
            **run.figures(), **vars(retention.counters), "restored_pages": events["restore"]["pages"],
            **{f"host_{name}": value for name, value in store.host_summary().items()},
            "peak_pages": scheduler.statistics.pages_most, "pages": config.main_pages,
        }
        retention.release_all(store)
        result.lost = lost_of(store)
    if has_kernels:
        result.figures |= run.check_alone(config)
    return result


def config_of(trace: Trace, options: ReplayOptions) -> pk.StoreConfig:
    """Return the configuration of a replay: a context for the longest request, and the pages that were asked for."""
    context = trace.tokens_most
    blocks = -(-context // pk.PAGE_TOKENS)
    # Every text ends inside a page of its own, and a fork begins with another.
    every_text = trace.text_tokens + 2 * pk.PAGE_TOKENS * len(trace.requests)
    retained = every_text if options.retained_tokens is None else options.retained_tokens
    rows_pages = options.concurrency * blocks
    pages = options.device_pages or rows_pages + -(-retained // pk.PAGE_TOKENS)
    heads, head_dim = (2, 64) if options.device != "none" else (1, 16)
    return pk.StoreConfig(
        pk.KVGeometry(layers=1, query_heads=heads, kv_heads=1, head_dim=head_dim), profile="bf16", max_context=context,
        max_concurrency=options.concurrency, kv_capacity=pk.ExplicitCapacity(max(pages * pk.PAGE_TOKENS, context)),
        retained_tokens=max(retained, max(pages - rows_pages, 0) * pk.PAGE_TOKENS), host_arena_bytes=options.host_bytes,
        kv_lease_growth=options.grows, lease_window_tokens=LEASE_WINDOW_TOKENS,
        prefill_columns_max=1024 if options.device != "none" else CHUNK_TOKENS,
    )


def lost_of(store: pk.Store) -> str:
    """Say what is not free when everything has ended; "" if nothing is."""
    store.check()
    now = store.inspect()
    counts = {"rows": len(now.active_rows), "units": len(now.units_in_flight), "continuations": len(now.continuations),
              "bytes on the Host": store.host_summary()["used_bytes"]}
    for name, pool in now.pools.items():
        counts |= {f"pages of {name}": pool.capacity - pool.available,
                   f"descriptors of {name}": int(np.count_nonzero(pool.serial)),
                   f"pins of {name}": int(pool.pins.sum())}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


class _Turn(NamedTuple):
    """A request of a trace: its number, from 0, its line and the token ids of its prompt."""

    number: int
    request: TraceRequest
    ids: Int32


class _Arrivals:
    """The requests of a trace in its order; a turn comes when the turn before has ended."""

    def __init__(self, trace: Trace) -> None:
        self._before = trace.turns_before()
        self._unended = set(range(len(self._before)))
        self._lines = enumerate(zip(trace.requests, trace.prompts(), strict=True))
        self._held: dict[int, list[_Turn]] = {}  # by the turn that they wait for
        self._held_count = 0
        self._ready: list[_Turn] = []  # a heap: held once, and first now

    def next(self) -> _Turn | None:
        """Return the first request that may come, or None while there is none."""
        while not self._ready and self._held_count < HELD_MAX:
            line = next(self._lines, None)
            if line is None:
                return None
            number, (request, ids) = line
            turn, before = _Turn(number, request, ids), self._before[number]
            if before not in self._unended:
                return turn
            self._held.setdefault(before, []).append(turn)
            self._held_count += 1
        return heapq.heappop(self._ready) if self._ready else None

    def end(self, number: int) -> None:
        """Note that a request has ended: the turns that waited for it may come."""
        self._unended.discard(number)
        for turn in self._held.pop(number, ()):
            heapq.heappush(self._ready, turn)
            self._held_count -= 1


class _Run:
    """Submits the requests of a trace, steps, and measures."""

    def __init__(self, scheduler: Scheduler, trace: Trace, options: ReplayOptions, result: Replay) -> None:
        self.scheduler = scheduler
        self.trace = trace
        self.options = options
        self.result = result
        self.bounded = self.prompt_tokens = self.output_tokens = self.ended = self.refused_steps = 0
        self.host_peak_bytes = 0
        self.steps_ns: list[int] = []  # of steps in which nobody came or left
        self.other_ns = self.other_steps = 0
        self.sampled: list[tuple[Int32, int, list[int]]] = []
        self._every = 1

    def serve(self, progress: Callable[[int], None]) -> None:
        """Submit requests as earlier ones end, and step until all have ended."""
        scheduler, arrivals, count = self.scheduler, _Arrivals(self.trace), len(self.trace.requests)
        open_requests: dict[Output, tuple[int, Request]] = {}
        begin, cpu = time.perf_counter(), time.thread_time()
        submitted, running = 0, 0
        while self.ended < count:
            while len(open_requests) < self.options.concurrency and (turn := arrivals.next()) is not None:
                one = scheduler.submit(turn.ids, max(turn.request.output_tokens, 1))
                open_requests[one.outputs[0]] = turn.number, one
                self.prompt_tokens += turn.ids.size
                submitted += 1
            before, is_busy = time.thread_time_ns(), len(open_requests) > running
            answer = scheduler.step()
            spent, running = time.thread_time_ns() - before, len(answer)
            if is_busy or answer.ended:
                self.other_ns += spent
                self.other_steps += 1
            else:
                self.steps_ns.append(spent)
            self.refused_steps += is_busy and scheduler.statistics.waiting > 0
            for output in answer.ended:
                number, one = open_requests.pop(output)
                arrivals.end(number)
                self._end(one)
            if answer.ended:
                progress(self.ended)
                self._sample(submitted)
        self.seconds, self.cpu_seconds = time.perf_counter() - begin, time.thread_time() - cpu

    def figures(self) -> dict[str, Any]:
        """Return what was served, and what it took."""
        quiet = float(np.median(self.steps_ns)) if self.steps_ns else 0.0
        admission = max(self.other_ns - self.other_steps * quiet, 0.0) / max(self.ended, 1)
        counters = self.scheduler.retention.counters if isinstance(self.scheduler.retention, LeastRecent) else None
        reused = counters.reused_tokens if counters is not None else 0
        return {
            "requests": self.ended, "skipped": self.trace.skipped, "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens, "reused_share": round(reused / max(self.prompt_tokens, 1), 4),
            "bounded_completions": self.bounded, "steps": self.scheduler.steps,
            "refused_steps": self.refused_steps, "seconds": round(self.seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 2), "requests_per_second": round(self.ended / self.seconds, 1),
            "us_per_step": round(quiet / 1000, 1),
            "us_per_request": round(admission / 1000, 1), "host_peak_bytes": self.host_peak_bytes,
        }

    def check_alone(self, config: pk.StoreConfig) -> dict[str, int]:
        """Compute sampled outputs again in a store that keeps nothing; return how many, and how many differ."""
        different = 0
        with pk.open_store(config, self.options.device) as store:
            alone = Scheduler(store, HashModel(store))
            for ids, count, tokens in self.sampled:
                request = alone.submit(ids, count)
                while not alone.is_idle:
                    alone.step()
                different += request.outputs[0].tokens[: len(tokens)] != tokens
        return {"checked_outputs": len(self.sampled), "different_outputs": different}

    def _end(self, request: Request) -> None:
        (output,) = request.outputs
        tokens = output.tokens
        self.ended += 1
        self.output_tokens += len(tokens)
        self.bounded += len(tokens) < request.max_new_tokens
        if self.options.device != "none" and request.number % self.options.check_every == 0:
            self.sampled.append((request.prompt_ids, request.max_new_tokens, tokens))

    def _sample(self, submitted: int) -> None:
        """Note the state of this moment; with many of them, of every second, fourth, ... end of a request."""
        samples, host_bytes = self.result.samples, self.scheduler.store.host_summary()["used_bytes"]
        self.host_peak_bytes = max(self.host_peak_bytes, host_bytes)
        if self.ended % self._every:
            return
        store, memory = self.scheduler.store, self.scheduler.store.memory_summary()["main"]
        used = memory["capacity_pages"] - memory["available_pages"]
        active = memory["reserved_pages"] + sum(-(-store.committed_tokens(one) // pk.PAGE_TOKENS)
                                                for one in store.sequences())
        samples.append(Sample(submitted, used, min(active, used), host_bytes, self.scheduler.statistics.waiting))
        if len(samples) >= 2 * SAMPLES:
            del samples[::2]
            self._every *= 2
