"""Activations: from a target to an active sequence, over all pools or not at all.  (C10)

    explain    what would be taken, or the Refusal                    no side effect
    prepare    reserve in every pool, name the pages of copied        claims only: nothing can be seen, everything
               tails, lease a row                                     can be given back
    (device)   copy the committed columns of tails, publish the       whoever executes it: copies, then tables
               row's whole membership in every pool
    commit     Move or Fork memberships, publish the sequence         cannot fail for room
    abort      give every claim back                                  the source is as it was

What becomes of each page of a source with frontier f, full = f / 64 and tail = f % 64 columns:

                       block < full             block = full, tail > 0             beyond
    Fork (kept)        one reference more       copied into a private page         -
    Move               stays as it is           moved and cut; copied when         released
                                                another space references it

Every pool follows its own frontier; the store derives none from another (C9.9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from pagedkv.errors import MisuseError
from pagedkv.ledger.active_spaces import AddressSpaces
from pagedkv.ledger.continuations import Continuation, Continuations
from pagedkv.ledger.free_runs import Ids, part_of
from pagedkv.ledger.growth import LeaseGrowth
from pagedkv.ledger.kept_spaces import RetainedSpaces
from pagedkv.ledger.sequences import Sequence, Sequences
from pagedkv.ledger.undo import Undo, undo_all
from pagedkv.values.config import StoreConfig
from pagedkv.values.quantities import PAGE_MASK, PAGE_SHIFT, PAGE_TOKENS, pages_for_tokens

Reason = Literal["context", "rows", "pages", "provisional"]
Kind = Literal["fresh", "move", "fork"]

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class ActivationTarget:
    """What a sequence is to be able to hold, in tokens, and where it begins.  (C9.2, C10.7)

    Args:
        prompt_tokens: tokens that will be written before the first is sampled; at least 1 without a source.
        output_tokens: tokens that may be sampled.
        source: a retained continuation to go on from; None starts from nothing.
        frontier: how much of the source: None is all that is committed in each pool, a number is Main's, which is
            all there is without a backend, and a mapping names every pool (C9.9).
        keep_source: True leaves the source as it is (Fork), False turns it into the sequence (Move); what the source
            protects ends with it then, so `frontier` may lie below that (C7.8).

    Raises:
        MisuseError: counts that are no integers or too small, or a frontier without a source.  More than S together
            is an answer of `explain`, not an error.
    """

    prompt_tokens: int
    output_tokens: int
    source: Continuation | None = None
    frontier: int | Mapping[str, int] | None = None
    keep_source: bool = True

    def __post_init__(self) -> None:
        low = 1 if self.source is None else 0
        if type(self.prompt_tokens) is not int or self.prompt_tokens < low:
            self._refuse_count("prompt_tokens", self.prompt_tokens, low)
        if type(self.output_tokens) is not int or self.output_tokens < 0:
            self._refuse_count("output_tokens", self.output_tokens, 0)
        if type(self.keep_source) is not bool:
            raise MisuseError("keep_source", expected="True or False", got=repr(self.keep_source),
                              remedy="say whether the source must survive", clause="C10.7")
        if self.source is None and (self.frontier is not None or not self.keep_source):
            raise MisuseError("a frontier, or keep_source=False, without a source", expected="a Continuation as source",
                              got="None", remedy="name the continuation to go on from", clause="C10.7")

    @property
    def total_tokens(self) -> int:
        """Prompt and whole output budget, behind what comes from the source."""
        return self.prompt_tokens + self.output_tokens

    def _refuse_count(self, name: str, value: object, low: int) -> None:
        raise MisuseError(f"an activation with {name}={value!r}", expected=f"an int of at least {low}",
                          got=repr(value), remedy="pass int(...) of a token count", clause="C9.2")


@dataclass(frozen=True)
class Refusal:
    """Why an activation or a snapshot cannot be honoured: a value, not an error.  (C10.6, C10.9)

    Attributes:
        pool: the pool that lacks pages, or "rows" when every execution row is leased.
        needed: pages (or rows) that it takes; the provisional pages that are mapped where that is the reason.
        available: pages (or rows) that are free now; the ceiling itself when `forever`.
        forever: whether waiting cannot help, because the target exceeds what a sequence may reach.
        reason: what stands in the way: "context" (more than S tokens), "rows", "pages", "provisional" (trim first).
    """

    pool: str
    needed: int
    available: int
    forever: bool
    reason: Reason = "pages"


class PoolPlan(NamedTuple):
    """What an activation takes in one pool; a tuple, because a frozen dataclass costs 1.1 us instead of 0.3.

    Attributes:
        pool: its name.
        entitlement_pages: membership and reservation together (C9.1).
        frontier: committed tokens at the start.
        kept_pages: pages of the source that become members, shared or moved.
        copied_columns: columns of a partial tail that are copied into a private page; 0 where nothing is copied.
        claimed_pages: pages that leave available.
        released_pages: pages of a moved source that come back to available.
    """

    pool: str
    entitlement_pages: int
    frontier: int = 0
    kept_pages: int = 0
    copied_columns: int = 0
    claimed_pages: int = 0
    released_pages: int = 0


class ActivationPlan(NamedTuple):
    """What an activation would take: in each pool, in pool order, and an execution row.  (C10.9)"""

    kind: Kind
    row: int
    pools: tuple[PoolPlan, ...]

    @property
    def entitlement_pages(self) -> tuple[tuple[str, int], ...]:
        """Entitlement of each pool, in pages."""
        return tuple((plan.pool, plan.entitlement_pages) for plan in self.pools)


@dataclass(frozen=True)
class TailCopy:
    """Copy the first `columns` rows of a page group over those of another, in every plane of a pool.  (C10.5)"""

    pool: str
    source_page: int
    destination_page: int
    columns: int


@dataclass(eq=False)
class PreparedActivation:
    """Claims of an activation that is neither committed nor aborted.

    Attributes:
        target, plan: what was asked and explained.
        copies: to be executed before `tables`.
        tables: per pool, page group ids of the whole membership, for row `plan.row` from block 0 on.
        tails: per pool, the descriptor that a copied tail will have.
        claimed: per pool, pages that left available.
        undo: gives every claim back.
        is_open: written by `Activations` alone.
    """

    target: ActivationTarget
    plan: ActivationPlan
    copies: tuple[TailCopy, ...]
    tables: dict[str, Ids]
    tails: dict[str, Ids]
    claimed: dict[str, int]
    undo: Undo
    is_open: bool = True


class Activations:
    """Prepares, commits and aborts activations; owns no state of its own."""

    def __init__(
        self, config: StoreConfig, spaces: Mapping[str, AddressSpaces], sequences: Sequences,
        continuations: Continuations, growth: LeaseGrowth,
    ) -> None:
        self.config = config
        self.spaces = dict(spaces)
        self.sequences = sequences
        self.continuations = continuations
        self.growth = growth
        self._lead_tokens = {pool.name: pool.lead_tokens for pool in config.pools}
        self._limit_tokens = config.blocks * PAGE_TOKENS

    def explain(self, target: ActivationTarget) -> ActivationPlan | Refusal:
        """Return what an activation would take, or why it cannot be honoured; no side effects.  (C10.9)

        Raises:
            StaleHandle: the source was released or moved.
            MisuseError: no ActivationTarget, a source without complete state (C2.2), a frontier it does not hold, a
                Move beside another activation from the same source (C10.4), or of pages that a copy uses (C7.4).
        """
        if not isinstance(target, ActivationTarget):
            raise MisuseError("a target", expected="an ActivationTarget", got=repr(target),
                              remedy="pass ActivationTarget(prompt_tokens, output_tokens)", clause="C10.9")
        frontiers = self._frontiers(target)
        if target.source is not None and not target.keep_source:
            for retained in self.continuations.retained.values():
                retained.require_releasable(target.source.number, "Move")
        base = frontiers["main"]
        total = base + target.prompt_tokens + target.output_tokens
        if total > self.config.max_context:
            return Refusal("main", pages_for_tokens(total), self.config.blocks, forever=True, reason="context")
        row = self.sequences.next_row
        if row is None:
            return Refusal("rows", 1, 0, forever=False, reason="rows")
        plans = []
        for name, spaces in self.spaces.items():
            entitlement = self.growth.first_pages(
                self._full_entitlement(name, total), filled_tokens=base + target.prompt_tokens
            )
            plan = self._plan_pool(target, name, frontiers[name], entitlement)
            available = spaces.pool.available
            # A tail is copied before anything of a moved source is released: its page must be available now.
            first_needed = 1 if plan.copied_columns else 0
            if plan.claimed_pages > available + plan.released_pages or first_needed > available:
                return Refusal(name, max(plan.claimed_pages - plan.released_pages, first_needed), available,
                               forever=False)
            plans.append(plan)
        kind: Kind = "fresh" if target.source is None else "fork" if target.keep_source else "move"
        return ActivationPlan(kind, row, tuple(plans))

    def prepare(self, target: ActivationTarget) -> PreparedActivation | Refusal:
        """Claim what the target takes in every pool, or change nothing.  (C10.2, C10.3)

        Raises:
            As `explain`.  Whatever is raised: no claim is left.
        """
        plan = self.explain(target)
        if isinstance(plan, Refusal):
            return plan
        prepared = PreparedActivation(target, plan, (), {}, {}, {}, [])
        undo = prepared.undo
        try:
            if target.source is not None:
                self.continuations.claim(target.source, is_move=not target.keep_source)
                undo.append((self.continuations.unclaim, target.source))
            for part in plan.pools:
                pool = self.spaces[part.pool].pool
                prepared.claimed[part.pool] = claim = min(part.claimed_pages, pool.available)
                granted = pool.try_reserve(claim)
                assert granted, f"pool {part.pool} changed between plan and reservation"
                undo.append((pool.shrink, claim))
                if target.source is not None:
                    self._claim_pages(prepared, part)
            leased = self.sequences.lease_row()
            undo.append((self.sequences.return_row, leased))
            assert leased == plan.row, f"row {leased} was leased, {plan.row} was planned"
        except BaseException as error:
            undo_all(undo, error)
            raise
        return prepared

    def commit(self, prepared: PreparedActivation) -> Sequence:
        """Publish the sequence: its copies and tables are on the stream.  (C10.3)

        Raises:
            MisuseError: it has ended, or a transfer began to use a page of a source that is moved; nothing changed.
        """
        self._require_open(prepared, "commit")
        target, row = prepared.target, prepared.plan.row
        if target.source is not None and not target.keep_source:
            for retained in self.continuations.retained.values():
                retained.require_untransferred(target.source.number, "Move")
        prepared.is_open = False
        prepared.undo.clear()
        for part in prepared.plan.pools:
            spaces = self.spaces[part.pool]
            members = _NONE if target.source is None else self._take_members(prepared, part)
            tail = prepared.tails.get(part.pool)
            missing = part.claimed_pages - prepared.claimed[part.pool]
            if missing:
                granted = spaces.pool.try_reserve(missing)
                assert granted, f"pool {part.pool} lacks pages that the moved source released"
            if tail is not None:
                spaces.pool.materialize(1)
                spaces.pages.publish_copy(tail, writer=row, active=1)
                spaces.events.record("materialize", row, part.kept_pages, prepared.tables[part.pool][-1:])
                members = np.concatenate((members, tail))
            if members.size:
                spaces.adopt(row, members, prepared.tables[part.pool], frontier=part.frontier,
                             entitlement_pages=part.entitlement_pages)
            else:
                spaces.open(row, entitlement_pages=part.entitlement_pages)
        for pool, page_ids in prepared.tables.items():
            if page_ids.size:
                self.spaces[pool].events.record("publish", row, 0, page_ids)
        if target.source is not None:
            self.continuations.unclaim(target.source)
            if not target.keep_source:
                del self.continuations.states[target.source.number]
        total = prepared.plan.pools[0].frontier + target.total_tokens
        if self.growth.is_on:
            self.growth.open(row, {name: self._full_entitlement(name, total) for name in self.spaces})
        return self.sequences.publish(row, total)

    def abort(self, prepared: PreparedActivation) -> None:
        """Give every claim back: counters, references, pins, rows and the source are as before.  (C10.2)"""
        self._require_open(prepared, "abort")
        prepared.is_open = False
        undo_all(prepared.undo)

    # ---- helpers ----------------------------------------------------------------------------------

    def _frontiers(self, target: ActivationTarget) -> dict[str, int]:
        """Return the frontier that the target names in each pool; 0 without a source."""
        if target.source is None:
            return dict.fromkeys(self.spaces, 0)
        # Read once, and before the source is looked up: a caller's mapping may answer otherwise the second time.
        given = target.frontier
        if given is not None and isinstance(given, Mapping):
            given = dict(given)
        number = self.continuations.require_claimable(target.source, is_move=not target.keep_source)
        if self.continuations.states[number].state is None:
            raise MisuseError(f"activation from {target.source}", expected="a continuation with the caller's state",
                              got="one without: KV presence alone is never a hit",
                              remedy="attach_state when the state is complete, or recompute", clause="C2.2")
        committed = {name: retained.spaces[number].frontier for name, retained in self.continuations.retained.items()}
        if given is None and len(committed) == 1:
            return committed
        wanted = {"main": given} if type(given) is int else committed if given is None else given
        if not isinstance(wanted, Mapping) or wanted.keys() != committed.keys():
            raise MisuseError(f"frontier {given!r} of {target.source}",
                              expected=f"None, an int, which is Main's, or a mapping that names {list(committed)}",
                              got=repr(given), remedy="name every pool: none is derived from another", clause="C9.9")
        for name, own in committed.items():  # Main first: the others are compared with it
            tokens = wanted[name]
            low, high = (1, own) if name == "main" else (0, min(own, wanted["main"]))
            if type(tokens) is not int or not low <= tokens <= high:
                remedy = "stay within what is committed"
                if name != "main":
                    remedy += f", and not beyond Main's: pass frontier={{'main': ..., {name!r}: ...}}"
                raise MisuseError(f"frontier {tokens!r} of {target.source} in pool {name}",
                                  expected=f"an int, {low} to {high} tokens", got=repr(tokens), remedy=remedy,
                                  clause="C10.7")
        return dict(wanted)

    def _full_entitlement(self, pool: str, total_tokens: int) -> int:
        """Return pages of a pool: the whole budget, and the backend's provisional lead, at most L.  (C9.2, C5.6)"""
        return pages_for_tokens(min(total_tokens + self._lead_tokens[pool], self._limit_tokens))

    def _plan_pool(self, target: ActivationTarget, pool: str, frontier: int, entitlement: int) -> PoolPlan:
        full, tail = frontier >> PAGE_SHIFT, frontier & PAGE_MASK
        if target.source is None:
            return PoolPlan(pool, entitlement, claimed_pages=entitlement)
        if target.keep_source:
            return PoolPlan(pool, entitlement, frontier, full, tail, entitlement - full)
        retained = self.continuations.retained[pool]
        members = retained.spaces[target.source.number].members
        is_moved = bool(tail) and int(retained.pages.references[members[full]]) == 1
        kept = full + is_moved
        return PoolPlan(pool, entitlement, frontier, kept, 0 if is_moved else tail, entitlement - kept,
                        retained.sole_pages(members[kept:]))

    def _claim_pages(self, prepared: PreparedActivation, part: PoolPlan) -> None:
        """Name the page of a copied tail, pin its source, and list the membership's page groups."""
        spaces, source = self.spaces[part.pool], prepared.target.source
        assert source is not None, "a fresh activation claims numbers only"
        pages = spaces.pages
        kept = part_of(self.continuations.retained[part.pool].spaces[source.number].index, 0, part.kept_pages)
        page_ids = pages.page_ids(kept)
        if part.copied_columns:
            tail_source = self._source_tail(source.number, part)
            destination = spaces.pool.bind(1, int(page_ids[-1]) if page_ids.size else -1)
            prepared.undo.append((spaces.pool.unbind, destination))
            prepared.tails[part.pool] = tail = pages.describe_copy(destination, block=part.kept_pages,
                                                                   columns=part.copied_columns)
            prepared.undo.append((pages.abort_copy, tail))
            pages.pin(tail_source)
            prepared.undo.append((pages.unpin, tail_source))
            prepared.copies += (TailCopy(part.pool, int(pages.device[tail_source[0]]), int(destination[0]),
                                         part.copied_columns),)
            page_ids = np.concatenate((page_ids, destination))
        prepared.tables[part.pool] = page_ids

    def _take_members(self, prepared: PreparedActivation, part: PoolPlan) -> Ids:
        """Turn pages of the source into members of the row, without the copied tail.  (C10.4, C10.5)"""
        source = prepared.target.source
        assert source is not None, "a fresh activation has no members"
        retained: RetainedSpaces = self.continuations.retained[part.pool]
        pages = retained.pages
        if part.copied_columns:
            pages.unpin(self._source_tail(source.number, part))
        if prepared.target.keep_source:
            space = retained.spaces[source.number]
            pages.share_active(part_of(space.index, 0, part.kept_pages))
            return space.members[: part.kept_pages]
        members = retained.take(source.number).members
        kept = members[: part.kept_pages]
        pages.activate(kept)
        if part.kept_pages > part.frontier >> PAGE_SHIFT:  # the partial tail moves: cut, and written by the row
            pages.withdraw(kept[-1:], part.frontier & PAGE_MASK)
            pages.thaw(kept[-1:], prepared.plan.row)
        retained.drop(members[part.kept_pages :], first_block=part.kept_pages, pages=members.size - part.kept_pages)
        return kept

    def _source_tail(self, number: int, part: PoolPlan) -> Ids:
        block = part.frontier >> PAGE_SHIFT
        return self.continuations.retained[part.pool].spaces[number].members[block : block + 1]

    def _require_open(self, prepared: PreparedActivation, operation: str) -> None:
        if not isinstance(prepared, PreparedActivation) or not prepared.is_open:
            raise MisuseError(f"{operation} of an activation", expected="one that is prepared",
                              got="one that has ended", remedy="commit or abort each once", clause="C10.2")
