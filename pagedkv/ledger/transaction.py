"""Transactions: from a target to a sequence, or from a sequence to a checkpoint, in all pools or in none.  (C10)

    explain    return the plan, or the Refusal                        no side effect
    prepare    reserve in every pool, bind the pages of copied        claims only: nobody sees them, and `abort` can
               tails, lease a row                                     give all of them back
    (device)   copy the committed columns of tails, publish the       the store does this: copies, then tables
               row's whole membership in every pool
    commit     move or share memberships, publish the result          needs no further room
    abort      give every claim back                                  the source is unchanged

For a space with frontier f, full = f / 64 pages and tail = f % 64 columns:

                         block < full             block = full, tail > 0               beyond
    Fork (source kept)   one reference more       copied into a private page           -
    Move                 stays as it is           moved and cut; copied when           released
                                                  another space references it
    Snapshot             frozen, one reference    copied into a page of the            - (refused: provisional)
                         more                     checkpoint; the row keeps its own

So a snapshot changes no table entry of the running sequence, and an aligned frontier copies nothing (C10.6).  Each pool
has its own frontier, which is not derived from another pool's (C9.9).

A source may lie on the Host (C7.3).  A page that becomes a member without a Device replica is restored into a page
group of its own; a tail that is copied comes straight from its record.  Until the commit such page groups are in no
space and no table, and the pages of the source that the transaction needs are pinned: a restore may run beside decode
(C10.10).

A Fork that lacks exactly one page may take the page group of the source's tail, its bytes in place, where the caller
allows it: the tail is backed up first, and the source keeps it on the Host alone (C10.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError, StaleHandle, shown
from pagedkv.ledger.active_spaces import ActiveSpaces
from pagedkv.ledger.continuations import Continuation, Continuations, Frontier, named_frontiers
from pagedkv.ledger.free_runs import Ids, Index, part_of
from pagedkv.ledger.growth import LeaseGrowth
from pagedkv.ledger.host_arena import ArenaPlan, HostArena
from pagedkv.ledger.kept_spaces import KeptSpace, KeptSpaces
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.sequences import Sequence, Sequences
from pagedkv.values.config import StoreConfig
from pagedkv.values.quantities import PAGE_MASK, PAGE_SHIFT, PAGE_TOKENS, pages_for_tokens

Reason = Literal["context", "rows", "pages", "provisional", "host", "copying"]
Kind = Literal["fresh", "move", "fork"]

TOKENS_MAX = 1 << 62
"""Counts of a target are below this, so that a Refusal with their sum can be printed and written to a journal."""

_NO_IDS: Ids = np.zeros(0, np.int32)


@dataclass(frozen=True)
class ActivationTarget:
    """The token budget of a sequence to activate, and its source.  (C9.2, C10.7)

    Args:
        prompt_tokens: tokens to write before the first is sampled; at least 1 without a source.
        output_tokens: tokens that may be sampled.
        source: the retained continuation from which the sequence starts; None starts at position 0.
        frontier: the tokens to take from the source.  None takes all committed tokens of each pool.  A number is for
            Main, and needs a store without a backend.  A mapping names every pool (C9.9).
        keep_source: True leaves the source unchanged (Fork), False turns it into the sequence (Move).  A Move ends the
            source's protection, so its `frontier` may be below the protected one (C7.8).
        allow_demote_source: a Fork that lacks one page may leave the source's partial tail on the Host alone, and take
            its page group (C10.8).  It needs a Host arena.

    Raises:
        MisuseError: counts that are no integers or too small, or a frontier without a source.  For more than S tokens
            together `explain` returns a Refusal.
    """

    prompt_tokens: int
    output_tokens: int
    source: Continuation | None = None
    frontier: Frontier | None = None
    keep_source: bool = True
    allow_demote_source: bool = False

    def __post_init__(self) -> None:
        low = 1 if self.source is None else 0
        if type(self.prompt_tokens) is not int or not low <= self.prompt_tokens < TOKENS_MAX:
            self._refuse_count("prompt_tokens", self.prompt_tokens, low)
        if type(self.output_tokens) is not int or not 0 <= self.output_tokens < TOKENS_MAX:
            self._refuse_count("output_tokens", self.output_tokens, 0)
        if type(self.keep_source) is not bool:
            raise MisuseError("keep_source", expected="True or False", got=shown(self.keep_source),
                              remedy="pass True to keep the source, False to move it", clause="C10.7")
        if type(self.allow_demote_source) is not bool:
            raise MisuseError("allow_demote_source", expected="True or False", got=shown(self.allow_demote_source),
                              remedy="pass True to let the source's tail go to the Host", clause="C10.8")
        is_fork = self.source is not None and self.keep_source
        if self.source is None and (self.frontier is not None or not self.keep_source):
            raise MisuseError("a frontier, or keep_source=False, without a source", expected="a Continuation as source",
                              got="None", remedy="pass the continuation to start from", clause="C10.7")
        if self.allow_demote_source and not is_fork:
            raise MisuseError("allow_demote_source without a Fork", expected="a source that is kept",
                              got="no source" if self.source is None else "a Move", clause="C10.8",
                              remedy="leave it out: only a source that stays can go to the Host")

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens, without the tokens from the source."""
        return self.prompt_tokens + self.output_tokens

    def _refuse_count(self, name: str, value: object, low: int) -> None:
        raise MisuseError(f"an activation with {name}={shown(value)}",
                          expected=f"an int of at least {low} and below 2**62", got=shown(value),
                          remedy="pass the number of tokens as an int; prompt_tokens may be 0 only with a source",
                          clause="C9.2")


@dataclass(frozen=True)
class Refusal:
    """Why an activation or a snapshot cannot be honoured: a value, not an error.  (C10.6, C10.9)

    Attributes:
        pool: the pool that lacks pages, or "rows" when every execution row is leased.
        needed: pages (or rows) that it needs; the mapped provisional pages if they are the reason, the pages that are
            being copied, or the Host pages.
        available: pages (or rows) that are free now; the most that a sequence may have if `forever`.
        forever: whether waiting cannot help, because the target exceeds the most that a sequence may have, or that the
            Host arena may hold.
        reason: "context" (more than S tokens), "rows", "pages", "provisional" (trim first), "host" (the arena lacks
            room), or "copying" (a copy uses pages that are needed: `Store.poll_copies`, and try again).
        move_fits: a Fork was refused, and a Move from the same source would be honoured now; not compared.
    """

    pool: str
    needed: int
    available: int
    forever: bool
    reason: Reason = "pages"
    move_fits: bool = field(default=False, compare=False)


class PoolPlan(NamedTuple):
    """The pages of an activation in one pool; a tuple, because a frozen dataclass costs 1.1 us instead of 0.3.

    Attributes:
        pool: its name.
        entitlement_pages: membership and reservation together (C9.1).
        frontier: committed tokens at the start.
        kept_pages: pages of the source that become members, shared or moved.
        copied_columns: columns of a partial tail that are copied into a private page; 0 without a copy.
        claimed_pages: pages that leave available.
        released_pages: pages of a moved source that come back to available.
        restored_pages: kept pages without a Device replica; each claims a page group too (C7.3).
        takes_tail: the copied columns stay where they are: the source's tail goes to the Host, and its page group to
            the sequence (C10.8).
    """

    pool: str
    entitlement_pages: int
    frontier: int = 0
    kept_pages: int = 0
    copied_columns: int = 0
    claimed_pages: int = 0
    released_pages: int = 0
    restored_pages: int = 0
    takes_tail: bool = False


class ActivationPlan(NamedTuple):
    """The plan of an activation: its row, and its pages in each pool, in pool order.  (C10.9)"""

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


class TailClaim(NamedTuple):
    """A copied tail in one pool, (1,) int32 each: the pinned source page, the new descriptor and its page group.

    A tail that takes the source's page group has no descriptor before the commit: `logical` is empty.
    """

    source: Ids
    logical: Ids
    page_id: Ids


class HostCopy(NamedTuple):
    """Copy whole pages of one pool between page groups and records of the Host arena, in one direction.  (C8.3)

    Attributes:
        pool: its name.
        logical: (n,) int32, the pinned descriptors whose content is copied.
        page_ids: (n,) int32, page groups, sources or destinations.
        places: (n,) int32, first arena units of the records (C8.1).
        contents, columns: (n,) int64 and int32, content epochs and committed columns at the claim (C7.4).
    """

    pool: str
    logical: Ids
    page_ids: Ids
    places: Ids
    contents: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int32]

    def require_current(self, pages: LogicalPages) -> None:
        """Refuse to publish a copy of other content than was claimed.  (C7.4, C7.6, C16.9)"""
        if not np.array_equal(pages.content[self.logical], self.contents):
            raise StaleHandle(f"the publication of {self.logical.size} copied pages of pool {self.pool}",
                              expected="pages with the content that was copied", got="other content epochs",
                              remedy="abort it and copy again", clause="C7.6")


@dataclass(eq=False, slots=True)
class Transaction:
    """Claims of an activation or a snapshot that is neither committed nor aborted.

    Attributes:
        row: the leased row, or the row of the sequence that is checkpointed.
        plans: the plan of each pool.
        target: of an activation.
        sequence, state, state_frontier: of a snapshot: the running sequence, the caller's state, and the frontier of
            each pool that the state belongs to.
        copies: to execute before `tables` are published, behind `backups` and `restores`.
        backups: from page groups to the Host, before anything else; for a tail that is taken (C10.8).
        restores: from the Host to page groups.
        restored: per pool, the part of `restores` that becomes the Device replica of the source's own pages.
        pinned: per pool, the kept pages of a source that lies on the Host in part.
        handle: of an activation that runs beside decode, what the sequence will be (C10.10).
        tables: per pool, page group ids of the whole membership, for `row` from block 0 on; none for a snapshot.
        reserved: per pool, the reserved pages, the page of a copied tail included.
        tails: per pool with a copied tail, its claims.
        is_open: neither committed nor aborted; `Transactions` alone writes it.
    """

    row: int
    plans: tuple[PoolPlan, ...]
    target: ActivationTarget | None = None
    sequence: Sequence | None = None
    state: object = None
    state_frontier: dict[str, int] = field(default_factory=dict)
    copies: tuple[TailCopy, ...] = ()
    tables: dict[str, Ids] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    tails: dict[str, TailClaim] = field(default_factory=dict)
    backups: tuple[HostCopy, ...] = ()
    restores: tuple[HostCopy, ...] = ()
    restored: dict[str, HostCopy] = field(default_factory=dict)
    pinned: dict[str, Index] = field(default_factory=dict)
    handle: Sequence | None = None
    is_open: bool = True

    @property
    def source(self) -> Continuation | None:
        """The continuation from which an activation starts, or None."""
        return None if self.target is None else self.target.source

    def claimed_ids(self, pool: str) -> Ids:
        """Return the page groups that are bound for copies in one pool, before they are published."""
        tail, restored = self.tails.get(pool), self.restored.get(pool)
        return np.concatenate((
            _NO_IDS if tail is None or not tail.logical.size else tail.page_id,
            _NO_IDS if restored is None else restored.page_ids,
        ))


class Transactions:
    """Explains, prepares, commits and aborts.

    If a `prepare` or `commit` breaks off, nobody can give its claims back: `Ledger.unsettled` then latches the store.

    Attributes:
        open: prepared and neither committed nor aborted, oldest first.
    """

    def __init__(
        self, config: StoreConfig, active: Mapping[str, ActiveSpaces], sequences: Sequences,
        continuations: Continuations, growth: LeaseGrowth, arena: HostArena,
    ) -> None:
        self.config = config
        self.active = dict(active)
        self.sequences = sequences
        self.continuations = continuations
        self.growth = growth
        self.arena = arena
        self.open: list[Transaction] = []
        self._lead_tokens = {pool.name: pool.lead_tokens for pool in config.pools}
        self._limit_tokens = config.blocks * PAGE_TOKENS

    # ---- explanations -----------------------------------------------------------------------------

    def explain(self, target: ActivationTarget) -> ActivationPlan | Refusal:
        """Return the plan of an activation, or the Refusal; no side effects.  (C10.9)"""
        if type(target) is not ActivationTarget:
            raise MisuseError("a target", expected="an ActivationTarget", got=shown(target),
                              remedy="pass ActivationTarget(prompt_tokens, output_tokens)", clause="C10.9")
        answer = self._explain(target, self._frontiers(target))
        if type(answer) is Refusal and answer.reason in ("pages", "host") and target.source and target.keep_source:
            moved = replace(target, keep_source=False, allow_demote_source=False)
            if not self.continuations.states[target.source.number].claims:
                fits = type(self._explain(moved, self._frontiers(moved))) is ActivationPlan
                return replace(answer, move_fits=fits)
        return answer

    def _explain(self, target: ActivationTarget, frontiers: Mapping[str, int]) -> ActivationPlan | Refusal:
        base = frontiers["main"]
        total = base + target.total_tokens
        if total > self.config.max_context:
            return Refusal("main", pages_for_tokens(total), self.config.blocks, forever=True, reason="context")
        row = self.sequences.next_row
        if row is None:
            return Refusal("rows", 1, 0, forever=False, reason="rows")
        plans = []
        for name, spaces in self.active.items():
            entitlement = self._full_entitlement(name, total)
            if self.growth.is_on:
                entitlement = self.growth.first_pages(entitlement, filled_tokens=base + target.prompt_tokens)
            plan = self._plan_pool(target, name, frontiers[name], entitlement)
            if spaces.pages.pins_total and target.source is not None:
                busy = self._busy_pages(target, plan)
                if busy:
                    return Refusal(name, busy, 0, forever=False, reason="copying")
            available = spaces.pool.available
            if target.allow_demote_source and plan.claimed_pages == available + 1:
                plan = self._with_taken_tail(target, plan)
            # A tail is copied, and a page is restored, before a moved source releases its pages.
            first_needed = plan.restored_pages + (plan.copied_columns > 0 and not plan.takes_tail)
            if plan.claimed_pages > available + plan.released_pages or first_needed > available:
                return Refusal(name, max(plan.claimed_pages - plan.released_pages, first_needed), available,
                               forever=False)
            plans.append(plan)
        backups = self._backups(target, plans)
        if backups:
            unfit = self.arena.plan([(1, pages.record_units) for pages in backups.values()])
            if type(unfit) is int:
                name, pages = [*backups.items()][unfit]
                return Refusal(name, 1, self.arena.room(pages.record_units), forever=not pages.has_host_pages,
                               reason="host")
        kind: Kind = "fresh" if target.source is None else "fork" if target.keep_source else "move"
        return ActivationPlan(kind, row, tuple(plans))

    def explain_snapshot(self, sequence: Sequence) -> tuple[PoolPlan, ...] | Refusal:
        """Return the plan of a snapshot in each pool, or the Refusal; no side effects.  (C10.6)"""
        for name, spaces in self.active.items():
            provisional = spaces.provisional_pages(sequence.row)
            if provisional:
                return Refusal(name, provisional, 0, forever=False, reason="provisional")
        plans = []
        for name, spaces in self.active.items():
            frontier = spaces.committed_end.item(sequence.row)
            full, tail = frontier >> PAGE_SHIFT, frontier & PAGE_MASK
            if tail and not spaces.pool.available:
                return Refusal(name, 1, 0, forever=False)
            plans.append(PoolPlan(name, 0, frontier, full, tail, int(tail > 0)))
        return tuple(plans)

    # ---- claims, commits, aborts ------------------------------------------------------------------

    def prepare(self, target: ActivationTarget, plan: ActivationPlan, *, is_announced: bool = False) -> Transaction:
        """Claim the pages of a plan in every pool, and its row; `is_announced` makes the handle now.  (C10.2, C10.3)"""
        transaction = Transaction(plan.row, plan.pools, target)
        self.open.append(transaction)
        source = target.source
        if source is not None:
            self.continuations.claim(source.number, is_move=not target.keep_source)
        places = self._claim_places(self._backups(target, plan.pools))
        for part in plan.pools:
            spaces = self.active[part.pool]
            pages = part.claimed_pages
            if part.released_pages:  # the commit reserves the rest, once the moved source has released it
                pages = min(pages, spaces.pool.available)
            transaction.reserved[part.pool] = pages
            granted = spaces.pool.try_reserve(pages)
            assert granted, f"pool {part.pool} changed between plan and reservation"
            if source is not None:
                space = self.continuations.kept[part.pool].by_number[source.number]
                page_ids = spaces.pages.page_ids(part_of(space.index, 0, part.kept_pages))
                if spaces.pages.has_host_pages:
                    self._claim_replicas(transaction, part, space, page_ids)
                if part.copied_columns:
                    block = part.frontier >> PAGE_SHIFT
                    after = int(page_ids[-1]) if page_ids.size else -1
                    tail = self._claim_tail(transaction, part, space.members[block : block + 1], after,
                                            places.get(part.pool))
                    page_ids = np.concatenate((page_ids, tail.page_id))
                transaction.tables[part.pool] = page_ids
        leased = self.sequences.lease_row()
        assert leased == plan.row, f"row {leased} was leased, {plan.row} was planned"
        if is_announced:
            transaction.handle = self.sequences.announce(leased)
        return transaction

    def prepare_snapshot(
        self, sequence: Sequence, state: object, state_frontier: dict[str, int], plans: tuple[PoolPlan, ...]
    ) -> Transaction:
        """Claim the pages of copied tails in every pool.  (C10.6)"""
        transaction = Transaction(sequence.row, plans, sequence=sequence, state=state, state_frontier=state_frontier)
        self.open.append(transaction)
        for part in plans:
            if part.copied_columns:
                spaces, block = self.active[part.pool], part.kept_pages
                granted = spaces.pool.try_reserve(1)
                assert granted, f"pool {part.pool} changed between plan and reservation"
                transaction.reserved[part.pool] = 1
                self._claim_tail(transaction, part, spaces.members[sequence.row, block : block + 1], -1)
        return transaction

    def require_committable(self, transaction: Transaction, kind: Literal["activation", "snapshot"]) -> None:
        """Refuse a second commit, content that changed under a copy, or a frontier that moved since.  (C7.4, C10.6)"""
        self.require_open(transaction, "commit")
        sequence = transaction.sequence
        if (sequence is not None) != (kind == "snapshot"):
            raise MisuseError(f"commit of {kind}", expected="what the prepare of one returned", got="the other kind",
                              remedy="commit each transaction as the kind that was prepared", clause="C10.2")
        if sequence is not None:
            for part in transaction.plans:
                frontier = self.active[part.pool].committed_end.item(sequence.row)
                if frontier != part.frontier:
                    raise MisuseError(f"commit of a snapshot of {sequence}",
                                      expected=f"frontier {part.frontier} in pool {part.pool}, as it was prepared",
                                      got=frontier, remedy="abort it and take another", clause="C10.6")
        for copy in (*transaction.backups, *transaction.restores):
            copy.require_current(self.active[copy.pool].pages)

    def commit_activation(self, transaction: Transaction) -> Sequence:
        """Publish the sequence; its copies and tables are queued already.  (C10.3)"""
        target, row = transaction.target, transaction.row
        assert target is not None, "an activation has a target"
        source = target.source
        self._end(transaction)
        for part in transaction.plans:
            spaces = self.active[part.pool]
            members = _NO_IDS if source is None else self._take_members(transaction, target, part)
            missing = part.claimed_pages - transaction.reserved[part.pool]
            if missing:
                granted = spaces.pool.try_reserve(missing)
                assert granted, f"pool {part.pool} lacks pages that the moved source released"
            if part.copied_columns:
                publish = self._take_tail if part.takes_tail else self._publish_tail
                members = np.concatenate((members, publish(transaction, part, row)))
            if members.size:
                spaces.adopt(row, members, transaction.tables[part.pool], frontier=part.frontier,
                             entitlement_pages=part.entitlement_pages)
            else:
                spaces.open(row, entitlement_pages=part.entitlement_pages)
        for pool, page_ids in transaction.tables.items():
            if page_ids.size:
                self.active[pool].events.record("publish", row, 0, page_ids)
        if source is not None:
            self.continuations.unclaim(source.number)
            if not target.keep_source:
                del self.continuations.states[source.number]
        total = transaction.plans[0].frontier + target.total_tokens
        if self.growth.is_on:
            self.growth.open(row, {name: self._full_entitlement(name, total) for name in self.active})
        return self.sequences.publish(row, total, transaction.handle)

    def commit_snapshot(self, transaction: Transaction) -> Continuation:
        """Publish the checkpoint; its copies are queued already.  (C10.6)"""
        self._end(transaction)
        kept: dict[str, tuple[Ids, int]] = {}
        for part in transaction.plans:
            spaces = self.active[part.pool]
            members = spaces.freeze(transaction.row)
            spaces.pages.share(members)
            if part.copied_columns:
                spaces.pages.unpin(transaction.tails[part.pool].source)
                members = np.concatenate((members, self._publish_tail(transaction, part, None)))
            kept[part.pool] = members, part.frontier
        return self.continuations.keep(kept, transaction.state, transaction.state_frontier)

    def abort(self, transaction: Transaction) -> None:
        """Give every claim back: counters, references, pins, rows and the source are as before `prepare`.  (C10.2)"""
        self._end(transaction)
        if transaction.target is not None:
            self.sequences.withdraw(transaction.row)
        for copy in transaction.backups:
            self.arena.release(copy.places, self.active[copy.pool].pages.record_units)
        for part in reversed(transaction.plans):
            spaces, tail = self.active[part.pool], transaction.tails.get(part.pool)
            if tail is not None:
                spaces.pages.unpin(tail.source)
                spaces.pages.abort_copy(tail.logical)
            if part.pool in transaction.pinned:
                spaces.pages.unpin(transaction.pinned[part.pool])
            spaces.pool.unbind(transaction.claimed_ids(part.pool))
            spaces.pool.shrink(transaction.reserved.get(part.pool, 0))
        if transaction.source is not None:
            self.continuations.unclaim(transaction.source.number)

    def require_open(self, transaction: Transaction, operation: str) -> None:
        """Refuse a transaction that was committed or aborted.  (C10.2)"""
        if not isinstance(transaction, Transaction) or not transaction.is_open:
            raise MisuseError(f"{operation} of a transaction", expected="one that is prepared",
                              got="one that has ended", remedy="commit or abort each once", clause="C10.2")

    # ---- plans ------------------------------------------------------------------------------------

    def _frontiers(self, target: ActivationTarget) -> dict[str, int]:
        """Return the frontier that the target names in each pool; 0 without a source."""
        if target.source is None:
            return dict.fromkeys(self.active, 0)
        requested = target.frontier
        if isinstance(requested, Mapping):  # copied before the source is looked up, for it may end meanwhile
            requested = dict(requested)
        number = self.continuations.require_claimable(target.source, is_move=not target.keep_source)
        if self.continuations.states[number].state is None:
            raise MisuseError(f"activation from {target.source}", expected="a continuation with the caller's state",
                              got="one without: KV presence alone is never a hit",
                              remedy="attach_state when the state is complete, or recompute", clause="C2.2")
        committed = self.continuations.committed(number)
        if requested is None and len(committed) == 1:
            return committed
        named = {"main": requested} if type(requested) is int else committed if requested is None else requested
        return named_frontiers("frontier", target.source, named, committed, clause="C10.7",
                               remedy="stay within what is committed, and not beyond Main's: pass a frontier for each "
                                      "pool")

    def _full_entitlement(self, pool: str, total_tokens: int) -> int:
        """Return the pages of the whole budget and of the backend's provisional lead, at most L.  (C9.2, C5.6)"""
        return pages_for_tokens(min(total_tokens + self._lead_tokens[pool], self._limit_tokens))

    def _plan_pool(self, target: ActivationTarget, pool: str, frontier: int, entitlement: int) -> PoolPlan:
        full, tail = frontier >> PAGE_SHIFT, frontier & PAGE_MASK
        if target.source is None:
            return PoolPlan(pool, entitlement, claimed_pages=entitlement)
        kept = self.continuations.kept[pool]
        space = kept.by_number[target.source.number]
        is_moved = not target.keep_source and tail > 0 and int(kept.pages.references[space.members[full]]) == 1
        pages, restored = full + is_moved, 0
        if kept.pages.hosted:
            restored = int(np.count_nonzero(kept.pages.device[part_of(space.index, 0, pages)] < 0))
        released = 0 if target.keep_source else kept.sole_pages(space.members[pages:])
        return PoolPlan(pool, entitlement, frontier, pages, 0 if is_moved else tail, entitlement - pages + restored,
                        released, restored)

    def _busy_pages(self, target: ActivationTarget, plan: PoolPlan) -> int:
        """Count pages that a transaction needs and another copy holds: restored ones, or those of a moved space."""
        assert target.source is not None, "a copy holds pages of a source"
        kept = self.continuations.kept[plan.pool]
        pages, at = kept.pages, kept.by_number[target.source.number].index
        is_needed = pages.device[at] < 0
        is_needed[plan.kept_pages :] = False
        if not target.keep_source:
            is_needed |= (pages.references[at] == 1) | (self.continuations.demotions[target.source.number] > 0)
        return int(np.count_nonzero(is_needed & (pages.pins[at] > 0)))

    def _with_taken_tail(self, target: ActivationTarget, plan: PoolPlan) -> PoolPlan:
        """Return the plan of a Fork that takes the page group of the source's tail, if nobody else uses it.  (C10.8)"""
        assert target.source is not None, "a Fork has a source"
        kept = self.continuations.kept[plan.pool]
        space = kept.by_number[target.source.number]
        tail = part_of(space.index, plan.kept_pages, plan.kept_pages + 1)
        if not plan.copied_columns or not kept.pages.is_idle(tail).all():
            return plan
        return plan._replace(claimed_pages=plan.claimed_pages - 1, takes_tail=True)

    def _backups(self, target: ActivationTarget, plans: Iterable[PoolPlan]) -> dict[str, LogicalPages]:
        """Return the descriptors of each pool whose tail is taken and has no valid Host replica.  (C10.8)"""
        backups = {}
        for plan in plans:
            if plan.takes_tail:
                assert target.source is not None, "a Fork has a source"
                kept = self.continuations.kept[plan.pool]
                space = kept.by_number[target.source.number]
                if not kept.pages.is_on_host(part_of(space.index, plan.kept_pages, plan.kept_pages + 1)).all():
                    backups[plan.pool] = kept.pages
        return backups

    # ---- helpers ----------------------------------------------------------------------------------

    def _end(self, transaction: Transaction) -> None:
        transaction.is_open = False
        self.open.remove(transaction)

    def _claim_places(self, backups: Mapping[str, LogicalPages]) -> dict[str, Ids]:
        """Take the record of each backup.  (C8.2)"""
        if not backups:
            return {}
        plan = self.arena.plan([(1, pages.record_units) for pages in backups.values()])
        assert isinstance(plan, ArenaPlan), "the arena changed between plan and claim"
        self.arena.apply(plan)
        return dict(zip(backups, plan.places, strict=True))

    def _claim_replicas(self, transaction: Transaction, part: PoolPlan, space: KeptSpace, page_ids: Ids) -> None:
        """Pin the kept pages, and bind page groups for those on the Host alone: into `page_ids` too.  (C7.4)"""
        spaces = self.active[part.pool]
        transaction.pinned[part.pool] = kept = part_of(space.index, 0, part.kept_pages)
        spaces.pages.pin(kept)
        if part.restored_pages:
            missing = np.flatnonzero(page_ids < 0)
            after = page_ids.item(missing[0] - 1) if missing[0] else -1
            page_ids[missing] = bound = spaces.pool.bind(missing.size, after)
            transaction.restored[part.pool] = copy = host_copy(part.pool, spaces.pages, space.members[missing], bound)
            transaction.restores += (copy,)

    def _claim_tail(
        self, transaction: Transaction, part: PoolPlan, source: Ids, after: int, place: Ids | None = None
    ) -> TailClaim:
        """Bind a page for a copied tail, next to page group `after`, and pin its source.

        Where the tail is taken, no page is bound; `place` is the record of its backup, or None if it needs none.
        """
        spaces = self.active[part.pool]
        pages, source = spaces.pages, source.copy()
        if part.takes_tail:
            tail = TailClaim(source, _NO_IDS, pages.page_ids(source))
            if place is not None:
                transaction.backups += (host_copy(part.pool, pages, source, tail.page_id, place),)
        else:
            page_id = spaces.pool.bind(1, after)
            tail = TailClaim(source, pages.describe_copy(page_id, block=part.frontier >> PAGE_SHIFT,
                                                         columns=part.copied_columns), page_id)
            source_page = int(pages.device[source[0]])
            if source_page < 0:
                transaction.restores += (host_copy(part.pool, pages, source, page_id),)
            else:
                transaction.copies += (TailCopy(part.pool, source_page, int(page_id[0]), part.copied_columns),)
        pages.pin(source)
        transaction.tails[part.pool] = tail
        return tail

    def _take_tail(self, transaction: Transaction, part: PoolPlan, row: int) -> Ids:
        """Leave the source's tail on the Host, and give its page group, bytes in place, to a row.  (C10.8)"""
        spaces, tail = self.active[part.pool], transaction.tails[part.pool]
        block = part.frontier >> PAGE_SHIFT
        for copy in transaction.backups:
            if copy.pool == part.pool:
                spaces.pages.add_host(copy.logical, copy.places, copy.columns)
        page_id = spaces.pages.drop_device(tail.source)
        spaces.events.record("demote", None, block, page_id)
        spaces.pool.renew(page_id)
        logical = spaces.pages.describe(page_id, writer=row, first_block=block)
        spaces.events.record("materialize", row, block, page_id)
        return logical

    def _publish_tail(self, transaction: Transaction, part: PoolPlan, row: int | None) -> Ids:
        """Give a copied tail to a row, or to a checkpoint (None), and return its descriptor."""
        spaces, tail = self.active[part.pool], transaction.tails[part.pool]
        spaces.pool.materialize(1)
        spaces.pages.publish_copy(tail.logical, writer=-1 if row is None else row, active=int(row is not None))
        spaces.events.record("materialize", row, part.frontier >> PAGE_SHIFT, tail.page_id)
        return tail.logical

    def _take_members(self, transaction: Transaction, target: ActivationTarget, part: PoolPlan) -> Ids:
        """Turn pages of the source, without a copied tail, into members of the row, and return them.  (C10.4, C10.5)"""
        assert target.source is not None, "a fresh activation has no members"
        kept: KeptSpaces = self.continuations.kept[part.pool]
        pages, number = kept.pages, target.source.number
        if part.copied_columns:
            pages.unpin(transaction.tails[part.pool].source)
        if part.pool in transaction.pinned:
            pages.unpin(transaction.pinned[part.pool])
        restored = transaction.restored.get(part.pool)
        if restored is not None:
            self.active[part.pool].pool.materialize(restored.logical.size)
            pages.add_device(restored.logical, restored.page_ids)
            self.active[part.pool].events.record_runs("restore", pages.block[restored.logical], restored.page_ids)
        if target.keep_source:
            space = kept.by_number[number]
            pages.share_active(part_of(space.index, 0, part.kept_pages))
            return space.members[: part.kept_pages]
        source_members = kept.take(number).members
        members = source_members[: part.kept_pages]
        pages.activate(members)
        if part.kept_pages > part.frontier >> PAGE_SHIFT:  # the partial tail moves: it is cut, and the row writes it
            pages.withdraw(members[-1:], part.frontier & PAGE_MASK)
            pages.thaw(members[-1:], transaction.row)
        kept.drop(source_members[part.kept_pages :], first_block=part.kept_pages,
                  pages=source_members.size - part.kept_pages)
        return members


def host_copy(pool: str, pages: LogicalPages, logical: Ids, page_ids: Ids, places: Ids | None = None) -> HostCopy:
    """Return a copy of pinned pages to `places`, or from their own records, with what it needs to be published."""
    at = pages.index_of(logical)
    own = pages.host[at].copy() if places is None else places
    return HostCopy(pool, logical, page_ids, own, pages.content[at].copy(), pages.committed[at].copy())
