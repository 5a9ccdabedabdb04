"""StoreLedgers: every ledger of one store, and the operations that combine them.

This is the store without a device: it decides, and returns what is to be done (table slices to
publish).  Everything here is plain Python and NumPy, so every rule of C5 to C13 is tested in
milliseconds.  `store.py` executes what stands in the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError
from pagedkv.ledger.activation import ActivationPlan, Activations, ActivationTarget, PreparedActivation, Refusal
from pagedkv.ledger.active_spaces import HOLD, AddressSpaces, Tokens
from pagedkv.ledger.block_tables import BlockTable, TableSlices
from pagedkv.ledger.continuations import Continuation, Continuations
from pagedkv.ledger.events import PageEvents, PoolEvents
from pagedkv.ledger.growth import LeaseGrowth
from pagedkv.ledger.kept_spaces import RetainedSpaces
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.sequences import Sequence, Sequences
from pagedkv.ledger.snapshot import PreparedSnapshot, Snapshots
from pagedkv.ledger.units import EntryColumns, Submission, UnitGuard, rows_mask_of
from pagedkv.values.config import VERIFY_WIDTH_MAX, StoreConfig
from pagedkv.values.quantities import PAGE_SHIFT

Columns = int | SequenceOf[int] | npt.NDArray[np.int32]
"""Columns of each batch entry: one number for all, or one per entry."""

PoolSlices = dict[str, TableSlices]


@dataclass(eq=False)
class Batch:
    """Sequences selected together, in batch order; made by `Store.batch`.

    `stamp` is the activation stamp at which the handles were last found current.  `uniform` keeps the
    counts of each decode width that all entries wrote together, prebuilt at first use: a steady step then
    spreads nothing over rows.
    """

    sequences: tuple[Sequence, ...]
    rows: npt.NDArray[np.int64]
    rows_mask: int
    stamp: int
    uniform: dict[int, EntryColumns] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)


class StoreLedgers:
    """Pools, logical pages, tables, address spaces, sequences and the unit guard of one store."""

    def __init__(self, config: StoreConfig, store_id: int = 0) -> None:
        self.config = config
        self.events = PageEvents()
        self.spaces: dict[str, AddressSpaces] = {
            pool.name: AddressSpaces(
                PagePool(pool.name, pool.pages), LogicalPages(pool.pages),
                BlockTable(rows=config.max_concurrency, blocks=config.blocks), max_context=config.max_context,
                events=PoolEvents(pool.name, self.events),
            )
            for pool in config.pools
        }
        self.sequences = Sequences(config.max_concurrency, store_id)
        self.continuations = Continuations(
            {name: RetainedSpaces(spaces.pool, spaces.pages, spaces.events) for name, spaces in self.spaces.items()},
            store_id,
        )
        self.growth = LeaseGrowth(config, self.spaces)
        for spaces in self.spaces.values() if self.growth.is_on else ():
            spaces.grows = True
        self.activations = Activations(config, self.spaces, self.sequences, self.continuations, self.growth)
        self.snapshots = Snapshots(self.spaces, self.continuations)
        self.guard = UnitGuard()
        self._aborting: dict[int, Sequence] = {}

    # ---- activation -------------------------------------------------------------------------------

    def explain(self, target: ActivationTarget) -> ActivationPlan | Refusal:
        """Return the ActivationPlan or the Refusal of a target; no side effects.  (C10.9)"""
        return self.activations.explain(target)

    def prepare_activation(self, target: ActivationTarget) -> PreparedActivation | Refusal:
        """Claim what a target takes in every pool; what is to be copied and published stands in the answer.  (C10.2)"""
        return self.activations.prepare(target)

    def commit_activation(self, prepared: PreparedActivation) -> Sequence:
        """Publish the sequence of a prepared activation.  (C10.3)"""
        return self.activations.commit(prepared)

    def abort_activation(self, prepared: PreparedActivation) -> None:
        """Give every claim of a prepared activation back.  (C10.2)"""
        self.activations.abort(prepared)

    def try_activate(self, target: ActivationTarget) -> Sequence | Refusal:
        """Prepare and commit, where nobody has bytes to copy or tables to publish.  (C10.2, C10.9)"""
        prepared = self.prepare_activation(target)
        return prepared if isinstance(prepared, Refusal) else self.commit_activation(prepared)

    def finish(self, sequence: Sequence, *, retain: bool = False, state: object = None) -> Continuation | None:
        """Trim, give up reservation, row and writers, then retain the pages or release them.  (C9.8)

        Raises:
            StaleHandle: the sequence has ended.
            UnitInFlight: a unit in flight selects it (C12.2).
            MisuseError: a copy uses one of its pages (C7.4); or it is to be retained, and a backend's frontier leads
                Main's (C13.2), or nothing is committed.
        """
        self._require_boundary(sequence, "finish")
        if type(retain) is not bool:
            raise MisuseError("retain", expected="True or False", got=repr(retain),
                              remedy="say whether the pages are to be kept", clause="C9.8")
        self._require_unpinned(sequence, "finish")
        if not retain:
            if state is not None:
                raise MisuseError("a state without retain=True", expected="None", got=repr(state),
                                  remedy="pass retain=True to keep the continuation", clause="C9.8")
            self._end_sequence(sequence)
            return None
        self._require_resumable(sequence, "retaining")
        for spaces in self.spaces.values():
            spaces.trim_row(sequence.row)
        kept = {name: spaces.detach(sequence.row) for name, spaces in self.spaces.items()}
        self.growth.close(sequence.row)
        self.sequences.end(sequence)
        return self.continuations.keep(kept, state)

    def abort(self, sequence: Sequence) -> bool:
        """End the sequence now, or at its boundary when a unit in flight selects it.  (C12.4)

        Returns:
            True when it has ended, False when it ends with the unit.

        Raises:
            MisuseError: a copy uses one of its pages (C7.4).
        """
        self.sequences.require_current(sequence)
        self._require_unpinned(sequence, "abort")
        if self.guard.rows_in_flight >> sequence.row & 1:
            self._aborting[sequence.row] = sequence
            return False
        self._end_sequence(sequence)
        return True

    # ---- continuations ----------------------------------------------------------------------------

    def prepare_snapshot(self, sequence: Sequence, state: object = None) -> PreparedSnapshot | Refusal:
        """Claim the pages of a checkpoint's copied tails; what is to be copied stands in the answer.  (C10.6)

        Raises:
            As `finish` with retain=True.
        """
        self._require_boundary(sequence, "snapshot")
        self._require_resumable(sequence, "a snapshot")
        return self.snapshots.prepare(sequence, state)

    def commit_snapshot(self, prepared: PreparedSnapshot) -> Continuation:
        """Publish the checkpoint of a prepared snapshot.  (C10.6)

        Raises:
            MisuseError: it has ended, or the sequence went on since; StaleHandle, UnitInFlight: the sequence has ended,
                or is in flight.  Nothing changed.
        """
        self.snapshots.require_open(prepared, "commit")
        self._require_boundary(prepared.sequence, "snapshot")
        return self.snapshots.commit(prepared)

    def abort_snapshot(self, prepared: PreparedSnapshot) -> None:
        """Give the claims of a prepared snapshot back.  (C10.6)"""
        self.snapshots.abort(prepared)

    def try_snapshot(self, sequence: Sequence, state: object = None) -> Continuation | Refusal:
        """Prepare and commit, where nobody has bytes to copy.  (C10.6)"""
        prepared = self.prepare_snapshot(sequence, state)
        return prepared if isinstance(prepared, Refusal) else self.commit_snapshot(prepared)

    def release(self, continuation: Continuation) -> None:
        """Give up every membership of a continuation; a page is freed with its last reference.  (C9.8)

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: an activation from it is prepared, or a copy uses one of its pages; nothing changed.
        """
        self.continuations.release(continuation)

    def attach_state(self, continuation: Continuation, state: object) -> None:
        """Replace the caller's state of a continuation; None says that it is not complete.  (C2.2)"""
        number = self.continuations.require_idle(continuation, "attach_state")
        self.continuations.states[number].state = state

    def protect(self, continuation: Continuation, tokens: int, pool: str) -> None:
        """Set the protected frontier of one pool of a continuation, up or down.  (C7.8)

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: tokens outside 0 to the committed frontier, or an unknown pool; nothing changed.
        """
        number = self.continuations.require_idle(continuation, "protect")
        self.pool_spaces(pool)
        self._require_tokens("protect", tokens, "C7.8")
        self.continuations.retained[pool].protect(number, tokens)

    def truncate_continuation(self, continuation: Continuation, tokens: int, pool: str) -> None:
        """Lower the committed frontier of one pool of a continuation.  (C9.10)

        The caller's state is of Main's frontier, so it goes when that is lowered (C2.2).

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: tokens above the committed or below the protected frontier, a cut inside or across a page
                that another space references, or Main cut to nothing; nothing changed.
        """
        number = self.continuations.require_idle(continuation, "truncate")
        self.pool_spaces(pool)
        self._require_tokens("truncate", tokens, "C9.10")
        if pool == "main" and tokens == 0:
            raise MisuseError(f"truncate of {continuation} to nothing", expected="at least 1 token of Main", got=0,
                              remedy="release it", clause="C9.10")
        retained = self.continuations.retained[pool]
        is_lowered = tokens < retained.spaces[number].frontier
        retained.truncate(number, tokens)
        if pool == "main" and is_lowered:
            self.continuations.states[number].state = None

    def batch(self, sequences: SequenceOf[Sequence]) -> Batch:
        """Select sequences, in batch order.  (C11.3)

        Raises:
            StaleHandle: one of them has ended.
            MisuseError: the batch is empty or names a sequence twice.
        """
        for sequence in sequences:
            self.sequences.require_current(sequence)
        rows = np.array([sequence.row for sequence in sequences], np.int64)
        rows.setflags(write=False)
        mask = rows_mask_of(rows)
        if not len(sequences) or mask.bit_count() != len(sequences):
            raise MisuseError("a batch", expected="at least one sequence, each once", got=list(sequences),
                              remedy="select distinct sequences", clause="C14.4")
        return Batch(tuple(sequences), rows, mask, self.sequences.stamp)

    # ---- units ------------------------------------------------------------------------------------

    def begin_unit(self, name: str, batch: Batch, columns: Mapping[str, Columns]) -> tuple[Submission, PoolSlices]:
        """Map what a unit may write in each named pool, and freeze its rows.  (C9.4, C12.1)

        Returns:
            The unit and, for each pool in which a row crossed a page, the slices to publish first.

        Raises:
            UnitInFlight: a row is selected by another unit.
            MisuseError: columns of a wrong count or sign, or a position at or beyond S (C11.2).
            EntitlementExceeded: a row needs more pages than its entitlement; nothing changed in any pool.
        """
        self._require_batch(batch)
        self.guard.require_thawed(batch.rows_mask, "a unit")
        if not columns:
            raise MisuseError("a unit that writes nothing", expected="columns for at least one pool", got="none",
                              remedy="name the pools the unit writes", clause="C9.4")
        written = {
            pool: self._entry_columns(batch, f"columns of a unit in pool {pool}", self.pool_spaces(pool), wanted)
            for pool, wanted in columns.items()
        }
        ends = {}
        for pool, entry in written.items():
            spaces = self.spaces[pool]
            ends[pool] = pool_ends = spaces.frontier + entry.span
            if spaces.has_row_beyond_ceiling(pool_ends):
                self._require_positions(batch, pool, entry)
                spaces.require_entitled(pool_ends)
        slices: PoolSlices = {}
        for pool, pool_ends in ends.items():
            pool_slices = self.spaces[pool].ensure_mapped_to_tokens(pool_ends)
            if pool_slices is not None:
                slices[pool] = pool_slices
        first_positions = {pool: self.spaces[pool].frontier[batch.rows] for pool in written}
        for positions in first_positions.values():
            positions.setflags(write=False)
        return self.guard.begin(name, batch.rows, batch.rows_mask, written, first_positions), slices

    def commit_unit(self, unit: Submission, accepted: Mapping[str, Columns] | None = None) -> None:
        """Advance committed frontiers by accepted columns, pool by pool, and thaw the rows.  (C9.5, C13.1)

        A pool that is not named keeps its frontier; None accepts every column of every pool.

        Raises:
            MisuseError: the unit has ended, or a count is negative or above what the unit wrote, or a copy uses a page
                of a sequence that was aborted in flight; nothing changed.
        """
        self.guard.require_open(unit, "commit")
        self._require_endable(unit, "commit")
        spans = (
            {pool: entry.span for pool, entry in unit.written.items()} if accepted is None
            else {pool: self._accepted_span(unit, pool, wanted) for pool, wanted in accepted.items()}
        )
        if len(spans) > 1:
            for pool, span in spans.items():
                self.spaces[pool].require_commit(span)
        for pool, span in spans.items():
            self.spaces[pool].commit(span)
        self._end_unit(unit)

    def fail_unit(self, unit: Submission) -> None:
        """End a unit without a commit: what it wrote stays invisible.  (C9.5)"""
        self.guard.require_open(unit, "fail")
        self._require_endable(unit, "fail")
        self._end_unit(unit)

    # ---- between units ----------------------------------------------------------------------------

    def begin_round(self, batch: Batch) -> list[Sequence]:
        """Extend the leases of a batch that are nearly used up; return those it could not, in batch order.  (C9.2)

        Raises:
            UnitInFlight: a unit in flight selects one of the rows; nothing changed.
        """
        self._require_batch(batch)
        self.guard.require_thawed(batch.rows_mask, "begin_round")
        return [batch.sequences[index] for index in self.growth.begin_round(batch.rows)]

    def covered_columns(self, batch: Batch, pool: str) -> Tokens:
        """Return (B,) int32: columns that each entry may still write in a pool.  (C9.2, C16.17)"""
        self._require_batch(batch)
        return self.pool_spaces(pool).covered_columns(batch.rows)

    def ensure_mapped_to_tokens(self, sequence: Sequence, tokens: int, pool: str) -> PoolSlices:
        """Map positions [0, tokens) of one sequence ahead of a unit; a lower bound.  (C9.3)"""
        self.sequences.require_current(sequence)
        spaces = self.pool_spaces(pool)
        if type(tokens) is not int or not 0 <= tokens <= self.config.max_context:
            raise MisuseError(f"mapping row {sequence.row} of pool {pool}",
                              expected=f"0 to max_context = {self.config.max_context} tokens", got=repr(tokens),
                              remedy="positions at or beyond max_context are inert", clause="C11.2")
        slices = spaces.ensure_mapped_to_tokens(spaces.spread(np.array([sequence.row]), np.array([tokens], np.int32)))
        return {} if slices is None else {pool: slices}

    def trim(self, batch: Batch, pool: str, provisional: Columns = 0) -> int:
        """Return trailing pages beyond max(committed, committed + provisional) to their reservation.  (C9.6)

        Returns:
            How many pages were trimmed.
        """
        self._require_batch(batch)
        spaces = self.pool_spaces(pool)
        self.guard.require_thawed(batch.rows_mask, "trim", pool)
        columns = self._counts("provisional columns", len(batch), provisional)
        keep = np.full(self.config.max_concurrency, HOLD, np.int32)
        # The sum may pass 2^31 - 64, and trim rounds it up to a page: it is held below in 64-bit.
        keep[batch.rows] = np.minimum(spaces.frontier[batch.rows].astype(np.int64) + columns, HOLD)
        return spaces.trim(keep)

    def truncate(self, sequence: Sequence, tokens: int, pool: str) -> None:
        """Lower the committed frontier of one pool, then trim.  (C9.10)"""
        self.sequences.require_current(sequence)
        spaces = self.pool_spaces(pool)
        self.guard.require_thawed(1 << sequence.row, "truncate", pool)
        self._require_tokens("truncate", tokens, "C9.10")
        spaces.truncate(sequence.row, tokens)

    # ---- helpers ----------------------------------------------------------------------------------

    def _end_unit(self, unit: Submission) -> None:
        self.guard.end(unit)
        for row in unit.rows.tolist() if self._aborting else ():
            sequence = self._aborting.pop(row, None)
            if sequence is not None:
                self._end_sequence(sequence)

    def _end_sequence(self, sequence: Sequence) -> None:
        """Close the sequence's spaces and return its row.  (C9.8)"""
        for spaces in self.spaces.values():
            spaces.close(sequence.row)
        self.growth.close(sequence.row)
        self.sequences.end(sequence)

    def _require_boundary(self, sequence: Sequence, operation: str) -> None:
        self.sequences.require_current(sequence)
        self.guard.require_thawed(1 << sequence.row, operation)

    def _require_resumable(self, sequence: Sequence, what: str) -> None:
        """Refuse to keep what no sequence can go on from: nothing in Main, or a backend that leads it.  (C13.2)"""
        main = int(self.spaces["main"].frontier[sequence.row])
        if not main:
            raise MisuseError(f"{what} of {sequence}", expected="at least 1 committed token of Main", got="none",
                              remedy="commit a unit first", clause="C9.8")
        for name, spaces in self.spaces.items():
            if int(spaces.frontier[sequence.row]) > main:
                raise MisuseError(f"{what} of {sequence}", expected=f"at most Main's {main} committed tokens in {name}",
                                  got=int(spaces.frontier[sequence.row]),
                                  remedy="a provisional lead is no checkpoint: truncate it first", clause="C13.2")

    def _require_endable(self, unit: Submission, operation: str) -> None:
        """Refuse to end a unit whose aborted sequences cannot end with it.  (C7.4, C12.4)"""
        for row in unit.rows.tolist() if self._aborting else ():
            if row in self._aborting:
                self._require_unpinned(self._aborting[row], f"{operation} of {unit.label}, and with it abort")

    def _require_unpinned(self, sequence: Sequence, operation: str) -> None:
        for spaces in self.spaces.values():
            mapped, bound = spaces.membership_pages(sequence.row), spaces.bound_end.item(sequence.row) >> PAGE_SHIFT
            if spaces.pool.pins_total:  # bound ids too: they become available with the others
                spaces.pool.require_unpinned(
                    spaces.table.mirror[sequence.row, :bound], f"{operation} of row {sequence.row}: release"
                )
            if spaces.pages.pins_total:
                spaces.pages.require_unpinned(
                    f"{operation} of row {sequence.row}", spaces.members[sequence.row, :mapped]
                )

    def _require_tokens(self, operation: str, tokens: object, clause: str) -> None:
        if type(tokens) is not int:
            raise MisuseError(operation, expected="an int, a number of tokens", got=repr(tokens),
                              remedy="pass int(tokens)", clause=clause)

    def _require_batch(self, batch: Batch) -> None:
        if not isinstance(batch, Batch):
            raise MisuseError("a batch", expected="what batch(sequences) returned", got=repr(batch),
                              remedy="select the sequences with batch first", clause="C11.3")
        if batch.stamp != self.sequences.stamp:
            for sequence in batch.sequences:
                self.sequences.require_current(sequence)
            batch.stamp = self.sequences.stamp

    def pool_spaces(self, pool: str) -> AddressSpaces:
        """Return the address spaces of an enabled pool.  (C3.3)

        Raises:
            MisuseError: the store has no such pool.
        """
        spaces = self.spaces.get(pool) if isinstance(pool, str) else None
        if spaces is None:
            raise MisuseError(f"pool {pool!r}", expected=f"one of {list(self.spaces)}", got=repr(pool),
                              remedy="name an enabled pool", clause="C3.3")
        return spaces

    def _counts(self, what: str, entries: int, wanted: Columns) -> npt.NDArray[np.int32]:
        try:
            counts = np.asarray(wanted)
        except ValueError:  # a ragged list: no array of counts
            counts = np.empty(0)
        if counts.dtype.kind not in "iu" or counts.shape not in ((), (entries,)) or (counts < 0).any():
            raise MisuseError(what, expected=f"a non-negative integer for all, or one for each of {entries} entries",
                              got=repr(wanted), remedy="pass one count, or one per batch entry", clause="C14.4")
        if (counts >= HOLD).any():  # a frontier and a count add up below 2^31
            raise MisuseError(what, expected=f"fewer than {int(HOLD)} columns", got=repr(wanted),
                              remedy="pass one count per batch entry", clause="C14.4")
        return np.broadcast_to(counts, (entries,)).astype(np.int32)

    def _entry_columns(self, batch: Batch, what: str, spaces: AddressSpaces, wanted: Columns) -> EntryColumns:
        """Return the counts of batch entries, (B,) and spread over all rows; kept for one number for all."""
        if type(wanted) is int:
            known = batch.uniform.get(wanted)
            if known is not None:
                return known
        counts = self._counts(what, len(batch), wanted)
        entry = EntryColumns(counts, spaces.spread(batch.rows, counts))
        counts.setflags(write=False)  # a caller sees them, and the commit of the unit trusts them
        entry.span.setflags(write=False)
        if type(wanted) is int and wanted <= VERIFY_WIDTH_MAX:
            batch.uniform[wanted] = entry
        return entry

    def _accepted_span(self, unit: Submission, pool: str, wanted: Columns) -> Tokens:
        if pool not in unit.written:
            raise MisuseError(f"a commit to pool {pool}", expected=f"one of {sorted(unit.written)}", got=pool,
                              remedy="commit only pools that the unit wrote", clause="C9.9")
        counts = self._counts(f"accepted columns of {unit.label}", len(unit.rows), wanted)
        limits = unit.written[pool].counts
        if (counts > limits).any():
            raise MisuseError(f"accepted columns of {unit.label}", expected=f"at most {limits.tolist()}",
                              got=counts.tolist(), remedy="accept at most what the unit wrote", clause="C9.5")
        return self.spaces[pool].spread(unit.rows, counts)

    def _require_positions(self, batch: Batch, pool: str, entry: EntryColumns) -> None:
        """Refuse a unit that writes at or beyond max_context.  (C11.2)"""
        first = self.spaces[pool].frontier[batch.rows].astype(np.int64)
        beyond = np.flatnonzero(first + entry.counts > self.config.max_context)
        if beyond.size:
            index = int(beyond[0])
            count, position = int(entry.counts[index]), int(first[index])
            raise MisuseError(
                f"a unit that writes up to position {position + count - 1} of row {int(batch.rows[index])} "
                f"in pool {pool}",
                expected=f"positions below max_context = {self.config.max_context}",
                got=f"{count} columns from position {position} on",
                remedy="make columns at or beyond max_context inert before the launch", clause="C11.2",
            )
