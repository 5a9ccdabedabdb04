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
    CopyModel,
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

MOVES_BYTES = frozenset({"activate", "snapshot", "truncate", "release", "finish", "demote", "poll"})
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
        restoring: by the number of their event, sequences that are restoring.
    """

    def __init__(self, shape: WalkShape, device: FaultyDevice, journal: TextIO | None = None) -> None:
        config = shape.config()
        self.device = device
        device.asks, device.is_still = 0, False
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
        self.restoring: dict[int, pk.Sequence] = {}
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
        self.device.is_still = False
        self._follow_copies()
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
            "unit": self.units, "batch": self.batches, "restoring": self.restoring,
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
            if self.model.host_bytes:
                require_same("free bytes of the arena", self.model.host_bytes_free(),
                             self.store.host_summary()["free_bytes"])  # fmt: skip

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
        self._finish_copies()
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
        keeps: bool = True, demotes: bool = False, wait: bool = True, asks: int = 0,
    ) -> None:  # fmt: skip
        self._end_earlier_copies(asks)
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
        if isinstance(explained, pk.Refusal):
            require_same("a Move fits", self.model.move_fits(target, explained.move_fits), explained.move_fits)
        refusals, is_sure = self.model.refusals(target)
        may_wait = wait and any(refusal.reason == "copying" for refusal in refusals)
        if may_wait:  # then all that is in flight ends at once, in order
            self.device.asks = 0
        answer = self._try(lambda: self.store.try_activate(**arguments, wait=wait), None if may_wait else before)
        if may_wait:  # the refusal may have been another one, before the store looked at the pages
            self._follow_copies()
            refusals, is_sure = self.model.refusals(target)
            explained = self._explain(arguments) if isinstance(answer, pk.Refusal) else explained
            self.counts["waits for other copies"] += not self.model.copies
        if isinstance(answer, pk.Refusal):
            require_same("explained and answered", explained, answer)
        if not self._is_granted(answer, refusals):
            return
        assert isinstance(answer, pk.Sequence), answer
        assert not is_sure, f"granted, model {refusals}"
        if not may_wait:
            assert isinstance(explained, pk.ActivationPlan), f"explained {explained}, granted"
            require_same("entitlement", self.model.entitlements(target), dict(explained.entitlement_pages))
            require_same("row", explained.row, answer.row)
        number = self._event.number
        self.counts["fresh" if source is None else "forks" if keeps else "moves"] += 1
        self.counts["staged forks"] += bool(self.model.taken_tails(target))
        needs_copies = self.model.needs_copies(target)
        require_same("is restoring", needs_copies and not wait, self.store.is_restoring(answer))
        if not needs_copies or wait:
            claims = self.model.claims(target)
            self.sequences[number] = self.model.activate(number, target, answer.row, claims), answer
            self.counts["restores"] += needs_copies
            return
        self.counts["restores beside other work"] += 1
        self.model.begin_restore(number, target, answer.row)
        self.restoring[number] = answer
        for use in (self.store.finish, self.store.committed_tokens, self.store.budget_tokens):
            self.call({"MisuseError"}, lambda use=use: use(answer))  # type: ignore[misc]

    # ---- events: the Host tier --------------------------------------------------------------------

    def _demote(self, continuation: ContinuationPair, wait: bool, asks: int) -> None:
        self._end_earlier_copies(asks)
        model, handle = continuation
        errors, before = self.model.demote_errors(model), self._inspect()
        if model.is_live:
            for pool, plan in self.store.explain_release(handle).items():
                require_same(f"release plan of {pool}", self.model.release_plan(model, pool), tuple(plan))
            self._require_unchanged(before)
        refusals, is_sure = ([], False) if errors else self.model.demote_refusals(model)
        answer = self.call(errors, lambda: self._try(lambda: self.store.demote(handle, wait=wait), before),
                           before=before)  # fmt: skip
        if not self._is_granted(answer, refusals):
            return
        assert not is_sure, f"granted, model {refusals}"
        self.model.begin_demotion(self._event.number, model)
        demotion = self.model.copies[-1]
        require_same("demoted pages", sum(map(len, demotion.demoted.values())), answer)
        self.counts["demoted pages"] += cast("int", answer)
        if wait or not any(demotion.records.values()):
            self.model.end_copies(demotion)
        else:
            self.counts["demotions beside other work"] += 1

    def _drop(self, continuation: ContinuationPair, replica: str) -> None:
        model, handle = continuation
        call = {"device": self.store.drop_device, "host": self.store.drop_host}[replica]
        answer = self.call(self.model.claim_errors(model), lambda: call(handle))
        if answer is not REFUSED:
            follow = {"device": self.model.drop_device, "host": self.model.drop_host}[replica]
            require_same(f"dropped on the {replica}", follow(model), answer)
            self.counts[f"dropped on the {replica}"] += cast("int", answer) > 0

    def _poll(self, is_last: bool) -> None:
        if is_last:
            self._finish_copies()
            return
        is_in_flight = self._poll_store()
        require_same("copies in flight", bool(self.model.copies), is_in_flight)

    def _give_up(self, restoring: pk.Sequence) -> None:
        copy = next((one for one in self.model.restoring if one.name == self._event.arguments["restoring"]), None)
        if copy is None:  # published or given up
            return
        self._inspection = None
        copy.is_aborting = True
        require_same("whether the sequence ended", False, self.store.abort(restoring))
        self.counts["aborted restores"] += 1

    def _end_earlier_copies(self, asks: int) -> None:
        """End copies that have run ahead of a call that does so too: what it changes is compared with what was before.

        Where a copy of the call is to fail, no other is in flight: which one fails would not be known.
        """
        if "fail_at" in self._event.arguments:
            self._finish_copies()
        elif self.model.copies:
            self._poll(is_last=False)
        self.device.asks, self.device.is_still = asks, True

    def _finish_copies(self) -> None:
        while self._poll_store():
            pass
        require_same("copies in flight", [], self.model.copies)

    def _poll_store(self) -> bool:
        self._inspection = None
        is_in_flight = self.store.poll_copies()
        self._follow_copies()
        return is_in_flight

    def _follow_copies(self) -> None:
        """Let the model end the copies that the store has ended, in the order of their begin."""
        if not self.model.copies:
            return
        is_restoring = {id(copy): self._is_restoring(copy) for copy in self.model.restoring}
        running = [copy for copy in self.model.restoring if is_restoring[id(copy)]]
        ended = [copy for copy in self.model.copies
                 if not (copy in running if copy.target else self._is_demoting(copy, running))]  # fmt: skip
        for copy in ended:
            self._inspection = None
            sequence = self.model.end_copies(copy)
            handle = self.restoring.pop(copy.name, None)
            if sequence is not None and handle is not None:
                self.sequences[copy.name] = sequence, handle

    def _is_restoring(self, copy: CopyModel) -> bool:
        """Ask the store about a sequence; the handle of one that was given up is stale."""
        try:
            return self.store.is_restoring(self.restoring[copy.name])
        except pk.StaleHandle:
            if copy.is_aborting:
                return False
            raise

    def _is_demoting(self, copy: CopyModel, running: list[CopyModel]) -> bool:
        """Return whether a demotion still holds its pages, beside restores."""
        pool, page = next((pool, pages[0]) for pool, pages in copy.pinned.items() if pages)
        pins = int(self._inspect().pools[pool].pins[page.logical])
        return pins > sum(other.pinned[pool].count(page) for other in running)

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
        self._end_earlier_copies(self.device.asks)
        model, handle = continuation
        if self.call(self.model.cut_errors(model), lambda: self.store.release(handle)) is not REFUSED:
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
        if self.store.sanitizer is not None and "fail_at" in self._event.arguments:
            self._finish_copies()  # a publication of theirs could break off too, and latch the store
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
        self._end_earlier_copies(self.device.asks)
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
        not: the store must be latched, and the walk ends (C12.4).  But a commit that has ended may meet the failure in
        the publication of a restore, and then this waits for the next call.

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
            if self._event.kind == "commit" and self.model.copies and self.store.evidence is None:
                self.counts["restores that a commit could not publish"] += 1  # it has ended; the next call tries again
                return None
            self.is_over = True
            self.counts["broken publications" if self._event.kind in PUBLISHES else "broken withdrawals"] += 1
            require_latched(self.store, self.model)
            return None
        return None if isinstance(answer, Refused) else (answer, follow(answer))

    def _try(self, call: Callable[[], T], before: pk.StoreInspection | None) -> T | Refused:
        """Make a call that may answer with a refusal, or in which a launch or copy fails: then nothing changes.

        Without `before` the call may have ended copies first.
        """
        self._inspection = None
        try:
            answer = self._with_fault(call)
        except InjectedFault:
            self.counts["faults"] += 1
            assert before is not None, "copies may have ended too"
            self._require_unchanged(before)
            self.store.check()
            return REFUSED
        if isinstance(answer, pk.Refusal) and before is not None:
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
