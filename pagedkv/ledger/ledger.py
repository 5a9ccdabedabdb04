"""Ledger: the decisions of one store, over its pools, pages, spaces, sequences and units.

A ledger is the store without a device: it decides, and returns the table slices to publish and the columns to copy.
Everything here is plain Python and NumPy, so tests check every rule of C5 to C13 in milliseconds.  The store executes
the answers on the device.

An operation that decides has three parts, in this order:

    checks      refusals; nothing has changed
    unsettled   set to the name of the operation, before the first write of any column
    writes      asserts only; if one of them breaks off, `unsettled` keeps the name

The store clears `unsettled` at the end of its own call, when the device tables are up to date.  If the next call finds
a name there, an interrupt, a failed allocation or a failed copy broke that operation off: the columns may contradict
each other, and the store is latched (C12.4).

`recorded` marks the operations that `Ledger.record_in` reports; the journal is one recorder.  Only `record_in` wraps
them, so that a ledger without a recorder makes no extra call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from pagedkv.errors import MisuseError, shown
from pagedkv.ledger.active_spaces import ActiveSpaces, TableSlices, Tokens
from pagedkv.ledger.batch import (
    Batch,
    Columns,
    EntryColumns,
    batch_after,
    batch_of,
    column_counts,
    common_ends,
    numbers_of,
)
from pagedkv.ledger.continuations import STATE_FOLLOWS, Continuation, Continuations, Frontier, state_frontier_of
from pagedkv.ledger.demotions import Demotion, Demotions
from pagedkv.ledger.events import PageEvents, PoolEvents
from pagedkv.ledger.free_runs import highest
from pagedkv.ledger.growth import LeaseGrowth
from pagedkv.ledger.host_arena import UNIT_BYTES, HostArena
from pagedkv.ledger.kept_spaces import KeptSpaces
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.sequences import Sequence, Sequences
from pagedkv.ledger.transaction import ActivationPlan, ActivationTarget, Refusal, Transaction, Transactions
from pagedkv.ledger.units import Submission, Units
from pagedkv.values.checks import checked_integer
from pagedkv.values.config import VERIFY_WIDTH_MAX, StoreConfig
from pagedkv.values.quantities import PAGE_SHIFT, PAGE_TOKENS

PoolSlices = dict[str, TableSlices]

_INT32 = np.dtype(np.int32)
_UINT32 = np.dtype(np.uint32)

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """Hears of every call of a recorded operation."""

    def reporting(self, operation: Callable[P, T]) -> Callable[P, T]:
        """Return an operation of one ledger that tells this recorder of each call, and answers or refuses as before."""


RECORDED: set[str] = set()
"""Names of the operations of a ledger that a journal may hold."""


def recorded(operation: Callable[Concatenate[Ledger, P], T]) -> Callable[Concatenate[Ledger, P], T]:
    """Mark an operation of `Ledger` that decides; `Ledger.record_in` reports each call of it."""
    RECORDED.add(operation.__name__)
    return operation


class Ledger:
    """Pools, logical pages, tables, address spaces, sequences, continuations and units of one store.

    Attributes:
        active, kept: the active and inactive address spaces of each pool, in pool order.
        unsettled: the operation whose writes have begun and whose end the store has not confirmed; "" otherwise.
    """

    def __init__(self, config: StoreConfig, store_id: int = 0) -> None:
        self.config = config
        self.unsettled = ""
        self.events = PageEvents()
        self.active: dict[str, ActiveSpaces] = {}
        self.kept: dict[str, KeptSpaces] = {}
        self.arena = HostArena(config.host_arena_bytes)
        for pool in config.pools:
            events = PoolEvents(pool.name, self.events)
            pages = LogicalPages(pool.pages, self.arena, pool.record_bytes // UNIT_BYTES)
            self.active[pool.name] = spaces = ActiveSpaces(
                PagePool(pool.name, pool.pages), pages, rows=config.max_concurrency, blocks=config.blocks,
                max_context=config.max_context, events=events, grows=config.kv_lease_growth,
            )
            self.kept[pool.name] = KeptSpaces(spaces.pool, pages, events)
        self.sequences = Sequences(config.max_concurrency, store_id)
        self.continuations = Continuations(self.kept, store_id)
        self.growth = LeaseGrowth(config, self.active)
        self.transactions = Transactions(config, self.active, self.sequences, self.continuations, self.growth,
                                         self.arena)
        self.demotions = Demotions(self.active, self.continuations, self.arena)
        self.units = Units()
        self._aborting: dict[int, Sequence] = {}
        # Counts of a unit in which each of B entries writes W columns, by (B, W); every batch of B entries has them.
        self._uniform: dict[tuple[int, int], Tokens] = {}
        self._last_batch = batch_of((), *numbers_of(()), self.sequences.stamp)

    def record_in(self, recorder: Recorder) -> None:
        """Report every later call of a recorded operation of this ledger; called once, by the store."""
        for name in RECORDED:
            setattr(self, name, recorder.reporting(getattr(self, name)))

    def end_record(self) -> None:
        """Report no further call: the recorder and this ledger hold each other until then."""
        for name in RECORDED:
            vars(self).pop(name, None)

    # ---- transactions -----------------------------------------------------------------------------

    @recorded
    def prepare_activation(self, target: ActivationTarget, is_announced: bool = False) -> Transaction | Refusal:
        """Claim the pages of a target in every pool; the answer lists the copies and the tables to publish.  (C10.2)

        `is_announced`: the handle exists from now on, and is refused until the commit (C10.10).
        """
        plan = self.transactions.explain(target)
        if not isinstance(plan, ActivationPlan):
            return plan
        self.unsettled = "activate"
        return self.transactions.prepare(target, plan, is_announced=is_announced)

    @recorded
    def prepare_snapshot(
        self, sequence: Sequence, state: object = None, state_frontier: Frontier | None = None
    ) -> Transaction | Refusal:
        """Claim the pages of a checkpoint's copied tails; the answer lists the copies.  (C10.6)"""
        self._require_boundary(sequence, "snapshot")
        frontier = self._require_resumable(sequence, "a snapshot", state, state_frontier)
        plans = self.transactions.explain_snapshot(sequence)
        if isinstance(plans, Refusal):
            return plans
        self.unsettled = "snapshot"
        return self.transactions.prepare_snapshot(sequence, state, frontier, plans)

    @recorded
    def commit_activation(self, transaction: Transaction) -> Sequence:
        """Publish the sequence of a prepared activation.  (C10.3)"""
        self.transactions.require_committable(transaction, "activation")
        self.unsettled = "activate"
        return self.transactions.commit_activation(transaction)

    @recorded
    def commit_snapshot(self, transaction: Transaction) -> Continuation:
        """Publish the checkpoint of a prepared snapshot.  (C10.6)"""
        self.transactions.require_open(transaction, "commit")
        if transaction.sequence is not None:
            self._require_boundary(transaction.sequence, "snapshot")
        self.transactions.require_committable(transaction, "snapshot")
        self.unsettled = "snapshot"
        return self.transactions.commit_snapshot(transaction)

    def try_activate(self, target: ActivationTarget) -> Sequence | Refusal:
        """Prepare and commit, for a caller without a device, which has no bytes to copy.  (C10.2, C10.9)"""
        transaction = self.prepare_activation(target)
        return transaction if isinstance(transaction, Refusal) else self.commit_activation(transaction)

    def try_snapshot(
        self, sequence: Sequence, state: object = None, state_frontier: Frontier | None = None
    ) -> Continuation | Refusal:
        """Prepare and commit, for a caller without a device, which has no bytes to copy.  (C10.6)"""
        transaction = self.prepare_snapshot(sequence, state, state_frontier)
        return transaction if isinstance(transaction, Refusal) else self.commit_snapshot(transaction)

    @recorded
    def abort_transaction(self, transaction: Transaction) -> None:
        """Give every claim of a transaction back.  (C10.2)"""
        self.transactions.require_open(transaction, "abort")
        self.unsettled = "the abort of an activation or a snapshot"
        self.transactions.abort(transaction)

    # ---- the Host tier ----------------------------------------------------------------------------

    @recorded
    def prepare_demotion(self, continuation: Continuation) -> Demotion | Refusal:
        """Claim records for the pages of a continuation that leave the Device; the answer lists the copies.  (C7.4)"""
        number = self.continuations.require_idle(continuation, "demote")
        self._require_arena("demote")
        plan = self.demotions.explain(number)
        if isinstance(plan, Refusal):
            return plan
        self.unsettled = "demote"
        return self.demotions.prepare(number, plan)

    @recorded
    def commit_demotion(self, demotion: Demotion) -> int:
        """Publish Host replicas that were copied, and drop Device replicas; return how many.  (C7.4, C16.9)"""
        self.demotions.require_committable(demotion)
        self.unsettled = "demote"
        return self.demotions.commit(demotion)

    @recorded
    def abort_demotion(self, demotion: Demotion) -> None:
        """Give the claims of a demotion back.  (C10.2)"""
        self.demotions.require_open(demotion, "abort")
        self.unsettled = "the abort of a demotion"
        self.demotions.abort(demotion)

    @recorded
    def drop_device(self, continuation: Continuation) -> int:
        """Drop the Device replicas of idle pages whose Host replica is valid; return how many.  (C7.7)"""
        number = self.continuations.require_idle(continuation, "drop_device")
        self.unsettled = "drop_device"
        return self.demotions.drop_device(number)

    @recorded
    def drop_host(self, continuation: Continuation) -> int:
        """Free the Host replicas of idle pages that keep their Device replica; return their bytes.  (C7.7)"""
        number = self.continuations.require_idle(continuation, "drop_host")
        self.unsettled = "drop_host"
        return self.demotions.drop_host(number)

    # ---- ending a sequence ------------------------------------------------------------------------

    @recorded
    def finish(
        self, sequence: Sequence, retain: bool = False, state: object = None, state_frontier: Frontier | None = None
    ) -> Continuation | None:
        """Trim, give up reservation, row and writers, then retain the pages or release them.  (C9.8)"""
        self._require_boundary(sequence, "finish")
        if type(retain) is not bool:
            raise MisuseError("retain", expected="True or False", got=shown(retain),
                              remedy="pass True to keep the pages, False to release them", clause="C9.8")
        for name, value in (("state", state), ("state_frontier", state_frontier)) if not retain else ():
            if value is not None:
                raise MisuseError(f"a {name} without retain=True", expected="None", got=shown(value),
                                  remedy="pass retain=True to keep the continuation", clause="C9.8")
        self._require_unpinned(sequence, "finish")
        frontier = self._require_resumable(sequence, "retaining", state, state_frontier) if retain else {}
        self.unsettled = "finish"
        if not retain:
            self._end_sequence(sequence)
            return None
        spaces: dict[str, Any] = {}
        for name, active in self.active.items():
            active.trim(slice(sequence.row, sequence.row + 1))
            spaces[name] = active.detach(sequence.row)
        self.growth.close(sequence.row)
        self.sequences.end(sequence.row)
        return self.continuations.keep(spaces, state, frontier)

    @recorded
    def abort(self, sequence: Sequence) -> bool:
        """End the sequence now (True), or with the unit in flight that selects it (False).  (C12.4)"""
        self.sequences.require_current(sequence)
        self._require_unpinned(sequence, "abort")
        self.unsettled = "abort"
        if self.units.rows_in_flight >> sequence.row & 1:
            self._aborting[sequence.row] = sequence
            return False
        self._end_sequence(sequence)
        return True

    # ---- continuations ----------------------------------------------------------------------------

    @recorded
    def release(self, continuation: Continuation) -> None:
        """Give up every membership of a continuation; free the pages that nobody references any more.  (C9.8)"""
        number = self.continuations.require_idle(continuation, "release")
        self.continuations.require_undemoted(number, f"release of {continuation}")
        self.unsettled = "release"
        self.continuations.release(number)

    @recorded
    def attach_state(
        self, continuation: Continuation, state: object, state_frontier: Frontier | None = None
    ) -> None:
        """Replace the caller's state of a continuation; STATE_FOLLOWS takes it back.  (C2.2, C9.8)"""
        number = self.continuations.require_idle(continuation, "attach_state")
        frontier = state_frontier_of("attach_state", continuation, state, state_frontier,
                                     self.continuations.committed(number))
        self.unsettled = "attach_state"
        self.continuations.attach(number, state, frontier)

    @recorded
    def protect(self, continuation: Continuation, tokens: int, pool: str) -> None:
        """Set the protected frontier of one pool of a continuation, up or down.  (C7.8)"""
        number = self.continuations.require_idle(continuation, "protect")
        committed = self.kept_in(pool).by_number[number].frontier
        if type(tokens) is not int or not 0 <= tokens <= committed:
            raise MisuseError(f"protection of {continuation} in pool {pool}",
                              expected=f"an int, 0 to {committed} tokens", got=shown(tokens),
                              remedy="only what is committed can be protected", clause="C7.8")
        self.unsettled = "protect"
        self.kept[pool].protect(number, tokens)

    @recorded
    def truncate_continuation(self, continuation: Continuation, tokens: int, pool: str) -> None:
        """Lower the committed frontier of one pool of a continuation.  (C9.10)

        A cut below the frontier that the caller's state belongs to in this pool deletes the state (C2.2).
        """
        number = self.continuations.require_idle(continuation, "truncate")
        kept = self.kept_in(pool)
        _require_tokens("truncate", tokens)
        if pool == "main" and tokens == 0:
            raise MisuseError(f"truncate of {continuation} to nothing", expected="at least 1 token of Main", got=0,
                              remedy="release it", clause="C9.10")
        kept.require_truncate(number, tokens)
        self.continuations.require_undemoted(number, f"truncate of {continuation}")
        loses_state = tokens < self.continuations.states[number].state_frontier.get(pool, 0)
        self.unsettled = "truncate"
        if loses_state:
            self.continuations.attach(number, STATE_FOLLOWS, {})
        kept.truncate(number, tokens)

    # ---- units ------------------------------------------------------------------------------------

    def batch(self, sequences: SequenceOf[Sequence]) -> Batch:
        """Select sequences, in batch order.  (C11.3)"""
        handles, previous, current = tuple(sequences), self._last_batch, self.sequences
        first, last = ends = common_ends(previous.sequences, handles)
        current.require_all_current(handles[first : len(handles) - last])
        batch = batch_after(previous, handles, ends, current.serials, current.stamp)
        if batch.stamp != current.stamp:
            self._require_batch(batch)  # the handles of the previous batch may have ended
        if not len(batch) or batch.rows_mask.bit_count() != len(batch):
            raise MisuseError("a batch", expected="at least one sequence, each once", got=list(sequences),
                              remedy="select distinct sequences", clause="C14.4")
        self._last_batch = batch
        return batch

    @recorded
    def begin_unit(self, name: str, batch: Batch, columns: Mapping[str, Columns]) -> tuple[Submission, PoolSlices]:
        """Map the pages that a unit may write in each named pool, and freeze its rows.  (C9.4, C12.1)

        The second answer has the slices to publish before the launches, for each pool in which a row crossed a page.
        """
        if not isinstance(name, str):
            raise MisuseError("the name of a unit", expected="a str", got=shown(name),
                              remedy="pass the name that errors are to print", clause="C12.2")
        if type(batch) is not Batch or batch.stamp != self.sequences.stamp:
            self._require_batch(batch)
        if self.units.rows_in_flight & batch.rows_mask:
            self.units.require_thawed(batch.rows_mask, "a unit")
        if not columns:
            raise MisuseError("a unit that writes nothing", expected="columns for at least one pool", got="none",
                              remedy="name the pools the unit writes", clause="C9.4")
        written: dict[str, EntryColumns] = {}
        first_positions = {}
        crossing: list[tuple[str, ActiveSpaces, bool]] | None = None
        for pool, pool_columns in columns.items():
            try:
                spaces = self.active[pool]
            except (KeyError, TypeError):
                spaces = self.active_in(pool)
            entry = batch.by_width.get(pool_columns) if type(pool_columns) is int else None
            if entry is None:
                entry = self._entry_columns(batch, pool, pool_columns)
            written[pool] = entry
            if spaces.reaches_new_pages(entry):
                is_ready = spaces.is_ready(entry)
                if not is_ready and not spaces.is_writable():
                    self._require_writable(batch, pool, entry)
                crossing = [*(crossing or ()), (pool, spaces, is_ready and entry.width <= PAGE_TOKENS)]
            first_positions[pool] = first = spaces.committed_end[batch.rows]
            first.setflags(write=False)
        self.unsettled = "begin_unit"
        slices: PoolSlices = {}
        for pool, spaces, is_one_page in crossing or ():
            new_slices = spaces.map_reached(is_one_page=is_one_page)
            if new_slices is not None:
                slices[pool] = new_slices
        return self.units.begin(name, batch, written, first_positions), slices

    @recorded
    def commit_unit(self, unit: Submission, accepted: Mapping[str, Columns] | None = None) -> None:
        """Advance committed frontiers by accepted columns, pool by pool, and thaw the rows.  (C9.5, C13.1)

        A pool that is not named keeps its frontier; None accepts every column of every pool.
        """
        self.units.require_open(unit, "commit")
        if self._aborting:
            self._require_endable(unit, "commit")
        if accepted is None:
            self.unsettled = "commit"
            for pool, entry in unit.written.items():
                self.active[pool].commit(entry.by_row)
        else:
            columns = {}
            for pool, counts in accepted.items():
                columns[pool] = self._accepted(unit, pool, counts)
            self.unsettled = "commit"
            for pool, counts in columns.items():
                self.active[pool].commit_at(unit.batch, counts)
        self.units.end(unit)
        if self._aborting:
            self._end_aborting(unit)

    @recorded
    def fail_unit(self, unit: Submission) -> None:
        """End a unit without a commit: no frontier moves, so nobody reads its columns.  (C9.5)"""
        self.units.require_open(unit, "fail")
        self._require_endable(unit, "fail")
        self.unsettled = "fail"
        self.units.end(unit)
        if self._aborting:
            self._end_aborting(unit)

    # ---- between units ----------------------------------------------------------------------------

    @recorded
    def begin_round(self, batch: Batch) -> list[Sequence]:
        """Extend the leases of a batch that are nearly used up; return the sequences that got no extension.  (C9.2)"""
        self._require_batch(batch)
        self.units.require_thawed(batch.rows_mask, "begin_round")
        if not self.growth.is_on:
            return []
        self.unsettled = "begin_round"
        return [batch.sequences[index] for index in self.growth.begin_round(batch.rows)]

    def covered_columns(self, batch: Batch, pool: str, forced: bool = False) -> Tokens:
        """Return (B,) int32: columns that each entry may still write in a pool.  (C9.2, C16.17)

        Room for one forced span is left out, unless `forced` asks for it too.
        """
        self._require_batch(batch)
        columns = self.active_in(pool).covered_columns(batch.rows)
        if type(forced) is not bool:
            raise MisuseError("forced", expected="True or False", got=shown(forced),
                              remedy="pass True to count the room for a forced span too", clause="C9.2")
        return columns if forced else np.maximum(columns - self.config.forced_span_tokens, 0)

    @recorded
    def ensure_mapped_to_tokens(self, sequence: Sequence, tokens: int, pool: str) -> PoolSlices:
        """Map positions [0, tokens) of one sequence ahead of a unit; a lower bound.  (C9.3)"""
        self.sequences.require_current(sequence)
        spaces = self.active_in(pool)
        checked_integer(f"mapping row {sequence.row} of pool {pool}", tokens, 0, np.iinfo(np.int32).max,
                        remedy="pass a count of tokens within the entitlement", clause="C9.3")
        spaces.require_entitled(np.array([sequence.row]), np.array([tokens]))
        self.unsettled = "ensure_mapped_to_tokens"
        slices = spaces.ensure_mapped_to_tokens(sequence.row, tokens)
        return {} if slices is None else {pool: slices}

    @recorded
    def trim(self, batch: Batch, pool: str, provisional: Columns = 0) -> int:
        """Return pages beyond committed + provisional columns to their reservation, and return how many.  (C9.6)"""
        if type(batch) is not Batch or batch.stamp != self.sequences.stamp:
            self._require_batch(batch)
        spaces = self.active_in(pool)
        if self.units.rows_in_flight & batch.rows_mask:
            self.units.require_thawed(batch.rows_mask, "trim", pool)
        columns = None
        if type(provisional) is not int or provisional:
            columns = column_counts("provisional columns", len(batch), provisional)
        if spaces.pages.pins_total:
            spaces.require_trimmable(batch.index, columns)
        self.unsettled = "trim"
        return spaces.trim(batch.index, columns)

    @recorded
    def truncate(self, sequence: Sequence, tokens: int, pool: str) -> None:
        """Lower the committed frontier of one pool, then trim.  (C9.10)"""
        self.sequences.require_current(sequence)
        spaces = self.active_in(pool)
        self.units.require_thawed(1 << sequence.row, "truncate", pool)
        _require_tokens("truncate", tokens)
        spaces.require_truncate(sequence.row, tokens)
        self.unsettled = "truncate"
        spaces.truncate(sequence.row, tokens)

    # ---- lookups ----------------------------------------------------------------------------------

    def active_in(self, pool: str) -> ActiveSpaces:
        """Return the active spaces of an enabled pool; refuse another name.  (C3.3)"""
        spaces = self.active.get(pool) if isinstance(pool, str) else None
        if spaces is None:
            raise MisuseError(f"pool {shown(pool)}", expected=f"one of {list(self.active)}", got=shown(pool),
                              remedy="name an enabled pool", clause="C3.3")
        return spaces

    def kept_in(self, pool: str) -> KeptSpaces:
        """Return the inactive spaces of an enabled pool; refuse another name.  (C3.3)"""
        self.active_in(pool)
        return self.kept[pool]

    # ---- helpers ----------------------------------------------------------------------------------

    def _end_aborting(self, unit: Submission) -> None:
        """End the sequences that were aborted while the unit was in flight.  (C12.4)"""
        for row in unit.rows.tolist():
            sequence = self._aborting.pop(row, None)
            if sequence is not None:
                self._end_sequence(sequence)

    def _end_sequence(self, sequence: Sequence) -> None:
        """Close the sequence's spaces and return its row.  (C9.8)"""
        for spaces in self.active.values():
            spaces.close(sequence.row)
        self.growth.close(sequence.row)
        self.sequences.end(sequence.row)

    def _require_arena(self, operation: str) -> None:
        if not self.arena.units:
            raise MisuseError(operation, expected="a store with a Host arena", got="host_arena_bytes=0",
                              remedy="open it with StoreConfig(host_arena_bytes=...)", clause="C5.7")

    def _require_boundary(self, sequence: Sequence, operation: str) -> None:
        self.sequences.require_current(sequence)
        self.units.require_thawed(1 << sequence.row, operation)

    def _require_resumable(
        self, sequence: Sequence, what: str, state: object, state_frontier: Frontier | None
    ) -> dict[str, int]:
        """Return the frontier that a state belongs to, as `state_frontier_of` does.

        Refuses to retain a sequence without tokens in Main, or with a backend's frontier beyond Main's.  (C13.2)
        """
        committed = {name: spaces.committed_end.item(sequence.row) for name, spaces in self.active.items()}
        main = committed["main"]
        if not main:
            raise MisuseError(f"{what} of {sequence}", expected="at least 1 committed token of Main", got="none",
                              remedy="commit a unit first", clause="C9.8")
        for name, frontier in committed.items():
            if frontier > main:
                raise MisuseError(f"{what} of {sequence}", expected=f"at most Main's {main} committed tokens in {name}",
                                  got=frontier, remedy="a provisional lead is no checkpoint: truncate it first",
                                  clause="C13.2")
        return state_frontier_of(what, sequence, state, state_frontier, committed)

    def _require_endable(self, unit: Submission, operation: str) -> None:
        """Refuse to end a unit while a copy uses a page of a sequence that ends with it.  (C7.4, C12.4)"""
        for row in unit.rows.tolist() if self._aborting else ():
            if row in self._aborting:
                self._require_unpinned(self._aborting[row], f"{operation} of {unit.label}, and with it abort")

    def _require_unpinned(self, sequence: Sequence, operation: str) -> None:
        """Refuse to end a sequence while a copy uses one of its pages.  (C7.4)"""
        for spaces in self.active.values():
            if spaces.pages.pins_total:
                bound = spaces.bound_end.item(sequence.row) >> PAGE_SHIFT
                members = spaces.members[sequence.row, :bound]
                spaces.pages.require_unpinned(f"{operation} of row {sequence.row}", members)

    def _require_batch(self, batch: Batch) -> None:
        if type(batch) is not Batch:
            raise MisuseError("a batch", expected="what batch(sequences) returned", got=shown(batch),
                              remedy="select the sequences with batch first", clause="C11.3")
        sequences = self.sequences
        if batch.stamp != sequences.stamp:
            is_own = batch.stamp >> 32 == sequences.store_id
            if not is_own or sequences.serials[batch.rows].tobytes() != batch.serials.tobytes():
                for sequence in batch.sequences:
                    sequences.require_current(sequence)
            batch.stamp = sequences.stamp

    def _entry_columns(self, batch: Batch, pool: str, columns: Columns) -> EntryColumns:
        """Return the columns of batch entries, and spread over rows; cached if all entries write the same number."""
        spaces = self.active[pool]
        if type(columns) is int and 0 <= columns <= VERIFY_WIDTH_MAX:
            count = len(batch.sequences)
            uniform = self._uniform.get((count, columns))
            if uniform is None:
                uniform = self._uniform[count, columns] = np.full(count, columns, np.int32)
                uniform.flags.writeable = False
            by_row = np.zeros(spaces.committed_end.size, np.int32)  # `zeros_like` takes 0.7 us
            by_row[batch.index] = columns
            by_row.flags.writeable = False
            batch.by_width[columns] = entry = EntryColumns(uniform, by_row, columns, batch.index, True)
            return entry
        counts = column_counts(f"columns of a unit in pool {pool}", len(batch), columns)
        by_row = spaces.by_row(batch.index, counts)
        counts.flags.writeable = by_row.flags.writeable = False  # a caller sees them, and `commit_unit` compares
        return EntryColumns(counts, by_row, highest(counts), batch.index, False)

    def _accepted(self, unit: Submission, pool: str, columns: Columns) -> Tokens:
        """Return accepted columns as (B,) int32; refuse more than the unit wrote.  (C9.5)"""
        entry = unit.written.get(pool)
        if entry is None:
            raise MisuseError(f"a commit to pool {pool}", expected=f"one of {sorted(unit.written)}", got=pool,
                              remedy="commit only pools that the unit wrote", clause="C9.9")
        limits = entry.by_entry
        size = limits.size
        if type(columns) is np.ndarray and columns.dtype is _INT32 and columns.size == size and columns.ndim == 1:
            counts: Tokens = columns  # type: ignore[assignment]
        else:
            counts = column_counts(f"accepted columns of {unit.label}", size, columns)
        if size == 1:
            most = counts.item(0)
        else:
            unsigned = counts.view(_UINT32)  # a negative count is a large one
            most = unsigned.item(unsigned.argmax())
        if not 0 <= most <= entry.width or not (entry.is_uniform or (counts <= limits).all()):
            raise MisuseError(f"accepted columns of {unit.label}", expected=f"0 to {limits.tolist()}",
                              got=counts.tolist(), remedy="accept at most what the unit wrote", clause="C9.5")
        return counts

    def _require_writable(self, batch: Batch, pool: str, entry: EntryColumns) -> None:
        """Refuse a unit that writes at or beyond max_context, or beyond an entitlement.  (C9.3, C11.2)"""
        spaces = self.active[pool]
        first = spaces.committed_end[batch.rows].astype(np.int64)
        ends = first + entry.by_entry
        beyond = np.flatnonzero(ends > self.config.max_context)
        if beyond.size:
            index = int(beyond[0])
            count, position = int(entry.by_entry[index]), int(first[index])
            raise MisuseError(
                f"a unit that writes up to position {position + count - 1} of row {int(batch.rows[index])} "
                f"in pool {pool}",
                expected=f"positions below max_context = {self.config.max_context}",
                got=f"{count} columns from position {position} on",
                remedy="make columns at or beyond max_context inert before the launch", clause="C11.2",
            )
        spaces.require_entitled(batch.rows, ends)


def _require_tokens(operation: str, tokens: object) -> None:
    if type(tokens) is not int:
        raise MisuseError(operation, expected="an int, a number of tokens", got=shown(tokens),
                          remedy="pass int(tokens)", clause="C9.10")
