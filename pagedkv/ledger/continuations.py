"""Continuations: retained sequences, each an inactive space per pool and the caller's state.  (C0, C2.2, C9.8)

    finish(retain=True) --+                            +-- Fork: the continuation stays, full pages are shared
    snapshot -------------+--> Continuation --activate-+
                               |                       +-- Move: it becomes the sequence, the handle is stale
                               +--release--> ended

A handle carries a number that is never used again, so a stale handle is refused.  The store never reads the caller's
state.  The caller names the frontier of each pool that the state belongs to; a pool behind it is refused (C9.8).  While
there is no state, no sequence can be activated from the continuation: KV pages alone are not enough to resume (C2.2,
C16.16).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pagedkv.errors import MisuseError, StaleHandle, shown
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.kept_spaces import KeptSpaces


class StateFollows(enum.Enum):
    """The type of `STATE_FOLLOWS`."""

    STATE_FOLLOWS = enum.auto()


STATE_FOLLOWS: Final = StateFollows.STATE_FOLLOWS
"""Pass it as `state`: the caller will attach the state later, and nothing activates before that.  (C9.8)"""

Frontier = int | Mapping[str, int]
"""Tokens: one count for the pools of a store, or a count for each of them, by name."""


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
        state: the caller's state, or None while there is none (C2.2).
        state_frontier: per pool, the tokens that the state belongs to; empty while there is none.
        claims: prepared activations from it that are neither committed nor aborted.
        is_moving: the prepared activation is a Move.
    """

    state: object
    state_frontier: dict[str, int] = field(default_factory=dict)
    claims: int = 0
    is_moving: bool = False


class Continuations:
    """The retained continuations of one store.

    Args:
        kept: the inactive spaces of each pool, in pool order.

    Attributes:
        demotions: of each continuation that have not ended; `Demotions` alone writes it.
    """

    def __init__(self, kept: Mapping[str, KeptSpaces], store_id: int) -> None:
        self.kept = dict(kept)
        self.store_id = store_id
        self.states: dict[int, ContinuationState] = {}
        self.demotions: Counter[int] = Counter()
        self._number_next = 1

    def handles(self) -> list[Continuation]:
        """Return a handle of every continuation, oldest first."""
        return [Continuation(self.store_id, number) for number in self.states]

    def keep(
        self, spaces: Mapping[str, tuple[Ids, int]], state: object, state_frontier: Mapping[str, int]
    ) -> Continuation:
        """Retain (members, frontier) of every pool as a new continuation; its state is as of `attach`.  (C9.8)"""
        number = self._number_next
        self._number_next += 1
        for pool, (members, frontier) in spaces.items():
            self.kept[pool].keep(number, members, frontier)
        self.attach(number, state, state_frontier)
        return Continuation(self.store_id, number)

    def attach(self, number: int, state: object, state_frontier: Mapping[str, int]) -> None:
        """Set the state, and the frontier that `state_frontier_of` returned for it; nobody claims it.  (C2.2, C9.8)"""
        self.states[number] = ContinuationState(None if state is STATE_FOLLOWS else state, dict(state_frontier))

    def committed(self, number: int) -> dict[str, int]:
        """Return the committed frontier of every pool, in tokens."""
        return {pool: kept.by_number[number].frontier for pool, kept in self.kept.items()}

    def release(self, number: int) -> None:
        """Give up every membership in every pool; the caller has called `require_undemoted`.  (C9.8)"""
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

    def require_undemoted(self, number: int, operation: str) -> None:
        """Refuse a continuation whose pages are on their way to the Host: it holds them until then.  (C7.4)"""
        if self.demotions[number]:
            raise MisuseError(operation, expected="a continuation that is not being demoted",
                              got=f"{self.demotions[number]} demotions in flight",
                              remedy="call poll_copies until it is False", clause="C7.4")

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


def state_frontier_of(
    what: str, subject: object, state: object, requested: Frontier | None, committed: Mapping[str, int]
) -> dict[str, int]:
    """Return the frontier of each pool that a state belongs to; nothing for `STATE_FOLLOWS`.  (C2.2, C9.8)

    Refuses a pool whose committed frontier is behind it.

    Args:
        what, subject: what is done with the state, and of which handle, for errors.
        state: the caller's state, or `STATE_FOLLOWS`.
        requested: as the caller named it.  A number is for every pool; None is Main's committed frontier, for every
            pool.
        committed: the committed frontier of each pool, Main first.
    """
    if state is None:
        raise MisuseError(f"{what} of {subject} without a state", expected="the caller's state, or STATE_FOLLOWS",
                          got="None", remedy="pass state=STATE_FOLLOWS now and attach_state when it is complete",
                          clause="C9.8")
    if state is STATE_FOLLOWS:
        if requested is not None:
            raise MisuseError(f"{what} of {subject}, with a state_frontier and no state", expected="None",
                              got=shown(requested), remedy="pass it to attach_state, with the state", clause="C9.8")
        return {}
    if requested is None or type(requested) is int:
        requested = dict.fromkeys(committed, committed["main"] if requested is None else requested)
    return named_frontiers("state_frontier", subject, requested, committed, clause="C9.8",
                           remedy="name what the state needs of each pool, commit the missing tokens first, or pass "
                                  "STATE_FOLLOWS")


def named_frontiers(
    what: str, subject: object, requested: object, committed: Mapping[str, int], *, clause: str, remedy: str
) -> dict[str, int]:
    """Return a frontier of a handle for each pool, within what is committed, and none beyond Main's.  (C9.9, C13.2)"""
    # Copied once: a second read of a caller's mapping may have other answers.
    frontiers = dict(requested) if isinstance(requested, Mapping) else None
    if frontiers is None or frontiers.keys() != committed.keys():
        raise MisuseError(f"{what} {shown(requested)} of {subject}", expected=f"a count for each of {list(committed)}",
                          got=shown(requested), remedy="name every pool in a mapping: none is derived from another",
                          clause="C9.9")
    for name, own in committed.items():  # Main first: the others are compared with it
        tokens = frontiers[name]
        low, high = (1, own) if name == "main" else (0, min(own, frontiers["main"]))
        if type(tokens) is not int or not low <= tokens <= high:
            raise MisuseError(f"{what} {shown(tokens)} of {subject} in pool {name}",
                              expected=f"an int, {low} to {high} tokens", got=shown(tokens), remedy=remedy,
                              clause=clause)
    return frontiers
