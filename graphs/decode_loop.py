"""DecodeLoop: prefill in chunks, then batched decode, one graph replay a step.

    loop = DecodeLoop(store, model)
    loop.prefill(sequence, prompt_ids)
    for tokens in loop.decode([sequence]):       # {sequence: new tokens}
        ...

A step extends the leases that are nearly used up (`begin_round`, with lease growth), maps and publishes the column that
each row will write (`begin_unit`), writes the selectors, replays, waits and commits.  Prefill samples the first token
and the first step delivers it; the last token is never written to the cache.  The loop decides on stop tokens and
lengths, the model samples (C1.2, C14).  A row ends with reason "length" where no lease covers its next column and one
forced span (C9.2).

The loop remembers a sequence until `forget`, or until it prefills or resumes another sequence of the same row: at most
`max_concurrency` sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import nvtx

import pagedkv as pk
from pagedkv.graphs.cache import GraphCache
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.key import GraphKey, key_for
from pagedkv.graphs.shapes import PREFILL_WIDTH_MIN, batch_shape, prefill_width
from pagedkv.graphs.unit import Model

FinishReason = Literal["stop", "length"]
Int32 = npt.NDArray[np.int32]

PREFILL_CHUNK = 128


@dataclass
class LoopStatistics:
    """Counters of a loop; they only grow.

    `decode_driver_calls` counts the device calls of decode steps: publication, replay and wait.  It does not count the
    capture of a new shape, nor what the caller does between two steps.
    """

    decode_steps: int = 0
    decode_driver_calls: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0

    @property
    def driver_calls_per_step(self) -> float:
        """Mean device calls of a decode step; 0 before the first."""
        return self.decode_driver_calls / self.decode_steps if self.decode_steps else 0.0


class _Output(NamedTuple):
    """The output of one sequence; a value, so that a step replaces the outputs of all its rows at once.

    `last_token` is sampled and not yet in the cache; the next step delivers the tokens of `undelivered`.
    """

    tokens_left: int
    last_token: int
    undelivered: tuple[int, ...] = ()
    reason: FinishReason | None = None

    def with_token(self, token: int, stops: frozenset[int]) -> _Output:
        """Return the output with one more sampled token; a stop token or the end of the budget ends it."""
        left = self.tokens_left - 1
        reason: FinishReason | None = "stop" if token in stops else "length" if not left else None
        return _Output(left, token, (*self.undelivered, token), reason)


@dataclass(eq=False)
class _Pending:
    """A step or a prefill that has begun: if it is interrupted, it is taken back, at the latest by the next call.

    Attributes:
        batch: its rows.
        name: of its units.
        frontiers: committed tokens of each row before it; none until its first unit has begun.
    """

    batch: pk.Batch
    name: str
    frontiers: tuple[int, ...] = ()


class DecodeLoop:
    """Drives a model over a store's sequences.

    Args:
        store: an open store.
        model: an object with the methods of `Model`; the loop calls it to warm up and to capture each shape.
        prefill_chunk: most tokens of one prefill unit, 16 to the store's `prefill_columns_max`; None is 128, or that
            maximum if it is less.
        use_graphs: False enqueues every unit eagerly; results are the same, bit for bit (C14.6).

    Attributes:
        graphs: the graphs of all shapes so far, with their replays.
        statistics: counters; written by the loop alone.

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
        if not isinstance(store, pk.Store) or not pk.checks.has_method(model, "enqueue"):
            raise pk.MisuseError("a decode loop", expected="an open Store, and a model with enqueue(unit)",
                                 got=f"{type(store).__name__} and {type(model).__name__}",
                                 remedy="pass what open_store returned and a Model", clause="C15")
        chunk_max = store.config.prefill_columns_max
        if prefill_chunk is None:
            prefill_chunk = min(PREFILL_CHUNK, chunk_max)
        if type(prefill_chunk) is not int or not PREFILL_WIDTH_MIN <= prefill_chunk <= chunk_max:
            raise pk.ConfigError("prefill_chunk", expected=f"an integer from {PREFILL_WIDTH_MIN} to {chunk_max}",
                                 got=pk.checks.shown(prefill_chunk),
                                 remedy="choose such a chunk, or raise prefill_columns_max", clause="C14.4")
        self.store = store
        self.prefill_chunk = prefill_chunk
        self.graphs = GraphCache(store, model, use_graphs=use_graphs)
        self.statistics = LoopStatistics()
        self._outputs: dict[pk.Sequence, _Output] = {}
        self._selection: tuple[pk.Batch, GraphKey] | None = None
        self._pending: _Pending | None = None

    def prefill(self, sequence: pk.Sequence, prompt_ids: Iterable[int]) -> None:
        """Write a prompt into the cache and sample the first token; the first step delivers it.

        An error, also one that the model raises, leaves the committed frontier where it was.

        Args:
            sequence: active; the prompt begins at its committed frontier.
            prompt_ids: token ids, at least one, within the activated budget.  Output may use the rest of the budget,
                also where that is more than `output_tokens` of the activation.  With lease growth the prompt must lie
                within the reserved pages without the room for a forced span, as the activated prompt does.

        Raises:
            MisuseError: no token, more than the budget or the lease holds, or ids that are no int32 of 0 or more.
        """
        self._recover()
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
        covered = int(self.store.covered_columns(batch, forced=True)[0])
        if covered < budget - start:  # the lease may still grow: a prompt leaves the room for the forced span
            covered = int(self.store.covered_columns(batch)[0])
        if ids.size > covered:
            raise pk.MisuseError(
                f"a prompt of {ids.size} tokens for {sequence}",
                expected=f"at most {covered} tokens, which are reserved", got=f"{ids.size}",
                remedy="activate with the prompt's length: leases grow with decoding only", clause="C9.2",
            )
        self._pending = _Pending(batch, "prefill", (start,))
        try:
            first_token = self._prefill_chunks(batch, ids)
            left = budget - start - ids.size
            output = _Output(left, first_token, reason="length")
            if left:
                output = _Output(left, first_token).with_token(first_token, frozenset())
            self.statistics.prefilled_tokens += ids.size
            self._outputs, self._pending = self._outputs_with(sequence, output), None
        except BaseException as error:
            self._recover_after(error)
            raise

    def last_token(self, sequence: pk.Sequence) -> int:
        """Return the token that was sampled last and is not in the cache: `resume` continues from it.

        This token and the pages are the whole state of a model that has no state of its own; pass the token as the
        state of `store.finish` and `store.snapshot` (C2.2).

        Raises:
            MisuseError: a sequence that this loop does not know.
        """
        return self._output_of(sequence).last_token

    def resume(self, sequence: pk.Sequence, last_token: int) -> None:
        """Continue to decode a sequence that was activated from a continuation, as if it had never stopped.  (C10.4)

        The first step writes the token in the decode route, as it would have done without the stop.  `prefill` of one
        token uses the other route, which is equal by the criterion of codecs 7 only (C14.6).

        Args:
            sequence: active, with something committed.
            last_token: sampled after the last committed token, and delivered before.

        Raises:
            MisuseError: no token id, nothing committed, or no token left in the activated budget.
        """
        self._recover()
        (token,) = _token_ids("the token to go on from", [last_token]).tolist()
        committed, budget = self.store.committed_tokens(sequence), self.store.budget_tokens(sequence)
        if not 1 <= committed < budget:
            raise pk.MisuseError(f"going on with {sequence}", expected=f"1 to {budget - 1} committed tokens",
                                 got=f"{committed} of a budget of {budget}",
                                 remedy="activate from a continuation, with room for the token", clause="C9.2")
        left = budget - committed - 1
        self._outputs = self._outputs_with(sequence, _Output(left, token, reason=None if left else "length"))

    def step(
        self, sequences: Iterable[pk.Sequence], *, stop_tokens: Iterable[int] = ()
    ) -> dict[pk.Sequence, list[int]]:
        """Advance every unfinished sequence by one token, in one replay.

        A stop token is delivered and ends its sequence.  The end of the activated budget also ends it, and with lease
        growth the end of what the pool could reserve, where a forced span still fits.  A sequence that has ended may be
        named, finished in the store or not: it gets its undelivered tokens, then nothing.

        Returns:
            The new tokens of each sequence that got any, the first one of its prefill included.

        Raises:
            MisuseError: a sequence that this loop does not know, one named twice, stop tokens that are no ids, or
                a model that sampled a negative id; nothing was delivered, and no frontier moved.
            StaleHandle: a sequence that has not ended was finished in the store; nothing was delivered.
        """
        outputs = self._outputs_of(sequences)
        return self._hand_over(self._advance(outputs, frozenset(_token_ids("stop_tokens", stop_tokens).tolist())))

    def decode(
        self, sequences: Iterable[pk.Sequence], *, stop_tokens: Iterable[int] = ()
    ) -> Iterator[dict[pk.Sequence, list[int]]]:
        """Step until every sequence has ended; yield {sequence: new tokens} after each step.

        Between two steps the caller may finish and forget sequences that have ended, and prefill others in their rows.

        Raises:
            MisuseError, StaleHandle: as `step`; wrong arguments are refused at once.
        """
        outputs = self._outputs_of(sequences)
        return self._steps(outputs, frozenset(_token_ids("stop_tokens", stop_tokens).tolist()))

    def finish_reason(self, sequence: pk.Sequence) -> FinishReason | None:
        """Return why the sequence ended: "stop", "length", or None while it runs.

        Raises:
            MisuseError: a sequence that this loop does not know.
        """
        return self._output_of(sequence).reason

    def forget(self, sequence: pk.Sequence) -> None:
        """Forget a sequence, before or after the store finishes it.

        The call is optional: the loop also forgets a sequence when another one takes its row.
        """
        self._recover()
        if type(sequence) is pk.Sequence:
            self._outputs.pop(sequence, None)

    def _advance(self, outputs: dict[pk.Sequence, _Output], stops: frozenset[int]) -> dict[pk.Sequence, list[int]]:
        """Run one step and return the tokens to deliver, which stay undelivered in the outputs."""
        running = []
        for sequence, output in outputs.items():
            if output.reason is None and output.undelivered and output.last_token in stops:
                self._outputs[sequence] = output._replace(reason="stop")  # prefill sampled a stop token
            elif output.reason is None:
                running.append(sequence)
        if running and self.store.config.kv_lease_growth:
            running = self._extend_leases(running)
        if running:
            self._decode(running, stops)
        delivered = {sequence: list(self._outputs[sequence].undelivered) for sequence in outputs
                     if self._outputs[sequence].undelivered}  # fmt: skip
        self.statistics.decoded_tokens += sum(map(len, delivered.values()))
        return delivered

    def _hand_over(self, delivered: dict[pk.Sequence, list[int]]) -> dict[pk.Sequence, list[int]]:
        """Return tokens, which then count as delivered; after an interrupt they do not.

        A caller passes the answer on in the same statement, so that no interrupt comes in between.
        """
        before = self._outputs
        after = before | {sequence: before[sequence]._replace(undelivered=()) for sequence in delivered}
        try:
            self._outputs = after
            return delivered  # noqa: TRY300 - an interrupt before the caller has the tokens is an error too
        except BaseException:  # an interrupt: the caller has got nothing
            self._outputs = before
            raise

    def _steps(
        self, outputs: dict[pk.Sequence, _Output], stops: frozenset[int]
    ) -> Iterator[dict[pk.Sequence, list[int]]]:
        while delivered := self._advance(outputs, stops):
            running = [sequence for sequence in outputs if self._outputs[sequence].reason is None]
            yield self._hand_over(delivered)
            outputs = self._outputs_of(running)  # the caller may have forgotten one

    def _decode(self, running: list[pk.Sequence], stops: frozenset[int]) -> None:
        """Run one decode unit of the running sequences and add a token to the output of each."""
        batch, key = self._select(running)
        graph = self.graphs.unit(key)
        calls_before = self.store.device.driver_calls
        tokens = np.array([[self._outputs[sequence].last_token] for sequence in running], np.int32)
        self._pending = _Pending(batch, key.unit)
        try:
            with nvtx.annotate("pagedkv.decode", domain="pagedkv"):
                sampled = self._run(graph, batch, 1, tokens)
            new = zip(running, sampled.tolist(), strict=True)
            outputs = {sequence: self._outputs[sequence].with_token(token, stops) for sequence, token in new}
            self._outputs, self._pending = self._outputs | outputs, None
        except BaseException as error:
            self._recover_after(error)
            raise
        self.statistics.decode_steps += 1
        self.statistics.decode_driver_calls += self.store.device.driver_calls - calls_before

    def _select(self, running: list[pk.Sequence]) -> tuple[pk.Batch, GraphKey]:
        """Return the batch of the running sequences and the key of its graph, those of the last step if they fit."""
        if self._selection is None or self._selection[0].sequences != tuple(running):
            shape = batch_shape(len(running), concurrency=self.store.config.max_concurrency)
            key = key_for(self.store.config, unit="decode", route="decode", batch=shape, width=1)
            self._selection = self.store.batch(running), key
        return self._selection

    def _extend_leases(self, running: list[pk.Sequence]) -> list[pk.Sequence]:
        """Extend leases; end rows without one for their next column and a forced span; return the others.  (C9.2)"""
        unextended = self.store.begin_round(self._select(running)[0])
        if not unextended:
            return running
        columns = self.store.covered_columns(self.store.batch(unextended)).tolist()
        ended = {sequence for sequence, covered in zip(unextended, columns, strict=True) if not covered}
        for sequence in ended:
            self._outputs[sequence] = self._outputs[sequence]._replace(reason="length")
        return [sequence for sequence in running if sequence not in ended]

    def _run(self, graph: UnitGraph, batch: pk.Batch, columns: int, tokens: Int32) -> Int32:
        """Run one unit and commit it; return the token sampled after the last column of each entry, (b,)."""
        control = graph.unit.control
        unit = self.store.begin_unit(batch, columns, name=graph.unit.key.unit)
        first_positions = unit.first_positions["main"]
        if self._pending is not None and not self._pending.frontiers:
            self._pending.frontiers = tuple(first_positions.tolist())
        control.write(batch.rows, first_positions, columns, tokens)
        graph.run()
        self.store.wait(unit)
        sampled = control.read_next_tokens(len(batch.rows))[:, columns - 1]
        if sampled.min() < 0:
            _refuse_samples(graph.unit.key, sampled)
        self.store.commit(unit)
        return sampled

    def _prefill_chunks(self, batch: pk.Batch, ids: Int32) -> int:
        """Write a prompt chunk by chunk; return the token sampled after its last one."""
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

    def _recover_after(self, error: BaseException) -> None:
        """Recover from an error; what goes wrong meanwhile becomes a note of it, and the next call tries again."""
        try:
            self._recover()
        except (pk.PagedKVError, MemoryError) as second:
            error.add_note(f"and the loop could not take its step back: {second}")

    def _recover(self) -> None:
        """Take back a step or a prefill that was interrupted, so that the caller can repeat it.  (C9.10)

        A latched store is left alone: only closing remains.
        """
        pending = self._pending
        if pending is None or self.store.evidence is not None:
            return
        for unit in self.store.units():
            if unit.name == pending.name and unit.rows_mask & pending.batch.rows_mask:
                self.store.fail(unit)
        current = set(self.store.sequences())
        for sequence, frontier in zip(pending.batch.sequences, pending.frontiers, strict=False):
            if sequence in current and self.store.committed_tokens(sequence) > frontier:
                self.store.truncate(sequence, frontier)
        self._pending = None

    def _outputs_with(self, sequence: pk.Sequence, output: _Output) -> dict[pk.Sequence, _Output]:
        """Return the outputs with another one, without earlier sequences of its row, which the store has ended."""
        others = {known: kept for known, kept in self._outputs.items() if known.row != sequence.row}
        return others | {sequence: output}

    def _outputs_of(self, sequences: Iterable[pk.Sequence]) -> dict[pk.Sequence, _Output]:
        """Return the outputs of sequences, each known here and named once."""
        if self._pending is not None:
            self._recover()
        expected, remedy = "sequences, each once", "pass a list of handles, of one sequence too"
        named: tuple[Any, ...] = tuple(sequences) if type(sequences) in (tuple, list) else pk.checks.checked_items(
            "a step", sequences, expected=expected, remedy=remedy, clause="C11.3"
        )
        if not set(map(type, named)) <= {pk.Sequence} or len(set(named)) != len(named):
            raise pk.MisuseError("a step", expected=expected, got=pk.checks.shown(named), remedy=remedy,
                                 clause="C11.3")
        return {sequence: self._output_of(sequence) for sequence in named}

    def _output_of(self, sequence: pk.Sequence) -> _Output:
        if self._pending is not None:
            self._recover()
        output = self._outputs.get(sequence) if type(sequence) is pk.Sequence else None
        if output is None:
            raise pk.MisuseError(f"decoding {pk.checks.shown(sequence)}",
                                 expected="a sequence that this loop has prefilled or resumed",
                                 got="one that it has not, or has forgotten, or whose row another sequence has",
                                 remedy="call prefill or resume first", clause="C9.4")
        return output


def _token_ids(what: str, ids: Iterable[int]) -> Int32:
    """Return token ids as int32; refuse anything that is not an id already."""
    id_max = np.iinfo(np.int32).max
    expected, remedy = f"integer token ids from 0 to {id_max}", "pass what the tokenizer gave"
    id_list: tuple[Any, ...] = tuple(ids) if type(ids) in (tuple, list) else pk.checks.checked_items(
        what, ids, expected=expected, remedy=remedy, clause="C14.4"
    )
    for token in id_list:
        if not (type(token) is int or isinstance(token, np.integer)) or not 0 <= token <= id_max:
            raise pk.MisuseError(what, expected=expected, got=pk.checks.shown(token), remedy=remedy, clause="C14.4")
    return np.array(id_list, np.int32)


def _refuse_samples(key: GraphKey, sampled: Int32) -> NoReturn:
    """Refuse a negative token: the model wrote it, or wrote no token in the first run of the shape."""
    raise pk.MisuseError(
        f"tokens sampled by {key}", expected="ids of 0 or more after live columns", got=sampled.tolist(),
        remedy="write next_tokens of every live column in the model, from finite logits", clause="C14.4",
    )
