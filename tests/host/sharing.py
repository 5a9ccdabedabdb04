"""What the tests of sharing have in common: a ledger with bytes behind it, and one-line continuations.

`SharedLedger` keeps one number for each column of each page group and moves numbers as a device would: a unit
writes through the table, a copied tail copies its columns, and page groups that are free hold -1.  So what a
space reads can be compared with what was written into it, however pages were shared, copied, cut and reused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedkv.ledger.active_spaces import UNMAPPED
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.continuations import STATE_FOLLOWS, Continuation
from pagedkv.ledger.demotions import Demotion
from pagedkv.ledger.kept_spaces import KeptSpace
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationPlan, ActivationTarget, HostCopy, Refusal, TailCopy, Transaction
from pagedkv.values.config import DraftFullBackend, MTPBackend
from pagedkv.values.quantities import PAGE_TOKENS
from tests.host.builders import DRAFT_GEOMETRY, make_ledger
from tests.host.refusals import assert_unchanged, snapshot

Held = Sequence | Continuation

MTP = MTPBackend(5)
DRAFT = DraftFullBackend(DRAFT_GEOMETRY)
BACKENDS = [None, MTP, DRAFT]

POISON = -1


class SharedLedger:
    """The ledger of a small store, with a number behind each column of each page group."""

    def __init__(self, *, max_concurrency: int = 4, **options: Any) -> None:
        self.ledger: Ledger = make_ledger(max_concurrency=max_concurrency, **options)
        self.bytes = {name: np.full((spaces.pool.capacity, PAGE_TOKENS), POISON, np.int64)
                      for name, spaces in self.ledger.active.items()}
        self.records: dict[tuple[str, int], np.ndarray[Any, Any]] = {}  # by pool and first unit
        self._number = itertools.count(1)

    # ---- acts -------------------------------------------------------------------------------------

    def start(self, prompt_tokens: int, output_tokens: int = 0, *, written: int | Mapping[str, int] = 0) -> Sequence:
        """Activate a sequence that starts from nothing and must fit, and commit what it has written."""
        sequence = self.activate(ActivationTarget(prompt_tokens, output_tokens))
        if written:
            self.append(sequence, written)
        return sequence

    def go_on(
        self, source: Continuation, prompt_tokens: int = 0, output_tokens: int = 0, *,
        frontier: int | Mapping[str, int] | None = None, keep_source: bool = True,
    ) -> Sequence:
        """Activate a sequence from a continuation; it must fit."""
        return self.activate(ActivationTarget(prompt_tokens, output_tokens, source, frontier, keep_source))

    def activate(self, target: ActivationTarget) -> Sequence:
        """Prepare, copy, commit; it must fit."""
        return self.publish(self.prepare(target))

    def publish(self, prepared: Transaction) -> Sequence:
        """Make the copies of an activation, and commit it."""
        self.copy_out(prepared.backups)
        self.copy_in(prepared.restores)
        self.copy(prepared.copies)
        sequence = self.ledger.commit_activation(prepared)
        self.poison()
        return sequence

    def demote(self, continuation: Continuation) -> int:
        """Copy what only the device holds, and commit; there must be room."""
        prepared = self.ledger.prepare_demotion(continuation)
        assert isinstance(prepared, Demotion), prepared
        self.copy_out(prepared.copies)
        pages = self.ledger.commit_demotion(prepared)
        self.poison()
        return pages

    def prepare(self, target: ActivationTarget) -> Transaction:
        """Prepare an activation that must fit; its copies are not made."""
        prepared = self.ledger.prepare_activation(target)
        assert isinstance(prepared, Transaction), prepared
        return prepared

    def explain(self, target: ActivationTarget) -> ActivationPlan:
        """Explain a target that must fit; nothing may change."""
        before = snapshot(self.ledger)
        plan = self.ledger.transactions.explain(target)
        assert_unchanged(before, self.ledger)
        assert isinstance(plan, ActivationPlan), plan
        return plan

    def refuse(self, target: ActivationTarget) -> Refusal:
        """Ask for what must not fit, in all three ways; the ledger must not change."""
        before = snapshot(self.ledger)
        answer = self.ledger.transactions.explain(target)
        assert isinstance(answer, Refusal), answer
        assert self.ledger.prepare_activation(target) == answer
        assert self.ledger.try_activate(target) == answer
        assert_unchanged(before, self.ledger)
        return answer

    def copy(self, copies: tuple[TailCopy, ...]) -> None:
        """Copy the columns of tails, and no others."""
        for copy in copies:
            pages = self.bytes[copy.pool]
            pages[copy.destination_page, : copy.columns] = pages[copy.source_page, : copy.columns]

    def copy_out(self, copies: tuple[HostCopy, ...]) -> None:
        """Copy whole page groups into their records."""
        for copy in copies:
            for page, place in zip(copy.page_ids.tolist(), copy.places.tolist(), strict=True):
                self.records[copy.pool, place] = self.bytes[copy.pool][page].copy()

    def copy_in(self, copies: tuple[HostCopy, ...]) -> None:
        """Copy records into page groups."""
        for copy in copies:
            for page, place in zip(copy.page_ids.tolist(), copy.places.tolist(), strict=True):
                self.bytes[copy.pool][page] = self.records[copy.pool, place]

    def append(self, sequence: Sequence, tokens: int | Mapping[str, int]) -> None:
        """Write numbers that were never written before behind the frontiers, and commit them."""
        columns = {"main": tokens} if isinstance(tokens, int) else dict(tokens)
        unit, _ = self.ledger.begin_unit("step", self.ledger.batch([sequence]), columns)
        for pool, count in columns.items():
            first = int(unit.first_positions[pool][0])
            for position in range(first, first + count):
                page = int(self.ledger.active[pool].table[sequence.row, position // PAGE_TOKENS])
                assert page != UNMAPPED, f"position {position} is not mapped"
                self.bytes[pool][page, position % PAGE_TOKENS] = next(self._number)
        self.ledger.commit_unit(unit)

    def retain(self, tokens: int | Mapping[str, int], *, state: object = "complete") -> Continuation:
        """Return a continuation of a sequence that wrote so many tokens and no budget beyond Main's."""
        columns = {"main": tokens} if isinstance(tokens, int) else dict(tokens)
        return self.finish(self.start(columns["main"], written=columns), state=state)

    def finish(self, sequence: Sequence, *, state: object = "complete") -> Continuation:
        """Finish a sequence and retain it; its state belongs to what each pool has committed."""
        kept = self.ledger.finish(sequence, True, state, self.state_frontier(sequence, state))
        assert kept is not None
        self.poison()
        return kept

    def snapshot(self, sequence: Sequence, *, state: object = "complete") -> Continuation:
        """Checkpoint a sequence, with a state as of `finish`; there must be room."""
        prepared = self.ledger.prepare_snapshot(sequence, state, self.state_frontier(sequence, state))
        assert not isinstance(prepared, Refusal), prepared
        self.copy(prepared.copies)
        return self.ledger.commit_snapshot(prepared)

    def release(self, continuation: Continuation) -> None:
        """Release a continuation."""
        self.ledger.release(continuation)
        self.poison()

    def end(self, sequence: Sequence) -> None:
        """Finish a sequence without retaining it."""
        self.ledger.finish(sequence)
        self.poison()

    def poison(self) -> None:
        """Overwrite every free page group: whoever still names it reads -1."""
        for name, spaces in self.ledger.active.items():
            self.bytes[name][spaces.pool.free_runs.mask()] = POISON
        held = {(name, place) for name, spaces in self.ledger.active.items() for place in spaces.pages.host.tolist()}
        held |= {(copy.pool, place) for one in self.ledger.demotions.open for copy in one.copies
                 for place in copy.places.tolist()}
        self.records = {key: record for key, record in self.records.items() if key in held}

    # ---- answers ----------------------------------------------------------------------------------

    def state_frontier(self, sequence: Sequence, state: object) -> dict[str, int] | None:
        """Return the committed frontier of each pool, for a state; None for one that follows."""
        return None if state is STATE_FOLLOWS else {pool: self.frontier(sequence, pool) for pool in self.ledger.active}

    def space(self, continuation: Continuation, pool: str = "main") -> KeptSpace:
        """Return the inactive space of a continuation."""
        return self.ledger.kept[pool].by_number[continuation.number]

    def frontier(self, held: Held, pool: str = "main") -> int:
        """Return the committed frontier."""
        if isinstance(held, Continuation):
            return self.space(held, pool).frontier
        return int(self.ledger.active[pool].committed_end[held.row])

    def logical(self, held: Held, pool: str = "main") -> list[int]:
        """Return the logical pages of a space in block order."""
        if isinstance(held, Continuation):
            members: list[int] = self.space(held, pool).members.tolist()
        else:
            spaces = self.ledger.active[pool]
            members = spaces.members[held.row, : spaces.membership_pages(held.row)].tolist()
        return members

    def page_ids(self, held: Held, pool: str = "main") -> list[int]:
        """Return the page groups of a space in block order."""
        return self.column("device", held, pool)

    def column(self, name: str, held: Held, pool: str = "main") -> list[int]:
        """Return one column of the logical pages of a space, in block order."""
        values: list[int] = getattr(self.ledger.active[pool].pages, name)[self.logical(held, pool)].tolist()
        return values

    def read(self, held: Held, pool: str = "main") -> list[int]:
        """Return the committed numbers of a space."""
        places = zip(self.page_ids(held, pool), self.column("host", held, pool), strict=True)
        pages = [self.bytes[pool][page] if page >= 0 else self.records[pool, place] for page, place in places]
        numbers: list[int] = np.concatenate([np.empty(0, np.int64), *pages]).tolist()
        return numbers[: self.frontier(held, pool)]

    def available(self, pool: str = "main") -> int:
        """Return the pages that anyone may reserve."""
        return self.ledger.active[pool].pool.available

    def check(self) -> None:
        """Check every invariant of C16."""
        check_ledger(self.ledger)


def started(
    prompt_tokens: int, output_tokens: int = 0, *, written: int | Mapping[str, int] = 0, **options: Any
) -> tuple[SharedLedger, Sequence]:
    """Return a ledger, options as of `make_config`, and a sequence in it, as of `SharedLedger.start`."""
    store = SharedLedger(**options)
    return store, store.start(prompt_tokens, output_tokens, written=written)


def retained(
    written: int | Mapping[str, int], *, state: object = "complete", **options: Any
) -> tuple[SharedLedger, Continuation]:
    """Return a ledger, options as of `make_config`, and a continuation in it, as of `SharedLedger.retain`."""
    store = SharedLedger(**options)
    return store, store.retain(written, state=state)
