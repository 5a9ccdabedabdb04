"""pagedkv fuzz: random walks over a store and its model, with everything compared after every event.  (C5 to C13, C16)

    seed -> rounds -> WalkShape -> EventDrawer --event--> Walk.perform --> the model: which errors, which answer
                                                                      \\-> the store: the same call
                                                          compare: `Store.inspect`, device tables, bytes (S86)

Each round has its own store.  A call that the model refuses must raise one of the errors it names, or answer with a
refusal that carries its numbers, and leave every observable as it was; so must one whose n-th launch or copy fails
(C10.2), unless that breaks a change of tables off: then the store must be latched, and its walk ends (C12.4).  Every
column that a unit may write gets a tag, through the device table, and what is committed must be read through it later,
whatever was forked, moved, truncated or handed on meanwhile.

A finding names seed and event, and the shortest list of events that still shows one: the walk is run again with
events left out, until none can go or the time is over.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TextIO, TypeVar, cast

import numpy as np

import pagedkv as pk
from pagedkv.tools.faulty_device import FaultyDevice, InjectedFault
from pagedkv.tools.finding import Finding, FuzzFound
from pagedkv.tools.fuzz_events import MISUSES, Event, EventDrawer, WalkShape, draw_shape
from pagedkv.tools.latched_store import require_latched
from pagedkv.tools.ledger_model import (
    ContinuationModel,
    GrowthShape,
    LedgerModel,
    PoolShape,
    SequenceModel,
    Target,
    UnitModel,
    Wanted,
)
from pagedkv.tools.model_view import Held, committed_bytes, compare
from pagedkv.tools.shortest import shortest

T = TypeVar("T")
M = TypeVar("M")
Progress = Callable[[int, int], None]

EVENTS_A_ROUND = 250
CHECK_EVERY = 16
BYTES_EVERY = 4
LAST_EVENTS = 12
SHORTEN_SECONDS = 20.0

MOVES_BYTES = frozenset({"activate", "snapshot", "truncate", "release", "finish"})
"""Kinds after which bytes are read at once; after every other kind they are read every `BYTES_EVERY` events."""

FINDINGS = (AssertionError, pk.PagedKVError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError, InjectedFault)  # fmt: skip
"""What a broken store raises: a comparison that fails, an error that is not right, or an accident inside."""


class Refused:
    """What `Walk.call` gives for a call that was refused, as it had to be."""


REFUSED = Refused()


class Walk:
    """One store, its model, and what the events so far have made.

    Attributes:
        is_over: a change of tables broke off, so the store was latched and is closed; later events do nothing.
        counts: how often each kind of event, error and refusal happened.
    """

    def __init__(self, shape: WalkShape, device: FaultyDevice, journal: TextIO | None = None) -> None:
        config = shape.config()
        self.shape = shape
        self.device = device
        self.store = pk.open_store(config, cast("pk.Device", device), journal=journal)
        self.model = LedgerModel(
            {pool.name: PoolShape(pool.pages, pool.lead_tokens) for pool in config.pools},
            max_context=config.max_context, max_concurrency=config.max_concurrency,
            growth=GrowthShape(shape.lease_window, shape.widest_columns + shape.forced_span)
            if shape.lease_window else None,
        )  # fmt: skip
        self.is_over = False
        self.sequences: dict[int, tuple[SequenceModel, pk.Sequence]] = {}
        self.continuations: dict[int, tuple[ContinuationModel, pk.Continuation]] = {}
        self.units: dict[int, tuple[UnitModel, pk.Submission]] = {}
        self.batches: dict[int, tuple[list[SequenceModel], pk.Batch]] = {}
        self.counts: Counter[str] = Counter()
        # What the store shows, until a call may have changed it; what was compared last, and what the model said then.
        self._shown: pk.StoreInspection | None = None
        self._compared: pk.StoreInspection | None = None
        self._held: Held = {}
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
            False when nothing happened: what it acts on was never made, or the walk is over.
        """
        arguments = event.arguments
        if self.is_over:
            return False
        for name, made in (("sequence", self.sequences), ("continuation", self.continuations), ("unit", self.units),
                           ("source", self.continuations), ("batch", self.batches)):  # fmt: skip
            if name in arguments and arguments[name] not in made:
                return False
        if any(name not in self.sequences for name in arguments.get("sequences", ())):
            return False
        self.counts[event.kind] += 1
        getattr(self, f"_{event.kind}")(event.number, **arguments)
        if self.is_over:
            return True
        self.compare_ledgers()
        if event.kind in MOVES_BYTES or event.number % BYTES_EVERY == 0:
            self.compare_bytes()
        if event.number % CHECK_EVERY == 0:
            self.store.check()
            self.compare_handles()
        return True

    def compare_ledgers(self) -> None:
        """Demand that the store shows what the model says.

        After a refused call that is known already: it showed before what it shows now, byte by byte, and the model
        moves with granted calls alone.
        """
        shown = self._look()
        if shown is not self._compared:
            self._held = compare(self.model, shown)
            self._compared = shown

    def compare_bytes(self) -> None:
        """Demand that device tables name the pages, and that each committed column shows its tag.  (S86)"""
        active = self.model.active
        self._read_device()
        for pool, (table, content) in self.hosts.items():
            rows = table.tolist()
            for sequence in active:
                ids = [page.page_id for page in sequence.spaces[pool].pages]
                shown = rows[sequence.row][: len(ids)]
                if shown != ids:
                    raise AssertionError(f"pool {pool} row {sequence.row}: the device table has {shown}, model {ids}")
            page_ids, is_committed, tags = committed_bytes(self._held[pool])
            is_wrong = (content[page_ids] != tags[:, :, None]) & is_committed[:, :, None]
            if is_wrong.any():
                page, column, _ = (int(index[0]) for index in np.nonzero(is_wrong))
                raise AssertionError(
                    f"pool {pool} page group {page_ids[page]} column {column}: "
                    f"{content[page_ids[page], column].tolist()}, model {tags[page, column]}"
                )

    def compare_handles(self) -> None:
        """Demand that what a store says of each handle is what the model says."""
        store = self.store
        for sequence, handle in self.sequences.values():
            if sequence.is_active:
                _same("budget", sequence.budget, store.budget_tokens(handle))
                for pool, space in sequence.spaces.items():
                    covered = min(space.entitlement * pk.PAGE_TOKENS, self.model.max_context) - space.frontier
                    _same("covered columns", [covered], store.covered_columns(store.batch([handle]), pool).tolist())
                    _same("committed", space.frontier, store.committed_tokens(handle, pool))
                    _same("page ids", [page.page_id for page in space.pages], store.page_ids(handle, pool))
        for continuation, kept in self.continuations.values():
            if continuation.is_current:
                _same("state", continuation.state, store.state_of(kept))
                for pool, space in continuation.spaces.items():
                    _same("committed", space.frontier, store.committed_tokens(kept, pool))
                    _same("protected", space.protected, store.protected_tokens(kept, pool))
                    _same("page ids", [page.page_id for page in space.pages], store.page_ids(kept, pool))
        current = [kept for continuation, kept in self.continuations.values() if continuation.is_current]
        _same("continuations", sorted(current, key=repr), sorted(store.continuations(), key=repr))

    def end_everything(self) -> None:
        """Finish all there is; every page of every pool is available again.  A walk that is over has ended already."""
        if self.is_over:
            return
        self.compare_ledgers()
        self.compare_bytes()
        for unit, submitted in self.units.values():
            if unit.is_open:
                self.store.fail(submitted)
                self.model.end(unit)
                self._shown = None
                self.compare_ledgers()
        for sequence, handle in self.sequences.values():
            if sequence.is_active:
                self.store.finish(handle)
                self.model.finish(sequence)
                self._shown = None
                self.compare_ledgers()
        for continuation, kept in self.continuations.values():
            if continuation.is_current:
                self.store.release(kept)
                self.model.release(continuation)
                self._shown = None
                self.compare_ledgers()
        self.store.check()
        for name, pool in self.store.inspect().pools.items():
            _same(f"pool {name}: pages at the end", pool.capacity, pool.available)
            _same(f"pool {name}: live descriptors at the end", 0, int(np.count_nonzero(pool.serial)))
        self.store.close()

    # ---- events: activations and continuations ----------------------------------------------------

    def _activate(
        self, number: int, prompt: int, output: int, source: int | None = None, frontier: Any = None,
        keeps: bool = True, fail_at: int = 0,
    ) -> None:  # fmt: skip
        model, kept = (None, None) if source is None else self.continuations[source]
        target = Target(prompt, output, model, frontier, keeps)
        wanted = {"prompt_tokens": prompt, "output_tokens": output, "source": kept, "frontier": frontier,
                  "keep_source": keeps}  # fmt: skip
        before = self._look()
        explained = self.call(self.model.target_errors(target), lambda: self._explain(wanted), before=before)
        if explained is REFUSED:
            self.call(self.model.target_errors(target), lambda: self.store.try_activate(**wanted), before=before)
            return
        self._require_unchanged(before)
        right, is_sure = self.model.refusals(target)
        answer = self._granted(lambda: self.store.try_activate(**wanted), fail_at, before)
        if answer is REFUSED:
            return
        if isinstance(answer, pk.Refusal):
            _same("explained and answered", explained, answer)
            if not any(refusal.is_told_by(answer) for refusal in right):
                raise AssertionError(f"{answer}, model {right or 'grants it'}")
            self.counts[f"refused for {answer.reason}"] += 1
            return
        assert isinstance(answer, pk.Sequence), answer
        assert not is_sure, f"granted, model {right}"
        assert isinstance(explained, pk.ActivationPlan), f"explained {explained}, granted"
        _same("entitlement", self.model.entitlements(target), dict(explained.entitlement_pages))
        _same("row", explained.row, answer.row)
        self.sequences[number] = self.model.activate(number, target, answer.row), answer
        self.counts["fresh" if source is None else "forks" if keeps else "moves"] += 1

    def _explain(self, wanted: Mapping[str, Any]) -> pk.ActivationPlan | pk.Refusal:
        target = pk.ActivationTarget(**wanted)
        answer = self.store.explain(target)
        _same("can_honour", isinstance(answer, pk.ActivationPlan), self.store.can_honour(target))
        return answer

    def _snapshot(self, number: int, sequence: int, state: str | None, fail_at: int = 0) -> None:
        model, handle = self.sequences[sequence]
        errors, right = self.model.retain_errors(model), self.model.snapshot_refusals(model)
        if errors - {"MisuseError"} or not right:  # where it may be refused for two reasons, any is right
            may: set[str] = set()
        else:
            errors, may = set(), errors
        before = self._look()
        answer = self.call(
            errors, lambda: self._granted(lambda: self.store.try_snapshot(handle, state=state), fail_at, before),
            may=may, before=before,
        )  # fmt: skip
        if answer is REFUSED:
            return
        if isinstance(answer, pk.Refusal):
            if not any(refusal.is_told_by(answer) for refusal in right):
                raise AssertionError(f"{answer}, model {right or 'grants it'}")
            self.counts[f"refused for {answer.reason}"] += 1
            return
        assert isinstance(answer, pk.Continuation), answer
        assert not right, f"granted, model {right}"
        self.continuations[number] = self.model.snapshot(number, answer.number, model, state), answer

    def _finish(
        self, number: int, sequence: int, retain: bool = False, state: str | None = None, fail_at: int = 0
    ) -> None:
        model, handle = self.sequences[sequence]
        errors = self.model.retain_errors(model) if retain else self.model.finish_errors(model)

        def follow(answer: pk.Continuation | None) -> ContinuationModel | None:
            if retain:
                return self.model.retain(number, answer.number if answer else 0, model, state)
            self.model.finish(model)
            return None

        done = self.settle(errors, lambda: self.store.finish(handle, retain=retain, state=state), follow, fail_at,
                           "withdrawals")  # fmt: skip
        if done is None:
            return
        kept, continuation = done
        _same("whether finish returns a continuation", retain, isinstance(kept, pk.Continuation))
        if kept is not None and continuation is not None:
            self.continuations[number] = continuation, kept
            self.counts["retained"] += 1

    def _release(self, _number: int, continuation: int) -> None:
        model, kept = self.continuations[continuation]
        if self.call(self.model.handle_errors(model), lambda: self.store.release(kept)) is not REFUSED:
            self.model.release(model)

    def _protect(self, _number: int, continuation: int, pool: str, tokens: int) -> None:
        model, kept = self.continuations[continuation]
        errors = self.model.protect_errors(model, pool, tokens)
        if self.call(errors, lambda: self.store.protect(kept, tokens, pool)) is not REFUSED:
            self.model.protect(model, pool, tokens)

    def _attach(self, _number: int, continuation: int, state: str | None) -> None:
        model, kept = self.continuations[continuation]
        if self.call(self.model.handle_errors(model), lambda: self.store.attach_state(kept, state)) is not REFUSED:
            model.state = state

    # ---- events: units ----------------------------------------------------------------------------

    def _batch(self, number: int, sequences: list[int]) -> None:
        chosen = [self.sequences[name] for name in sequences]
        models, handles = [model for model, _ in chosen], [handle for _, handle in chosen]
        batch = self.call(self.model.batch_errors(models), lambda: self.store.batch(handles))
        if isinstance(batch, pk.Batch):
            self.batches[number] = models, batch

    def _begin(
        self, number: int, columns: dict[str, Wanted], form: int, sequences: list[int] | None = None,
        batch: int | None = None, fail_at: int = 0,
    ) -> None:  # fmt: skip
        chosen = self._chosen(number, sequences, batch)
        if chosen is None:
            return
        models, made = chosen
        errors = self.model.begin_errors(models, columns)
        published = self.store.published_slices
        given = as_given(columns, form)
        done = self.settle(errors, lambda: self.store.begin_unit(made, given, name="fuzz"),
                           lambda _: self.model.begin(number, models, columns), fail_at, "publications")  # fmt: skip
        if done is None:
            return
        unit, (model, slices) = done
        _same("published slices", slices, self.store.published_slices - published)
        _same("columns", model.columns, {pool: part.tolist() for pool, part in unit.columns.items()})
        _same("first positions", model.firsts, {pool: part.tolist() for pool, part in unit.first_positions.items()})
        self.units[number] = model, unit
        self.counts["crossings"] += bool(slices)
        self._write(model)

    def _write(self, unit: UnitModel) -> None:
        """Write the tags of a unit where its rows of the device tables say, as a kernel would."""
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

    def _commit(
        self, _number: int, unit: int, accepted: dict[str, Wanted] | None, form: int, fail_at: int = 0
    ) -> None:
        model, handle = self.units[unit]
        told: dict[str, Wanted] = dict(model.columns) if accepted is None else accepted
        errors = self.model.commit_errors(model, told)
        given = None if accepted is None else as_given(accepted, form)
        self.call(errors if not model.is_open else set(), lambda: self.store.wait(handle))
        self.settle(errors, lambda: self.store.commit(handle, given), lambda _: self.model.commit(model, told), fail_at,
                    "withdrawals")  # fmt: skip

    def _fail(self, _number: int, unit: int, fail_at: int = 0) -> None:
        model, handle = self.units[unit]
        self.settle(self.model.end_errors(model), lambda: self.store.fail(handle), lambda _: self.model.end(model),
                    fail_at, "withdrawals")  # fmt: skip

    # ---- events: between units --------------------------------------------------------------------

    def _round(self, number: int, sequences: list[int] | None = None, batch: int | None = None) -> None:
        chosen = self._chosen(number, sequences, batch)
        if chosen is None:
            return
        models, made = chosen
        answer = self.call(self.model.round_errors(models), lambda: self.store.begin_round(made))
        if isinstance(answer, Refused):
            return
        thin = sum(self.model.is_thin(model) for model in models)
        short = self.model.begin_round(models)
        rows = {handle: model.row for model, handle in self.sequences.values()}
        _same("rows that were not extended", [model.row for model in short], [rows[handle] for handle in answer])
        self.counts["extended rows"] += thin - len(short)
        self.counts["rows not extended"] += len(short)

    def _trim(
        self, number: int, pool: str, provisional: Wanted, sequences: list[int] | None = None,
        batch: int | None = None, fail_at: int = 0,
    ) -> None:  # fmt: skip
        chosen = self._chosen(number, sequences, batch)
        if chosen is None:
            return
        models, made = chosen
        errors = self.model.trim_errors(models, pool, provisional)
        done = self.settle(errors, lambda: self.store.trim(made, pool, provisional),
                           lambda _: self.model.trim(models, pool, provisional), fail_at, "withdrawals")  # fmt: skip
        if done is not None:
            _same("trimmed pages", done[1], done[0])
            self.counts["trimmed pages"] += done[1]

    def _truncate(
        self, _number: int, pool: str, tokens: int, sequence: int | None = None, continuation: int | None = None,
        fail_at: int = 0,
    ) -> None:  # fmt: skip
        model: SequenceModel | ContinuationModel
        handle: pk.Sequence | pk.Continuation
        model, handle = self.continuations[continuation] if sequence is None else self.sequences[sequence]  # type: ignore[index]
        errors = self.model.truncate_errors(model, pool, tokens)
        done = self.settle(errors, lambda: self.store.truncate(handle, tokens, pool),
                           lambda _: self.model.truncate(model, pool, tokens), fail_at, "withdrawals")  # fmt: skip
        self.counts["cut continuations"] += done is not None and sequence is None

    def _ensure(self, _number: int, sequence: int, pool: str, tokens: int, fail_at: int = 0) -> None:
        model, handle = self.sequences[sequence]
        errors = self.model.ensure_errors(model, pool, tokens)
        published = self.store.published_slices
        done = self.settle(errors, lambda: self.store.ensure_mapped_to_tokens(handle, tokens, pool),
                           lambda _: self.model.ensure(model, pool, tokens), fail_at, "publications")  # fmt: skip
        if done is not None:
            _same("published slices", done[1], self.store.published_slices - published)

    def _abort(self, _number: int, sequence: int, fail_at: int = 0) -> None:
        model, handle = self.sequences[sequence]
        done = self.settle(self.model.abort_errors(model), lambda: self.store.abort(handle),
                           lambda _: self.model.abort(model), fail_at, "withdrawals")  # fmt: skip
        if done is not None:
            _same("whether it ended", done[1], done[0])
            self.counts["aborts in flight"] += not done[0]

    def _misuse(self, _number: int, which: int, row: int) -> None:
        foreign, kept = pk.Sequence(0, row, 1), pk.Continuation(0, 1)
        store = self.store
        calls: list[tuple[str, Callable[[], object]]] = [
            ("StaleHandle", lambda: store.finish(foreign)),
            ("StaleHandle", lambda: store.abort(foreign)),
            ("StaleHandle", lambda: store.batch([foreign])),
            ("StaleHandle", lambda: store.truncate(foreign, 0)),
            ("StaleHandle", lambda: store.ensure_mapped_to_tokens(foreign, 0)),
            ("StaleHandle", lambda: store.try_snapshot(foreign)),
            ("StaleHandle", lambda: store.release(kept)),
            ("StaleHandle", lambda: store.protect(kept, 0)),
            ("StaleHandle", lambda: store.try_activate(prompt_tokens=1, output_tokens=0, source=kept)),
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
        """Call the store: it succeeds when the model names no error, else raises one of them and changes nothing.

        Args:
            errors: names of errors, one of which must be raised.
            call: what to call.
            may: names of errors that may be raised where none must be.
            before: how things are, for a caller that has looked already.

        Returns:
            What the call returned, or REFUSED.
        """
        if before is None and (errors or may):
            before = self._look()
        self._shown = None
        try:
            answer = call()
        except pk.PagedKVError as error:
            name = type(error).__name__
            if before is None or not (errors or may):
                raise AssertionError(f"the model accepts what was refused: {name}: {error}") from error
            if name not in errors | (may or set()):
                raise AssertionError(f"got {name} ({error}), model {sorted(errors)}") from error
            self._require_unchanged(before)
            self.counts[name] += 1
            return REFUSED
        if errors:
            raise AssertionError(f"nothing was raised, model {sorted(errors)}")
        return answer

    def settle(
        self, errors: set[str], call: Callable[[], T], follow: Callable[[T | None], M], fail_at: int, breaks: str
    ) -> tuple[T, M] | None:
        """Make a call, as `call` does, behind which the store changes device tables, and let the model follow.

        Args:
            errors, call: as of `call`.
            follow: moves the model on and returns what it says; gets the store's answer, None where the call broke off.
            fail_at: the launch or copy of the call that fails; 0 for none.  The ledgers have moved on by then, so the
                store must be latched, and the walk ends (C12.4).
            breaks: what breaks off then: "publications" or "withdrawals".

        Returns:
            What the store and the model answered, or None: it was refused, or broke off.
        """
        faults = self.device.faults
        try:
            with self.device.failing_at(fail_at) if fail_at else nullcontext():
                answer = self.call(errors, call)
        except InjectedFault as fault:
            if errors:
                raise AssertionError(f"{fault}, model {sorted(errors)} before anything is published") from fault
            follow(None)
            self.is_over = True
            self.counts[f"broken {breaks}"] += 1
            require_latched(self.store, self.model)
            return None
        if self.device.faults != faults:
            raise AssertionError("a launch or copy failed, and the call succeeded")
        return None if isinstance(answer, Refused) else (answer, follow(answer))

    def _granted(self, call: Callable[[], T], fail_at: int, before: pk.StoreInspection) -> T | Refused:
        """Make a call that may answer with a refusal, or in which a launch or copy fails: then nothing changed."""
        faults = self.device.faults
        self._shown = None
        try:
            with self.device.failing_at(fail_at) if fail_at else nullcontext():
                answer = call()
        except InjectedFault:
            self.counts["faults"] += 1
            self._require_unchanged(before)
            self.store.check()
            return REFUSED
        if self.device.faults != faults:
            raise AssertionError("a launch or copy failed, and the call succeeded")
        if isinstance(answer, pk.Refusal):
            self._require_unchanged(before)
        return answer

    def _look(self) -> pk.StoreInspection:
        """Return what the store shows, inspected anew if it was called since.

        What one event leaves is what the next one finds.
        """
        if self._shown is None:
            self._shown = self.store.inspect()
        return self._shown

    def _require_unchanged(self, before: pk.StoreInspection) -> None:
        changed = self.store.inspect().differences(before)
        if changed:
            raise AssertionError(f"state changed in {len(changed)} places: " + "; ".join(changed[:5]))
        self._shown = before

    def _chosen(
        self, number: int, sequences: list[int] | None, batch: int | None
    ) -> tuple[list[SequenceModel], pk.Batch] | None:
        """Return a batch that was made, or make one; None where sequences are no longer such as a batch takes."""
        if batch is not None:
            return self.batches[batch]
        self._batch(number, sequences or [])
        return self.batches.get(number)

    def _read_device(self) -> None:
        """Fill the host copies of device tables and planes."""
        self.reading.launch(self.store.stream)
        self.store.stream.synchronize()


def as_given(columns: dict[str, Wanted], form: int) -> dict[str, Any]:
    """Return columns in one of the forms that callers use: numbers and lists, or arrays of some integer type."""
    if form == 0:
        return dict(columns)
    kinds = {pool: np.int32 if form == 2 and np.max(wanted, initial=0) < 1 << 31 else np.int64
             for pool, wanted in columns.items()}  # fmt: skip
    return {pool: np.array(wanted, kinds[pool]) for pool, wanted in columns.items()}


def replay(
    shape: WalkShape, device: FaultyDevice, events: list[Event], journal: TextIO | None = None
) -> tuple[int, str] | None:
    """Run events again; return how many were needed to find something and what it is, or None."""
    walk = Walk(shape, device, journal)
    run = 0
    try:
        for event in events:
            run += 1
            walk.perform(event)
        walk.end_everything()
    except FINDINGS as found:
        return run, _told(found)
    return None


def walk_once(
    seed: int, round_seed: int, events: int, device: FaultyDevice, *, shorten_seconds: float
) -> tuple[Counter[str], int]:
    """Walk one round of at most so many events; return how often each thing happened, and how many they were.

    Raises:
        FuzzFound: something was found.
    """
    rng = random.Random(round_seed)
    shape = draw_shape(rng)
    walk = Walk(shape, device)
    drawer = EventDrawer(rng, walk.model, shape.sanitizer)
    past: list[Event] = []
    try:
        for number in range(1, events + 1):
            past.append(drawer.draw(number))
            walk.perform(past[-1])
            if walk.is_over:
                break
            if number in walk.batches:
                drawer.keep_batch(number, walk.batches[number][0])
        walk.end_everything()
    except FINDINGS as found:
        short, message = shortest(
            past, lambda tried: replay(shape, device, tried), first=_told(found), seconds=shorten_seconds
        )
        journal = io.StringIO()
        replay(shape, device, short, journal)
        finding = Finding(
            seed, round_seed, past[-1].number, shape, _told(found), tuple(past[-LAST_EVENTS:]), tuple(short), message,
            tuple(journal.getvalue().splitlines(keepends=True)),
        )
        raise FuzzFound(finding) from found
    return walk.counts, len(past)


def fuzz(
    seed: int, events: int, *, device: str = "cpu", shorten_seconds: float = SHORTEN_SECONDS,
    progress: Progress | None = None,
) -> Counter[str]:  # fmt: skip
    """Walk `events` events in rounds, each with its own store and a seed that derives from `seed`.

    Args:
        seed: of everything that is drawn.
        events: in all.
        device: where the stores are.
        shorten_seconds: time to look for the shortest history of a finding.
        progress: told (events so far, events in all) after each round.

    Returns:
        How often each kind of event, error and refusal happened.

    Raises:
        FuzzFound: something was found.
    """
    counts: Counter[str] = Counter()
    shared = FaultyDevice(pk.open_device(device))
    done = 0
    while done < events:
        part = min(EVENTS_A_ROUND, events - done)
        told, walked = walk_once(seed, seed * 1_000_003 + done, part, shared, shorten_seconds=shorten_seconds)
        counts += told
        done += walked
        if progress is not None:
            progress(done, events)
    return counts


def _told(found: BaseException) -> str:
    first = str(found).splitlines()[0] if str(found) else ""
    return first if isinstance(found, AssertionError) else f"{type(found).__name__}: {first}"


def _same(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise AssertionError(f"{what}: {got}, model {expected}")
