"""Continuations: what can be resumed, one inactive space per pool and the caller's state.  (C0, C2.2, C9.8)

    finish(retain=True) --+                            +-- Fork: it stays, full pages are shared
    snapshot -------------+--> Continuation --activate-+
                               |                       +-- Move: it becomes the sequence, the handle is stale
                               +--release--> gone

A handle carries a number that is never used again, so one that outlived its continuation is refused.
The caller's state is opaque: without it (None) the continuation is KV and nothing else, which proves no
resumability, and no sequence can be activated from it (C2.2, C16.16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedkv.errors import MisuseError, StaleHandle
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.kept_spaces import RetainedSpaces


@dataclass(frozen=True)
class Continuation:
    """A thin handle of a retained continuation; made by `Store.finish` and `Store.snapshot`."""

    store_id: int
    number: int

    def __repr__(self) -> str:
        return f"Continuation(number={self.number})"


@dataclass(eq=False)
class RetainedState:
    """What a continuation is beside its spaces; written by `Continuations` alone.

    Attributes:
        state: the caller's handle, or None where it is not complete (C2.2).
        claims: activations from it that are prepared and not ended.
        is_moving: the one that is prepared will turn it into a sequence.
    """

    state: object
    claims: int = 0
    is_moving: bool = False


class Continuations:
    """The retained continuations of one store.

    Args:
        retained: the inactive spaces of each pool, in pool order.
    """

    def __init__(self, retained: Mapping[str, RetainedSpaces], store_id: int) -> None:
        self.retained = dict(retained)
        self.store_id = store_id
        self.states: dict[int, RetainedState] = {}
        self._number_next = 1

    def handles(self) -> list[Continuation]:
        """Return a handle of every continuation, oldest first."""
        return [Continuation(self.store_id, number) for number in self.states]

    def keep(self, spaces: Mapping[str, tuple[Ids, int]], state: object) -> Continuation:
        """Hold (members, frontier) of every pool as a new continuation.  (C9.8)"""
        number = self._number_next
        self._number_next += 1
        for pool, (members, frontier) in spaces.items():
            self.retained[pool].keep(number, members, frontier)
        self.states[number] = RetainedState(state)
        return Continuation(self.store_id, number)

    def release(self, continuation: Continuation) -> dict[str, Ids]:
        """Give up every membership in every pool, or change nothing.  (C9.8)

        Returns:
            The page group ids of each pool that became available.

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: an activation from it is prepared, or a copy uses one of its pages.
        """
        number = self.require_idle(continuation, "release")
        for retained in self.retained.values():
            retained.require_releasable(number, "release")
        gone = {pool: retained.release(number) for pool, retained in self.retained.items()}
        del self.states[number]
        return gone

    def require_current(self, continuation: Continuation) -> int:
        """Return the number behind a handle.

        Raises:
            StaleHandle: it was released or moved, or belongs to another store.
            MisuseError: no Continuation.
        """
        if not isinstance(continuation, Continuation):
            raise MisuseError("a handle", expected="the Continuation that finish or snapshot returned",
                              got=repr(continuation), remedy="pass the handle", clause="C9.8")
        known = (
            type(continuation.store_id) is int and continuation.store_id == self.store_id
            and type(continuation.number) is int
        )
        if not known or continuation.number not in self.states:
            raise StaleHandle(f"{continuation}", expected="a retained continuation of this store",
                              got="one that was released or moved, or of another store",
                              remedy="use it until its release or Move; a Fork, keep_source=True, leaves it",
                              clause="C9.8")
        return continuation.number

    def require_claimable(self, continuation: Continuation, *, is_move: bool) -> int:
        """Return the number of a continuation that an activation may be prepared from.  (C10.2, C10.4)

        Raises:
            StaleHandle: it was released or moved.
            MisuseError: a Move beside another activation, or any beside a Move.
        """
        number = self.require_idle(continuation, "Move") if is_move else self.require_current(continuation)
        if self.states[number].is_moving:
            raise MisuseError(f"an activation from {continuation}", expected="a source that stays",
                              got="one that a prepared activation moves", remedy="commit or abort that one first",
                              clause="C10.4")
        return number

    def claim(self, continuation: Continuation, *, is_move: bool) -> None:
        """Count an activation that is being prepared from a continuation that is claimable; a Move is the only one."""
        state = self.states[continuation.number]
        state.claims += 1
        state.is_moving = is_move

    def unclaim(self, continuation: Continuation) -> None:
        """End one `claim`."""
        state = self.states[continuation.number]
        state.claims -= 1
        state.is_moving = False

    def require_idle(self, continuation: Continuation, operation: str) -> int:
        """Return the number of a continuation from which no activation is being prepared.  (C10.2)"""
        number = self.require_current(continuation)
        if self.states[number].claims:
            raise MisuseError(f"{operation} of {continuation}",
                              expected="a continuation that nobody is activating from",
                              got=f"{self.states[number].claims} prepared activations",
                              remedy="commit or abort them first", clause="C10.2")
        return number
