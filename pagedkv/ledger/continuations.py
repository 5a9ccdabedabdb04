"""Continuations: retained sequences, each an inactive space per pool and the caller's state.  (C0, C2.2, C9.8)

    finish(retain=True) --+                            +-- Fork: the continuation stays, full pages are shared
    snapshot -------------+--> Continuation --activate-+
                               |                       +-- Move: it becomes the sequence, the handle is stale
                               +--release--> ended

A handle carries a number that is never used again, so a stale handle is refused.  The store never reads the caller's
state.  If the state is None, it is not complete, and no sequence can be activated from the continuation: KV pages alone
are not enough to resume (C2.2, C16.16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedkv.errors import MisuseError, StaleHandle, shown
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.kept_spaces import KeptSpaces


@dataclass(frozen=True)
class Continuation:
    """A thin handle of a retained continuation; made by `Store.finish` and `Store.snapshot`."""

    store_id: int
    number: int

    def __repr__(self) -> str:
        return f"Continuation(number={self.number})"


@dataclass(eq=False)
class ContinuationState:
    """The caller's state and the claims of one continuation; written by the ledger alone.

    Attributes:
        state: the caller's state, or None if it is not complete (C2.2).
        claims: prepared activations from it that are neither committed nor aborted.
        is_moving: the prepared activation is a Move.
    """

    state: object
    claims: int = 0
    is_moving: bool = False


class Continuations:
    """The retained continuations of one store.

    Args:
        kept: the inactive spaces of each pool, in pool order.
    """

    def __init__(self, kept: Mapping[str, KeptSpaces], store_id: int) -> None:
        self.kept = dict(kept)
        self.store_id = store_id
        self.states: dict[int, ContinuationState] = {}
        self._number_next = 1

    def handles(self) -> list[Continuation]:
        """Return a handle of every continuation, oldest first."""
        return [Continuation(self.store_id, number) for number in self.states]

    def keep(self, spaces: Mapping[str, tuple[Ids, int]], state: object) -> Continuation:
        """Retain (members, frontier) of every pool as a new continuation.  (C9.8)"""
        number = self._number_next
        self._number_next += 1
        for pool, (members, frontier) in spaces.items():
            self.kept[pool].keep(number, members, frontier)
        self.states[number] = ContinuationState(state)
        return Continuation(self.store_id, number)

    def release(self, number: int) -> None:
        """Give up every membership in every pool; the caller has called `require_unpinned`.  (C9.8)"""
        for kept in self.kept.values():
            kept.release(number)
        del self.states[number]

    def claim(self, number: int, *, is_move: bool) -> None:
        """Count a prepared activation; the caller has called `require_claimable`.  (C10.2)"""
        self.states[number].claims += 1
        self.states[number].is_moving = is_move

    def unclaim(self, number: int) -> None:
        """End one `claim`."""
        self.states[number].claims -= 1
        self.states[number].is_moving = False

    def require_unpinned(self, number: int, operation: str) -> None:
        """Refuse a continuation if a copy uses one of its pages.  (C7.4)"""
        for kept in self.kept.values():
            kept.pages.require_unpinned(operation, kept.by_number[number].index)

    def require_current(self, continuation: Continuation) -> int:
        """Return the number of a handle; refuse a handle that was released or moved, or of another store."""
        if type(continuation) is not Continuation:
            raise MisuseError("a handle", expected="the Continuation that finish or snapshot returned",
                              got=shown(continuation), remedy="pass the handle", clause="C9.8")
        is_known = type(continuation.store_id) is int and continuation.store_id == self.store_id
        if not is_known or type(continuation.number) is not int or continuation.number not in self.states:
            raise StaleHandle(shown(continuation), expected="a retained continuation of this store",
                              got="one that was released or moved, or of another store",
                              remedy="use a handle only before release and Move; a Fork keeps it valid",
                              clause="C9.8")
        return continuation.number

    def require_claimable(self, continuation: Continuation, *, is_move: bool) -> int:
        """Return the number of a continuation; refuse one that a Move claims, or a Move of a claimed one.  (C10.4)"""
        number = self.require_idle(continuation, "Move") if is_move else self.require_current(continuation)
        if self.states[number].is_moving:
            raise MisuseError(f"an activation from {continuation}", expected="a source that stays",
                              got="one that a prepared activation moves", remedy="commit or abort that one first",
                              clause="C10.4")
        return number

    def require_idle(self, continuation: Continuation, operation: str) -> int:
        """Return the number of a continuation; refuse one with claims.  (C10.2)"""
        number = self.require_current(continuation)
        if self.states[number].claims:
            raise MisuseError(f"{operation} of {continuation}",
                              expected="a continuation that nobody is activating from",
                              got=f"{self.states[number].claims} prepared activations",
                              remedy="commit or abort them first", clause="C10.2")
        return number
