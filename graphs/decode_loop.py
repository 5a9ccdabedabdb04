"""DecodeLoop: prefill in chunks, then batched decode, one graph replay a step.

    loop = DecodeLoop(store, model)
    loop.prefill(sequence, prompt_ids)
    for tokens in loop.decode([sequence]):       # {sequence: new tokens}
        ...

A step: extend the leases that are nearly used up (`begin_round`, with lease growth), map and publish the
column each row will write (`begin_unit`), write the selectors, replay, wait, commit.  The first token is
sampled by prefill and delivered with the first step; the last one is never written to the cache.  Stop
tokens and lengths are the loop's business, sampling is the model's (C1.2, C14).  A row whose next column
no lease covers ends with reason "length" where it stands (C9.2).

What the loop knows of a sequence it keeps until `forget`, or until another sequence of the same row is prefilled or
resumed: never more than `max_concurrency` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import nvtx

import pagedkv as pk
from pagedkv.graphs.cache import GraphCache
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.key import key_for
from pagedkv.graphs.shapes import PREFILL_WIDTH_MIN, batch_shape, prefill_width
from pagedkv.graphs.unit import Model

FinishReason = Literal["stop", "length"]

PREFILL_CHUNK = 128


@dataclass
class LoopStatistics:
    """What a loop did; counters only grow.

    `decode_driver_calls` counts the device calls of decode steps: publication, replay and wait.  What captures a new
    shape, and what the caller does between two steps, is not counted.
    """

    decode_steps: int = 0
    decode_driver_calls: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0

    @property
    def driver_calls_per_step(self) -> float:
        """Mean device calls of a decode step; 0 before the first."""
        return self.decode_driver_calls / self.decode_steps if self.decode_steps else 0.0


@dataclass
class _Progress:
    """Where one sequence stands; written by the loop alone.

    `last_token` is sampled and not yet in the cache; `undelivered` waits for the next step.
    """

    tokens_left: int
    last_token: int
    undelivered: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class DecodeLoop:
    """Drives a model over a store's sequences.

    Args:
        store: an open store.
        model: an object, what `Model` says; it is called to warm up and to capture each shape.
        prefill_chunk: most tokens of one prefill unit, 16 to the store's `prefill_columns_max`; None is 128, or that
            if less.
        use_graphs: False enqueues every unit eagerly; results are the same, bit for bit (C14.6).

    Attributes:
        graphs: the captured units, with their replays.
        statistics: what was done so far; written by the loop alone.

    Raises:
        ConfigError: `prefill_chunk` is out of range.
        MisuseError: no store, or a model that cannot be enqueued, such as its class.
    """

    def __init__(
        self, store: pk.Store, model: Model, *, prefill_chunk: int | None = None, use_graphs: bool = True
    ) -> None:
        if isinstance(model, type):
            raise pk.MisuseError("a decode loop", expected="a model, which is an object with enqueue(unit)",
                                 got=f"the class {model.__name__}", remedy="make one of the class and pass that",
                                 clause="C15")
        if not isinstance(store, pk.Store) or not callable(getattr(model, "enqueue", None)):
            raise pk.MisuseError("a decode loop", expected="an open Store, and a model with enqueue(unit)",
                                 got=f"{type(store).__name__} and {type(model).__name__}",
                                 remedy="pass what open_store returned and a Model", clause="C15")
        planned = store.config.prefill_columns_max
        if prefill_chunk is None:
            prefill_chunk = min(PREFILL_CHUNK, planned)
        if type(prefill_chunk) is not int or not PREFILL_WIDTH_MIN <= prefill_chunk <= planned:
            raise pk.ConfigError("prefill_chunk", expected=f"an integer from {PREFILL_WIDTH_MIN} to {planned}",
                                 got=repr(prefill_chunk), remedy="choose such a chunk, or raise prefill_columns_max",
                                 clause="C14.4")
        self.store = store
        self.prefill_chunk = prefill_chunk
        self.graphs = GraphCache(store, model, use_graphs=use_graphs)
        self.statistics = LoopStatistics()
        self._progress: dict[pk.Sequence, _Progress] = {}
        self._batch: pk.Batch | None = None

    def prefill(self, sequence: pk.Sequence, prompt_ids: Iterable[int]) -> None:
        """Write a prompt into the cache and sample the first token, delivered by the first step.

        Args:
            sequence: active; its committed frontier is where the prompt goes.
            prompt_ids: token ids; at least one, and within the activated budget.  What they leave of it is for output,
                also where that is more than `output_tokens` of the activation.  With lease growth they lie within what
                is reserved by now, as the activated prompt does.

        Raises:
            MisuseError: no token, more than the budget holds, or ids that are no int32 of 0 or more.

        Whatever is raised, by the model too, the committed frontier is where it was.
        """
        ids = _token_ids("a prompt", prompt_ids)
        start = self.store.committed_tokens(sequence)
        budget = self.store.budget_tokens(sequence)
        if not 1 <= ids.size <= budget - start:
            raise pk.MisuseError(
                f"a prompt of {ids.size} tokens for {sequence}",
                expected=f"1 to {budget - start} token ids (activated for {budget}, {start} written)",
                got=f"{ids.size}", remedy="activate with the prompt's length", clause="C9.2",
            )
        batch = self.store.batch([sequence])
        covered = int(self.store.covered_columns(batch)[0])
        if ids.size > covered:
            raise pk.MisuseError(
                f"a prompt of {ids.size} tokens for {sequence}",
                expected=f"at most {covered} tokens, which are reserved", got=f"{ids.size}",
                remedy="activate with the prompt's length: leases grow with decoding only",
                clause="C9.2",
            )
        try:
            sampled = self._prefill_chunks(batch, ids)
        except BaseException:
            self._take_back(batch, [start])
            raise
        self.statistics.prefilled_tokens += ids.size
        left = budget - start - ids.size
        progress = _Progress(tokens_left=left, last_token=sampled)
        if left:
            self._deliver(progress, sampled, frozenset())
        else:
            progress.reason = "length"
        self._keep(sequence, progress)

    def last_token(self, sequence: pk.Sequence) -> int:
        """Return the token that was sampled last and is not in the cache: what `resume` goes on from.

        With the pages it is the whole state of a model that keeps none of its own: a handle for `store.finish` and
        `store.snapshot` (C2.2).

        Raises:
            MisuseError: a sequence that this loop does not know.
        """
        return self._progress_of(sequence).last_token

    def resume(self, sequence: pk.Sequence, last_token: int) -> None:
        """Go on decoding a sequence that was activated from a continuation, as if it had never stopped.  (C10.4)

        The token is written by the first step, in the decode route, as it would have been without the stop: `prefill`
        of one token is the other route, and equal to it by the criterion of codecs 7 only (C14.6).

        Args:
            sequence: active, with something committed.
            last_token: sampled after the last committed token, and delivered by whoever sampled it.

        Raises:
            MisuseError: no token id, nothing committed, or no token left in the activated budget.
        """
        (token,) = _token_ids("the token to go on from", [last_token]).tolist()
        committed, budget = self.store.committed_tokens(sequence), self.store.budget_tokens(sequence)
        if not 1 <= committed < budget:
            raise pk.MisuseError(f"going on with {sequence}", expected=f"1 to {budget - 1} committed tokens",
                                 got=f"{committed} of a budget of {budget}",
                                 remedy="activate from a continuation, with room for the token", clause="C9.2")
        progress = _Progress(tokens_left=budget - committed - 1, last_token=token)
        self._stop_at_pending(progress, frozenset())
        self._keep(sequence, progress)

    def step(
        self, sequences: Iterable[pk.Sequence], *, stop_tokens: Iterable[int] = ()
    ) -> dict[pk.Sequence, list[int]]:
        """Advance every unfinished sequence by one token, in one replay.

        Returns:
            New tokens of each sequence that got any, the first one of its prefill included.  A stop
            token is delivered, and ends its sequence; so does the activated budget, and with lease growth the end of
            what the pool could reserve for it.

        Raises:
            MisuseError: a sequence that this loop does not know, one named twice, stop tokens that are no ids, or
                a model that sampled a negative id; nothing was delivered, and no frontier moved.
            StaleHandle: a sequence that runs here still was finished in the store; nothing was delivered.  One that
                has ended here may be named, finished or not: it gets what is undelivered, then nothing.
        """
        return self._step(self._named(sequences), _stop_ids(stop_tokens))

    def _step(self, named: tuple[pk.Sequence, ...], stops: frozenset[int]) -> dict[pk.Sequence, list[int]]:
        for progress in [self._progress_of(sequence) for sequence in named]:
            self._stop_at_pending(progress, stops)
        running = tuple(sequence for sequence in named if self._progress[sequence].reason is None)
        if running and self.store.config.kv_lease_growth:
            running = self._covered(running)
        if running:
            self._decode(running, stops)
        delivered = {}
        for sequence in named:
            progress = self._progress[sequence]
            if progress.undelivered:
                delivered[sequence] = progress.undelivered
                progress.undelivered = []
        self.statistics.decoded_tokens += sum(len(tokens) for tokens in delivered.values())
        return delivered

    def decode(
        self, sequences: Iterable[pk.Sequence], *, stop_tokens: Iterable[int] = ()
    ) -> Iterator[dict[pk.Sequence, list[int]]]:
        """Step until every sequence has ended; yields {sequence: new tokens} after each step.

        Between two steps the caller may finish and forget what has ended, and prefill others in its row.

        Raises:
            MisuseError, StaleHandle: as `step`; what is wrong with the arguments is said at once.
        """
        return self._decode_all(self._named(sequences), _stop_ids(stop_tokens))

    def _decode_all(
        self, named: tuple[pk.Sequence, ...], stops: frozenset[int]
    ) -> Iterator[dict[pk.Sequence, list[int]]]:
        while tokens := self._step(named, stops):
            named = tuple(sequence for sequence in named if self._progress[sequence].reason is None)
            yield tokens

    def finish_reason(self, sequence: pk.Sequence) -> FinishReason | None:
        """Return why the sequence ended: "stop", "length", or None while it runs.

        Raises:
            MisuseError: a sequence that this loop does not know.
        """
        return self._progress_of(sequence).reason

    def forget(self, sequence: pk.Sequence) -> None:
        """Drop what the loop knows of a sequence, before or after the store finishes it.

        Who never calls it loses nothing: the next sequence of the same row drops it too.
        """
        self._progress.pop(sequence, None)

    def _keep(self, sequence: pk.Sequence, progress: _Progress) -> None:
        """Know a sequence from here on, and none that had its row before: the store has ended those."""
        for earlier in [known for known in self._progress if known.row == sequence.row]:
            del self._progress[earlier]
        self._progress[sequence] = progress

    def _decode(self, running: tuple[pk.Sequence, ...], stops: frozenset[int]) -> None:
        calls_before = self.store.device.driver_calls
        batch = self._select(running)
        shape = batch_shape(len(running), concurrency=self.store.config.max_concurrency)
        key = key_for(self.store.config, unit="decode", route="decode", batch=shape, width=1)
        captured = self.graphs.unit(key)
        if captured.replays == 0:
            calls_before = self.store.device.driver_calls
        tokens = np.array([[self._progress[sequence].last_token] for sequence in running], np.int32)
        with nvtx.annotate("pagedkv.decode", domain="pagedkv"):
            sampled = self._run(captured, batch, 1, tokens)
        for sequence, token in zip(running, sampled.tolist(), strict=True):
            self._deliver(self._progress[sequence], token, stops)
        self.statistics.decode_steps += 1
        self.statistics.decode_driver_calls += self.store.device.driver_calls - calls_before

    def _select(self, running: tuple[pk.Sequence, ...]) -> pk.Batch:
        if self._batch is None or self._batch.sequences != running:
            self._batch = self.store.batch(running)
        return self._batch

    def _covered(self, running: tuple[pk.Sequence, ...]) -> tuple[pk.Sequence, ...]:
        """Extend leases; end the rows whose next column none covers, and return the others.  (C9.2, C16.17)"""
        unextended = self.store.begin_round(self._select(running))
        if not unextended:
            return running
        columns = self.store.covered_columns(self.store.batch(unextended)).tolist()
        ended = {sequence for sequence, covered in zip(unextended, columns, strict=True) if not covered}
        for sequence in ended:
            self._progress[sequence].reason = "length"
        return tuple(sequence for sequence in running if sequence not in ended)

    def _run(
        self, captured: UnitGraph, batch: pk.Batch, columns: int, tokens: np.ndarray
    ) -> np.ndarray:
        """Run one unit over a batch: map, publish, select, replay, wait, commit.

        Returns:
            (b,) int32: the token sampled after the last live column of each entry.
        """
        unit = self.store.begin_unit(batch, columns, name=captured.unit.key.unit)
        first_positions = unit.first_positions["main"]
        try:
            captured.unit.control.write(batch.rows, unit.first_positions["main"], unit.columns["main"], tokens)
            captured.run()
            self.store.wait(unit)
            sampled = _sampled(captured, len(batch), columns)
            self.store.commit(unit)
        except BaseException:
            if self.store.evidence is None and unit.is_open:
                self.store.fail(unit)
            self._take_back(batch, first_positions.tolist())
            raise
        return sampled

    def _prefill_chunks(self, batch: pk.Batch, ids: npt.NDArray[np.int32]) -> int:
        """Write a prompt chunk by chunk; returns the token sampled after its last one."""
        sampled = 0
        for first in range(0, ids.size, self.prefill_chunk):
            chunk = ids[first : first + self.prefill_chunk]
            width = prefill_width(chunk.size, chunk=self.prefill_chunk)
            key = key_for(self.store.config, unit="prefill", route="prefill", batch=1, width=width)
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : chunk.size] = chunk
            with nvtx.annotate("pagedkv.prefill", domain="pagedkv"):
                sampled = int(self._run(self.graphs.unit(key), batch, chunk.size, tokens)[0])
        return sampled

    def _take_back(self, batch: pk.Batch, frontiers: list[int]) -> None:
        """Set committed frontiers back after a failure, so that the same call may be made again.  (C9.10)"""
        if self.store.evidence is None:
            for sequence, frontier in zip(batch.sequences, frontiers, strict=True):
                if self.store.committed_tokens(sequence) > frontier:
                    self.store.truncate(sequence, frontier)

    def _named(self, sequences: Iterable[pk.Sequence]) -> tuple[pk.Sequence, ...]:
        """Return sequences, each known here and named once."""
        named = tuple(sequences) if isinstance(sequences, Iterable) else ()
        if not isinstance(sequences, Iterable) or not all(isinstance(sequence, pk.Sequence) for sequence in named) or (
            len(set(named)) != len(named)
        ):
            raise pk.MisuseError("a step", expected="sequences, each once", got=repr(sequences),
                                 remedy="pass a list of handles, of one sequence too", clause="C11.3")
        for sequence in named:
            self._progress_of(sequence)
        return named

    def _deliver(self, progress: _Progress, token: int, stops: frozenset[int]) -> None:
        progress.undelivered.append(token)
        progress.last_token = token
        progress.tokens_left -= 1
        self._stop_at_pending(progress, stops)

    def _stop_at_pending(self, progress: _Progress, stops: frozenset[int]) -> None:
        if progress.reason is None and progress.undelivered and progress.last_token in stops:
            progress.reason = "stop"
        elif progress.reason is None and progress.tokens_left == 0:
            progress.reason = "length"

    def _progress_of(self, sequence: pk.Sequence) -> _Progress:
        progress = self._progress.get(sequence) if isinstance(sequence, pk.Sequence) else None
        if progress is None:
            raise pk.MisuseError(f"decoding {sequence}", expected="a sequence that this loop has prefilled or resumed",
                                 got="one that it has not, or has forgotten, or whose row another sequence has",
                                 remedy="call prefill or resume first", clause="C9.4")
        return progress


def _token_ids(what: str, ids: Iterable[int]) -> npt.NDArray[np.int32]:
    """Return token ids as int32; nothing is converted that is not an id already.

    Raises:
        MisuseError: no iterable of integers, or an id below 0 or beyond int32.
    """
    given = list(ids) if isinstance(ids, Iterable) else [None]
    top = np.iinfo(np.int32).max
    for token in given:
        if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token <= top:
            raise pk.MisuseError(what, expected=f"integer token ids from 0 to {top}",
                                 got=repr(token) if isinstance(ids, Iterable) else repr(ids),
                                 remedy="pass what the tokenizer gave", clause="C14.4")
    return np.array(given, np.int32)


def _sampled(captured: UnitGraph, count: int, columns: int) -> npt.NDArray[np.int32]:
    """Return the token after the last live column of each entry, (b,) int32.

    Raises:
        MisuseError: a negative one: the model wrote it, or enqueued no write of it, as the first run of a shape shows.
    """
    sampled = captured.unit.control.read_next_tokens(count)[:, columns - 1]
    if (sampled < 0).any():
        raise pk.MisuseError(
            f"tokens sampled by {captured.unit.key}", expected="ids of 0 or more after live columns",
            got=sampled.tolist(), remedy="write next_tokens of every live column in the model", clause="C14.4",
        )
    return sampled


def _stop_ids(ids: Iterable[int]) -> frozenset[int]:
    return frozenset(_token_ids("stop_tokens", ids).tolist())
