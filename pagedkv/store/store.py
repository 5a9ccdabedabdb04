"""Store: the object that callers use.  The ledger decides, the device acts.  (C1, C5, C9 to C12)

    with open_store(config, device="auto") as store:
        sequence = store.activate(prompt_tokens=1000, output_tokens=256)
        batch = store.batch([sequence])
        unit = store.begin_unit(batch, 128)          # map pages, publish table slices, freeze the rows
        ...                                          # launch on store.stream
        store.wait(unit)                             # until the device has finished
        store.commit(unit)                           # advance frontiers, thaw the rows
        store.trim(batch)                            # return rejected tails to their reservation
        saved = store.finish(sequence, retain=True, state=mine)
        again = store.activate(source=saved, frontier=900, prompt_tokens=20, output_tokens=64)     # Fork

Every per-step call takes a batch.  A call has four parts: `Access.enter` checks the caller, the ledger decides, the
device executes the decision (`actions.py`), and `_settle` ends the call.  If a call breaks off after the ledger's first
write and before `_settle`, the store is latched (`ledger.py` says how).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
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
    TransferFailed,
    shown,
)
from pagedkv.ledger.batch import Batch, Columns
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.continuations import Continuation, Frontier
from pagedkv.ledger.demotions import Demotion, ReleasePlan
from pagedkv.ledger.events import PageObserver
from pagedkv.ledger.host_arena import UNIT_BYTES
from pagedkv.ledger.inspect import StoreInspection, inspect_ledger
from pagedkv.ledger.kept_spaces import KeptSpace
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationPlan, ActivationTarget, Refusal, Transaction
from pagedkv.ledger.units import Submission
from pagedkv.ops.ops import Ops
from pagedkv.ops.views import PagedKVBatchLayerView, PagedKVLayerView
from pagedkv.record.journal import Journal, JournalRecorder
from pagedkv.store.access import Access
from pagedkv.store.actions import Actions
from pagedkv.store.host_copies import CopyJob, HostCopies
from pagedkv.store.sanitizer import Sanitizer
from pagedkv.transfer.mover import MoverCounters, PageMover
from pagedkv.values.checks import checked_counts, checked_integer, checked_items
from pagedkv.values.config import StoreConfig
from pagedkv.values.layout import (
    ATTENTION_WORKSPACE,
    CONTROL_EGRESS,
    CONTROL_INGRESS,
    TABLE_ENTRIES,
    StoreLayout,
    build_layout,
)
from pagedkv.values.planner import CapacityPlan
from pagedkv.values.profiles import CODEC_EVENTS, ROLES

_LOG = logging.getLogger("pagedkv")
_STORE_IDS = itertools.count(1)


class Store:
    """A KV store on one device; made by `open_store`.

    Attributes:
        config: the configuration of the plan, with its capacity resolved; fixed.
        plan: Main's capacity in pages and in token-equivalents (`plan.tokens`, C5.5), and every byte by owner.
        device, stream: everything runs on this device and this one ordered stream.
        owns_device: whether `close` closes the device too, because `open_store` opened it by name.
        ops: launches the kernels on this device.
        layout: every slab, as allocated.
        views: `views[pool][layer]`; kernels read pages through it (C14.1).
        block_tables: `block_tables[pool]`, (C, L) int32 on the device; entries beyond membership are unspecified,
            and name the guard page in sanitizer mode (C11.1).
        sanitizer: looks for corruption; None unless `config.sanitizer`.
        workspace: uint8, for the attention of every unit on `stream`; None if no unit needs it.
        control_ingress, control_egress: int32 words of every unit on `stream`, at fixed addresses (C15.1).

    A sequence's budget, a backend's lead included, is reserved in whole pages.  So its row may write to the end of the
    last page, below max_context; `covered_columns` returns how far.

    The store alone writes every attribute.  Every method except `close`, `memory_summary`, `host_summary`,
    `event_counts` and `latch` raises MisuseError on a closed store or from another thread or process, and StoreLatched
    after a device error or an operation that broke off (C12.4).  Each method lists its further errors.  If copying
    table entries fails after memberships changed, the error is raised again and the store is latched (C11.2).

    Several stores of one thread may share one device, for example one of `open_device`.  A fault of any launch on the
    device latches all of them.  While a store is open, its device, its streams and `ops` refuse other threads and a
    forked process.  While any stream of the device captures, every method that reaches the device raises CaptureRefused
    and changes nothing; after the capture it works again.  A store that owns its device closes last.
    """

    def __init__(
        self, plan: CapacityPlan, device: Device, *, journal: Journal | None = None, owns_device: bool = False,
    ) -> None:
        self.config = config = plan.config
        self.device = device
        self.owns_device = owns_device
        self.plan = plan
        self.stream: Stream = device.stream()
        self.ops = Ops(device)
        self.layout: StoreLayout = build_layout(config)
        self._ledger = _build_ledger(config)
        self._page_bytes = {pool.name: pool.page_bytes for pool in config.pools}
        self._access = Access(self._ledger, device.state, journal)
        device.state.users.join(self._access)
        self._journal = journal
        if journal is not None:
            self._ledger.record_in(JournalRecorder(self._ledger, journal, defers=True))
        self._slabs: dict[str, Array] = {
            slab.name: (device.empty if slab.is_scratch else device.zeros)(slab.shape, slab.dtype, name=slab.name)
            for slab in self.layout.slabs
        }
        self.workspace: Array | None = self._slabs.get(ATTENTION_WORKSPACE)
        self.control_ingress: Array = self._slabs[CONTROL_INGRESS]
        self.control_egress: Array = self._slabs[CONTROL_EGRESS]
        self._graph_buffers: list[weakref.ref[Array]] = []
        self._closed_parts: set[Callable[[Store], None]] = set()
        self.block_tables: dict[str, Array] = {
            pool.name: self._slabs[f"{pool.name}.block_table"] for pool in config.pools
        }
        self.views: dict[str, tuple[PagedKVBatchLayerView, ...]] = {
            pool.name: tuple(self._layer_view(pool.name, layer) for layer in range(pool.geometry.layers))
            for pool in config.pools
        }
        for pool in config.pools:
            self.ops.prepare(pool.profile, pool.geometry.head_dim, order=pool.order, counts_events=pool.counts_events)
        self._events: dict[Submission, Event] = {}
        planes = {  # of each pool in ordinal order (C4.2)
            pool.name: [(self._slabs[f"{pool.name}.{plane.layer}.{plane.role}"], plane) for plane in pool.planes]
            for pool in config.pools
        }
        self.sanitizer: Sanitizer | None = None
        if config.sanitizer:
            self.sanitizer = Sanitizer(self.ops, device, self.stream, planes, self.block_tables, self._ledger.active,
                                       latch=self._access.latch, scratch=self.control_ingress[:1])
        self._copies: HostCopies | None = None
        self._failed_copies: list[PagedKVError] = []
        if config.host_arena_bytes:
            arena = device.pinned((config.host_arena_bytes,), np.uint8, name="host arena")
            mover = PageMover(device, self.ops, self.stream, planes, arena, self._slabs)
            self._copies = HostCopies(mover, arena, self.sanitizer)
        self._actions = Actions(self.ops, device, self.stream, planes, self.block_tables,
                                self._slabs[TABLE_ENTRIES], self._ledger.active, self.sanitizer)

    # ---- entering, closing, latching ----------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with Caught(error):
            self.close()

    def __reduce__(self) -> NoReturn:
        raise MisuseError("a copy of a store", expected="one object for one set of device arrays", got="copy or pickle",
                          remedy="open another store from the same StoreConfig", clause="C1.1")

    def close(self) -> None:
        """Wait for the stream, give the slabs back, and close the journal and a device that `open_store` opened.

        A capture on the store's stream is aborted first.  Units in flight end without a commit when the device has
        finished them; one WARNING of the `pagedkv` log names them and their sequences.  Observers hear nothing more.
        An array that the caller still holds keeps its memory until the caller drops it.

        Closing twice is harmless, and goes on where an interrupt stopped the first call.

        Raises:
            MisuseError: other stores use the device, which would close with this store; this store stays open.
            CaptureRefused: a capture that began on another stream is on; this store stays open.
            DeviceFault: a kernel failed, or wrote beyond a buffer.
            JournalFailed: a line of the journal could not be written.
            The store is closed nevertheless, also after every other error of the stream.  Of several errors the first
            is raised, and the others are notes of it.
        """
        if not self._closed_parts:
            self._require_closable()
        elif len(self._closed_parts) < len(_CLOSING):
            self._access.require_owner("close")
        first: BaseException | None = None
        for close_part in _CLOSING:
            if close_part in self._closed_parts:
                continue
            with Caught(first, all_kinds=True) as caught:
                close_part(self)
            first = first or caught.error
            if caught.error is None or isinstance(caught.error, PagedKVError):
                self._closed_parts.add(close_part)  # the next call repeats a part that an interrupt stopped
        if first is not None:
            raise first

    def _require_closable(self) -> None:
        """Refuse to close from elsewhere, or while others use a device that closes too, or capture on it."""
        self._access.require_owner("close")
        state = self.device.state
        if self.owns_device and state.users.has_others(self._access):
            raise MisuseError("close", expected="no other store on the device, which closes with this one",
                              got="another one", clause="C1.1",
                              remedy="close the other store first, or share a device of open_device")
        if state.capturing_on and not self.stream.is_capturing:
            state.check_outside_capture("close")

    def _finish_work(self) -> None:
        if self._access.is_closed:  # an interrupt stopped the wait of an earlier call
            return
        if self.stream.is_capturing:
            self.device.abort_capture(self.stream)
        if self._access.fault is None:
            self.stream.synchronize()
            if self._copies is not None:
                self._copies.drain()

    def _report_ended_units(self) -> None:
        running = self._ledger.sequences.handles()
        texts = [f"{unit.label} of {', '.join(str(one) for one in running if unit.rows_mask >> one.row & 1)}"
                 for unit in self._ledger.units.in_flight]
        if texts:
            _LOG.warning("close ended units in flight without a commit: %s", "; ".join(texts))

    def _give_back(self) -> None:
        self._access.is_closed = True
        self.device.state.users.leave(self._access)
        self._ledger.end_record()
        self._ledger.events.end()
        self._actions.close()
        self._copies = None
        self._events.clear()
        self.views.clear()
        self.block_tables.clear()
        self._slabs.clear()
        self.workspace = self.control_ingress = self.control_egress = self.sanitizer = None
        if self.owns_device:
            self.device.close()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def latch(self, fault: DeviceFault) -> None:
        """Stop the store after a device error; the first one becomes the evidence.  (C12.4)

        The device calls this itself, for every open store; a caller needs it only for work that bypasses the device.

        Raises:
            MisuseError: `fault` is no DeviceFault.
        """
        self._access.write_journal()
        if not isinstance(fault, DeviceFault):
            raise MisuseError("latch", expected="a DeviceFault", got=shown(fault),
                              remedy="pass the error that the device raised", clause="C12.4")
        self._access.latch(fault)

    @property
    def evidence(self) -> PagedKVError | None:
        """The device error, or the operation that broke off, that latched the store.  (C12.4)"""
        return self._access.evidence

    # ---- activation -------------------------------------------------------------------------------

    def try_activate(
        self, *, prompt_tokens: int, output_tokens: int, source: Continuation | None = None,
        frontier: int | Mapping[str, int] | None = None, keep_source: bool = True, allow_demote_source: bool = False,
        wait: bool = True,
    ) -> Sequence | Refusal:
        """Activate a sequence in every pool, or return the Refusal if there is no room.  (C9.2, C10.2, C10.9)

        Pages of the source that lie on the Host are restored.

        Args:
            prompt_tokens, output_tokens: the budget behind the source's frontier, or from position 0 without a source.
            source, frontier, keep_source, allow_demote_source: as in `ActivationTarget`; a Fork, or with
                keep_source=False a Move.
            wait: block until the copies from and to the Host have run.  With False the sequence may be *restoring*: it
                is refused everywhere but in `is_restoring` and `abort` until `poll_copies`, or another call between
                units, has published it (C10.10).

        Raises:
            MisuseError: counts that are no integers or too small, a source without complete state (C2.2), or a
                frontier that the source does not hold.
            StaleHandle: the source was released or moved.
            CaptureRefused: there is a source, and the stream is capturing.
            TransferFailed, DeviceFault: a copy or a publication failed; every claim was given back, the source is
                unchanged (C10.2).
        """
        self._access.enter("activate", reaches_device=source is not None or self.sanitizer is not None)
        target = ActivationTarget(prompt_tokens, output_tokens, source, frontier, keep_source, allow_demote_source)
        if type(wait) is not bool:
            raise MisuseError("wait", expected="True or False", got=shown(wait), clause="C10.10",
                              remedy="pass False to let copies run beside decode")
        return self._activate(target, wait)

    def activate(
        self, *, prompt_tokens: int, output_tokens: int, source: Continuation | None = None,
        frontier: int | Mapping[str, int] | None = None, keep_source: bool = True, allow_demote_source: bool = False,
        wait: bool = True,
    ) -> Sequence:
        """Activate a sequence, from nothing or from a continuation; arguments as of `try_activate`.  (C10.9)

        Raises:
            ActivationRefused: there is no room now, or never (`refusal.forever`).
            MisuseError, StaleHandle, CaptureRefused, TransferFailed, DeviceFault: as `try_activate`.
        """
        answer = self.try_activate(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, source=source, frontier=frontier,
            keep_source=keep_source, allow_demote_source=allow_demote_source, wait=wait,
        )
        if isinstance(answer, Refusal):
            limits = {
                "context": f"at most {answer.available} pages, of max_context = {self.config.max_context} tokens, "
                           "what the source holds included",
                "rows": f"at most {answer.available} rows",
                "host": f"room for {answer.needed} Host pages of {answer.pool}",
                "copying": "pages that no other copy uses",
            }
            remedies = {"copying": "poll_copies and try again", "host": "release or drop_host something first"}
            raise ActivationRefused(
                f"activation of {prompt_tokens} + {output_tokens} tokens",
                expected=limits.get(answer.reason, f"at most {answer.available} pages of {answer.pool}"),
                got=f"{answer.needed} pages" if answer.reason == "context" else f"{answer.needed}",
                remedy=remedies.get(answer.reason, "lower the budget" if answer.forever
                                    else "finish a sequence first and try again"),
                clause="C10.9", refusal=answer,
            )
        return answer

    def _activate(self, target: ActivationTarget, wait: bool) -> Sequence | Refusal:
        self._end_copies()
        transaction = self._ledger.prepare_activation(target, *(() if wait else (True,)))
        while isinstance(transaction, Refusal):
            if not wait or transaction.reason != "copying":
                return transaction
            self._wait_for_copies()
            transaction = self._ledger.prepare_activation(target)
        if transaction.backups or transaction.restores:
            self._copy(transaction, wait=wait)
            if not wait:
                assert transaction.handle is not None, "it was announced"
                self._settle()
                return transaction.handle
        self._follow(transaction)
        sequence = self._ledger.commit_activation(transaction)
        self._settle()
        return sequence

    def can_honour(self, target: ActivationTarget) -> bool:
        """Say whether there is room for `activate` now; no side effects.  (C10.9)

        Raises:
            MisuseError, StaleHandle: as `try_activate`.
        """
        return isinstance(self.explain(target), ActivationPlan)

    def explain(self, target: ActivationTarget) -> ActivationPlan | Refusal:
        """Return the plan of an activation, or the Refusal; no side effects.  Raises as `can_honour`.  (C10.9)"""
        self._access.enter("explain")
        return self._ledger.transactions.explain(target)

    def finish(
        self, sequence: Sequence, *, retain: bool = False, state: object = None, state_frontier: Frontier | None = None
    ) -> Continuation | None:
        """End a sequence: trim, give up reservation and row, then release its pages or retain them.  (C9.8)

        Args:
            sequence: active, and no unit in flight selects it.
            retain: keep its pages as an immutable continuation, which protects all committed tokens.
            state: the caller's state, which the store never reads; it goes with `retain`.  `STATE_FOLLOWS` says that it
                comes later: no sequence can be activated from the continuation until `attach_state` (C2.2).
            state_frontier: the committed tokens of each pool that the state needs.  None is Main's frontier, for every
                pool; a number is for every pool; a mapping names every pool (C9.9).

        Returns:
            The continuation, or None without `retain`.

        Raises:
            UnitInFlight: a unit in flight selects it (C12.2).
            StaleHandle: it has ended.
            MisuseError: a copy uses one of its pages; a state without `retain`; or with `retain`, there is no state, a
                pool is behind the frontier of the state, Main has no committed token, or a backend's frontier is beyond
                Main's (C13.2).
        """
        self._access.enter("finish", reaches_device=self.sanitizer is not None)
        continuation = self._ledger.finish(sequence, retain=retain, state=state, state_frontier=state_frontier)
        self._settle()
        return continuation

    def abort(self, sequence: Sequence) -> bool:
        """End the sequence now (True), or later (False): with the unit that selects it, or with its copies.  (C12.4)

        Raises:
            StaleHandle: it has ended.
            MisuseError: a transfer uses one of its pages (C7.4).
        """
        self._access.enter("abort", reaches_device=self.sanitizer is not None)
        if self._ledger.sequences.is_announced(sequence):
            self._abort_restore(sequence)
            return False
        has_ended = self._ledger.abort(sequence)
        self._settle()
        return has_ended

    # ---- continuations ----------------------------------------------------------------------------

    def try_snapshot(
        self, sequence: Sequence, *, state: object = None, state_frontier: Frontier | None = None
    ) -> Continuation | Refusal:
        """Checkpoint an active sequence at a boundary; it runs on.  (C10.6)

        `state` and `state_frontier` are as of `finish`.

        The checkpoint shares the full pages.  If the frontier lies inside a page, its committed columns are copied into
        a new page of the checkpoint, so no table entry changes.  Launches: one per plane of a copied tail.

        Returns:
            The checkpoint, or the Refusal: no free page for a tail, or provisional pages are mapped (trim first).

        Raises:
            UnitInFlight, StaleHandle, MisuseError: as `finish` with retain=True; nothing changed.
            CaptureRefused: the stream is capturing, and a replay must not repeat the copy.
            DeviceFault: a copy failed; every claim was given back.
        """
        self._access.enter("snapshot", reaches_device=True)
        transaction = self._ledger.prepare_snapshot(sequence, state, state_frontier)
        if isinstance(transaction, Refusal):
            return transaction
        self._follow(transaction)
        checkpoint = self._ledger.commit_snapshot(transaction)
        self._settle()
        return checkpoint

    def snapshot(
        self, sequence: Sequence, *, state: object = None, state_frontier: Frontier | None = None
    ) -> Continuation:
        """Checkpoint an active sequence at a boundary; it runs on.  (C10.6)

        `state` and `state_frontier` are as of `finish`.

        Raises:
            SnapshotRefused: no free page for a copied tail, or provisional pages are mapped.
            UnitInFlight, StaleHandle, MisuseError, CaptureRefused, DeviceFault: as `try_snapshot`.
        """
        answer = self.try_snapshot(sequence, state=state, state_frontier=state_frontier)
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

    # ---- the Host tier ----------------------------------------------------------------------------

    def demote(self, continuation: Continuation, *, wait: bool = True) -> int | Refusal:
        """Move the pages of a continuation to the Host, and return how many page groups become available.  (C7.4)

        What only the Device holds is copied; then every page that no active sequence, no other copy and no writer uses
        loses its Device replica.  Pages that other continuations share move for them too.

        Args:
            wait: block until the copies have run.  With False they run beside decode, and `poll_copies`, or another
                call between units, ends the demotion; a page that a Fork took meanwhile stays on the Device.

        Returns:
            The page groups that became available, or will; or the Refusal if the arena lacks room.

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: the store has no Host arena, or somebody is activating from the continuation.
            CaptureRefused: the stream is capturing.
            TransferFailed, DeviceFault: a copy failed; every claim was given back, and nothing left the Device.
        """
        self._access.enter("demote", reaches_device=True)
        self._end_copies()
        demotion = self._ledger.prepare_demotion(continuation)
        if isinstance(demotion, Refusal):
            return demotion
        pages = demotion.page_count
        if demotion.copies:
            self._copy(demotion, wait=wait)
        if wait or not demotion.copies:
            pages = self._ledger.commit_demotion(demotion)
        self._settle()
        return pages

    def drop_device(self, continuation: Continuation) -> int:
        """Drop the Device replicas of pages whose Host replica is valid, without a copy; return how many.  (C7.7)

        Pages of active sequences, and pages that a copy uses, stay.

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: somebody is activating from the continuation.
        """
        self._access.enter("drop_device")
        pages = self._ledger.drop_device(continuation)
        self._settle()
        return pages

    def drop_host(self, continuation: Continuation) -> int:
        """Free the Host replicas of idle pages that keep their Device replica, and return their bytes.  (C7.7)

        A page is idle while no active sequence, no copy and no writer uses it.

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: somebody is activating from the continuation.
        """
        self._access.enter("drop_host")
        freed = self._ledger.drop_host(continuation)
        self._settle()
        return freed

    def poll_copies(self) -> bool:
        """End the demotions and activations whose copies have run; return whether others are in flight.  (C10.10)

        Raises:
            TransferFailed: a copy failed since the last call; its claims were given back, the handle is stale.
            CaptureRefused: the stream is capturing.
            DeviceFault: the device failed; the store is latched.
        """
        self._access.enter("poll_copies", reaches_device=True)
        self._end_copies()
        if self._failed_copies:
            raise self._failed_copies.pop(0)
        return self._copies is not None and bool(self._copies.jobs)

    def is_restoring(self, sequence: Sequence) -> bool:
        """Say whether a sequence of `activate(wait=False)` still waits for its pages.  (C10.10)

        Raises:
            StaleHandle: it has ended, or its copies failed.
        """
        self._access.enter("is_restoring")
        if self._ledger.sequences.is_announced(sequence):
            return True
        self._ledger.sequences.require_current(sequence)
        return False

    def explain_release(self, continuation: Continuation) -> dict[str, ReleasePlan]:
        """Return, per pool, what releasing or demoting a continuation would free now; no side effects.  (C7.3, C9.8)

        Raises:
            StaleHandle: it was released or moved.
        """
        self._access.enter("explain_release")
        return self._ledger.demotions.explain_release(self._ledger.continuations.require_current(continuation))

    # ---- continuations that stay ------------------------------------------------------------------

    def release(self, continuation: Continuation) -> None:
        """Give up a continuation; a page becomes available when nobody references it any more.  (C9.8)

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: a copy uses one of its pages; nothing changed.
        """
        self._access.enter("release")
        self._end_copies()
        self._ledger.release(continuation)
        self._settle()

    def protect(self, continuation: Continuation, tokens: int, pool: str = "main") -> None:
        """Set the frontier below which `truncate` may not cut a continuation, higher or lower than before.  (C7.8)

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: tokens outside 0 to the committed frontier, or an unknown pool; nothing changed.
        """
        self._access.enter("protect")
        self._ledger.protect(continuation, tokens, pool)
        self._settle()

    def attach_state(
        self, continuation: Continuation, state: object, *, state_frontier: Frontier | None = None
    ) -> None:
        """Replace the caller's state of a continuation; `STATE_FOLLOWS` takes it back.  (C2.2, C9.8)

        `state` and `state_frontier` are as of `finish`.

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: there is no state, or a pool is behind its frontier; nothing changed.
        """
        self._access.enter("attach_state")
        self._ledger.attach_state(continuation, state, state_frontier)
        self._settle()

    def state_of(self, continuation: Continuation) -> object:
        """Return the caller's state of a continuation, or None while there is none.  (C2.2)

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
        """Return every active sequence in ascending order of rows, so that a lost handle can be found.  (C12.4)"""
        self._access.enter("sequences")
        return self._ledger.sequences.handles()

    def units(self) -> list[Submission]:
        """Return every unit in flight in the order of their begin, so that a lost handle can be found.  (C12.4)"""
        self._access.enter("units")
        return list(self._ledger.units.in_flight)

    def protected_tokens(self, continuation: Continuation, pool: str = "main") -> int:
        """Return the protected frontier of a continuation in a pool, in tokens; StaleHandle if it ended.  (C7.8)"""
        self._access.enter("protected_tokens")
        return self._kept_space(continuation, pool).protected_frontier

    def batch(self, sequences: Iterable[Sequence]) -> Batch:
        """Select sequences in batch order, once for many units.  (C11.3)

        Raises:
            StaleHandle: one of them has ended.
            MisuseError: no sequence, or one twice.
        """
        self._access.enter("batch")
        if type(sequences) is not tuple:
            sequences = checked_items("a batch", sequences, expected="sequences in batch order",
                                      remedy="pass a list, of one sequence too", clause="C11.3")
        return self._ledger.batch(sequences)

    def layer_view(self, sequence: Sequence, pool: str = "main", layer: int = 0) -> PagedKVLayerView:
        """Return the view of one layer for one sequence: every op takes it without `table_rows`, for B = 1.  (C14.1)

        It holds until the sequence ends; afterwards an op refuses it with StaleHandle, also when another sequence has
        the row.  Pages that later units map are seen through it.

        Raises:
            StaleHandle: the sequence has ended.
            MisuseError: an unknown pool or layer.
            CaptureRefused: the stream is capturing, and a graph would freeze the row's address (C15.2).
        """
        self._access.enter("layer_view", reaches_device=True)
        self._ledger.sequences.require_current(sequence)
        self._ledger.active_in(pool)
        views = self.views[pool]
        checked_integer(f"a layer of pool {pool}", layer, 0, len(views) - 1, remedy="count layers from 0 in each pool",
                        clause="C14.1")

        def require_current() -> None:
            self._access.enter("a launch with a view of one sequence")
            self._ledger.sequences.require_current(sequence)

        view = views[layer]
        return PagedKVLayerView(
            view.k_pages, view.v_pages, view.k_scale_pages, view.v_scale_pages, view.block_tables[sequence.row],
            view.head_dim, view.num_kv_heads, view.storage, view.order, view.max_context, view.codec_counts,
            require_current,
        )

    # ---- units ------------------------------------------------------------------------------------

    def begin_unit(
        self, batch: Batch, columns: Columns | Mapping[str, Columns] = 1, *, name: str = "unit"
    ) -> Submission:
        """Map the pages that the unit may write, publish new table slices, and freeze the rows.  (C9.4, C11.2)

        Args:
            batch: from `batch`.
            columns: columns of each entry in Main (one number, or one per entry), or a mapping
                pool -> columns.  0 selects a row without writing.
            name: the unit's name in errors.

        Returns:
            The unit; `first_positions[pool]` and `columns[pool]` are (B,) int32 in batch order.

        Raises:
            UnitInFlight, EntitlementExceeded, MisuseError, StaleHandle: nothing changed.
            CaptureRefused: the stream is capturing, and a replay must not repeat the publication.
            The error of a failed publication: the pages are members already, so the store is latched (C12.4).
        """
        try:
            self._access.enter("begin_unit", reaches_device=True)
            unit, slices = self._ledger.begin_unit(name, batch, _counts_by_pool(columns))
        except BaseException:
            self._access.write_journal()
            raise
        if slices:
            self._actions.publish(slices)
        self._settle()
        return unit

    def submit(self, unit: Submission) -> None:
        """Record an event on the stream behind the unit's launches; `poll` queries it.  (C12.4)

        Raises:
            MisuseError: the unit has ended, or is of another store.
        """
        self._access.enter("submit", reaches_device=True)
        self._ledger.units.require_open(unit, "submit")
        unit.is_completed = False  # first: after an interrupt the unit counts as not waited for
        event = self.device.event()
        self.stream.record(event)
        self._events[unit] = event

    def poll(self) -> list[Submission]:
        """Return the submitted units that the device has finished and that are not yet committed.  (C12.4)"""
        self._access.enter("poll", reaches_device=True)
        for unit, event in list(self._events.items()):
            if event.query():
                unit.is_completed = True
                del self._events[unit]
        return [unit for unit in self._ledger.units.in_flight if unit.is_completed]

    def wait(self, unit: Submission) -> None:
        """Block until the device has finished the unit.  (C12.4)

        Raises:
            MisuseError: the unit has ended, or is of another store.
            DeviceFault: a kernel failed; the store is latched.
        """
        self._access.enter("wait", reaches_device=True)
        self._ledger.units.require_open(unit, "wait")
        event = self._events.pop(unit, None) if self._events else None
        if event is not None:
            event.synchronize()
        elif not unit.is_completed:
            self.stream.synchronize()
        unit.is_completed = True

    def commit(self, unit: Submission, accepted: Columns | Mapping[str, Columns] | None = None) -> None:
        """Advance committed frontiers after the unit completed, and thaw its rows.  (C9.5, C12.3)

        Args:
            unit: waited for, or returned by `poll`.
            accepted: accepted columns of each entry in Main, or a mapping pool -> columns; a pool without an entry
                stays as it is.  None accepts every column of every pool that the unit wrote.

        Raises:
            MisuseError: the unit was not waited for, has ended, or wrote fewer columns; nothing changed.
        """
        self._access.enter("commit", reaches_device=self.sanitizer is not None)
        by_pool = None if accepted is None else _counts_by_pool(accepted)
        if type(unit) is not Submission or not unit.is_completed:
            self._ledger.units.require_open(unit, "commit")
            raise MisuseError(f"commit of unit {unit.label}", expected="a unit the device has finished",
                              got="one that was not waited for", remedy="call wait(unit), or poll()", clause="C12.3")
        self._ledger.commit_unit(unit, by_pool)
        self._settle()  # an abort takes effect here
        if self._copies is not None and self._copies.jobs:
            self._end_copies()

    def fail(self, unit: Submission) -> None:
        """Wait for a unit and end it without a commit.  (C9.5)

        Raises:
            MisuseError, DeviceFault: as `wait`.
        """
        self._access.enter("fail", reaches_device=True)
        self._ledger.units.require_open(unit, "fail")
        self.wait(unit)
        self._ledger.fail_unit(unit)
        self._settle()

    def launch_graph(self, graph: Graph) -> None:
        """Replay a captured graph on the store's stream; a device error latches the store.  (C12.4)"""
        self._access.enter("launch_graph", reaches_device=True)
        if not hasattr(type(graph), "launch"):  # asked of the class: an object may raise
            raise MisuseError("launch_graph", expected="a graph that end_capture gave", got=shown(graph),
                              remedy="capture the unit first", clause="C15.1")
        graph.launch(self.stream)

    def graph_buffer(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocate a buffer for a captured unit; it counts in `graph_bytes` until its last user drops it.  (C5.4)

        The plan has an allowance for all these buffers.  If capacity was automatic, a warning is logged each time that
        they come to exceed it.
        """
        self._access.enter("graph_buffer", reaches_device=True)
        buffer = self.device.empty(shape, dtype)
        before, allowance = self.graph_bytes, self.config.allowance_bytes
        self._graph_buffers = [known for known in self._graph_buffers if known() is not None]
        self._graph_buffers.append(weakref.ref(buffer))
        if self.plan.free_bytes is not None and before <= allowance < before + int(buffer.nbytes):
            _LOG.warning("buffers of captured units take %d bytes, %d were planned; set graph_allowance_bytes",
                         before + int(buffer.nbytes), allowance)
        return buffer

    # ---- between units ----------------------------------------------------------------------------

    def begin_round(self, batch: Batch) -> list[Sequence]:
        """Extend the leases of a batch that are nearly used up.  (C9.2)

        Call it once before each launch with `kv_lease_growth`; without that it does nothing.  It maps, publishes and
        launches nothing.

        Returns:
            The sequences that could not be extended, in batch order.  Each may go on while `covered_columns` is enough
            for its next launch; then the caller ends it with reason "length", and can still write one forced span.  To
            get pages, release a continuation and call `begin_round` again.

        Raises:
            UnitInFlight: a unit in flight selects one of the rows (C12.2); nothing changed.
            StaleHandle: one of the sequences has ended.
        """
        self._access.enter("begin_round")
        sequences = self._ledger.begin_round(batch)
        self._settle()
        return sequences

    def covered_columns(self, batch: Batch, pool: str = "main", *, forced: bool = False) -> npt.NDArray[np.int32]:
        """Return (B,) int32: columns behind its frontier that each entry may still write in a pool.  (C9.2, C16.17)

        Room for one forced span, `forced_span_tokens` of the configuration, is left out, with and without lease growth:
        a loop that ends a row when its next launch is not covered can still write that span.  It is part of what was
        activated, so `output_tokens` include it.

        Args:
            batch: the sequences.
            pool: the name of a pool.
            forced: count the room for the forced span too, as before that span itself, or before a prompt.

        Raises:
            StaleHandle: one of the sequences has ended.
            MisuseError: an unknown pool, or `forced` is no bool.
        """
        self._access.enter("covered_columns")
        return self._ledger.covered_columns(batch, pool, forced)

    def ensure_mapped_to_tokens(self, sequence: Sequence, tokens: int, pool: str = "main") -> None:
        """Map and publish positions [0, tokens) of one sequence ahead of a unit; a lower bound.  (C9.3)

        Raises:
            EntitlementExceeded: tokens needs more pages than the sequence was activated for; whole pages count, so the
                last one may end beyond max_context.
            MisuseError: no count of tokens, or an unknown pool.
            StaleHandle: it has ended.
        """
        self._access.enter("ensure_mapped_to_tokens", reaches_device=True)
        slices = self._ledger.ensure_mapped_to_tokens(sequence, tokens, pool)
        self._actions.publish(slices)
        self._settle()

    def trim(self, batch: Batch, pool: str = "main", provisional: Columns = 0) -> int:
        """Return trailing pages of the batch to their own reservations, and return how many.  (C9.6)

        Args:
            batch: from `batch`.
            pool: whose pages.
            provisional: columns beyond the committed frontier that stay mapped, one number or one per entry.

        Raises:
            UnitInFlight: a unit in flight selects one of the rows (C12.2).
            MisuseError: an unknown pool, counts of another form, or a page that a transfer uses (C7.4).
            StaleHandle: one of the sequences has ended.
        """
        self._access.enter("trim", reaches_device=self.sanitizer is not None)
        pages = self._ledger.trim(batch, pool, _counts(provisional))
        self._settle()
        return pages

    def truncate(self, target: Sequence | Continuation, tokens: int, pool: str = "main") -> None:
        """Lower the committed frontier of one pool to `tokens`.  (C9.10)

        The pages behind it return to the sequence's reservation; pages of a continuation are released.  Whole pages
        that other spaces hold too only lose this holder.  A sequence keeps its entitlement, so as many available pages
        are reserved in their place.  A cut below the frontier that a continuation's state belongs to in this pool
        deletes the state, until `attach_state` (C2.2).
        Each pool is cut by itself (C9.9).  If Main of a continuation was cut below a backend's frontier, activate from
        it with a frontier for every pool.

        Raises:
            UnitInFlight: a unit in flight selects the row (C12.2).
            MisuseError: tokens above the frontier, below a continuation's protected frontier, or negative; an unknown
                pool; a cut inside a page that another space references; fewer available pages than a sequence needs in
                place of shared ones; or a copy uses one of the pages to cut (C7.4).
            StaleHandle: it has ended.
        """
        self._access.enter("truncate", reaches_device=self.sanitizer is not None)
        if isinstance(target, Continuation):
            self._ledger.truncate_continuation(target, tokens, pool)
        else:
            self._ledger.truncate(target, tokens, pool)
        self._settle()

    def committed_tokens(self, target: Sequence | Continuation, pool: str = "main") -> int:
        """Return the committed frontier in one pool, in tokens; StaleHandle if the target ended.  (C9.1)"""
        self._access.enter("committed_tokens")
        if isinstance(target, Continuation):
            return self._kept_space(target, pool).frontier
        self._ledger.sequences.require_current(target)
        return self._ledger.active_in(pool).committed_end.item(target.row)

    def budget_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that the sequence may hold: source, prompt and output; StaleHandle if it ended.  (C9.2)"""
        self._access.enter("budget_tokens")
        self._ledger.sequences.require_current(sequence)
        return int(self._ledger.sequences.budget_tokens[sequence.row])

    def page_ids(self, target: Sequence | Continuation, pool: str = "main") -> list[int]:
        """Return the page group ids of a membership, in block order; StaleHandle if the target ended.  (C9.1)"""
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
    def graph_bytes(self) -> int:
        """Bytes of the buffers of `graph_buffer` that somebody still uses; the plan holds an allowance for them."""
        self._access.write_journal()
        buffers = (known() for known in self._graph_buffers)
        return sum(int(buffer.nbytes) for buffer in buffers if buffer is not None)

    @property
    def published_slices(self) -> int:
        """Slices of new pages that were published so far, most of them ahead, with a window.  (C11.2)"""
        self._access.write_journal()
        return self._actions.published_slices

    def check(self) -> None:
        """Check every invariant, and that the device tables show the memberships.  (C16)

        Raises:
            AssertionError: an invariant is broken; the message names it.
            Corruption: in sanitizer mode, a table or a guard page was overwritten; the store is latched.
        """
        self._access.enter("check", reaches_device=True)
        check_ledger(self._ledger)
        if self.sanitizer is not None:
            self.sanitizer.check()
        if self.device.keeps_bytes:
            self._actions.check_tables()

    def memory_summary(self) -> dict[str, dict[str, int]]:
        """Return, per pool, pages (capacity, allocated, reserved, available) and bytes; a latched store answers too."""
        self._access.write_journal()
        summary = {}
        for name, spaces in self._ledger.active.items():
            counters, page_bytes = spaces.pool, self._page_bytes[name]
            summary[name] = {
                "capacity_pages": counters.capacity,
                "allocated_pages": counters.allocated,
                "reserved_pages": counters.reserved,
                "available_pages": counters.available,
                "page_bytes": page_bytes,
                "slab_bytes": page_bytes * counters.capacity,
            }
        return summary

    def host_summary(self) -> dict[str, int]:
        """Return bytes of the Host arena (capacity, used, free), and what was copied; a latched store answers too.

        Copied so far, to and from the Host: "copied_pages", "copied_runs" (of records that lie together),
        "copied_bytes", and "copy_operations" (copies and launches).  Without an arena everything is 0.  (C8.2, C8.3)
        """
        self._access.write_journal()
        arena, counters = self._ledger.arena, MoverCounters() if self._copies is None else self._copies.mover.counters
        capacity, free = arena.units * UNIT_BYTES, arena.free_units * UNIT_BYTES
        return {"capacity_bytes": capacity, "used_bytes": capacity - free, "free_bytes": free,
                "copied_pages": counters.pages, "copied_runs": counters.runs, "copied_bytes": counters.bytes,
                "copy_operations": counters.operations}

    def inspect(self) -> StoreInspection:
        """Return a copy of the ledger's whole state, for tests and tools; linear in pages.  (C16)"""
        self._access.enter("inspect")
        return inspect_ledger(self._ledger)

    def observe(self, observer: PageObserver) -> Callable[[], None]:
        """Call `observer` with every later PageEvent, at the end of the operation that caused it.  (C9.6, C13.3)

        Events come in order.  A refused or aborted operation causes none.  If an observer raises an Exception, it is
        logged, the operation stays valid, and the next observer is called.  An interrupt or an exit is raised after
        every observer got every event.  `ledger/events.py` describes each kind of event.

        Returns:
            A function that ends the observation; a second call of it does nothing.

        Raises:
            MisuseError: the observer cannot be called.
        """
        self._access.enter("observe")
        return self._ledger.events.observe(observer)

    def event_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return, per pool and kind of event, pages and bytes so far; a latched store answers too.  (C3.11)

        Events count whether or not anybody observes them.  Bytes are the sizes of the page groups in all planes, also
        for "publish", which concerns only their table entries.
        """
        self._access.write_journal()
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for name, spaces in self._ledger.active.items():
            page_bytes = self._page_bytes[name]
            counts[name] = {kind: {"pages": n, "bytes": n * page_bytes} for kind, n in spaces.events.pages.items()}
        return counts

    def codec_counts(self) -> dict[str, dict[str, int]]:
        """Return, per pool, how many groups appends stored beyond ordinary ones; waits for the stream.  (codecs 8)

        A group is 64 dims (int8), a row (fp8) or 16 dims (fp4) of one K or V row, and counts each time it is written:
        "saturated" if its magnitude is beyond the format, "nonfinite" if its scale is NaN or infinite, "zero_groups" if
        its scale is zero.  Replayed units count too; dead columns, copies and moves of pages do not.  A bf16 pool has
        no groups, so all its counts are 0.

        Raises:
            MisuseError: the store was opened without `codec_events`.
            CaptureRefused: the stream is capturing.
            DeviceFault: a kernel failed; the store is latched.
        """
        self._access.enter("codec_counts", reaches_device=True)
        if not self.config.codec_events:
            raise MisuseError("codec_counts", expected="a store that counts codec events",
                              got="one opened without codec_events",
                              remedy="open it with StoreConfig(codec_events=True)", clause="codecs 8")
        counts = {pool.name: np.zeros(len(CODEC_EVENTS), np.uint64) for pool in self.config.pools}
        for pool in self.config.pools:
            if pool.counts_events:
                self.device.copy(counts[pool.name], self._slabs[f"{pool.name}.codec_counts"], self.stream)
        self.stream.synchronize()
        return {pool: dict(zip(CODEC_EVENTS, array.tolist(), strict=True)) for pool, array in counts.items()}

    # ---- helpers ----------------------------------------------------------------------------------

    def _kept_space(self, continuation: Continuation, pool: str) -> KeptSpace:
        number = self._ledger.continuations.require_current(continuation)
        return self._ledger.kept_in(pool).by_number[number]

    def _follow(self, transaction: Transaction) -> None:
        """Copy the tails of a transaction and publish its tables; after an error, give every claim back.  (C10.2)"""
        try:
            self._actions.execute(transaction)
        except BaseException as error:
            with Caught(error):
                self._ledger.abort_transaction(transaction)
                if self._access.fault is None:
                    self._settle()
            raise

    def _copy(self, claims: Demotion | Transaction, *, wait: bool) -> None:
        """Submit the copies of claims, and with `wait` block until they have run; after an error, give claims back."""
        assert self._copies is not None, "a store without an arena copies nothing to it"
        job = CopyJob(claims)
        try:
            self._copies.begin(job)
            if wait:
                self._copies.run(job)
                self._copies.verify(job)
        except BaseException as error:
            self._give_back_claims(job, error)
            raise
        if wait:
            self._copies.forget(job)  # the claims end with this call of the store

    def _give_back_claims(self, job: CopyJob, error: BaseException) -> None:
        """Wait for what was queued, and give claims back while an error is raised."""
        assert self._copies is not None, "a job belongs to the copies of a store"
        with Caught(error):
            if self._access.fault is None:
                self._copies.fail(job)
                self._abort_claims(job)
                self._copies.forget(job)
                self._settle()

    def _abort_claims(self, job: CopyJob) -> None:
        if isinstance(job.claims, Transaction):
            self._ledger.abort_transaction(job.claims)
        else:
            self._ledger.abort_demotion(job.claims)

    def _end_copies(self) -> None:
        """Publish or give back what has run; an error of copies waits for `poll_copies`.  (C10.10)"""
        if self._copies is None or not self._copies.jobs or self.device.state.capturing_on:
            return
        for job in tuple(self._copies.jobs):
            try:
                if job.claims.is_open and not self._end_copy(job):
                    continue
                self._copies.forget(job)  # last: after an interrupt the next call finds claims that have ended
            except TransferFailed as error:
                self._give_back_claims(job, error)
                self._failed_copies.append(error)

    def _end_copy(self, job: CopyJob) -> bool:
        """Publish the claims of a job, or give them back, if its copies have run; say whether they have."""
        assert self._copies is not None, "a job belongs to the copies of a store"
        if not self._copies.advance(job):
            return False
        if job.is_aborting:
            self._abort_claims(job)
        else:
            self._copies.verify(job)
            if isinstance(job.claims, Transaction):  # after an interrupt the next call begins here again
                self._actions.execute(job.claims)
                self._ledger.commit_activation(job.claims)
            else:
                self._ledger.commit_demotion(job.claims)
        self._settle()
        return True

    def _wait_for_copies(self) -> None:
        """Block until every copy in flight has run, and end it."""
        while self._copies is not None and self._copies.jobs:
            job = self._copies.jobs[0]
            with contextlib.suppress(TransferFailed):  # `_end_copies` meets it again, and gives the claims back
                self._copies.run(job)
            self._end_copies()

    def _abort_restore(self, sequence: Sequence) -> None:
        """Let an activation end without publication when its copies have run.  (C10.10, S27)"""
        assert self._copies is not None, "a store without an arena restores nothing"
        for job in self._copies.jobs:
            if isinstance(job.claims, Transaction) and job.claims.handle == sequence:
                job.is_aborting = True
                job.waiting.clear()
        self._end_copies()

    def _settle(self) -> None:
        """End an operation: withdraw table entries (sanitizer mode), confirm the ledger, deliver its events."""
        if self.sanitizer is not None:
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
            self._slabs.get(f"{pool_name}.codec_counts"),
        )


_CLOSING = (Store._finish_work, Store._report_ended_units, Store._give_back, Store._close_journal)
"""The parts of `Store.close`, in order; each runs whatever became of the one before."""


def _counts(columns: Columns) -> Columns:
    """Read counts of columns once, ahead of every check: reading them may run the caller's code, which may call us."""
    if type(columns) is int:
        return columns
    return checked_counts("columns of a unit", columns, remedy="pass one count, or one per batch entry", clause="C14.4")


def _counts_by_pool(columns: Columns | Mapping[str, Columns]) -> Mapping[str, Columns]:
    """Read the columns of each pool once; those without a pool are Main's."""
    if type(columns) is int:
        return {"main": columns}
    if type(columns) is dict:
        for given in columns.values():
            if type(given) is not int:
                break
        else:
            return columns
        return {pool: given if type(given) is int else _counts(given) for pool, given in columns.items()}
    if isinstance(columns, Mapping):
        by_pool: dict[str, Columns] | None = None
        with Caught(but=MemoryError) as caught:
            by_pool = dict(columns.items())
        if by_pool is None:
            raise MisuseError("columns by pool", expected="a mapping from pools to columns", got=shown(columns),
                              remedy="pass a dict", clause="C14.4") from caught.error
        return {pool: _counts(given) for pool, given in by_pool.items()}
    return {"main": _counts(columns)}


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
    """Refuse a `config` that is not a StoreConfig."""
    if not isinstance(config, StoreConfig):
        raise ConfigError("the configuration", expected="a StoreConfig", got=shown(config),
                          remedy="build a StoreConfig first", clause="C5.2")
