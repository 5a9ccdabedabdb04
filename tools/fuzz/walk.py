"""Walk: one store and its model, with everything compared after every event.  (C5 to C13, C16)

    event  -->  the model: the right errors, the right answer
           -->  the store: the same call
           -->  compare: `Store.inspect`, device tables, bytes (S86)

A call that the model refuses must raise one of the errors that the model names, or answer with a refusal of the right
numbers, and change nothing.  A call whose n-th launch or copy fails must change nothing too (C10.2), unless the tables
were about to follow the ledgers: then the store must be latched, and the walk ends (C12.4).  Every column that a unit
may write gets a tag, through the device table.  Committed columns must show their tags later, after every fork, move
and truncate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TextIO, TypeVar, cast

import numpy as np

import pagedkv as pk
from pagedkv.tools.fuzz.compare import Holdings, committed_bytes, compare, require_same
from pagedkv.tools.fuzz.events import FOLLOWS, MISUSES, Event, WalkShape
from pagedkv.tools.fuzz.faulty_device import FaultyDevice, InjectedFault
from pagedkv.tools.fuzz.latched_store import require_latched
from pagedkv.tools.fuzz.ledger_model import (
    ContinuationModel,
    Counts,
    GrowthShape,
    LedgerModel,
    PoolShape,
    RightRefusal,
    SequenceModel,
    Target,
    UnitModel,
)

T = TypeVar("T")
M = TypeVar("M")

SequencePair = tuple[SequenceModel, pk.Sequence]
ContinuationPair = tuple[ContinuationModel, pk.Continuation]
UnitPair = tuple[UnitModel, pk.Submission]
BatchPair = tuple[list[SequenceModel], pk.Batch]

CHECK_EVERY = 16
BYTES_EVERY = 4

MOVES_BYTES = frozenset({"activate", "snapshot", "truncate", "release", "finish", "demote"})
"""Kinds after which bytes are read at once; after every other kind they are read every `BYTES_EVERY` events."""

PUBLISHES = frozenset({"begin", "ensure"})
"""Kinds whose failing launch or copy breaks off a publication; of every other kind, a withdrawal."""


class Refused:
    """The answer of `Walk.call` for a call that was refused, as it had to be."""


REFUSED = Refused()


class Walk:
    """One store, its model, and the handles of the events so far.

    Attributes:
        is_over: a change of tables broke off, so the store was latched and is closed; later events do nothing.
        counts: how often each kind of event, error and refusal happened.
        sequences, continuations, units, batches: by the number of their event, what the model and the store returned.
    """

    def __init__(self, shape: WalkShape, device: FaultyDevice, journal: TextIO | None = None) -> None:
        config = shape.config()
        self.device = device
        self.store = pk.open_store(config, cast("pk.Device", device), journal=journal)
        self.model = LedgerModel(
            {pool.name: PoolShape(pool.pages, pool.lead_tokens, pool.record_bytes) for pool in config.pools},
            host_bytes=config.host_arena_bytes,
            max_context=config.max_context, max_concurrency=config.max_concurrency, forced_tokens=shape.forced_span,
            growth=GrowthShape(shape.lease_window, shape.widest_columns + shape.forced_span)
            if shape.lease_window else None,
        )  # fmt: skip
        self.is_over = False
        self.sequences: dict[int, SequencePair] = {}
        self.continuations: dict[int, ContinuationPair] = {}
        self.units: dict[int, UnitPair] = {}
        self.batches: dict[int, BatchPair] = {}
        self.counts: Counter[str] = Counter()
        self._event = Event(0, "", {})
        # The inspection of the store, None after a call that may have changed it; the inspection that was compared
        # last, and the holdings of the model then.
        self._inspection: pk.StoreInspection | None = None
        self._compared: pk.StoreInspection | None = None
        self._holdings: Holdings = {}
        # (pages, 64, D) uint16 of the plane whose bytes are compared, of each pool; then the host copies, which one
        # graph fills, of the device table and of that plane
        self.planes: dict[str, Any] = {}
        self.hosts: dict[str, tuple[Any, Any]] = {}
        for pool in config.pools:
            view = self.store.views[pool.name][0]
            plane = view.k_pages if shape.role == "k_code" else view.v_pages
            self.planes[pool.name] = plane = plane.reshape(-1, pk.PAGE_TOKENS, plane.shape[-1])
            table = self.store.block_tables[pool.name]
            self.hosts[pool.name] = device.pinned(table.shape, table.dtype), device.pinned(plane.shape, plane.dtype)
        device.begin_capture(self.store.stream)
        for name, (table, content) in self.hosts.items():
            device.copy(table, self.store.block_tables[name], self.store.stream)
            device.copy(content, self.planes[name], self.store.stream)
        self.reading = device.end_capture(self.store.stream)

    # ---- one event --------------------------------------------------------------------------------

    def perform(self, event: Event) -> bool:
        """Let an event happen in the model and in the store, and compare.

        Returns:
            False when nothing happened: a subject of the event does not exist, or the walk is over.
        """
        arguments = None if self.is_over else self._with_subjects(event)
        if arguments is None:
            return False
        self._event = event
        self.counts[event.kind] += 1
        getattr(self, f"_{event.kind}")(**arguments)
        if self.is_over:
            return True
        self.compare_ledgers()
        if event.kind in MOVES_BYTES or event.number % BYTES_EVERY == 0:
            self.compare_bytes()
        if event.number % CHECK_EVERY == 0:
            self.store.check()
            self.compare_handles()
        return True

    def _with_subjects(self, event: Event) -> dict[str, Any] | None:
        """Return the arguments of an event with pairs of model and handle for names; None where one does not exist."""
        arguments = {name: value for name, value in event.arguments.items() if name != "fail_at"}
        tables: dict[str, Mapping[int, object]] = {
            "sequence": self.sequences, "continuation": self.continuations, "source": self.continuations,
            "unit": self.units, "batch": self.batches,
        }  # fmt: skip
        if arguments.get("state") == FOLLOWS:
            arguments["state"] = pk.STATE_FOLLOWS
        for name in tables.keys() & arguments.keys():
            if arguments[name] not in tables[name]:
                return None
            arguments[name] = tables[name][arguments[name]]
        if "sequences" in arguments:
            if any(name not in self.sequences for name in arguments["sequences"]):
                return None
            arguments["sequences"] = [self.sequences[name] for name in arguments["sequences"]]
        return arguments

    def compare_ledgers(self) -> None:
        """Require that the store shows the state of the model.

        After a refused call that is known already: the store shows what it showed before the call, byte by byte, and
        the model moves with granted calls alone.
        """
        inspection = self._inspect()
        if inspection is not self._compared:
            self._holdings = compare(self.model, inspection)
            self._compared = inspection

    def compare_bytes(self) -> None:
        """Require that device tables name the pages, and that each committed column shows its tag.  (S86)"""
        active = self.model.active
        self._read_device()
        for pool, (table, content) in self.hosts.items():
            rows = table.tolist()
            for sequence in active:
                ids = [page.page_id for page in sequence.spaces[pool].pages]
                require_same(f"pool {pool} row {sequence.row}: device table", ids, rows[sequence.row][: len(ids)])
            page_ids, is_committed, tags = committed_bytes(self._holdings[pool])
            is_wrong = (content[page_ids] != tags[:, :, None]) & is_committed[:, :, None]
            if is_wrong.any():
                page, column, _ = (int(index[0]) for index in np.nonzero(is_wrong))
                raise AssertionError(
                    f"pool {pool} page group {page_ids[page]} column {column}: "
                    f"{content[page_ids[page], column].tolist()}, model {tags[page, column]}"
                )

    def compare_handles(self) -> None:
        """Require that the store answers for each handle as the model does."""
        store = self.store
        for sequence, handle in self.sequences.values():
            if sequence.is_live:
                require_same("budget", sequence.budget, store.budget_tokens(handle))
                for pool, space in sequence.spaces.items():
                    batch = store.batch([handle])
                    for forced in (False, True):
                        covered = self.model.covered_columns(sequence, pool, forced=forced)
                        columns = store.covered_columns(batch, pool, forced=forced).tolist()
                        require_same("covered columns", [covered], columns)
                    require_same("committed", space.frontier, store.committed_tokens(handle, pool))
                    require_same("page ids", [page.page_id for page in space.pages], store.page_ids(handle, pool))
        current = [pair for pair in self.continuations.values() if pair[0].is_live]
        for continuation, source in current:
            require_same("state", continuation.state, store.state_of(source))
            for pool, space in continuation.spaces.items():
                require_same("committed", space.frontier, store.committed_tokens(source, pool))
                require_same("protected", space.protected, store.protected_tokens(source, pool))
                require_same("page ids", [page.page_id for page in space.pages], store.page_ids(source, pool))
        handles = sorted((source for _, source in current), key=repr)
        require_same("continuations", handles, sorted(store.continuations(), key=repr))

    def end_everything(self) -> None:
        """End every unit, sequence and continuation; then every page is available again.  A walk that is over ends."""
        if self.is_over:
            return
        self.compare_ledgers()
        self.compare_bytes()
        for unit, submission in self.units.values():
            if unit.is_live:
                self._end(self.store.fail, submission, self.model.end, unit)
        for sequence, handle in self.sequences.values():
            if sequence.is_live:
                self._end(self.store.finish, handle, self.model.release, sequence)
        for continuation, source in self.continuations.values():
            if continuation.is_live:
                self._end(self.store.release, source, self.model.release, continuation)
        self.store.check()
        for name, pool in self.store.inspect().pools.items():
            require_same(f"pool {name}: pages at the end", pool.capacity, pool.available)
            require_same(f"pool {name}: live descriptors at the end", 0, int(np.count_nonzero(pool.serial)))
        if self.model.host_bytes:
            require_same("Host bytes at the end", 0, self.store.host_summary()["used_bytes"])
        self.store.close()

    def _end(self, call: Callable[[T], object], handle: T, follow: Callable[[M], object], model: M) -> None:
        call(handle)
        follow(model)
        self._inspection = None
        self.compare_ledgers()

    # ---- events: activations and continuations ----------------------------------------------------

    def _activate(
        self, prompt: int, output: int, source: ContinuationPair | None = None, frontier: Any = None,
        keeps: bool = True, demotes: bool = False, wait: bool = True, ends: str = "poll",
    ) -> None:  # fmt: skip
        model, handle = source or (None, None)
        target = Target(prompt, output, model, frontier, keeps, demotes)
        arguments: dict[str, Any] = {"prompt_tokens": prompt, "output_tokens": output, "source": handle,
                                     "frontier": frontier, "keep_source": keeps, "allow_demote_source": demotes}
        before, errors = self._inspect(), self.model.target_errors(target)
        explained = self.call(errors, lambda: self._explain(arguments), before=before)
        if explained is REFUSED:
            self.call(errors, lambda: self.store.try_activate(**arguments), before=before)
            return
        self._require_unchanged(before)
        refusals, is_sure = self.model.refusals(target)
        answer = self._try(lambda: self.store.try_activate(**arguments, wait=wait), before)
        if isinstance(answer, pk.Sequence) and self.store.is_restoring(answer):
            if ends == "abort":
                assert not is_sure, f"granted, model {refusals}"
                self._abort_restore(answer, before)
                return
            self._poll(answer)
        if isinstance(answer, pk.Refusal):
            require_same("explained and answered", explained, answer)
        if not self._is_granted(answer, refusals):
            return
        assert isinstance(answer, pk.Sequence), answer
        assert not is_sure, f"granted, model {refusals}"
        assert isinstance(explained, pk.ActivationPlan), f"explained {explained}, granted"
        require_same("entitlement", self.model.entitlements(target), dict(explained.entitlement_pages))
        require_same("row", explained.row, answer.row)
        number = self._event.number
        self.sequences[number] = self.model.activate(number, target, answer.row), answer
        self.counts["fresh" if source is None else "forks" if keeps else "moves"] += 1

    def _poll(self, sequence: pk.Sequence) -> None:
        """End a restore; until then the sequence is refused everywhere."""
        self.counts["restores beside other work"] += 1
        for use in (self.store.finish, self.store.committed_tokens, self.store.budget_tokens):
            try:
                use(sequence)
            except pk.MisuseError:
                continue
            raise AssertionError(f"{use.__name__} took a restoring sequence")
        self.store.check()
        while self.store.poll_copies():
            pass

    def _abort_restore(self, sequence: pk.Sequence, before: pk.StoreInspection) -> None:
        """Abort a restore: everything is as before.  (C10.2, S26 to S28)"""
        self.counts["aborted restores"] += 1
        self.store.abort(sequence)
        self.store.abort(sequence) if self.store.poll_copies() else None
        while self.store.poll_copies():
            pass
        self._require_unchanged(before)

    # ---- events: the Host tier --------------------------------------------------------------------

    def _demote(self, continuation: ContinuationPair, wait: bool) -> None:
        model, handle = continuation
        errors, before = self.model.demote_errors(model), self._inspect()
        if not errors:
            for pool, plan in self.store.explain_release(handle).items():
                require_same(f"release plan of {pool}", self.model.release_plan(model, pool), tuple(plan))
            self._require_unchanged(before)
        refusals, is_sure = ([], False) if errors else self.model.demote_refusals(model)
        answer = self.call(errors, lambda: self._try(lambda: self.store.demote(handle, wait=wait), before),
                           before=before)  # fmt: skip
        if not self._is_granted(answer, refusals):
            return
        assert not is_sure, f"granted, model {refusals}"
        while self.store.poll_copies():
            pass
        require_same("demoted pages", self.model.demote(model), answer)
        self.counts["demoted pages"] += cast("int", answer)

    def _drop(self, continuation: ContinuationPair, replica: str) -> None:
        model, handle = continuation
        call = {"device": self.store.drop_device, "host": self.store.drop_host}[replica]
        answer = self.call(self.model.stale_errors([model]), lambda: call(handle))
        if answer is not REFUSED:
            follow = {"device": self.model.drop_device, "host": self.model.drop_host}[replica]
            require_same(f"dropped on the {replica}", follow(model), answer)

    def _explain(self, arguments: Mapping[str, Any]) -> pk.ActivationPlan | pk.Refusal:
        target = pk.ActivationTarget(**arguments)
        answer = self.store.explain(target)
        require_same("can_honour", isinstance(answer, pk.ActivationPlan), self.store.can_honour(target))
        return answer

    def _snapshot(self, sequence: SequencePair, state: object, frontier: Any = None) -> None:
        model, handle = sequence
        errors, refusals = self.model.retain_errors(model, state, frontier), self.model.snapshot_refusals(model)
        may: set[str] = set()
        if refusals and not errors - {"MisuseError"}:  # there are two reasons to refuse, and either is right
            errors, may = may, errors
        before = self._inspect()
        answer = self.call(
            errors,
            lambda: self._try(lambda: self.store.try_snapshot(handle, state=state, state_frontier=frontier), before),
            may=may, before=before,
        )  # fmt: skip
        if not self._is_granted(answer, refusals):
            return
        assert isinstance(answer, pk.Continuation), answer
        assert not refusals, f"granted, model {refusals}"
        number = self._event.number
        self.continuations[number] = self.model.snapshot(number, answer.number, model, state, frontier), answer

    def _finish(
        self, sequence: SequencePair, retain: bool = False, state: object = None, frontier: Any = None
    ) -> None:
        model, handle = sequence
        number = self._event.number
        errors = self.model.retain_errors(model, state, frontier) if retain else self.model.boundary_errors([model])

        def follow(answer: pk.Continuation | None) -> ContinuationModel | None:
            if retain:
                return self.model.retain(number, answer.number if answer else 0, model, state, frontier)
            self.model.release(model)
            return None

        answers = self.change(
            errors, lambda: self.store.finish(handle, retain=retain, state=state, state_frontier=frontier), follow
        )
        if answers is None:
            return
        answer, continuation = answers
        require_same("whether finish returns a continuation", retain, isinstance(answer, pk.Continuation))
        if answer is not None and continuation is not None:
            self.continuations[number] = continuation, answer
            self.counts["retained"] += 1

    def _release(self, continuation: ContinuationPair) -> None:
        model, handle = continuation
        if self.call(self.model.stale_errors([model]), lambda: self.store.release(handle)) is not REFUSED:
            self.model.release(model)

    def _protect(self, continuation: ContinuationPair, pool: str, tokens: int) -> None:
        model, handle = continuation
        errors = self.model.protect_errors(model, pool, tokens)
        if self.call(errors, lambda: self.store.protect(handle, tokens, pool)) is not REFUSED:
            self.model.protect(model, pool, tokens)

    def _attach(self, continuation: ContinuationPair, state: object, frontier: Any = None) -> None:
        model, handle = continuation
        errors = self.model.attach_errors(model, state, frontier)
        answer = self.call(errors, lambda: self.store.attach_state(handle, state, state_frontier=frontier))
        if answer is not REFUSED:
            self.model.attach(model, state, frontier)

    # ---- events: units ----------------------------------------------------------------------------

    def _batch(self, sequences: list[SequencePair]) -> BatchPair | None:
        """Make a batch; None where the sequences cannot be one."""
        models, handles = [model for model, _ in sequences], [handle for _, handle in sequences]
        batch = self.call(self.model.batch_errors(models), lambda: self.store.batch(handles))
        if isinstance(batch, Refused):
            return None
        self.batches[self._event.number] = pair = models, batch
        return pair

    def _begin(
        self, columns: dict[str, Counts], form: int, sequences: list[SequencePair] | None = None,
        batch: BatchPair | None = None,
    ) -> None:  # fmt: skip
        pair = batch or self._batch(sequences or [])
        if pair is None:
            return
        models, selected = pair
        errors = self.model.begin_errors(models, columns)
        published, number, counts = self.store.published_slices, self._event.number, in_form(columns, form)
        answers = self.change(errors, lambda: self.store.begin_unit(selected, counts, name="fuzz"),
                              lambda _: self.model.begin(number, models, columns))  # fmt: skip
        if answers is None:
            return
        unit, (model, slices) = answers
        require_same("published slices", slices, self.store.published_slices - published)
        require_same("columns", model.columns, {pool: part.tolist() for pool, part in unit.columns.items()})
        firsts = {pool: part.tolist() for pool, part in unit.first_positions.items()}
        require_same("first positions", model.firsts, firsts)
        self.units[number] = model, unit
        self.counts["crossings"] += bool(slices)
        self._write(model)

    def _write(self, unit: UnitModel) -> None:
        """Write the tags of a unit to the pages in its rows of the device tables, as a kernel would."""
        self._read_device()
        for pool, entries in self.model.write(unit).items():
            (table, _), plane = self.hosts[pool], self.planes[pool]
            for row, first, tags in entries:
                position, end = first, first + tags.size
                while position < end:
                    block, offset = divmod(position, pk.PAGE_TOKENS)
                    count = min(pk.PAGE_TOKENS - offset, end - position)
                    page = int(table[row, block])
                    if not 0 <= page < self.model.pools[pool].capacity:
                        raise AssertionError(f"pool {pool} row {row}: the device table names page {page} at {block}")
                    rows = np.repeat(tags[position - first : position - first + count, None], plane.shape[-1], axis=1)
                    self.device.copy(plane[page, offset : offset + count], rows, self.store.stream)
                    position += count

    def _commit(self, unit: UnitPair, accepted: dict[str, Counts] | None, form: int) -> None:
        model, handle = unit
        counts: dict[str, Counts] = dict(model.columns) if accepted is None else accepted
        argument = None if accepted is None else in_form(accepted, form)
        errors = self.model.commit_errors(model, counts)
        self.call(errors if not model.is_live else set(), lambda: self.store.wait(handle))
        self.change(errors, lambda: self.store.commit(handle, argument), lambda _: self.model.commit(model, counts))

    def _fail(self, unit: UnitPair) -> None:
        model, handle = unit
        self.change(self.model.end_errors(model), lambda: self.store.fail(handle), lambda _: self.model.end(model))

    # ---- events: between units --------------------------------------------------------------------

    def _round(self, sequences: list[SequencePair] | None = None, batch: BatchPair | None = None) -> None:
        pair = batch or self._batch(sequences or [])
        if pair is None:
            return
        models, selected = pair
        answer = self.call(self.model.boundary_errors(models), lambda: self.store.begin_round(selected))
        if isinstance(answer, Refused):
            return
        thin = sum(self.model.is_thin(model) for model in models)
        short = self.model.begin_round(models)
        rows = {handle: model.row for model, handle in self.sequences.values()}
        require_same("rows that were not extended", [model.row for model in short], [rows[handle] for handle in answer])
        self.counts["extended rows"] += thin - len(short)
        self.counts["rows not extended"] += len(short)

    def _trim(
        self, pool: str, provisional: Counts, sequences: list[SequencePair] | None = None,
        batch: BatchPair | None = None,
    ) -> None:  # fmt: skip
        pair = batch or self._batch(sequences or [])
        if pair is None:
            return
        models, selected = pair
        answers = self.change(
            self.model.trim_errors(models, pool, provisional), lambda: self.store.trim(selected, pool, provisional),
            lambda _: self.model.trim(models, pool, provisional),
        )  # fmt: skip
        if answers is not None:
            require_same("trimmed pages", answers[1], answers[0])
            self.counts["trimmed pages"] += answers[1]

    def _truncate(
        self, pool: str, tokens: int, sequence: SequencePair | None = None,
        continuation: ContinuationPair | None = None,
    ) -> None:  # fmt: skip
        pair: SequencePair | ContinuationPair | None = sequence or continuation
        assert pair is not None, "a truncate has a subject"
        model, handle = pair
        answers = self.change(
            self.model.truncate_errors(model, pool, tokens), lambda: self.store.truncate(handle, tokens, pool),
            lambda _: self.model.truncate(model, pool, tokens),
        )  # fmt: skip
        if answers is not None:
            whose = "sequences" if continuation is None else "continuations"
            self.counts[f"cut {whose}"] += 1
            self.counts[f"shared pages left by {whose}"] += answers[1]

    def _ensure(self, sequence: SequencePair, pool: str, tokens: int) -> None:
        model, handle = sequence
        published = self.store.published_slices
        answers = self.change(
            self.model.ensure_errors(model, pool, tokens),
            lambda: self.store.ensure_mapped_to_tokens(handle, tokens, pool),
            lambda _: self.model.ensure(model, pool, tokens),
        )  # fmt: skip
        if answers is not None:
            require_same("published slices", answers[1], self.store.published_slices - published)

    def _abort(self, sequence: SequencePair) -> None:
        model, handle = sequence
        answers = self.change(self.model.stale_errors([model]), lambda: self.store.abort(handle),
                              lambda _: self.model.abort(model))  # fmt: skip
        if answers is not None:
            require_same("whether the sequence ended", answers[1], answers[0])
            self.counts["aborts in flight"] += not answers[0]

    def _misuse(self, which: int, row: int) -> None:
        sequence, continuation = pk.Sequence(0, row, 1), pk.Continuation(0, 1)  # handles of another store
        store = self.store
        calls: list[tuple[str, Callable[[], object]]] = [
            ("StaleHandle", lambda: store.finish(sequence)),
            ("StaleHandle", lambda: store.abort(sequence)),
            ("StaleHandle", lambda: store.batch([sequence])),
            ("StaleHandle", lambda: store.truncate(sequence, 0)),
            ("StaleHandle", lambda: store.ensure_mapped_to_tokens(sequence, 0)),
            ("StaleHandle", lambda: store.try_snapshot(sequence)),
            ("StaleHandle", lambda: store.release(continuation)),
            ("StaleHandle", lambda: store.protect(continuation, 0)),
            ("StaleHandle", lambda: store.try_activate(prompt_tokens=1, output_tokens=0, source=continuation)),
            ("MisuseError", lambda: store.batch([])),
            ("MisuseError", lambda: store.try_activate(prompt_tokens=0, output_tokens=1)),
            ("MisuseError", lambda: store.try_activate(prompt_tokens=1, output_tokens=-1)),
        ]
        assert len(calls) == MISUSES, f"{len(calls)} calls, {MISUSES} are drawn"
        self.call({calls[which][0]}, calls[which][1])

    # ---- calls ------------------------------------------------------------------------------------

    def call(
        self, errors: set[str], call: Callable[[], T], *, may: set[str] | None = None,
        before: pk.StoreInspection | None = None,
    ) -> T | Refused:  # fmt: skip
        """Call the store: it succeeds when the model names no error, else it raises one of them and changes nothing.

        Args:
            errors: names of errors, one of which must be raised.
            call: the call.
            may: names of errors that may be raised where none must be.
            before: the inspection before the call, from a caller that has it already.

        Returns:
            The answer of the call, or REFUSED.
        """
        if before is None and (errors or may):
            before = self._inspect()
        self._inspection = None
        try:
            answer = call()
        except pk.PagedKVError as error:
            name = type(error).__name__
            if before is None or not (errors or may):
                raise AssertionError(f"the store refused, and the model accepts: {name}: {error}") from error
            if name not in errors | (may or set()):
                raise AssertionError(f"got {name} ({error}), model {sorted(errors)}") from error
            self._require_unchanged(before)
            self.counts[name] += 1
            return REFUSED
        if errors:
            raise AssertionError(f"nothing was raised, model {sorted(errors)}")
        return answer

    def change(self, errors: set[str], call: Callable[[], T], follow: Callable[[T | None], M]) -> tuple[T, M] | None:
        """Make a call, as `call` does, after which the store changes device tables, and let the model follow.

        Where a launch or copy of the call fails (`fail_at` of the event), the ledgers have changed and the tables have
        not: the store must be latched, and the walk ends (C12.4).

        Args:
            errors, call: as of `call`.
            follow: changes the model and returns its answer; takes the store's answer, None where the call broke off.

        Returns:
            The answers of store and model, or None: the call was refused, or broke off.
        """
        try:
            answer = self._with_fault(lambda: self.call(errors, call))
        except InjectedFault as fault:
            if errors:
                raise AssertionError(f"{fault}, model {sorted(errors)} before anything is published") from fault
            follow(None)
            self.is_over = True
            self.counts["broken publications" if self._event.kind in PUBLISHES else "broken withdrawals"] += 1
            require_latched(self.store, self.model)
            return None
        return None if isinstance(answer, Refused) else (answer, follow(answer))

    def _try(self, call: Callable[[], T], before: pk.StoreInspection) -> T | Refused:
        """Make a call that may answer with a refusal, or in which a launch or copy fails: then nothing changes."""
        self._inspection = None
        try:
            answer = self._with_fault(call)
        except InjectedFault:
            self.counts["faults"] += 1
            self._require_unchanged(before)
            self.store.check()
            return REFUSED
        if isinstance(answer, pk.Refusal):
            self._require_unchanged(before)
        return answer

    def _with_fault(self, call: Callable[[], T]) -> T:
        """Make a call in which the launch or copy `fail_at` of the event fails; then the call must not succeed."""
        faults, fail_at = self.device.faults, self._event.arguments.get("fail_at", 0)
        with self.device.failing_at(fail_at) if fail_at else nullcontext():
            answer = call()
        if self.device.faults != faults:
            raise AssertionError("a launch or copy failed, and the call succeeded")
        return answer

    def _is_granted(self, answer: object, refusals: list[RightRefusal]) -> bool:
        """Return whether a call was granted; a refusal must be one of the model's."""
        if isinstance(answer, pk.Refusal):
            if not any(refusal.matches(answer) for refusal in refusals):
                raise AssertionError(f"{answer}, model {refusals or 'grants it'}")
            self.counts[f"refused for {answer.reason}"] += 1
        return not isinstance(answer, pk.Refusal | Refused)

    def _inspect(self) -> pk.StoreInspection:
        """Return the inspection of the store; the one after an event serves as the one before the next."""
        if self._inspection is None:
            self._inspection = self.store.inspect()
        return self._inspection

    def _require_unchanged(self, before: pk.StoreInspection) -> None:
        differences = self.store.inspect().differences(before)
        if differences:
            raise AssertionError(f"state changed in {len(differences)} places: " + "; ".join(differences[:5]))
        self._inspection = before

    def _read_device(self) -> None:
        """Fill the host copies of device tables and planes."""
        self.reading.launch(self.store.stream)
        self.store.stream.synchronize()


def in_form(columns: dict[str, Counts], form: int) -> dict[str, Any]:
    """Return columns in one of the forms of callers: numbers and lists, or arrays of some integer type."""
    if form == 0:
        return dict(columns)
    kinds = {pool: np.int32 if form == 2 and np.max(counts, initial=0) < 1 << 31 else np.int64
             for pool, counts in columns.items()}  # fmt: skip
    return {pool: np.array(counts, kinds[pool]) for pool, counts in columns.items()}
