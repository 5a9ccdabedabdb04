"""Store: the object a caller holds.  The ledger decides, the device acts.  (C1, C5, C9 to C12)

    with open_store(config, device="auto") as store:
        sequence = store.activate(prompt_tokens=1000, output_tokens=256)
        batch = store.batch([sequence])
        unit = store.begin_unit(batch, 128)          # maps, publishes table slices, freezes the rows
        ...                                          # launches on store.stream
        store.wait(unit)                             # the device has finished
        store.commit(unit)                           # frontiers advance, rows thaw
        store.trim(batch)                            # rejected tails return to their reservation
        saved = store.finish(sequence, retain=True, state=mine)
        again = store.activate(source=saved, frontier=900, prompt_tokens=20, output_tokens=64)     # Fork

Every per-step call takes a batch.  A call has three parts: `Access.enter` checks the caller, the ledger decides, and
the device follows (`actions.py`).  `_settle` ends it.  What breaks off in between latches the store (`ledger.py` says
how).
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Array, Device, Event, Graph, Stream
from pagedkv.errors import (
    ActivationRefused,
    CapacityError,
    Caught,
    ConfigError,
    DeviceFault,
    MisuseError,
    PagedKVError,
    SnapshotRefused,
)
from pagedkv.ledger.batch import Batch, Columns
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.events import PageObserver
from pagedkv.ledger.inspect import StoreInspection, inspect_ledger
from pagedkv.ledger.kept_spaces import KeptSpace
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationPlan, ActivationTarget, Refusal, Transaction
from pagedkv.ledger.units import Submission
from pagedkv.ops.ops import Ops
from pagedkv.ops.views import PagedKVBatchLayerView
from pagedkv.record.journal import Journal, JournalRecorder
from pagedkv.store.access import Access
from pagedkv.store.actions import Actions
from pagedkv.store.sanitizer import Sanitizer
from pagedkv.values.config import StoreConfig
from pagedkv.values.layout import ATTENTION_WORKSPACE, CONTROL_EGRESS, CONTROL_INGRESS, StoreLayout, build_layout
from pagedkv.values.planner import CapacityPlan
from pagedkv.values.profiles import ROLES

_LOG = logging.getLogger("pagedkv")
_STORE_IDS = itertools.count(1)


class Store:
    """A KV store on one device; made by `open_store`.

    Attributes:
        config: what it was built from, its capacity resolved; fixed.
        plan: how automatic capacity was resolved; None when capacity was explicit, and nothing was measured (C5.2).
        device, stream: where everything runs; one ordered stream.
        owns_device: whether the device closes with the store, because `open_store` opened it by name.
        ops: the kernels' wrappers on this device.
        layout: every slab, as allocated.
        views: `views[pool][layer]`, what kernels read through (C14.1).
        block_tables: `block_tables[pool]`, (C, L) int32 on the device; entries beyond membership are unspecified,
            and the guard page in sanitizer mode (C11.1).
        sanitizer: poisons, withdraws and looks for corruption; None unless `config.sanitizer`.
        workspace: uint8, for the attention of every unit on `stream`; None where no unit needs any.
        control_ingress, control_egress: int32 words of every unit on `stream`, at fixed addresses (C15.1).
        graph_bytes: bytes handed to captured units so far; planned as the graph allowance.

    A sequence's budget, a backend's lead included, is reserved in whole pages: its row may write to the end of the last
    one, below max_context; `covered_columns` says how far.

    Every attribute is written by the store alone.  Every method but `close`, `memory_summary`, `event_counts` and
    `latch` raises MisuseError on a closed store or from another thread or process, and StoreLatched after a device
    error or an operation that broke off (C12.4); the method says what else it raises.  If copying table entries fails
    after memberships changed, the error is raised again and the store is latched (C11.2).
    """

    def __init__(
        self, config: StoreConfig, device: Device, *, plan: CapacityPlan | None = None, journal: Journal | None = None,
        owns_device: bool = False,
    ) -> None:
        require_config(config)
        self.config = config
        self.device = device
        self.owns_device = owns_device
        self.plan = plan
        self.stream: Stream = device.stream()
        self.ops = Ops(device)
        self.layout: StoreLayout = build_layout(config)
        self._ledger = _build_ledger(config)
        self._access = Access(self._ledger, self.stream)
        self._journal = journal
        if journal is not None:
            self._ledger.recorder = JournalRecorder(self._ledger, journal)
        self._slabs: dict[str, Array] = {
            slab.name: (device.empty if slab.is_scratch else device.zeros)(slab.shape, slab.dtype, name=slab.name)
            for slab in self.layout.slabs
        }
        self.workspace: Array | None = self._slabs.get(ATTENTION_WORKSPACE)
        self.control_ingress: Array = self._slabs[CONTROL_INGRESS]
        self.control_egress: Array = self._slabs[CONTROL_EGRESS]
        self.graph_bytes = 0
        self.block_tables: dict[str, Array] = {
            pool.name: self._slabs[f"{pool.name}.block_table"] for pool in config.pools
        }
        self.views: dict[str, tuple[PagedKVBatchLayerView, ...]] = {
            pool.name: tuple(self._layer_view(pool.name, layer) for layer in range(pool.geometry.layers))
            for pool in config.pools
        }
        for pool in config.pools:
            self.ops.prepare(pool.profile, pool.geometry.head_dim, order=pool.order)
        self._events: dict[int, Event] = {}
        self._completed: set[int] = set()
        planes = {  # of each pool in ordinal order (C4.2)
            pool.name: [(self._slabs[f"{pool.name}.{plane.layer}.{plane.role}"], plane) for plane in pool.planes]
            for pool in config.pools
        }
        self.sanitizer: Sanitizer | None = None
        if config.sanitizer:
            self.sanitizer = Sanitizer(self.ops, device, self.stream, planes, self.block_tables, self._ledger.active,
                                       latch=self._access.latch, scratch=self.control_ingress[:1])
        self._actions = Actions(self.ops, device, self.stream, planes, self.block_tables, self._ledger.active,
                                self.sanitizer)

    # ---- the life of a store ----------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PagedKVError as second:
            if error is None:
                raise
            error.add_note(f"and the store could not be closed well: {second}")

    def __reduce__(self) -> NoReturn:
        raise MisuseError("a copy of a store", expected="one object for one set of device arrays", got="copy or pickle",
                          remedy="open another store from the same StoreConfig", clause="C1.1")

    def close(self) -> None:
        """Wait for the stream, give the slabs back, and close the journal and a device that `open_store` opened.

        A capture on the store's stream is aborted first.  Closing twice is harmless.

        Raises:
            DeviceFault: a kernel failed meanwhile, or had written beyond a buffer; the fault is the evidence.
            JournalFailed: a line of the journal could not be written.
            The store is closed nevertheless, as after everything else that draining the stream raises.
        """
        if self._access.is_closed:
            return
        self._access.require_owner("close")
        try:
            try:
                if self.stream.is_capturing:
                    self.device.abort_capture(self.stream)
                if self._access.fault is None:
                    with self._access:
                        self.stream.synchronize()
            finally:
                self._access.is_closed = True
                self.views.clear()
                self.block_tables.clear()
                self._slabs.clear()
                self.workspace = self.control_ingress = self.control_egress = self.sanitizer = None
                if self.owns_device:
                    self.device.close()
        except BaseException as error:
            if self._journal is not None:
                self._journal.close_after(error)
            raise
        if self._journal is not None:
            self._journal.close()

    def latch(self, fault: DeviceFault) -> None:
        """Stop the store after a device error that a caller met; the first one is kept as evidence.  (C12.4)"""
        self._access.latch(fault)

    @property
    def evidence(self) -> PagedKVError | None:
        """The device error, or the operation that broke off, that latched the store.  (C12.4)"""
        return self._access.evidence

    # ---- activation -------------------------------------------------------------------------------

    def try_activate(
        self, *, prompt_tokens: int, output_tokens: int, source: Continuation | None = None,
        frontier: int | Mapping[str, int] | None = None, keep_source: bool = True,
    ) -> Sequence | Refusal:
        """Activate in every pool, from nothing or from a continuation, or say why not.  (C9.2, C10.2, C10.9)

        Args:
            prompt_tokens, output_tokens: the budget, in whole pages; with a source, what comes behind its frontier.
            source, frontier, keep_source: as `ActivationTarget` says: a Fork, or with keep_source=False a Move.

        Raises:
            MisuseError: counts of another form, a source without complete state (C2.2), a frontier it does not hold,
                or a Move of pages that a copy uses (C7.4).
            StaleHandle: the source was released or moved.
            CaptureRefused: a source is named, and the stream is capturing.
            DeviceFault: a copy or a publication failed; every claim was given back, the source is as it was (C10.2).
        """
        self._access.enter("activate", is_publishing=source is not None or self.sanitizer is not None)
        return self._activate(ActivationTarget(prompt_tokens, output_tokens, source, frontier, keep_source))

    def activate(
        self, *, prompt_tokens: int, output_tokens: int, source: Continuation | None = None,
        frontier: int | Mapping[str, int] | None = None, keep_source: bool = True,
    ) -> Sequence:
        """Activate a sequence, from nothing or from a continuation.  (C10.9)

        Raises:
            ActivationRefused: there is no room now, or (`refusal.forever`) never.
            MisuseError, StaleHandle, DeviceFault: as `try_activate`.
        """
        answer = self.try_activate(prompt_tokens=prompt_tokens, output_tokens=output_tokens, source=source,
                                   frontier=frontier, keep_source=keep_source)
        if isinstance(answer, Refusal):
            limits = {
                "context": f"at most {answer.available} pages, of max_context = {self.config.max_context} tokens, "
                           "what the source holds included",
                "rows": f"at most {answer.available} rows",
            }
            raise ActivationRefused(
                f"activation of {prompt_tokens} + {output_tokens} tokens",
                expected=limits.get(answer.reason, f"at most {answer.available} pages of {answer.pool}"),
                got=f"{answer.needed} pages" if answer.reason == "context" else f"{answer.needed}",
                remedy="lower the budget" if answer.forever else "finish a sequence first and try again",
                clause="C10.9", refusal=answer,
            )
        return answer

    def _activate(self, target: ActivationTarget) -> Sequence | Refusal:
        transaction = self._ledger.prepare_activation(target)
        if isinstance(transaction, Refusal):
            return transaction
        self._follow(transaction)
        sequence = self._ledger.commit_activation(transaction)
        self._settle()
        return sequence

    def can_honour(self, target: ActivationTarget) -> bool:
        """Say whether there is room for `activate` now; no side effects.  (C10.9)

        Raises:
            MisuseError, StaleHandle: a target that is wrong whatever room there is, as `try_activate` says.
        """
        return isinstance(self.explain(target), ActivationPlan)

    def explain(self, target: ActivationTarget) -> ActivationPlan | Refusal:
        """Return what an activation would take, or the refusal; no side effects.  (C10.9)"""
        self._access.enter("explain")
        return self._ledger.transactions.explain(target)

    def finish(self, sequence: Sequence, *, retain: bool = False, state: object = None) -> Continuation | None:
        """End a sequence: trim, give up reservation and row, then release its pages or retain them.  (C9.8)

        Args:
            sequence: active, at a boundary.
            retain: keep its pages as an immutable continuation, which protects all that is committed.
            state: the caller's own state at the frontier, which the store never looks into; None says that it is not
                complete, and then no sequence can be activated from the continuation until `attach_state` (C2.2).

        Returns:
            The continuation, or None without `retain`.

        Raises:
            UnitInFlight: a unit in flight selects it (C12.2).
            StaleHandle: it has ended.
            MisuseError: a copy uses one of its pages; or it is to be retained, and nothing is committed in Main, or a
                backend's frontier leads Main's (C13.2).
        """
        self._access.enter("finish", is_publishing=self.sanitizer is not None)
        continuation = self._ledger.finish(sequence, retain=retain, state=state)
        self._settle()
        return continuation

    def abort(self, sequence: Sequence) -> bool:
        """End the sequence now (True), or at the end of the unit that selects it (False).  (C12.4)

        Raises:
            StaleHandle: it has ended.
            MisuseError: a transfer uses one of its pages (C7.4).
        """
        self._access.enter("abort", is_publishing=self.sanitizer is not None)
        has_ended = self._ledger.abort(sequence)
        self._settle()
        return has_ended

    # ---- continuations ----------------------------------------------------------------------------

    def try_snapshot(self, sequence: Sequence, *, state: object = None) -> Continuation | Refusal:
        """Checkpoint an active sequence at a boundary; it runs on.  (C10.6)

        Full pages are shared in place; of an unaligned tail the committed columns are copied into one page of each
        pool, which goes to the checkpoint, so no table entry changes.  Launches: one per plane of a copied tail.

        Returns:
            The checkpoint, or the Refusal: no free page for a tail, or provisional pages are mapped (trim first).

        Raises:
            UnitInFlight, StaleHandle, MisuseError: as `finish` with retain=True; nothing changed.
            CaptureRefused: the stream is capturing: the copy must happen now, not at a replay.
            DeviceFault: a copy failed; every claim was given back.
        """
        self._access.enter("snapshot", is_publishing=True)
        transaction = self._ledger.prepare_snapshot(sequence, state)
        if isinstance(transaction, Refusal):
            return transaction
        self._follow(transaction)
        checkpoint = self._ledger.commit_snapshot(transaction)
        self._settle()
        return checkpoint

    def snapshot(self, sequence: Sequence, *, state: object = None) -> Continuation:
        """Checkpoint an active sequence at a boundary; it runs on.  (C10.6)

        Raises:
            SnapshotRefused: no free page for a copied tail, or provisional pages are mapped.
            UnitInFlight, StaleHandle, MisuseError, DeviceFault: as `try_snapshot`.
        """
        answer = self.try_snapshot(sequence, state=state)
        if isinstance(answer, Refusal):
            is_provisional = answer.reason == "provisional"
            raise SnapshotRefused(
                f"a snapshot of {sequence}",
                expected=f"no provisional page in {answer.pool}" if is_provisional else f"a free page in {answer.pool}",
                got=f"{answer.needed}" if is_provisional else "none",
                remedy="trim the sequence first" if is_provisional else "release or finish something first",
                clause="C10.6", refusal=answer,
            )
        return answer

    def release(self, continuation: Continuation) -> None:
        """Give up a continuation; a page returns to available with its last reference.  (C9.8)

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: a copy uses one of its pages; nothing changed.
        """
        self._access.enter("release")
        self._ledger.release(continuation)
        self._settle()

    def protect(self, continuation: Continuation, tokens: int, pool: str = "main") -> None:
        """Set the frontier below which `truncate` may not cut a continuation, up or down.  (C7.8)

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: tokens outside 0 to the committed frontier, or an unknown pool; nothing changed.
        """
        self._access.enter("protect")
        self._ledger.protect(continuation, tokens, pool)
        self._settle()

    def attach_state(self, continuation: Continuation, state: object) -> None:
        """Replace the caller's state of a continuation; None says that it is not complete.  (C2.2)

        Raises:
            StaleHandle: it was released or moved.
        """
        self._access.enter("attach_state")
        self._ledger.attach_state(continuation, state)
        self._settle()

    def state_of(self, continuation: Continuation) -> object:
        """Return the caller's state of a continuation, or None.  (C2.2)

        Raises:
            StaleHandle: it was released or moved.
        """
        self._access.enter("state_of")
        number = self._ledger.continuations.require_current(continuation)
        return self._ledger.continuations.states[number].state

    def continuations(self) -> list[Continuation]:
        """Return every retained continuation, oldest first.  (C9.8)"""
        self._access.enter("continuations")
        return self._ledger.continuations.handles()

    def sequences(self) -> list[Sequence]:
        """Return every active sequence, in ascending order of execution rows: a way back to a lost handle.  (C12.4)"""
        self._access.enter("sequences")
        return self._ledger.sequences.handles()

    def units(self) -> list[Submission]:
        """Return every unit in flight, in the order of their begin: a way back to a lost handle.  (C12.4)"""
        self._access.enter("units")
        return list(self._ledger.units.in_flight)

    def protected_tokens(self, continuation: Continuation, pool: str = "main") -> int:
        """Return the protected frontier of a continuation in a pool, in tokens; StaleHandle when it ended.  (C7.8)"""
        self._access.enter("protected_tokens")
        return self._kept_space(continuation, pool).protected_frontier

    def batch(self, sequences: Iterable[Sequence]) -> Batch:
        """Select sequences in batch order, once for many units.  (C11.3)

        Raises:
            StaleHandle: one of them has ended.
            MisuseError: no sequence, or one twice.
        """
        self._access.enter("batch")
        if not isinstance(sequences, Iterable):
            raise MisuseError("a batch", expected="sequences in batch order", got=repr(sequences),
                              remedy="pass a list, of one sequence too", clause="C11.3")
        return self._ledger.batch(tuple(sequences))

    # ---- units ------------------------------------------------------------------------------------

    def begin_unit(
        self, batch: Batch, columns: Columns | Mapping[str, Columns] = 1, *, name: str = "unit"
    ) -> Submission:
        """Map what the unit may write, publish new table slices on the stream, freeze the rows.  (C9.4, C11.2)

        Args:
            batch: from `batch`.
            columns: columns of each entry in Main (one number, or one per entry), or a mapping
                pool -> columns.  0 selects a row without writing.
            name: how errors call the unit.

        Returns:
            The unit; `first_positions[pool]` and `columns[pool]` are (B,) int32 in batch order.

        Raises:
            UnitInFlight, EntitlementExceeded, MisuseError, StaleHandle: nothing changed.
            Whatever breaks a publication off: the pages are members by then, so the store is latched (C12.4).
        """
        self._access.enter("begin_unit", is_publishing=True)
        by_pool = columns if isinstance(columns, Mapping) else {"main": columns}
        unit, slices = self._ledger.begin_unit(name, batch, by_pool)
        if slices:
            with self._access:
                self._actions.publish(slices)
        self._settle()
        return unit

    def submit(self, unit: Submission) -> None:
        """Record on the stream that the unit's launches end here, so that `poll` can ask.  (C12.4)

        Raises:
            MisuseError: the unit has ended, or is of another store.
        """
        self._access.enter("submit")
        self._ledger.units.require_open(unit, "submit")
        with self._access:
            event = self.device.event()
            self.stream.record(event)
        self._events[unit.number] = event
        self._completed.discard(unit.number)

    def poll(self) -> list[Submission]:
        """Return the submitted units that the device has finished and that are not yet committed.  (C12.4)"""
        self._access.enter("poll")
        with self._access:
            for number, event in list(self._events.items()):
                if event.query():
                    self._completed.add(number)
                    del self._events[number]
        return [unit for unit in self._ledger.units.in_flight if unit.number in self._completed]

    def wait(self, unit: Submission) -> None:
        """Block until the device has finished the unit.  (C12.4)

        Raises:
            MisuseError: the unit has ended, or is of another store.
            DeviceFault: a kernel failed; the store is latched.
        """
        self._access.enter("wait")
        self._ledger.units.require_open(unit, "wait")
        with self._access:
            event = self._events.pop(unit.number, None)
            if event is not None:
                event.synchronize()
            elif unit.number not in self._completed:
                self.stream.synchronize()
        self._completed.add(unit.number)

    def commit(self, unit: Submission, accepted: Columns | Mapping[str, Columns] | None = None) -> None:
        """Advance committed frontiers after the unit completed, and thaw its rows.  (C9.5, C12.3)

        Args:
            unit: waited for, or returned by `poll`.
            accepted: accepted columns of each entry in Main, a mapping pool -> columns, or None for
                every column of every pool the unit wrote.

        Raises:
            MisuseError: the unit was not waited for, has ended, or wrote fewer columns; nothing changed.
        """
        self._access.enter("commit", is_publishing=self.sanitizer is not None)
        self._ledger.units.require_open(unit, "commit")
        if unit.number not in self._completed:
            raise MisuseError(f"commit of unit {unit.label}", expected="a unit the device has finished",
                              got="one that was not waited for", remedy="call wait(unit), or poll()", clause="C12.3")
        by_pool = accepted if accepted is None or isinstance(accepted, Mapping) else {"main": accepted}
        self._ledger.commit_unit(unit, by_pool)
        self._completed.discard(unit.number)
        self._events.pop(unit.number, None)
        self._settle()  # an abort takes effect here

    def fail(self, unit: Submission) -> None:
        """End a unit without a commit, after what it launched has drained.  (C9.5)

        Raises:
            MisuseError, DeviceFault: as `wait`.
        """
        self._access.enter("fail", is_publishing=self.sanitizer is not None)
        self._ledger.units.require_open(unit, "fail")
        self.wait(unit)
        self._ledger.fail_unit(unit)
        self._completed.discard(unit.number)
        self._settle()

    def launch_graph(self, graph: Graph) -> None:
        """Replay a captured graph on the store's stream; a device error latches the store.  (C12.4)"""
        self._access.enter("launch_graph")
        if not hasattr(graph, "launch"):
            raise MisuseError("launch_graph", expected="a graph that end_capture gave", got=repr(graph),
                              remedy="capture the unit first", clause="C15.1")
        with self._access:
            graph.launch(self.stream)

    def graph_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocate a buffer that lives with a captured unit, and count it into `graph_bytes`.  (C5.4)

        The graph allowance of the plan is meant to hold them all; what exceeds it is logged once, not refused.
        """
        self._access.enter("graph_buffer")
        with self._access:
            buffer = self.device.empty(shape, dtype)
        allowance = self.config.allowance_bytes
        is_first_excess = self.graph_bytes <= allowance < self.graph_bytes + int(buffer.nbytes)
        self.graph_bytes += int(buffer.nbytes)
        if is_first_excess and self.plan is not None:
            _LOG.warning("buffers of captured units take %d bytes, %d were planned; set graph_allowance_bytes",
                         self.graph_bytes, allowance)
        return buffer

    # ---- between units ----------------------------------------------------------------------------

    def begin_round(self, batch: Batch) -> list[Sequence]:
        """Extend the leases of a batch before its next launch, where they are nearly used up.  (C9.2)

        Needed once a round with `kv_lease_growth`; without it nothing is done.  Host work only: nothing is mapped,
        published or launched.

        Returns:
            The sequences that could not be extended, in batch order.  Each runs on while `covered_columns` holds its
            next launch; then the caller ends it with reason "length".  After releasing a continuation, try again.

        Raises:
            UnitInFlight: a unit in flight selects one of the rows (C12.2); nothing changed.
            StaleHandle: one of the sequences has ended.
        """
        self._access.enter("begin_round")
        sequences = self._ledger.begin_round(batch)
        self._settle()
        return sequences

    def covered_columns(self, batch: Batch, pool: str = "main") -> npt.NDArray[np.int32]:
        """Return (B,) int32: columns behind its frontier that each entry may still write in a pool.  (C9.2, C16.17)

        Raises:
            StaleHandle: one of the sequences has ended.
            MisuseError: an unknown pool.
        """
        self._access.enter("covered_columns")
        return self._ledger.covered_columns(batch, pool)

    def ensure_mapped_to_tokens(self, sequence: Sequence, tokens: int, pool: str = "main") -> None:
        """Map and publish positions [0, tokens) of one sequence ahead of a unit; a lower bound.  (C9.3)

        Raises:
            EntitlementExceeded: tokens needs more pages than the sequence was activated for.
            MisuseError: more than max_context tokens, or an unknown pool.
            StaleHandle: it has ended.
        """
        self._access.enter("ensure_mapped_to_tokens", is_publishing=True)
        slices = self._ledger.ensure_mapped_to_tokens(sequence, tokens, pool)
        with self._access:
            self._actions.publish(slices)
        self._settle()

    def trim(self, batch: Batch, pool: str = "main", provisional: Columns = 0) -> int:
        """Return trailing pages of the batch to their own reservations; says how many.  (C9.6)

        Args:
            batch: from `batch`.
            pool: whose pages.
            provisional: columns beyond the committed frontier that stay mapped, one number or one per entry.

        Raises:
            UnitInFlight: a unit in flight selects one of the rows (C12.2).
            MisuseError: an unknown pool, counts of another form, or a page that a transfer uses (C7.4).
            StaleHandle: one of the sequences has ended.
        """
        self._access.enter("trim", is_publishing=self.sanitizer is not None)
        pages = self._ledger.trim(batch, pool, provisional)
        self._settle()
        return pages

    def truncate(self, target: Sequence | Continuation, tokens: int, pool: str = "main") -> None:
        """Lower the committed frontier of one pool to `tokens`, then trim, or release what is behind.  (C9.10)

        A continuation's state belongs to Main's frontier: lowering that deletes the state, until `attach_state` (C2.2).
        Pools are cut one by one (C9.9): a continuation whose Main was cut below a backend's frontier is activated with
        a frontier for every pool.

        Raises:
            UnitInFlight: a unit in flight selects the row (C12.2).
            MisuseError: tokens above the frontier, below the protected one of a continuation, or negative; an unknown
                pool; or a page is cut that another space references or a copy uses (C7.4).
            StaleHandle: it has ended.
        """
        self._access.enter("truncate", is_publishing=self.sanitizer is not None)
        if isinstance(target, Continuation):
            self._ledger.truncate_continuation(target, tokens, pool)
        else:
            self._ledger.truncate(target, tokens, pool)
        self._settle()

    def committed_tokens(self, target: Sequence | Continuation, pool: str = "main") -> int:
        """Return the committed frontier in one pool, in tokens; StaleHandle when it ended.  (C9.1)"""
        self._access.enter("committed_tokens")
        if isinstance(target, Continuation):
            return self._kept_space(target, pool).frontier
        self._ledger.sequences.require_current(target)
        return self._ledger.active_in(pool).committed_end.item(target.row)

    def budget_tokens(self, sequence: Sequence) -> int:
        """Return prompt plus output tokens that the sequence was activated for; StaleHandle when it ended.  (C9.2)"""
        self._access.enter("budget_tokens")
        self._ledger.sequences.require_current(sequence)
        return int(self._ledger.sequences.budget_tokens[sequence.row])

    def page_ids(self, target: Sequence | Continuation, pool: str = "main") -> list[int]:
        """Return the page group ids of a membership, in block order; StaleHandle when it ended.  (C9.1)"""
        self._access.enter("page_ids")
        ids: list[int]
        if isinstance(target, Continuation):
            members = self._kept_space(target, pool).members
            ids = self._ledger.active_in(pool).pages.device[members].tolist()
        else:
            self._ledger.sequences.require_current(target)
            ids = self._ledger.active_in(pool).mapped_ids(target.row).tolist()
        return ids

    # ---- evidence ---------------------------------------------------------------------------------

    @property
    def published_slices(self) -> int:
        """Table slices copied to the device so far.  (C11.2)"""
        return self._actions.published_slices

    def check(self) -> None:
        """Assert every invariant of C16, the device tables included; AssertionError says which.  (C16)

        Raises:
            Corruption: in sanitizer mode, a table or a guard page holds something else; the store is latched.
        """
        self._access.enter("check")
        check_ledger(self._ledger)
        if self.sanitizer is not None:
            with self._access:
                self.sanitizer.check()
        with self._access:
            self._actions.check_tables()

    def memory_summary(self) -> dict[str, dict[str, int]]:
        """Return, per pool, pages (capacity, allocated, reserved, available) and bytes; works when latched."""
        summary = {}
        for pool in self.config.pools:
            counters = self._ledger.active[pool.name].pool
            summary[pool.name] = {
                "capacity_pages": counters.capacity,
                "allocated_pages": counters.allocated,
                "reserved_pages": counters.reserved,
                "available_pages": counters.available,
                "page_bytes": pool.page_bytes,
                "slab_bytes": pool.page_bytes * pool.pages,
            }
        return summary

    def inspect(self) -> StoreInspection:
        """Return a copy of everything the ledgers show, for tests and tools; linear in pages.  (C16)"""
        self._access.enter("inspect")
        return inspect_ledger(self._ledger)

    def observe(self, observer: PageObserver) -> Callable[[], None]:
        """Call `observer` with every later PageEvent, at the end of the operation that caused it.  (C9.6, C13.3)

        Events come in order, and none tells of a refused or aborted operation.  An error of an observer is logged: the
        operation is valid, and the next observer is called.  `ledger/events.py` says what each kind means.

        Returns:
            A function that ends it; a second call of that does nothing.

        Raises:
            MisuseError: the observer cannot be called.
        """
        self._access.enter("observe")
        return self._ledger.events.observe(observer)

    def event_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return, per pool and kind of event, pages and bytes so far, observed or not; works when latched.  (C3.11)

        Bytes are those of the page groups in all planes, of "publish" too, which copies table entries only.
        """
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for pool in self.config.pools:
            pages, page_bytes = self._ledger.active[pool.name].events.pages, pool.page_bytes
            counts[pool.name] = {kind: {"pages": n, "bytes": n * page_bytes} for kind, n in pages.items()}
        return counts

    # ---- helpers ----------------------------------------------------------------------------------

    def _kept_space(self, continuation: Continuation, pool: str) -> KeptSpace:
        number = self._ledger.continuations.require_current(continuation)
        return self._ledger.kept_in(pool).by_number[number]

    def _follow(self, transaction: Transaction) -> None:
        """Copy the tails of a transaction and publish its tables; if that fails, give every claim back.  (C10.2)"""
        try:
            with self._access:
                self._actions.copy_tails(transaction.copies)
                self._actions.publish_memberships(transaction.row, transaction.tables)
        except BaseException as error:
            with Caught(error):
                self._ledger.abort_transaction(transaction)
                if self._access.fault is None:
                    self._settle()
            raise

    def _settle(self) -> None:
        """End an operation: withdraw table entries (sanitizer mode), confirm the ledger, deliver its events."""
        if self.sanitizer is not None:
            with self._access:
                self.sanitizer.withdraw()
        self._ledger.unsettled = ""
        if self._ledger.events.pending:
            self._ledger.events.deliver()

    def _layer_view(self, pool_name: str, layer: int) -> PagedKVBatchLayerView:
        pool = next(pool for pool in self.config.pools if pool.name == pool_name)
        k_pages, v_pages, k_scale_pages, v_scale_pages = (
            self._slabs.get(f"{pool_name}.{layer}.{role}") for role in ROLES
        )
        return PagedKVBatchLayerView(
            k_pages, v_pages, k_scale_pages, v_scale_pages, self.block_tables[pool_name], pool.geometry.head_dim,
            pool.geometry.kv_heads, pool.profile, pool.order, self.config.max_context,
        )


def _build_ledger(config: StoreConfig) -> Ledger:
    """Build the ledger under an id that no other process on this machine uses: a handle from there is refused."""
    try:
        return Ledger(config, os.getpid() << 32 | next(_STORE_IDS))
    except MemoryError as error:
        raise CapacityError(
            "the ledgers of a store", expected="host memory for page descriptors and table mirrors", got=str(error),
            remedy="lower max_context, max_concurrency or kv_capacity", clause="C5.2",
        ) from error


def require_config(config: StoreConfig) -> None:
    """Refuse what no store can be built from.

    Raises:
        ConfigError: `config` is not a StoreConfig, or asks for what this version lacks.
    """
    if not isinstance(config, StoreConfig):
        raise ConfigError("the configuration", expected="a StoreConfig", got=repr(config),
                          remedy="build a StoreConfig first", clause="C5.2")
    if config.host_arena_bytes:
        raise ConfigError("host_arena_bytes", expected="0: this version plans host replicas but keeps none",
                          got=f"{config.host_arena_bytes} bytes", remedy="open the store without a host arena",
                          clause="C5.7")
