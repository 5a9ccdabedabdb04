"""Scheduler: continuous batching over a store and a model.  (C1.2, C9.2, C10.5, C14.6)

    scheduler = Scheduler(store, model)
    request = scheduler.submit(prompt_ids, 100)
    while not scheduler.is_idle:
        for output, tokens in scheduler.step().items():
            ...

A request has n outputs, each a text of its own.  An output is in one of these states, in this order:

    waiting   in the queue: first come, first served
    writing   active in the store, with pages for its prompt and all its tokens; its prompt is written piece by piece
    running   a token in each step, or several with a draft, in one replay with all others that run
    ended     "stop", "length" or "cancelled"; its sequence has ended in the store

A step admits outputs from the head of the queue, writes pieces of prompts in the order of admission, and decodes all
that run.  Columns of decoding come first under `step_tokens`, and prompts share the rest.  Nobody is preempted, because
an admitted output has all its pages.  With lease growth it holds a window of them, and an output is admitted only if
the pool has room for the whole budget of all; so it ends early only if somebody else takes the pages.  With
`overcommits` its prompt and a window are enough: more outputs run at a time, and where pages run out some end early.

The outputs of one request share its prompt.  The first one writes all but the last prompt token, a snapshot keeps that
prefix, and the others fork it; the last one moves it.  Each writes the last prompt token itself, in the prefill route,
so its first token is its own and equals that of the same request with n = 1.  If there is no room for the snapshot, or
for a fork while nothing else runs, the next output writes its prompt itself.

With a retention policy an ended output stays in the store as a continuation, and a prompt that begins like a kept text
starts from it: the longest common prefix is forked, or moved where only that fits.  Where pages are missing the policy
gives others up first.  Every output says what it would say without the policy (C14.6).

What the outputs are is a value, `_State`: a transition replaces all of it with one assignment.  `_call` names a call
that has begun and not ended, and `_pending` what the store may hold that the state does not show yet.  After an
interrupt the next call completes both, so it finds each transition done or not begun.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType, MappingProxyType
from typing import Literal, NamedTuple, NoReturn

import numpy as np

import pagedkv as pk
from pagedkv.graphs.decode_loop import DRAFT_TOKENS, DecodeLoop, Hook, Prefill, token_ids
from pagedkv.graphs.draft import Draft
from pagedkv.graphs.outputs import Int32, StepTokens
from pagedkv.graphs.retention import RetainedPrefix, RetainedText, Retention
from pagedkv.graphs.sampling import SAMPLING_WORDS, Sampling
from pagedkv.graphs.shapes import PREFILL_WIDTH_MIN
from pagedkv.graphs.unit import Model

OutputReason = Literal["stop", "length", "cancelled"]

STEP_TOKENS = 256
OUTPUTS_MAX = 1 << 20
"""Most outputs of one request."""

_PREFIX = "all but the last token of a prompt"
"""State of the snapshot of a prefix: a model without state of its own needs none (C2.2)."""


class Output:
    """One text of a request; the scheduler alone writes it.

    Attributes:
        request: to which it belongs.
        index: its place among the outputs of the request.
        reason: None until it has ended, then "stop", "length" or "cancelled".
        admitted_step, first_token_step, ended_step: number of the step, or None before it.
    """

    __slots__ = ("_tokens", "admitted_step", "ended_step", "first_token_step", "index", "reason", "request")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.reason: OutputReason | None = None
        self.admitted_step: int | None = None
        self.first_token_step: int | None = None
        self.ended_step: int | None = None
        self._tokens: list[int] = []

    def __repr__(self) -> str:
        return f"Output(request={self.request.number}, index={self.index}, reason={self.reason})"

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, in a new list; a stop token is the last one."""
        self.request._scheduler._distribute()
        return self._tokens.copy()


class Request:
    """A prompt and its outputs; made by `Scheduler.submit`.

    Attributes, fixed:
        number: counts the requests of the scheduler.
        prompt_ids: (n,) int32.
        max_new_tokens: most tokens of each output.
        stop_tokens: each ends an output that samples it.
        outputs: at least one.
        sampling, words: of the request; each output has words of its own (`words_of`).
        salt: what the content of its pages depends on beside the tokens; its words if `submit` got none.
        submitted_step: steps that had ended when it was submitted.
    """

    __slots__ = ("_scheduler", "max_new_tokens", "number", "outputs", "prompt_ids", "salt", "sampling", "stop_tokens",
                 "submitted_step", "words")

    def __init__(
        self, scheduler: Scheduler, number: int, prompt_ids: Int32, max_new_tokens: int, stop_tokens: frozenset[int],
        outputs: int, sampling: Sampling | None, words: tuple[int, ...], salt: Hashable,
    ) -> None:
        self.salt = salt
        self._scheduler = scheduler
        self.number = number
        self.prompt_ids = prompt_ids
        self.max_new_tokens = max_new_tokens
        self.stop_tokens = stop_tokens
        self.sampling = sampling
        self.words = words
        self.outputs = tuple(Output(self, index) for index in range(outputs))
        self.submitted_step = scheduler.steps

    def __repr__(self) -> str:
        return f"Request(number={self.number}, outputs={len(self.outputs)})"

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended."""
        return all(output.reason is not None for output in self.outputs)

    def words_of(self, index: int) -> tuple[int, ...]:
        """Return the caller's words of the row of an output: its sampling with seed + index, then `words`.  (C15.1)"""
        if self.sampling is None:
            return self.words
        return (*replace(self.sampling, seed=self.sampling.seed + index).words, *self.words)

    @property
    def pages(self) -> int:
        """Pages of Main for the prompt and the whole budget of one output."""
        return -(-(self.prompt_ids.size + self.max_new_tokens) // pk.PAGE_TOKENS)


class SchedulerStep(Mapping[Output, list[int]]):
    """New tokens of each output that got any; builds its lists when somebody asks."""

    __slots__ = ("_entries", "_lists")

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self._lists: dict[Output, list[int]] | None = None

    def __getitem__(self, output: Output) -> list[int]:
        return self._by_output()[output]

    def __iter__(self) -> Iterator[Output]:
        return iter(self._by_output())

    def __len__(self) -> int:
        return len(self._by_output())

    def __repr__(self) -> str:
        return repr(self._by_output())

    @property
    def token_count(self) -> int:
        """New tokens of all outputs together."""
        return sum(tokens.token_count for tokens, _ in self._entries)

    @property
    def ended(self) -> tuple[Output, ...]:
        """Outputs that ended with this step, but those that were cancelled."""
        return tuple(outputs[sequence] for tokens, outputs in self._entries for sequence in tokens.ended)

    def _by_output(self) -> dict[Output, list[int]]:
        if self._lists is None:
            self._lists = _lists_of(self._entries)
        return self._lists


@dataclass(frozen=True)
class SchedulerStatistics:
    """Figures of a scheduler at one moment.

    Attributes:
        steps: that have ended.
        waiting, writing, running: outputs in each state.
        ended: outputs that have ended, those that were cancelled included.
        rows_most: most rows of its own at a time.
        pages, pages_most: pages of Main that are leased or reserved now, and at most; those of others included.
        first_token_steps_mean, first_token_steps_max: steps from `submit` to the first token, that step included, of
            the outputs that got one; 0 before the first.
    """

    steps: int
    waiting: int
    writing: int
    running: int
    ended: int
    rows_most: int
    pages: int
    pages_most: int
    first_token_steps_mean: float
    first_token_steps_max: int

    @property
    def rows(self) -> int:
        """Rows in use by the scheduler."""
        return self.writing + self.running


class _Row:
    """An output that is active and has no token yet; `prompt` is begun when its first piece is written.

    `makes_prefix`: others wait for the prefix that it writes, which is not kept yet.
    """

    __slots__ = ("makes_prefix", "output", "prompt", "sequence")

    def __init__(self, output: Output, sequence: pk.Sequence, makes_prefix: bool) -> None:
        self.output = output
        self.sequence = sequence
        self.makes_prefix = makes_prefix
        self.prompt: Prefill | None = None


class _Leaving(NamedTuple):
    """Something that ends: an output with its reason, or a prefix; what the store holds of it must be given up."""

    handle: pk.Sequence | pk.Continuation | None
    output: Output | None = None
    reason: OutputReason | None = None
    step: int = 0


class _State(NamedTuple):
    """Every output that has not ended; mappings are replaced and never changed.

    Attributes:
        waiting: the queue.
        writing: in the order of admission.
        running, outputs: sequences in the order of their first token, and the output of each.
        prefixes: the kept prefix of a request whose outputs wait.
        leaving: what the next call gives up if this one is interrupted.
    """

    waiting: tuple[Output, ...] = ()
    writing: tuple[_Row, ...] = ()
    running: tuple[pk.Sequence, ...] = ()
    outputs: Mapping[pk.Sequence, Output] = MappingProxyType({})
    prefixes: Mapping[Request, pk.Continuation] = MappingProxyType({})
    leaving: tuple[_Leaving, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in use."""
        return len(self.writing) + len(self.running)

    def without_prefix(self, request: Request) -> _State:
        """Return the state without the prefix of a request."""
        return self._replace(prefixes={one: kept for one, kept in self.prefixes.items() if one is not request})

    def with_row(self, row: _Row, *, has_moved: bool) -> _State:
        """Return the state in which the head of the queue has a row; a Move used up the prefix of its request."""
        state = self.without_prefix(row.output.request) if has_moved else self
        return state._replace(waiting=state.waiting[1:], writing=(*state.writing, row))

    def with_running(self, row: _Row) -> _State:
        """Return the state in which a row has its first token."""
        return self._replace(writing=tuple(one for one in self.writing if one is not row),
                             running=(*self.running, row.sequence), outputs={**self.outputs, row.sequence: row.output})

    def with_ended(self, ended: Mapping[pk.Sequence, OutputReason | None], step: int) -> _State:
        """Return the state in which running sequences are leaving; others are ignored."""
        leaving = [_Leaving(one, self.outputs[one], ended[one], step) for one in self.running if one in ended]
        return self._replace(
            running=tuple(one for one in self.running if one not in ended),
            outputs={one: output for one, output in self.outputs.items() if one not in ended},
            leaving=(*self.leaving, *leaving),
        )

    def without_request(self, request: Request, step: int) -> _State:
        """Return the state in which everything of a request is leaving."""
        running: dict[pk.Sequence, OutputReason | None] = {
            one: "cancelled" for one, output in self.outputs.items() if output.request is request
        }
        leaving = [_Leaving(row.sequence, row.output, "cancelled", step) for row in self.writing
                   if row.output.request is request]
        leaving += [_Leaving(None, output, "cancelled", step) for output in self.waiting if output.request is request]
        leaving += [_Leaving(kept) for one, kept in self.prefixes.items() if one is request]
        state = self.with_ended(running, step).without_prefix(request)
        return state._replace(
            waiting=tuple(output for output in self.waiting if output.request is not request),
            writing=tuple(row for row in self.writing if row.output.request is not request),
            leaving=(*state.leaving, *leaving),
        )


class _Pending(NamedTuple):
    """A call of the store that makes a handle; after an interrupt the new one among `known` and others is its result.

    Attributes:
        known: handles of that kind before the call.
        output: that gets a row, or whose row makes a prefix.
        makes_prefix, has_moved: of an activation.
    """

    known: list[pk.Sequence] | list[pk.Continuation]
    output: Output
    makes_prefix: bool = False
    has_moved: bool = False


class _FirstTokens(NamedTuple):
    """Steps from `submit` to first tokens: of how many outputs, together, and most."""

    outputs: int = 0
    steps: int = 0
    steps_max: int = 0

    def with_output(self, output: Output) -> _FirstTokens:
        """Return the figures with one more output."""
        assert output.first_token_step is not None, "it has a token"
        steps = output.first_token_step - output.request.submitted_step
        return _FirstTokens(self.outputs + 1, self.steps + steps, max(self.steps_max, steps))


_Entry = tuple[StepTokens, Mapping[pk.Sequence, Output]]
"""Tokens of one step of the loop, and the outputs that ran in it."""


class Scheduler:
    """Serves requests with one store and one model, in one thread.

    Args:
        store: an open store.  Others may hold rows and pages of it; the scheduler uses what is left.
        model: as of `DecodeLoop`.
        step_tokens: most columns of a step, decode and prompts together; None is 256, or what every row and a piece of
            16 tokens need if that is more.
        prefill_chunk, draft, draft_tokens, before_replay, use_graphs: as of `DecodeLoop`.
        retention: what to keep of ended outputs, such as `LeastRecent()`; None keeps nothing.  It is for a model whose
            whole state at any token is in the pages.
        overcommits: with lease growth, admit an output that has room for its prompt and a window.  Where the pool
            cannot extend a lease, its output ends with the tokens that it has, and reason "length" (C9.2).

    Attributes:
        loop: the decode loop; only the scheduler calls it.
        steps: steps that have ended.

    Raises:
        ConfigError: `step_tokens` is too small, the store of a scheduler that overcommits has no lease growth, or as
            `DecodeLoop`.
        MisuseError: as `DecodeLoop`.

    An exception of the model leaves every request as it was before the step.  A note of the exception names the
    request if the model ran for one prompt alone: cancel it and step again.  From inside a step, an observer or a
    signal handler, every call is refused (C12.3).
    """

    def __init__(
        self, store: pk.Store, model: Model, *, step_tokens: int | None = None, prefill_chunk: int | None = None,
        draft: Draft | None = None, draft_tokens: int = DRAFT_TOKENS, before_replay: Hook | None = None,
        use_graphs: bool = True, retention: Retention | None = None, overcommits: bool = False,
    ) -> None:
        if overcommits and not store.config.kv_lease_growth:
            raise pk.ConfigError("overcommits", expected="a store with kv_lease_growth", got="exact reservations",
                                 remedy="pass kv_lease_growth=True to StoreConfig", clause="C9.2")
        self.retention, self.overcommits = retention, overcommits
        self.loop = DecodeLoop(store, model, prefill_chunk=prefill_chunk, use_graphs=use_graphs, draft=draft,
                               draft_tokens=draft_tokens, before_replay=before_replay)
        self.store = store
        self.steps = 0
        self._columns = 1 if draft is None else 1 + draft_tokens
        least = store.config.max_concurrency * self._columns + PREFILL_WIDTH_MIN
        self.step_tokens = pk.checks.checked_integer(
            "step_tokens", max(STEP_TOKENS, least) if step_tokens is None else step_tokens, least, 1 << 30,
            remedy="leave room for a column of every row and a piece of a prompt", clause="C14.4", kind=pk.ConfigError,
        )
        self._state = _State()
        self._call: FrameType | None = None
        self._pending: _Pending | None = None
        self._requests = 0
        self._first_tokens = _FirstTokens()
        self._ended = self._rows_most = self._pages_most = 0
        # Steps of the loop, and how many of them had their ended outputs retired, were handed over to the caller, and
        # were distributed to the outputs.
        self._entries: list[_Entry] = []
        self._retired = self._handed = self._distributed = 0
        self._distributing: list[tuple[Output, int, list[int]]] | None = None

    # ---- calls ------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: Iterable[int], max_new_tokens: int, *, stop_tokens: Iterable[int] = (), n: int = 1,
        words: Iterable[int] | None = None, sampling: Sampling | None = None, seed: int | None = None,
        salt: Hashable = None,
    ) -> Request:
        """Put a request into the queue.

        Args:
            prompt_ids: token ids, at least one.
            max_new_tokens: most tokens of each output, at least 1.
            stop_tokens: each is delivered and ends its output.
            n: outputs; they share the pages of the prompt (C10.5).
            words: the caller's words of its rows, as many as `caller_words` of the configuration, or with a sampling
                as many as are left behind its words; None is zeros (C15.1).
            sampling: how tokens are chosen, for a model that reads the words; output i has its seed + i.
            seed: in place of that of the sampling, or of a sampling with temperature 1.
            salt: an identity such as the digest of an image or the name of an adapter; kept texts with another one are
                not used.  None is `words` without those of a sampling, because the model may read them.

        Raises:
            ActivationRefused: one output needs more pages than a sequence may have; it would never fit (C10.9).
            MisuseError: ids or counts of another form; nothing changed.
        """
        if self._call is not None:
            self._recover()
        ids = token_ids("a prompt", prompt_ids)
        stops = frozenset(token_ids("stop_tokens", stop_tokens).tolist())
        n = pk.checks.checked_integer("n", n, 1, OUTPUTS_MAX, remedy="pass the number of outputs", clause="C10.5")
        max_new_tokens = pk.checks.checked_integer(
            "max_new_tokens", max_new_tokens, 1, self.store.config.max_context, clause="C9.2",
            remedy="pass the most tokens of an output, or raise max_context",
        )
        answer = self.store.explain(pk.ActivationTarget(ids.size, max_new_tokens))
        if isinstance(answer, pk.Refusal) and answer.forever:
            raise pk.ActivationRefused(
                f"a request of {ids.size} + {max_new_tokens} tokens", clause="C10.9", refusal=answer,
                expected=f"at most {answer.available} pages, of max_context = {self.store.config.max_context} tokens",
                got=f"{answer.needed} pages", remedy="lower max_new_tokens or shorten the prompt: it never fits",
            )
        if seed is not None:
            sampling = replace(sampling or Sampling(), seed=seed)
        all_words = self._checked_words(words, sampling)
        if self.retention is not None:
            pk.checks.require_hashable("salt", salt, remedy="pass text, bytes or a number", clause="C2.2")
        if salt is None:
            is_greedy = sampling is None and not any(all_words[:SAMPLING_WORDS])
            salt = "words", all_words[SAMPLING_WORDS:] if is_greedy else all_words
        request = Request(self, self._requests + 1, ids, max_new_tokens, stops, n, sampling, all_words, salt)
        request.words_of(n - 1)  # refuses a seed that is too large
        before = self._state
        try:
            self._state, self._requests = before._replace(waiting=before.waiting + request.outputs), request.number
            return request  # noqa: TRY300 - an interrupt before the caller has the request is an error too
        except BaseException:
            self._state = before
            raise

    def step(self) -> SchedulerStep:
        """Admit, write pieces of prompts, and decode one token of every output that runs; with a draft one or more.

        Without any request it does nothing.  After an interrupt the tokens that the caller has not got come with the
        answer of the next step.

        Returns:
            A mapping with the new tokens of each output that got any, its first one included.

        Raises:
            ActivationRefused: nothing runs, and the head of the queue does not fit, because others hold rows or pages;
                release them and step again.
            MisuseError: the model sampled a negative id, or refused its tokens; no frontier moved.
        """
        if self._call is not None:
            self._recover()
        self._call = sys._getframe()
        if self._distributed:
            self._drop_entries()
        state = self._state
        if state.waiting or state.writing:
            self._write_prompts()
            state = self._state
        if state.running:
            if self.retention is not None and self.store.config.kv_lease_growth:
                self._make_room_to_grow(self.retention, state.running)
            self._entries.append((self.loop.step(state.running), state.outputs))  # one line: no token is lost
            if self._entries[-1][0].ended:
                self._retire()
                self._release()
            else:
                self._retired = len(self._entries)
        handed, answer = self._handed, SchedulerStep(self._entries[self._handed :])
        try:
            self._handed, self.steps, self._call = len(self._entries), self.steps + 1, None
            return answer  # noqa: TRY300 - an interrupt before the caller has the tokens is an error too
        except BaseException:
            self._handed = handed
            raise

    def cancel(self, request: Request) -> None:
        """End the outputs of a request that have not ended, with reason "cancelled"; their tokens so far stay.

        Raises:
            MisuseError: it is no request of this scheduler.
        """
        if self._call is not None:
            self._recover()
        if type(request) is not Request or request._scheduler is not self:
            raise pk.MisuseError("cancel", expected="a request that submit of this scheduler returned",
                                 got=pk.checks.shown(request), remedy="pass that request", clause="C1.2")
        self._call = sys._getframe()
        self._state = self._state.without_request(request, self.steps)
        self._release()
        self._call = None

    @property
    def is_idle(self) -> bool:
        """Whether every output has ended."""
        state = self._state
        return not (state.waiting or state.running or state.writing or state.leaving)

    @property
    def requests(self) -> list[Request]:
        """Requests with outputs that have not ended, in the order of `submit`, so that a lost one can be found."""
        state = self._state
        outputs = [*state.outputs.values(), *(row.output for row in state.writing), *state.waiting]
        return sorted({output.request for output in outputs}, key=lambda request: request.number)

    @property
    def statistics(self) -> SchedulerStatistics:
        """Figures of this moment."""
        state = self._state
        self._note_use()
        return SchedulerStatistics(
            self.steps, len(state.waiting), len(state.writing), len(state.running), self._ended, self._rows_most,
            self._used_pages(), self._pages_most,
            self._first_tokens.steps / max(self._first_tokens.outputs, 1), self._first_tokens.steps_max,
        )

    def _checked_words(self, words: Iterable[int] | None, sampling: Sampling | None) -> tuple[int, ...]:
        """Return the words behind those of the sampling; refuse others.  (C15.1)"""
        shown, limit = pk.checks.shown, 1 << 31
        if sampling is not None and type(sampling) is not Sampling:
            raise pk.MisuseError("sampling", expected="a Sampling", got=shown(sampling), clause="C15.1",
                                 remedy="pass Sampling(temperature=0.8, top_p=0.9, seed=1)")
        count = self.store.config.caller_words - (SAMPLING_WORDS if sampling is not None else 0)
        if count < 0:
            raise pk.MisuseError("a request with a sampling", expected=f"a store of at least {SAMPLING_WORDS} words",
                                 got=f"caller_words={self.store.config.caller_words}",
                                 remedy=f"open it with StoreConfig(caller_words={SAMPLING_WORDS})", clause="C15.1")
        expected, remedy = f"{count} integers of 32 bits", "pass as many as caller_words, without those of a sampling"
        items = (0,) * count if words is None else pk.checks.checked_items(
            "words", words, expected=expected, remedy=remedy, clause="C15.1"
        )
        if len(items) != count:
            raise pk.MisuseError("words", expected=expected, got=f"{len(items)}", remedy=remedy, clause="C15.1")
        return tuple(pk.checks.checked_integer("a word", word, -limit, limit - 1, remedy=remedy, clause="C15.1",
                                               takes_numpy=True) for word in items)

    # ---- from the queue to a row ------------------------------------------------------------------

    def _write_prompts(self) -> None:
        """Admit outputs, and write pieces of prompts in their order, within the columns that decoding leaves."""
        left = self.step_tokens - len(self._state.running) * self._columns
        while True:
            if self._state.waiting:
                self._admit()
            if not self._state.writing:
                return
            row = self._state.writing[0]
            prompt = row.prompt or self._begin_prompt(row)
            size = prompt.tokens_left - row.makes_prefix
            piece = min(size, left, self.loop.prefill_chunk)
            if piece < min(size, PREFILL_WIDTH_MIN):
                return  # not a whole unit for a few tokens
            if piece:
                left -= piece
                _advance(row, prompt, piece)
            if piece < size:
                continue
            if row.makes_prefix:
                self._keep_prefix(row)
                continue
            row.output.first_token_step = self.steps + 1
            self._state, self._first_tokens = self._state.with_running(row), self._first_tokens.with_output(row.output)
            left -= self._columns

    def _admit(self) -> None:
        """Activate outputs from the head of the queue while there is room."""
        while self._state.waiting and self._state.rows < self.store.config.max_concurrency:
            state = self._state
            output = state.waiting[0]
            request = output.request
            if any(row.makes_prefix and row.output.request is request for row in state.writing):
                return
            is_last = len(state.waiting) == 1 or state.waiting[1].request is not request
            prefix = state.prefixes.get(request)
            if state.rows and not self._has_room_to_grow(request):
                return
            kept = None
            if self.retention is not None and prefix is None:
                kept = self.retention.find(self.store, request.prompt_ids, request.salt)
            target = _target(request, prefix, keep_source=prefix is None or not is_last)
            if kept is not None:
                target = self._target_from(request, kept)
            answer = self._explained(target)
            if isinstance(answer, pk.Refusal) and kept is not None:  # without a Fork: a Move, or from nothing
                if answer.move_fits:
                    target = replace(target, keep_source=False)
                    answer = self.store.explain(target)
                elif not state.rows:
                    target, kept = _target(request, None, keep_source=True), None
                    answer = self._explained(target)
            if isinstance(answer, pk.Refusal) and not state.rows and target.keep_source and prefix is not None:
                target = _target(request, prefix, keep_source=False)  # the others write their prompts themselves
                answer = self.store.explain(target)
            if isinstance(answer, pk.Refusal):
                if not state.rows:
                    self._refuse_to_wait(request, answer)
                return
            self._activate(output, target, makes_prefix=prefix is None and not is_last and request.prompt_ids.size > 1)
            if self.retention is not None and kept is not None:
                self.retention.started(self.store, kept, has_moved=not target.keep_source)

    def _activate(self, output: Output, target: pk.ActivationTarget, *, makes_prefix: bool) -> None:
        """Activate the head of the queue; there is room."""
        has_moved = target.source is not None and not target.keep_source
        self._pending = _Pending(self.store.sequences(), output, makes_prefix, has_moved)
        self._adopt([self.store.activate(
            prompt_tokens=target.prompt_tokens, output_tokens=target.output_tokens, source=target.source,
            frontier=target.frontier, keep_source=target.keep_source,
        )])
        self._note_use()

    def _explained(self, target: pk.ActivationTarget) -> pk.ActivationPlan | pk.Refusal:
        """Return the plan of an activation, or the Refusal; the retention policy may give others up for it."""
        answer = self.store.explain(target)
        while isinstance(answer, pk.Refusal) and self.retention is not None:
            if not self.retention.make_room(self.store, answer, target.source):
                break
            answer = self.store.explain(target)
        return answer

    def _target_from(self, request: Request, kept: RetainedPrefix) -> pk.ActivationTarget:
        """Return the Fork of a kept text at the end of the common prefix, in every pool.  (C9.9)"""
        pools = [pool.name for pool in self.store.config.pools]
        frontier = {pool: min(kept.tokens, self.store.committed_tokens(kept.source, pool)) for pool in pools}
        return pk.ActivationTarget(request.prompt_ids.size - kept.tokens, request.max_new_tokens, kept.source, frontier)

    def _make_room_to_grow(self, retention: Retention, running: tuple[pk.Sequence, ...]) -> None:
        """Give kept texts up where rows that run cannot extend their leases.  (C9.2)"""
        short = self.store.begin_round(self.store.batch(running))
        if short:
            window = -(-self.store.config.lease_window_tokens // pk.PAGE_TOKENS)
            available = self.store.memory_summary()["main"]["available_pages"]
            pages = len(short) * window
            while pages and not retention.make_room(
                self.store, pk.Refusal("main", available + pages, available, forever=False), None
            ):
                pages //= 2  # a part of it is better than nothing

    def _keep_prefix(self, row: _Row) -> None:
        """Snapshot all but the last token of a prompt for the other outputs; without room they write it themselves."""
        if row.output.request not in self._state.prefixes:
            self._pending = _Pending(self.store.continuations(), row.output)
            answer = self.store.try_snapshot(row.sequence, state=_PREFIX)
            if isinstance(answer, pk.Refusal) and self.retention is not None and self.retention.make_room(
                self.store, answer, None
            ):
                answer = self.store.try_snapshot(row.sequence, state=_PREFIX)
            self._adopt([] if isinstance(answer, pk.Refusal) else [answer])
            self._note_use()
        row.makes_prefix = False

    def _adopt(self, handles: Iterable[pk.Sequence | pk.Continuation]) -> None:
        """Note the handle that a call of the store made, and that the call has ended."""
        pending, state = self._pending, self._state
        assert pending is not None, "a call of the store made a handle"
        output = pending.output
        for handle in handles:
            if isinstance(handle, pk.Sequence):
                output.admitted_step = self.steps + 1
                row = _Row(output, handle, pending.makes_prefix)
                state = state.with_row(row, has_moved=pending.has_moved)
            else:
                state = state._replace(prefixes={**state.prefixes, output.request: handle})
        self._state, self._pending = state, None

    def _has_room_to_grow(self, request: Request) -> bool:
        """Say whether the pool holds one more output and the whole budgets of all that are active.  (C9.2)"""
        if self.overcommits or not self.store.config.kv_lease_growth:
            return True  # nothing is promised, or reservations are exact
        state, capacity = self._state, self.store.memory_summary()["main"]["capacity_pages"]
        active = [*state.outputs.values(), *(row.output for row in state.writing)]
        prefixes = sum(-(-one.prompt_ids.size // pk.PAGE_TOKENS) for one in state.prefixes)
        return request.pages + prefixes + sum(output.request.pages for output in active) <= capacity

    def _begin_prompt(self, row: _Row) -> Prefill:
        """Begin the prompt of a row: all of it, or the last token behind a prefix."""
        request = row.output.request
        written = self.store.committed_tokens(row.sequence)
        row.prompt = self.loop.begin_prefill(
            row.sequence, request.prompt_ids[written:], last_token=None, stop_tokens=request.stop_tokens,
            words=request.words_of(row.output.index),
        )
        return row.prompt

    # ---- from a row to the end --------------------------------------------------------------------

    def _retire(self) -> None:
        """Let the outputs leave that ended in steps of the loop which are not retired yet."""
        outputs, entries = self._state.outputs, self._entries
        ended = {one: self.loop.finish_reason(one) for tokens, _ in entries[self._retired :] for one in tokens.ended
                 if one in outputs}
        self._state, self._retired = self._state.with_ended(ended, self.steps + 1), len(entries)

    def _release(self) -> None:
        """Give up what is leaving; the tokens of an output are complete before it has a reason."""
        if self._state.leaving:
            self._note_use()
            self._distribute()
        while self._state.leaving:
            handle, output, reason, step = self._state.leaving[0]
            with contextlib.suppress(pk.StaleHandle):  # an interrupted call has ended it
                if isinstance(handle, pk.Sequence):
                    self.loop.forget(handle)
                    self._finish(handle, output, reason)
                elif handle is not None:
                    self.store.release(handle)
            ended = self._ended
            if output is not None:
                output.reason, output.ended_step, ended = reason, step, ended + 1
            self._state, self._ended = self._state._replace(leaving=self._state.leaving[1:]), ended

    def _finish(self, sequence: pk.Sequence, output: Output | None, reason: OutputReason | None) -> None:
        """End a sequence; with a retention policy its text stays, unless the output was cancelled."""
        committed = {pool.name: self.store.committed_tokens(sequence, pool.name) for pool in self.store.config.pools}
        written = committed["main"]
        is_kept = self.retention is not None and output is not None and reason != "cancelled"
        if not is_kept or not 0 < written == max(committed.values()):  # a lead of a backend is no checkpoint (C13.2)
            self.store.finish(sequence)
            return
        assert self.retention is not None, "it is kept"
        assert output is not None, "it is kept"
        text = np.concatenate((output.request.prompt_ids, np.array(output._tokens, np.int32)))[:written]
        kept = self.store.finish(sequence, retain=True, state=RetainedText(text, output.request.salt),
                                 state_frontier=committed)
        assert kept is not None, "it was retained"
        self.retention.keep(self.store, kept)

    def _recover(self) -> None:
        """Complete a call that was interrupted; refuse a call from the middle of another one.  (C12.3)"""
        if self._call is not None and pk.checks.is_on_the_stack(self._call):
            raise pk.MisuseError("a call of a scheduler in the middle of another one", clause="C12.3",
                                 expected="a call before or after it", got="one of an observer, a handler or the model",
                                 remedy="note there what to do, and call the scheduler after its step")
        self._call = sys._getframe()
        if self._pending is not None:
            known = set(self._pending.known)
            is_row = self._pending.output in self._state.waiting
            now = self.store.sequences() if is_row else self.store.continuations()
            self._adopt([handle for handle in now if handle not in known])
        if self.retention is not None:
            self.retention.recover(self.store)
        self._retire()
        self._release()
        self._call = None

    # ---- tokens and figures -----------------------------------------------------------------------

    def _distribute(self) -> None:
        """Add the tokens of steps to their outputs; a second call completes one that was interrupted."""
        if self._distributing is None:
            lists, count = _lists_of(self._entries[self._distributed :]), len(self._entries)
            starts = [(output, len(output._tokens), tokens) for output, tokens in lists.items()]
            self._distributing, self._distributed = starts, count
        for output, start, tokens in self._distributing:
            output._tokens[start:] = tokens
        self._distributing = None

    def _drop_entries(self) -> None:
        """Drop steps that are retired, handed over and distributed."""
        count = min(self._retired, self._handed, self._distributed)
        counts = self._retired - count, self._handed - count, self._distributed - count
        self._entries, (self._retired, self._handed, self._distributed) = self._entries[count:], counts

    def _used_pages(self) -> int:
        memory = self.store.memory_summary()["main"]
        return memory["capacity_pages"] - memory["available_pages"]

    def _note_use(self) -> None:
        """Note the most rows and pages so far; pages return only when something leaves."""
        self._rows_most = max(self._rows_most, self._state.rows)
        self._pages_most = max(self._pages_most, self._used_pages())

    def _refuse_to_wait(self, request: Request, refusal: pk.Refusal) -> NoReturn:
        what = "rows" if refusal.reason == "rows" else f"pages of {refusal.pool}"
        raise pk.ActivationRefused(
            f"waiting with {request}, the next of the queue", refusal=refusal, clause="C10.9",
            expected=f"{refusal.needed} {what}, or something running that will free them",
            got=f"{refusal.available}, and nothing of this scheduler runs",
            remedy="finish or release what others hold in the store and step again, or cancel the request",
        )


def _target(request: Request, prefix: pk.Continuation | None, *, keep_source: bool) -> pk.ActivationTarget:
    """Return the activation of one output, from nothing or from a prefix."""
    prompt_tokens = request.prompt_ids.size if prefix is None else 1
    return pk.ActivationTarget(prompt_tokens, request.max_new_tokens, prefix, keep_source=keep_source)


def _lists_of(entries: Iterable[_Entry]) -> dict[Output, list[int]]:
    """Return the tokens of each output in some steps."""
    lists: dict[Output, list[int]] = {}
    for tokens, outputs in entries:
        for sequence, new in tokens.items():
            lists.setdefault(outputs[sequence], []).extend(new)
    return lists


def _advance(row: _Row, prompt: Prefill, tokens: int) -> None:
    """Write a piece of a prompt; a note of an error names the request."""
    try:
        prompt.advance(tokens)
    except BaseException as error:
        error.add_note(f"while the prompt of {row.output.request} was written")
        raise
