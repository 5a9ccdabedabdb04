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
`max_concurrency` sequences.  While a step or a piece of a prompt runs, the loop refuses every other call of it: an
observer or a signal handler notes what to do, and the caller does it after the step (C12.3).
"""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import nvtx

import pagedkv as pk
from pagedkv.graphs.cache import GraphCache
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.draft import Draft, Texts
from pagedkv.graphs.key import GraphKey, key_for
from pagedkv.graphs.outputs import (
    LENGTH,
    NO_STOPS,
    REASONS,
    RUNNING,
    FinishReason,
    Int32,
    Outputs,
    StepTokens,
    Stops,
    no_outputs,
)
from pagedkv.graphs.shapes import PREFILL_WIDTH_MIN, batch_shape, prefill_width
from pagedkv.graphs.unit import Model, Unit

PREFILL_CHUNK = 128
DRAFT_TOKENS = 4

Hook = Callable[[Unit, pk.Batch], object]
"""Called with the unit and the batch of a run."""

TOKENS_MAX = 1 << 30

_VERIFY = "verify"
_LISTS = (list, tuple)
_NAMES, _NAMES_REMEDY = "sequences, each once", "pass a list of handles, of one sequence too"
_NO_FRONTIERS: Int32 = np.zeros(0, np.int32)
_DOMAIN = nvtx.get_domain("pagedkv")
_DECODE = _DOMAIN.get_event_attributes(message="pagedkv.decode")
_PREFILL = _DOMAIN.get_event_attributes(message="pagedkv.prefill")


class Unsaid(enum.Enum):
    """The type of `UNSAID`."""

    UNSAID = enum.auto()


UNSAID: Final = Unsaid.UNSAID
"""Nothing was said about the token that was sampled last."""


@dataclass
class LoopStatistics:
    """Counters of a loop; they only grow.

    `decode_driver_calls` counts the device calls of decode steps: publication, replay and wait.  It does not count the
    capture of a new shape, nor what the caller does between two steps.  `accepted_tokens` are those of
    `proposed_tokens` that became text.  `trims` counts the units after which pages went back to a
    reservation, and `trimmed_pages` counts these pages.
    """

    decode_steps: int = 0
    decode_driver_calls: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    trims: int = 0
    trimmed_pages: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted tokens of each proposed one; 0 before the first."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0

    @property
    def driver_calls_per_step(self) -> float:
        """Mean device calls of a decode step; 0 before the first."""
        return self.decode_driver_calls / self.decode_steps if self.decode_steps else 0.0


class _Pending(NamedTuple):
    """A step or a piece of a prompt that has begun; if an interrupt ends it, the next call takes it back.

    Attributes:
        batch: its rows.
        name: of its units.
        frontiers: committed tokens of each entry before it.
        call: that runs it, or was interrupted.
    """

    batch: pk.Batch
    name: str
    frontiers: Int32
    call: FrameType


class _Chosen(NamedTuple):
    """The sequences of a step, kept until they, or what has ended, change.

    Attributes:
        named: as the caller named them.
        handles, reasons: columns of the outputs for which this holds.
        batch: those that have not ended, or None if all have.
        graph: of their shape.
        words: their words, (b, K), or None if K is 0.
        own_stops: the own stop tokens of all of them.
    """

    named: tuple[pk.Sequence, ...]
    handles: tuple[pk.Sequence | None, ...]
    reasons: npt.NDArray[np.int8]
    batch: pk.Batch | None
    graph: UnitGraph | None
    words: Int32 | None
    own_stops: frozenset[int]


class DecodeLoop:
    """Drives a model over a store's sequences.

    Args:
        store: an open store.
        model: an object with the methods of `Model`; the loop calls it to warm up and to capture each shape.
        prefill_chunk: most tokens of one prefill unit, 16 to the store's `prefill_columns_max`; None is 128, or that
            maximum if it is less.
        use_graphs: False enqueues every unit eagerly; results are the same, bit for bit (C14.6).
        draft: proposes tokens that a verify unit checks, such as `PromptLookup()`; the text stays the same (C14.6).
            The model writes next_tokens of every live column, as it does for decode units.
        draft_tokens: most proposed tokens of a row; the store must be planned for units of one column more.
        before_replay: called as `before_replay(unit, batch)` when the selectors of a unit are written and it has not
            begun; it may write `unit.control.words_host` (B, K).
        drives_backend: the caller drives the backend's pools himself; a store that has some is refused otherwise,
            because the loop writes Main alone.

    Attributes:
        graphs: the graphs of all shapes so far, with their replays.
        statistics: counters; written by the loop alone.

    Raises:
        ConfigError: `prefill_chunk` or `draft_tokens` is out of range, or a draft on a device that computes nothing.
        MisuseError: no store, a model that cannot be enqueued, such as its class, no draft or hook, or a store with a
            backend that nobody drives.
    """

    def __init__(
        self, store: pk.Store, model: Model, *, prefill_chunk: int | None = None, use_graphs: bool = True,
        draft: Draft | None = None, draft_tokens: int = DRAFT_TOKENS, before_replay: Hook | None = None,
        drives_backend: bool = False,
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
        if len(store.config.pools) > 1 and drives_backend is not True:
            raise pk.MisuseError("a decode loop", expected="a store without a backend", clause="C13.1",
                                 got=f"one with pools {[pool.name for pool in store.config.pools]}",
                                 remedy="open the store without a backend; if you write its pools yourself, make a "
                                        "DecodeLoop with drives_backend=True")
        if not (draft is None or pk.checks.has_method(draft, "propose")) or not (
            before_replay is None or callable(before_replay)
        ):
            raise pk.MisuseError("a decode loop", expected="a draft with propose(...), and a hook that can be called",
                                 got=f"{pk.checks.shown(draft)} and {pk.checks.shown(before_replay)}",
                                 remedy="pass PromptLookup(), or leave both out", clause="C13.1")
        if draft is not None:
            if not store.device.keeps_bytes:
                raise pk.ConfigError("a draft of a loop on no device", expected="a device that computes",
                                     got=store.device.description, clause="C13.1",
                                     remedy="leave the draft out, or open the store on a device with memory")
            most = store.config.decode_columns - 1
            if type(draft_tokens) is not int or not 1 <= draft_tokens <= most:
                raise pk.ConfigError("draft_tokens", expected=f"an integer from 1 to {most}",
                                     got=pk.checks.shown(draft_tokens), clause="C5.4",
                                     remedy="propose fewer tokens, or raise decode_columns_max of StoreConfig, which "
                                            "holds one column more")
        self.store = store
        self.prefill_chunk = prefill_chunk
        self.graphs = GraphCache(store, model if draft is None else _Verified(model), use_graphs=use_graphs)
        self.statistics = LoopStatistics()
        self._draft = draft
        self._draft_tokens = draft_tokens
        self._texts = None if draft is None else Texts(store.config.max_concurrency, store.config.max_context)
        self._before_replay = before_replay
        self._outputs = no_outputs(store.config.max_concurrency, store.config.caller_words)
        self._graphs_by_shape: dict[tuple[pk.Route, int, int], UnitGraph] = {}
        self._chosen: _Chosen | None = None
        self._pending: _Pending | None = None

    def prefill(
        self, sequence: pk.Sequence, prompt_ids: Iterable[int], *, last_token: int | Unsaid | None = UNSAID,
        stop_tokens: Iterable[int] = (), words: Iterable[int] | None = None,
    ) -> None:
        """Write a prompt into the cache and sample the first token; the first step delivers it.

        An error, also one that the model raises, leaves the committed frontier where it was.

        Args:
            sequence: active; the prompt begins at its committed frontier.
            prompt_ids: token ids, at least one, within the activated budget; an array of integers is not walked in
                Python.  Output may use the rest of the budget, also where that is more than `output_tokens` of the
                activation.  With lease growth the prompt must lie within the reserved pages without the room for a
                forced span, as the activated prompt does.  Behind output of this loop, ended or not, it may be that
                span: up to `forced_span_tokens` tokens, the last token included, always fit into its room (C9.2).
            last_token: must be said if the sequence has something committed, because the token that was sampled last
                is not in the cache.  That token is written ahead of the prompt.  None: the prompt takes its place.
            stop_tokens: each ends this sequence, beside those of `step`.
            words: K numbers that units find in `words` at this sequence's entry, with K = `caller_words` of the
                configuration; None is zeros.

        Raises:
            MisuseError: no token, more than the budget or the lease holds, ids that are no int32 of 0 or more, or
                committed tokens and nothing said about the last one.
        """
        prompt = self.begin_prefill(sequence, prompt_ids, last_token=last_token, stop_tokens=stop_tokens, words=words)
        self._write(prompt, prompt.ids.size)

    def begin_prefill(
        self, sequence: pk.Sequence, prompt_ids: Iterable[int], *, last_token: int | Unsaid | None = UNSAID,
        stop_tokens: Iterable[int] = (), words: Iterable[int] | None = None,
    ) -> Prefill:
        """Check a prompt that is to be written piece by piece, between steps of other sequences.

        Arguments and errors are those of `prefill`.  `Prefill.advance` writes a piece; before the last one the loop
        does not know the sequence.
        """
        self._recover()
        ids, stops, own_words = token_ids("a prompt", prompt_ids), _stops(stop_tokens), self._words(words)
        start = self.store.committed_tokens(sequence)
        if start and last_token is UNSAID:
            raise pk.MisuseError(
                f"a prompt for {sequence}, which has {start} committed tokens",
                expected="last_token, because the token that was sampled last is not among them", got="none",
                remedy="pass last_token=loop.last_token(...), or last_token=None if the prompt takes its place",
                clause="C2.2",
            )
        if isinstance(last_token, int | np.integer):
            ids = np.concatenate((token_ids("last_token", [last_token]), ids))
        elif last_token is not None and last_token is not UNSAID:
            token_ids("last_token", [last_token])
        budget = self.store.budget_tokens(sequence)
        if not 1 <= ids.size <= budget - start:
            raise pk.MisuseError(
                f"a prompt of {ids.size} tokens for {sequence}",
                expected=f"1 to {budget - start} token ids (activated for {budget}, {start} written)",
                got=f"{ids.size}", remedy="pass a token, and no more than prompt_tokens + output_tokens of activate",
                clause="C9.2",
            )
        batch = self.store.batch([sequence])
        reserved = covered = int(self.store.covered_columns(batch, forced=True)[0])
        if reserved < budget - start:  # the lease may still grow: a prompt leaves the room for the forced span
            covered = int(self.store.covered_columns(batch)[0])
            if self._outputs.knows(sequence):  # what is appended behind output is that span
                covered = max(covered, min(reserved, self.store.config.forced_span_tokens))
        if ids.size > covered:
            raise pk.MisuseError(
                f"a prompt of {ids.size} tokens for {sequence}",
                expected=f"at most {covered} tokens, which are reserved", got=f"{ids.size}",
                remedy="activate with the prompt's length, or raise forced_span_tokens for tokens behind output: "
                       "leases grow with decoding only", clause="C9.2",
            )
        return Prefill(self, batch, ids, start, budget - start - ids.size, stops, own_words)

    def last_token(self, sequence: pk.Sequence) -> int:
        """Return the token that was sampled last and is not in the cache: `resume` continues from it.

        This token and the pages are the whole state of a model that has no state of its own; pass the token as the
        state of `store.finish` and `store.snapshot` (C2.2).

        Raises:
            MisuseError: a sequence that this loop does not know.
        """
        return self._require_known(sequence).last_tokens.item(sequence.row)

    def resume(
        self, sequence: pk.Sequence, last_token: int, *, stop_tokens: Iterable[int] = (),
        words: Iterable[int] | None = None,
    ) -> None:
        """Continue to decode a sequence that was activated from a continuation, as if it had never stopped.  (C10.4)

        The first step writes the token in the decode route, as it would have done without the stop.  `prefill` of one
        token uses the other route, which is equal by the criterion of codecs 7 only (C14.6).

        Args:
            sequence: active, with something committed.
            last_token: sampled after the last committed token, and delivered before.
            stop_tokens, words: as of `prefill`.

        Raises:
            MisuseError: no token id, nothing committed, or no token left in the activated budget.
        """
        self._recover()
        (token,) = token_ids("the token to go on from", [last_token]).tolist()
        stops, own_words = _stops(stop_tokens), self._words(words)
        committed, budget = self.store.committed_tokens(sequence), self.store.budget_tokens(sequence)
        if not 1 <= committed < budget:
            raise pk.MisuseError(f"going on with {sequence}", expected=f"1 to {budget - 1} committed tokens",
                                 got=f"{committed} of a budget of {budget}",
                                 remedy="activate from a continuation, with room for the token", clause="C9.2")
        self._outputs = self._outputs.with_sequence(sequence, token, budget - committed - 1, is_new=False, stops=stops,
                                                    words=own_words, text=(committed, 1))

    def step(self, sequences: Iterable[pk.Sequence], *, stop_tokens: Iterable[int] = ()) -> StepTokens:
        """Advance every unfinished sequence by one token, in one replay; with a draft by one token or more.

        A stop token is delivered and ends its sequence.  The end of the activated budget also ends it, and with lease
        growth the end of what the pool could reserve, where a forced span still fits.  A sequence that has ended may be
        named, finished in the store or not: it gets its undelivered tokens, then nothing.  A step with the sequences of
        the last one is the cheapest.

        Returns:
            A mapping with the new tokens of each sequence that got any, the first one of its prefill included; its
            `ended` names the sequences that ended.

        Raises:
            MisuseError: a sequence that this loop does not know, one named twice, stop tokens that are no ids, a model
                that sampled a negative id, or a draft that proposed no array of ids; nothing was delivered, and no
                frontier moved.
            StaleHandle: a sequence that has not ended was finished in the store; nothing was delivered.
        """
        return self._hand_over(self._advance(sequences, _stops(stop_tokens)))

    def decode(
        self, sequences: Iterable[pk.Sequence], *, stop_tokens: Iterable[int] = ()
    ) -> Iterator[StepTokens]:
        """Step until every sequence has ended; yield {sequence: new tokens} after each step.

        Between two steps the caller may finish and forget sequences that have ended, and prefill others in their rows.

        Raises:
            MisuseError, StaleHandle: as `step`; wrong arguments are refused at once.
        """
        return self._steps(self._named(sequences), _stops(stop_tokens))

    def finish_reason(self, sequence: pk.Sequence) -> FinishReason | None:
        """Return why the sequence ended: "stop", "length", or None while it runs.

        Raises:
            MisuseError: a sequence that this loop does not know.
        """
        return REASONS[self._require_known(sequence).reasons.item(sequence.row)]

    def forget(self, sequence: pk.Sequence) -> None:
        """Forget a sequence, before or after the store finishes it.

        The call is optional: the loop also forgets a sequence when another one takes its row.
        """
        self._recover()
        if self._outputs.knows(sequence):
            self._outputs = self._outputs.without(sequence)

    def _advance(self, sequences: Iterable[pk.Sequence], stops: frozenset[int]) -> _Chosen:
        """Run one step; its tokens stay undelivered in the outputs."""
        if self._pending is not None:
            self._recover()
        if stops and self._outputs.undelivered:  # prefill may have sampled a stop token
            sequences = self._named(sequences)
            self._outputs = self._with_stops(sequences, stops)
        chosen = self._choose(sequences)
        if chosen.batch is not None and self.store.config.kv_lease_growth:
            chosen = self._extend_leases(chosen)
        if chosen.batch is not None:
            of_step = Stops(stops, stops | chosen.own_stops if chosen.own_stops else stops)
            if self._draft is None or self._texts is None:
                self._decode(chosen, of_step)
            else:
                self._speculate(chosen, chosen.batch, of_step, self._draft, self._texts)
        return chosen

    def _hand_over(self, chosen: _Chosen) -> StepTokens:
        """Return tokens, which then count as delivered; after an interrupt they do not.

        A caller passes the answer on in the same statement, so that no interrupt comes in between.
        """
        before = self._outputs
        delivered, after = before.delivered_to(chosen.named, chosen.batch)
        self.statistics.decoded_tokens += delivered.token_count
        try:
            self._outputs = after
            return delivered  # noqa: TRY300 - an interrupt before the caller has the tokens is an error too
        except BaseException:  # an interrupt: the caller has got nothing
            self._outputs = before
            raise

    def _steps(self, sequences: tuple[pk.Sequence, ...], stops: frozenset[int]) -> Iterator[StepTokens]:
        while True:
            chosen = self._advance(sequences, stops)
            outputs, batch = self._outputs, chosen.batch
            if not outputs.has_undelivered(chosen.named):
                return
            if outputs.reasons is not chosen.reasons or batch is None or len(batch.sequences) < len(chosen.named):
                reasons = outputs.reasons  # another sequence may take the row of one that has ended
                sequences = tuple(sequence for sequence in sequences if reasons.item(sequence.row) == RUNNING)
            yield self._hand_over(chosen)

    def _choose(self, sequences: Iterable[pk.Sequence]) -> _Chosen:
        """Return the sequences of a step with their batch and graph: those of the last step if nothing changed."""
        chosen, outputs = self._chosen, self._outputs
        if (
            chosen is not None and chosen.handles is outputs.handles and chosen.reasons is outputs.reasons
            and type(sequences) in _LISTS and len(sequences) == len(chosen.named)  # type: ignore[arg-type]
            and all(map(operator.is_, sequences, chosen.named))
        ):
            return chosen
        named = tuple(sequences) if type(sequences) in _LISTS else self._named(sequences)
        codes, batch, graph, words = outputs.reasons.tobytes(), None, None, None
        if codes.count(RUNNING) != len(codes):  # somebody has ended, and may be named
            named = self._named(named)
            running = tuple([sequence for sequence in named if codes[sequence.row] == RUNNING])
            batch = self.store.batch(running) if running else None
        elif named:
            batch = self._known_batch(named)
        if batch is not None:
            graph = self._graph("decode", batch_shape(len(batch), concurrency=len(codes)), 1)
            words = outputs.words[batch.index] if outputs.words.size else None
        own_stops = NO_STOPS
        if batch is not None and outputs.stops:
            own_stops = own_stops.union(*(outputs.stops.get(row, ()) for row in batch.rows.tolist()))
        self._chosen = chosen = _Chosen(named, outputs.handles, outputs.reasons, batch, graph, words, own_stops)
        return chosen

    def _known_batch(self, named: tuple[pk.Sequence, ...]) -> pk.Batch:
        """Return the batch of sequences, each known here; a loop over handles runs only to refuse one."""
        try:
            batch = self.store.batch(named)
        except pk.PagedKVError:
            self._named(named)  # the loop's own refusal is the better one
            raise
        if self._outputs.serials[batch.rows].tobytes() != batch.serials.tobytes():
            self._named(named)
        return batch

    def _graph(self, route: pk.Route, batch: int, width: int) -> UnitGraph:
        """Return the graph of a shape; its unit has the name of the route, or is a verify unit."""
        graph = self._graphs_by_shape.get((route, batch, width))
        if graph is None or not graph.replays:  # an egress that was never written is blanked
            name = _VERIFY if route == "decode" and width > 1 else route
            graph = self.graphs.unit(key_for(self.store.config, unit=name, route=route, batch=batch, width=width))
            self._graphs_by_shape[route, batch, width] = graph
        return graph

    def _decode(self, chosen: _Chosen, stops: Stops) -> None:
        """Run one decode unit of the running sequences and add a token to the output of each."""
        batch, graph, outputs = chosen.batch, chosen.graph, self._outputs
        assert batch is not None, "somebody is running"
        assert graph is not None, "somebody is running"
        if not graph.replays:
            graph.unit.control.blank()
        calls_before = self.store.device.driver_calls
        self._pending = _Pending(batch, "decode", _NO_FRONTIERS, sys._getframe())
        _DOMAIN.push_range(_DECODE)
        try:
            sampled = self._run(graph, batch, 1, outputs.last_tokens[batch.index].reshape(-1, 1), chosen.words)
            self._outputs, self._pending = outputs.with_tokens(batch, sampled, stops), None
        except BaseException as error:
            self._recover_after(error)
            raise
        finally:
            _DOMAIN.pop_range()
        self.statistics.decode_steps += 1
        self.statistics.decode_driver_calls += self.store.device.driver_calls - calls_before

    def _speculate(self, chosen: _Chosen, batch: pk.Batch, stops: Stops, draft: Draft, texts: Texts) -> None:
        """Run a verify unit of what the draft proposes, or a decode unit if it proposes nothing.  (C13.1, C13.3)"""
        outputs, graph = self._outputs, chosen.graph
        last_tokens, lengths = outputs.last_tokens[batch.rows], outputs.lengths[batch.rows]
        proposals = self._proposals(draft, texts.of(batch, lengths, last_tokens), batch, lengths)
        columns = 1 + np.count_nonzero(proposals >= 0, axis=1).astype(np.int32)
        width = 1 + proposals.shape[1]
        if width > 1:
            graph = self._graph("decode", batch_shape(len(batch), concurrency=len(outputs.handles)), width)
        assert graph is not None, "somebody is running"
        if not graph.replays:
            graph.unit.control.blank()
        tokens = np.zeros((len(batch), width), np.int32)
        tokens[:, 0] = last_tokens
        np.maximum(proposals, 0, out=tokens[:, 1:])
        calls_before, statistics = self.store.device.driver_calls, self.statistics
        name = _VERIFY if width > 1 else "decode"
        self._pending = _Pending(batch, name, _NO_FRONTIERS, sys._getframe())
        _DOMAIN.push_range(_DECODE)
        try:
            if width > 1:
                sampled, counts = self._verify(graph, batch, columns, tokens, chosen.words, stops)
                trimmed = self.store.trim(batch)
            else:
                sampled, trimmed = self._run(graph, batch, 1, tokens, chosen.words).reshape(-1, 1), 0
                counts = columns
            texts.append(batch.rows, lengths, sampled, counts)
            self._outputs, self._pending = outputs.with_accepted(batch, sampled, counts, stops), None
        except BaseException as error:
            self._recover_after(error)
            raise
        finally:
            _DOMAIN.pop_range()
        statistics.decode_steps += 1
        statistics.decode_driver_calls += self.store.device.driver_calls - calls_before
        statistics.proposed_tokens += int(columns.sum()) - len(batch)
        statistics.accepted_tokens += int(counts.sum()) - len(batch)
        statistics.trims += trimmed > 0
        statistics.trimmed_pages += trimmed

    def _proposals(self, draft: Draft, texts: Int32, batch: pk.Batch, lengths: Int32) -> Int32:
        """Return what the draft proposes, (b, draft_tokens) or (b, 0) if it proposes nothing; -1 behind each proposal.

        A row gets no more than its tokens left and its lease cover (C9.2).
        """
        most = np.minimum(self._outputs.tokens_left[batch.rows] - 1, self._draft_tokens)
        if self.store.config.kv_lease_growth:
            most = np.minimum(most, self.store.covered_columns(batch) - 1)
        nothing = np.empty((len(batch), 0), np.int32)
        if not (most > 0).any():
            return nothing
        lengths.flags.writeable = most.flags.writeable = False
        given = draft.propose(texts, lengths, most)
        is_array = type(given) is np.ndarray and given.dtype == np.int32 and given.ndim == 2
        if not is_array or given.shape[0] != len(batch) or given.shape[1] > self._draft_tokens:
            raise pk.MisuseError("proposals of a draft", expected=f"({len(batch)}, K) int32, K to {self._draft_tokens}",
                                 got=pk.checks.shown(given), remedy="return ids, and -1 behind them", clause="C13.1")
        columns = np.arange(given.shape[1])
        is_used = np.logical_and.accumulate((given >= 0) & (columns < most[:, None]), axis=1)
        if not is_used.any():
            return nothing
        proposals = np.full((len(batch), self._draft_tokens), -1, np.int32)
        proposals[:, : given.shape[1]] = np.where(is_used, given, -1)
        return proposals

    def _verify(
        self, graph: UnitGraph, batch: pk.Batch, columns: Int32, tokens: Int32, words: Int32 | None, stops: Stops
    ) -> tuple[Int32, Int32]:
        """Run a verify unit and commit what is accepted, up to a stop token; return (b, W) tokens and (b,) counts."""
        unit = self._launch(graph, batch, columns, tokens, words)
        control, rows = graph.unit.control, batch.rows
        sampled, counts = control.read_next_tokens(rows.size), control.read_accepted(rows.size)
        if (counts < 1).any() or (counts > columns).any():
            raise pk.MisuseError(f"columns accepted by {graph.unit.key}", expected=f"1 to {columns.tolist()}",
                                 got=counts.tolist(), clause="C13.1",
                                 remedy="write accepted of every live entry, or leave it to unit.accept_greedy()")
        is_text = np.arange(sampled.shape[1]) < counts[:, None]
        if (sampled < 0)[is_text].any():
            _refuse_samples(graph.unit.key, sampled)
        if stops.of_all:
            is_stop = self._outputs.are_stops(rows, sampled, stops) & is_text
            counts = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, counts).astype(np.int32)
        self.store.commit(unit, counts)
        return sampled, counts

    def _extend_leases(self, chosen: _Chosen) -> _Chosen:
        """Extend leases; end rows without one for their next column and a forced span; return the others.  (C9.2)"""
        assert chosen.batch is not None, "somebody is running"
        unextended = self.store.begin_round(chosen.batch)
        if not unextended:
            return chosen
        batch = self.store.batch(unextended)
        ended = batch.rows[self.store.covered_columns(batch) == 0]
        if not ended.size:
            return chosen
        self._outputs = self._outputs.with_reason(ended, LENGTH)
        return self._choose(chosen.named)

    def _run(
        self, graph: UnitGraph, batch: pk.Batch, columns: int, tokens: Int32, words: Int32 | None
    ) -> Int32:
        """Run one unit and commit it; return the token sampled after the last column of each entry, (b,)."""
        unit, control = self._launch(graph, batch, columns, tokens, words), graph.unit.control
        sampled = control.read_next_tokens(batch.rows.size)[:, columns - 1]
        if sampled.item(sampled.argmin()) < 0:
            _refuse_samples(graph.unit.key, sampled)
        self.store.commit(unit)
        return sampled

    def _launch(
        self, graph: UnitGraph, batch: pk.Batch, columns: int | Int32, tokens: Int32, words: Int32 | None
    ) -> pk.Submission:
        """Begin the unit that is pending, run it, and wait for it."""
        control, pending = graph.unit.control, self._pending
        assert pending is not None, "what runs can be taken back"
        unit = self.store.begin_unit(batch, columns, name=pending.name)
        first_positions = unit.first_positions["main"]
        if pending.frontiers is _NO_FRONTIERS:
            self._pending = _Pending(batch, pending.name, first_positions, pending.call)
        if self._before_replay is None:
            control.write(batch.rows, first_positions, columns, tokens, words)
        else:  # which may have changed the words of the last run
            shape = batch.rows.size, control.words_host.shape[1]
            fresh = np.zeros(shape, np.int32) if words is None else words.copy()
            control.write(batch.rows, first_positions, columns, tokens, fresh)
            self._before_replay(graph.unit, batch)
        graph.run()
        self.store.wait(unit)
        return unit

    def _write(self, prompt: Prefill, count: int) -> None:
        """Write the next `count` tokens of a prompt, chunk by chunk; an error takes all of them back."""
        batch, left = prompt.batch, prompt.tokens_left
        (sequence,), done = batch.sequences, prompt.ids.size - left
        self._pending = _Pending(batch, "prefill", np.array([prompt.start + done], np.int32), sys._getframe())
        _DOMAIN.push_range(_PREFILL)
        try:
            token = 0
            for first in range(done, done + count, self.prefill_chunk):
                chunk = prompt.ids[first : min(first + self.prefill_chunk, done + count)]
                width = prefill_width(chunk.size, chunk=self.prefill_chunk)
                graph = self._graph("prefill", 1, width)
                tokens = np.zeros((1, width), np.int32)
                tokens[0, : chunk.size] = chunk
                token = self._run(graph, batch, chunk.size, tokens, prompt.words).item(0)
            if count < left:
                outputs = self._outputs.without(sequence)
            else:
                outputs = self._outputs.with_sequence(
                    sequence, token, max(prompt.output_tokens - 1, 0), is_new=prompt.output_tokens > 0,
                    words=None if prompt.words is None else prompt.words[0], stops=prompt.stops,
                    text=self._with_text(sequence, prompt),
                )
            self.statistics.prefilled_tokens += count
            self._outputs, self._pending, prompt.written = outputs, None, done + count
        except BaseException as error:
            self._recover_after(error)
            raise
        finally:
            _DOMAIN.pop_range()

    def _with_text(self, sequence: pk.Sequence, prompt: Prefill) -> tuple[int, int]:
        """Add a prompt to what is known of a sequence's text, for the draft; return its start and its length."""
        if self._texts is None:
            return 0, 0
        row, start = sequence.row, prompt.start
        if self._outputs.knows(sequence):
            start = self._outputs.starts.item(row)
        self._texts.write(row, prompt.start - start, prompt.ids)
        return start, prompt.start - start + prompt.ids.size + 1

    def _words(self, words: Iterable[int] | None) -> Int32 | None:
        """Return the words of one entry, (1, K), or None if there are none; refuse another number of them."""
        count = self.store.config.caller_words
        if words is None:
            return np.zeros((1, count), np.int32) if count else None
        given = pk.checks.checked_items("the words of a sequence", words, expected=f"{count} integers", clause="C15.1",
                                        remedy="pass as many as caller_words of the StoreConfig")
        bounds = np.iinfo(np.int32)
        for word in given:
            is_integer = type(word) is int or isinstance(word, np.integer)
            if not is_integer or not bounds.min <= word <= bounds.max:
                raise pk.MisuseError("the words of a sequence", expected="integers of 32 bits",
                                     got=pk.checks.shown(word), remedy="pass int32 numbers", clause="C15.1")
        if len(given) != count:
            raise pk.MisuseError("the words of a sequence", expected=f"{count} integers", got=f"{len(given)}",
                                 remedy="pass as many as caller_words of the StoreConfig", clause="C15.1")
        return np.array([given], np.int32) if count else None

    def _recover_after(self, error: BaseException) -> None:
        """Recover from an error; what goes wrong meanwhile becomes a note of it, and the next call tries again."""
        try:
            self._take_back()
        except (pk.PagedKVError, MemoryError) as second:
            error.add_note(f"and the loop could not take its step back: {second}")

    def _recover(self) -> None:
        """Take back what was interrupted; refuse a call from the middle of a step, which would take back that step."""
        pending = self._pending
        if pending is None:
            return
        if pk.checks.is_on_the_stack(pending.call):
            raise pk.MisuseError(f"a call of a loop in the middle of its own {pending.name}",
                                 expected="a call before or after it", got="one of an observer, a handler or the model",
                                 remedy="note there what to do, and call the loop after its step", clause="C12.3")
        self._take_back()

    def _take_back(self) -> None:
        """Take back a step or a piece of a prompt that was interrupted, so that the caller can repeat it.  (C9.10)

        A latched store is left alone: only closing remains.
        """
        pending = self._pending
        if pending is None or self.store.evidence is not None:
            return
        for unit in self.store.units():
            if unit.batch is pending.batch:  # a unit of the caller may have the same name and rows
                self.store.fail(unit)
        current = set(self.store.sequences())
        for sequence, frontier in zip(pending.batch.sequences, pending.frontiers.tolist(), strict=False):
            if sequence in current and self.store.committed_tokens(sequence) > frontier:
                self.store.truncate(sequence, frontier)
        self._pending = None

    def _with_stops(self, sequences: tuple[pk.Sequence, ...], stops: frozenset[int]) -> Outputs:
        """Return the outputs in which running sequences whose undelivered last token is a stop token have ended."""
        outputs = self._outputs
        waiting = {sequence for part in outputs.undelivered for sequence in part.sequences}
        rows = np.array([s.row for s in sequences if s in waiting and not outputs.reasons.item(s.row)], np.int64)
        return outputs.with_stops(rows, outputs.last_tokens[rows], Stops(stops, stops))

    def _named(self, sequences: Iterable[pk.Sequence]) -> tuple[pk.Sequence, ...]:
        """Return sequences as a tuple, each known here and named once."""
        named: tuple[Any, ...] = tuple(sequences) if type(sequences) in _LISTS else pk.checks.checked_items(
            "a step", sequences, expected=_NAMES, remedy=_NAMES_REMEDY, clause="C11.3"
        )
        if not set(map(type, named)) <= {pk.Sequence}:
            raise _refused_names(named)
        for sequence in named:
            self._require_known(sequence)
        if len(set(named)) != len(named):
            raise _refused_names(named)
        return named

    def _require_known(self, sequence: pk.Sequence) -> Outputs:
        """Return the outputs; refuse a sequence that has none."""
        if self._pending is not None:
            self._recover()
        if not self._outputs.knows(sequence):
            raise pk.MisuseError(f"decoding {pk.checks.shown(sequence)}",
                                 expected="a sequence that this loop has prefilled or resumed",
                                 got="one that it has not, or has forgotten, or whose row another sequence has",
                                 remedy="call prefill or resume first", clause="C9.4")
        return self._outputs


class Prefill:
    """A prompt that is written piece by piece; made by `DecodeLoop.begin_prefill`.

    Attributes, written by the loop alone:
        batch: its one sequence.
        ids: (n,) int32, all tokens of the prompt.
        start: committed tokens before it.
        output_tokens: tokens that may be sampled.
        stops, words: own stop tokens of the sequence; (1, K) int32, or None if K is 0.
        written: tokens of the prompt that are committed.
    """

    def __init__(
        self, loop: DecodeLoop, batch: pk.Batch, ids: Int32, start: int, output_tokens: int, stops: frozenset[int],
        words: Int32 | None,
    ) -> None:
        self.batch = batch
        self.ids = ids
        self.start = start
        self.output_tokens = output_tokens
        self.stops = stops
        self.words = words
        self.written = 0
        self._loop = loop

    @property
    def tokens_left(self) -> int:
        """Tokens of the prompt that are not written yet; 0 when the first token has been sampled.

        Raises:
            StaleHandle: the sequence has ended.
            MisuseError: somebody else has written to it or truncated it.
        """
        self._loop._recover()
        (sequence,) = self.batch.sequences
        committed, own = self._loop.store.committed_tokens(sequence), self.start + self.written
        if committed != own:
            raise pk.MisuseError(f"the prompt of {sequence}", clause="C9.4", got=f"{committed}",
                                 expected=f"{own} committed tokens, as its pieces have left it",
                                 remedy="begin another prompt; write nothing else while one is being written")
        return self.ids.size - self.written

    def advance(self, tokens_max: int | None = None) -> int:
        """Write the next piece, `prefill_chunk` tokens or the rest, and return how many tokens are left.

        The last piece samples the first token.  An error takes the piece back, and the next call writes it again.

        Args:
            tokens_max: most tokens of the piece, at least 1; None leaves the chunk alone to decide.

        Raises:
            MisuseError: `tokens_max` is less.
        """
        left, most = self.tokens_left, self._loop.prefill_chunk
        if tokens_max is not None:
            most = min(most, pk.checks.checked_integer("tokens_max", tokens_max, 1, TOKENS_MAX, clause="C14.4",
                                                       remedy="write at least a token"))
        if left:
            self._loop._write(self, min(left, most))
        return self.tokens_left


class _Verified:
    """A model whose verify units also say how many columns they accept; the model itself may do so."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def enqueue(self, unit: Unit) -> None:
        """Enqueue the model, and in a verify unit the comparison of its tokens with the proposed ones."""
        self._model.enqueue(unit)
        if unit.key.unit == _VERIFY and not getattr(self._model, "writes_accepted", False):
            unit.accept_greedy()


def _stops(stop_tokens: Iterable[int]) -> frozenset[int]:
    if type(stop_tokens) is tuple and not stop_tokens:
        return NO_STOPS
    return frozenset(token_ids("stop_tokens", stop_tokens).tolist())


def token_ids(what: str, ids: Iterable[int]) -> Int32:
    """Return token ids as int32; refuse anything that is not an id already.  An array is not walked in Python."""
    id_max = np.iinfo(np.int32).max
    if type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype.kind in "iu":
        is_legal = not ids.size or (ids.min() >= 0 and ids.max() <= id_max)
        if is_legal:
            return np.array(ids, np.int32)
    expected, remedy = f"integer token ids from 0 to {id_max}", "pass what the tokenizer gave"
    id_list: tuple[Any, ...] = tuple(ids) if type(ids) in _LISTS else pk.checks.checked_items(
        what, ids, expected=expected, remedy=remedy, clause="C14.4"
    )
    for token in id_list:
        if not (type(token) is int or isinstance(token, np.integer)) or not 0 <= token <= id_max:
            raise pk.MisuseError(what, expected=expected, got=pk.checks.shown(token), remedy=remedy, clause="C14.4")
    return np.array(id_list, np.int32)


def _refused_names(named: object) -> pk.MisuseError:
    return pk.MisuseError("a step", expected=_NAMES, got=pk.checks.shown(named), remedy=_NAMES_REMEDY, clause="C11.3")


def _refuse_samples(key: GraphKey, sampled: Int32) -> NoReturn:
    """Refuse a negative token: the model wrote it, or wrote no token in the first run of the shape."""
    raise pk.MisuseError(
        f"tokens sampled by {key}", expected="ids of 0 or more after live columns", got=sampled.tolist(),
        remedy="write next_tokens of every live column in the model, from finite logits", clause="C14.4",
    )
