"""Sequences: handles, execution rows and atomic activation over all pools.  (C10, C11.3)

A sequence bundles one address space per enabled pool (C10.1).  Its life:

    activate   reserve in every pool, lease an execution row      all or nothing (C10.2)
    units      map, publish, launch, commit, trim                 per pool (C9.9)
    finish     trim, give up reservation and row, release pages   at a boundary (C9.8)

An execution row is leased in every pool's table at once, so one number selects the sequence in all of
them; it owns no page, no reservation and no frontier (C9.7).  Handles carry the row's serial: one
that outlived its sequence is refused.

Read next: `unit_guard.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.address_space import AddressSpaces
from pagedkv.config import StoreConfig
from pagedkv.errors import MisuseError, StaleHandle
from pagedkv.pool import try_reserve_bundle
from pagedkv.quantities import PAGE_TOKENS, pages_for_tokens


@dataclass(frozen=True)
class ActivationTarget:
    """What a sequence is to be able to hold, in tokens.  (C9.2)

    Raises:
        MisuseError: a prompt of no token, a negative output, or counts that are no integers.  More than S together
            is an answer of `explain`, not an error.
    """

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name, low in (("prompt_tokens", 1), ("output_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise MisuseError(f"an activation with {name}={value!r}", expected=f"an integer of at least {low}",
                                  got=repr(value), remedy="pass token counts", clause="C9.2")

    @property
    def total_tokens(self) -> int:
        """Prompt and whole output budget."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Refusal:
    """Why an activation cannot be honoured: a value, not an error.  (C10.9)

    Attributes:
        pool: the pool that lacks pages, or "rows" when every execution row is leased.
        needed: pages (or rows) that the target takes.
        available: pages (or rows) that are free now; the ceiling itself when `forever`.
        forever: whether waiting cannot help, because the target exceeds what a sequence may reach.
    """

    pool: str
    needed: int
    available: int
    forever: bool


@dataclass(frozen=True)
class ActivationPlan:
    """What an activation would take: pages per pool, in pool order, and an execution row.  (C10.9)"""

    entitlement_pages: tuple[tuple[str, int], ...]
    row: int


@dataclass(frozen=True)
class Sequence:
    """A thin handle of an active sequence; made by `Store.activate`, valid until it is finished."""

    store_id: int
    row: int
    serial: int

    def __repr__(self) -> str:
        return f"Sequence(row={self.row}, serial={self.serial})"


class Sequences:
    """Execution rows and the address spaces of every pool, activated and finished together.

    Attributes:
        serials: (C,) int64, serial of the sequence that holds a row, 0 while it is free.
        budget_tokens: (C,) int32, prompt plus output tokens of that sequence.
        stamp: moves whenever a row is leased or returned; batches revalidate only then.  No two stores share a value,
            so a batch of another store is revalidated too, and refused.

    They are written by `try_activate` and `finish` alone.
    """

    def __init__(self, config: StoreConfig, spaces: tuple[AddressSpaces, ...], store_id: int) -> None:
        self.config = config
        self.spaces = spaces
        self.store_id = store_id
        rows = config.max_concurrency
        self.serials = np.zeros(rows, np.int64)
        self.budget_tokens = np.zeros(rows, np.int32)
        self.stamp = store_id << 32
        self._lead_tokens = tuple(pool.lead_tokens for pool in config.pools)
        self._free_rows = list(range(rows - 1, -1, -1))
        self._serial_next = 1

    @property
    def active_count(self) -> int:
        """Sequences that hold an execution row."""
        return self.config.max_concurrency - len(self._free_rows)

    def active_rows(self) -> list[int]:
        """Return the leased rows in ascending order."""
        return np.flatnonzero(self.serials).tolist()

    def free_rows(self) -> list[int]:
        """Return the rows that an activation may lease, in ascending order."""
        return sorted(self._free_rows)

    def explain(self, target: ActivationTarget) -> ActivationPlan | Refusal:
        """Return what an activation would take, or why it cannot be honoured; no side effects.  (C10.9)"""
        if not isinstance(target, ActivationTarget):
            raise MisuseError("a target", expected="an ActivationTarget", got=repr(target),
                              remedy="pass ActivationTarget(prompt_tokens, output_tokens)", clause="C10.9")
        if target.total_tokens > self.config.max_context:
            return Refusal("main", pages_for_tokens(target.total_tokens), self.config.blocks, forever=True)
        entitlement = self._entitlement(target)
        if not self._free_rows:
            return Refusal("rows", 1, 0, forever=False)
        for spaces, pages in zip(self.spaces, entitlement, strict=True):
            if pages > spaces.pool.available:
                return Refusal(spaces.pool.name, pages, spaces.pool.available, forever=False)
        named = tuple((spaces.pool.name, pages) for spaces, pages in zip(self.spaces, entitlement, strict=True))
        return ActivationPlan(named, self._free_rows[-1])

    def try_activate(self, target: ActivationTarget) -> Sequence | Refusal:
        """Reserve in every pool and lease a row, or change nothing.  (C10.2, C10.3)"""
        plan = self.explain(target)
        if isinstance(plan, Refusal):
            return plan
        entitlement = [pages for _, pages in plan.entitlement_pages]
        lacking = try_reserve_bundle(
            [(spaces.pool, pages) for spaces, pages in zip(self.spaces, entitlement, strict=True)]
        )
        assert lacking is None, f"pool {lacking} changed between plan and reservation"
        row = self._free_rows.pop()
        for spaces, pages in zip(self.spaces, entitlement, strict=True):
            spaces.open(row, entitlement_pages=pages)
        self.serials[row] = self._serial_next
        self._serial_next += 1
        self.budget_tokens[row] = target.total_tokens
        self.stamp += 1
        return Sequence(self.store_id, row, int(self.serials[row]))

    def finish(self, sequence: Sequence) -> None:
        """Release every membership and reservation, then return the row.  (C9.8)"""
        self.require_current(sequence)
        row = sequence.row
        for spaces in self.spaces:
            spaces.close(row)
        self.serials[row] = 0
        self.budget_tokens[row] = 0
        self._free_rows.append(row)
        self._free_rows.sort(reverse=True)
        self.stamp += 1

    def require_current(self, sequence: Sequence) -> None:
        """Refuse a handle of another store or of a sequence that has ended.  (C10.1)

        Raises:
            StaleHandle: the row is free or serves another sequence.
        """
        if not isinstance(sequence, Sequence):
            raise MisuseError("a handle", expected="the Sequence that activate returned", got=repr(sequence),
                              remedy="pass the handle; try_activate may have answered with a Refusal", clause="C10.1")
        known = (
            sequence.store_id == self.store_id and type(sequence.row) is int and 0 <= sequence.row < self.serials.size
            and type(sequence.serial) is int and sequence.serial > 0
        )
        if not known or self.serials[sequence.row] != sequence.serial:
            raise StaleHandle(f"{sequence}", expected="an active sequence of this store",
                              got="one that was finished, or of another store",
                              remedy="use the handle that activate returned, until finish", clause="C10.1")

    def _entitlement(self, target: ActivationTarget) -> list[int]:
        """Return pages per pool: prompt and output, and the backend's provisional lead, at most L.  (C9.2, C5.6)"""
        ceiling = self.config.blocks * PAGE_TOKENS
        return [
            pages_for_tokens(min(target.total_tokens + lead_tokens, ceiling)) for lead_tokens in self._lead_tokens
        ]
