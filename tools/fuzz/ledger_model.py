"""LedgerModel: a slow, obvious model of what a store shows, in lists, dicts and plain integers.  (C5 to C13, C16)

It is written from the contract and imports public names only.  For each call it says which errors are right (none: the
call must succeed), what the call answers, and what every observable is afterwards.  Pages are objects, and two spaces
that share a page hold the same object, so references are counted by looking.  The model does not predict the ids of a
store: it learns them when they first appear (`compare.py`), and then requires that they are in range, distinct, and
stable while they are mapped.

    errors = model.begin_errors(...)     names of right errors; empty means that the call must succeed
    answer = model.begin(...)            changes the model and returns the right answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Counts = int | Sequence[int]
Frontier = int | Mapping[str, int] | None

COLUMNS_MAX = (1 << 30) - 1


def pages_of(tokens: int) -> int:
    """Return how many pages hold that many tokens."""
    return -(-tokens // pk.PAGE_TOKENS)


@dataclass(frozen=True)
class PoolShape:
    """The pages of a pool, how far a row may lead its budget in the pool, and the bytes of a Host page."""

    capacity: int
    lead_tokens: int
    record_bytes: int


@dataclass(frozen=True)
class GrowthShape:
    """The window of lease growth, and the tokens of the widest launch with one forced span.  (C9.2)"""

    window_tokens: int
    widest_tokens: int

    @property
    def cushion_pages(self) -> int:
        """Pages behind the window; a row that was not extended runs on them, up to the room for the forced span."""
        return pages_of(self.widest_tokens) + 1

    @property
    def ladder_pages(self) -> list[int]:
        """Pages that a round tries to add: the window, then less of it."""
        return sorted({pages_of(min(tokens, self.window_tokens)) for tokens in (self.window_tokens, 128, 64)})[::-1]


@dataclass(eq=False, slots=True)
class Page:
    """One page of a space; ids and serials are None until they are observed for the first time.

    Attributes:
        tags: (64,) uint16, the last tag written into each column.
        logical, page_id: the descriptor, and the page group.
        lease, identity, content: serial of the page group, generation of the descriptor, content epoch.
        is_on_device: whether it has a Device replica; else its page group is -1, and its lease 0.
        host: columns that its Host replica covers, or None without one.
    """

    tags: npt.NDArray[np.uint16]
    logical: int | None = None
    page_id: int | None = None
    lease: int | None = None
    identity: int | None = None
    content: int | None = None
    is_on_device: bool = True
    host: int | None = None

    @classmethod
    def new(cls, tags: npt.NDArray[np.uint16] | None = None) -> Page:
        """Return a page without observations, perhaps a copy of another page."""
        return cls(np.zeros(pk.PAGE_TOKENS, np.uint16) if tags is None else tags.copy())


@dataclass(eq=False)
class Space:
    """One address space: entitled pages, member pages, tokens committed and protected.

    Attributes:
        full: pages that the entitlement may grow to; the entitlement itself without lease growth.
    """

    entitlement: int
    pages: list[Page] = field(default_factory=list)
    frontier: int = 0
    protected: int = 0
    full: int = 0


@dataclass(eq=False)
class SequenceModel:
    """One sequence, from activation to its end."""

    name: int
    row: int
    budget: int
    spaces: dict[str, Space]
    is_live: bool = True
    is_aborting: bool = False
    unit: UnitModel | None = None


@dataclass(eq=False)
class ContinuationModel:
    """One retained continuation, until it is released or moved; `number` is in its handle.

    `state_frontier` is the frontier of each pool that the state belongs to; without a state, nothing.
    """

    name: int
    number: int
    spaces: dict[str, Space]
    state: object
    state_frontier: dict[str, int] = field(default_factory=dict)
    is_live: bool = True


@dataclass(eq=False)
class UnitModel:
    """One unit: its sequences in batch order and the columns each may write, per pool."""

    name: int
    sequences: list[SequenceModel]
    columns: dict[str, list[int]]
    firsts: dict[str, list[int]]
    is_live: bool = True


Holder = SequenceModel | ContinuationModel


@dataclass(frozen=True)
class Target:
    """The target of an activation."""

    prompt: int
    output: int
    source: ContinuationModel | None = None
    frontier: Frontier = None
    keeps: bool = True
    demotes: bool = False


@dataclass(frozen=True)
class Claim:
    """The part of an activation in one pool, as it is when the activation is granted.

    Attributes:
        kept: pages of the source that become members.
        tail: the page of the source whose columns are copied, or None.
        is_taken: the tail goes to the Host, and its page group to the sequence.  (C10.8)
        page_groups: that nobody else may reserve from now on.
    """

    entitlement: int
    full: int
    frontier: int
    kept: list[Page]
    tail: Page | None
    is_taken: bool
    page_groups: int


@dataclass(eq=False)
class CopyModel:
    """A demotion, or an activation that is restoring, from its grant until its copies have run.  (C7.4, C10.10)

    Attributes:
        name: of the event, and so of the sequence.
        pinned: per pool, pages that nobody may release, cut, move or demote.
        records: per pool, records that are claimed and that no page has yet.
        source: the continuation of a demotion, which stays as it is until then.
        demoted: of a demotion: per pool, its pages and their columns.
        target, row, claims: of an activation.
        is_aborting: everything is given back at the end.
    """

    name: int
    pinned: dict[str, list[Page]]
    records: dict[str, int]
    source: ContinuationModel | None = None
    demoted: dict[str, list[tuple[Page, int]]] = field(default_factory=dict)
    target: Target | None = None
    row: int = -1
    claims: dict[str, Claim] = field(default_factory=dict)
    is_aborting: bool = False


@dataclass(frozen=True)
class RightRefusal:
    """A right refusal; `needed` or `available` is None where any number is right."""

    pool: str
    needed: int | None
    available: int | None
    reason: str
    forever: bool = False

    def matches(self, refusal: pk.Refusal) -> bool:
        """Return whether a store's refusal is this one."""
        fields = (refusal.pool, refusal.reason, refusal.forever)
        is_same = fields == (self.pool, self.reason, self.forever) and self.available in (None, refusal.available)
        return is_same and self.needed in (None, refusal.needed)


class LedgerModel:
    """The right state of a store with these pools."""

    def __init__(
        self, pools: Mapping[str, PoolShape], *, max_context: int, max_concurrency: int,
        forced_tokens: int = 0, growth: GrowthShape | None = None, host_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.pools = dict(pools)
        self.host_bytes = host_bytes
        self.forced_tokens = forced_tokens
        self.growth = growth
        self.max_context = max_context
        self.max_concurrency = max_concurrency
        self.sequences: list[SequenceModel] = []
        self.continuations: list[ContinuationModel] = []
        self.units: list[UnitModel] = []
        self.copies: list[CopyModel] = []
        self.retired: dict[str, set[int]] = {
            f"{pool}.{what}": set() for pool in pools for what in ("lease", "identity", "content")
        }
        self.tags_next = 1

    # ---- state ------------------------------------------------------------------------------------

    @property
    def active(self) -> list[SequenceModel]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.is_live]

    @property
    def retained(self) -> list[ContinuationModel]:
        """Continuations that were neither released nor moved."""
        return [continuation for continuation in self.continuations if continuation.is_live]

    @property
    def open_units(self) -> list[UnitModel]:
        """Units in flight."""
        return [unit for unit in self.units if unit.is_live]

    def spaces(self, pool: str) -> list[Space]:
        """Return every space of a pool, active spaces first."""
        active = [sequence.spaces[pool] for sequence in self.active]
        return active + [continuation.spaces[pool] for continuation in self.retained]

    def references(self, page: Page, pool: str) -> int:
        """Return how many spaces hold a page."""
        return sum(page in space.pages for space in self.spaces(pool))

    def allocated(self, pool: str) -> int:
        """Return the number of distinct pages that belong to a space, and lie on the Device.  (C6.4)"""
        return len({id(page) for space in self.spaces(pool) for page in space.pages if page.is_on_device})

    def reserved(self, pool: str) -> int:
        """Return the pages that active spaces may still map, and those that restoring sequences have claimed."""
        spaces = [sequence.spaces[pool] for sequence in self.active]
        claimed = sum(copy.claims[pool].page_groups for copy in self.restoring)
        return sum(space.entitlement - len(space.pages) for space in spaces) + claimed

    def available(self, pool: str) -> int:
        """Return the pages that anyone may still reserve."""
        return self.pools[pool].capacity - self.allocated(pool) - self.reserved(pool)

    # ---- copies that may still run ----------------------------------------------------------------

    @property
    def restoring(self) -> list[CopyModel]:
        """Activations that wait for their copies."""
        return [copy for copy in self.copies if copy.target is not None]

    @property
    def rows(self) -> list[int]:
        """Leased rows, those of restoring sequences too."""
        return [sequence.row for sequence in self.active] + [copy.row for copy in self.restoring]

    def pins(self, page: Page, pool: str) -> int:
        """Return how many copies in flight need that a page stays as it is.  (C7.4)"""
        return sum(copy.pinned[pool].count(page) for copy in self.copies)

    def claims(self, target: Target) -> dict[str, Claim]:
        """Return the part of an activation in each pool; it must fit."""
        claims, full, taken = {}, self.full_entitlements(target), self.taken_tails(target)
        for pool, entitlement in self.entitlements(target).items():
            frontier, inherited = self.frontiers(target)[pool], self.inherited_pages(target, pool)
            old = [] if target.source is None else target.source.spaces[pool].pages
            tail = old[inherited] if inherited * pk.PAGE_TOKENS < frontier else None
            page_groups = self._claim(target, pool, entitlement) - (pool in taken)
            claims[pool] = Claim(entitlement, full[pool], frontier, old[:inherited], tail, pool in taken,
                                 min(page_groups, self.available(pool)))  # fmt: skip
        return claims

    def backups(self, target: Target) -> list[str]:
        """Return the pools whose tail is taken and has no Host replica that covers it.  (C10.8)"""
        assert target.source is not None or not self.taken_tails(target), "only a Fork takes a tail"
        return [pool for pool, page in self.taken_tails(target).items()
                if (page.host or 0) < self._columns(target.source, pool, page)]  # fmt: skip

    def needs_copies(self, target: Target) -> bool:
        """Return whether an activation copies pages from or to the Host."""
        claims = self.claims(target).values()
        sources = [page for claim in claims for page in (*claim.kept, claim.tail) if page is not None]
        return bool(self.backups(target)) or not all(page.is_on_device for page in sources)

    def begin_demotion(self, name: int, continuation: ContinuationModel) -> None:
        """Claim the records of a demotion, and hold its pages."""
        demoted = {pool: self.idle_pages(continuation, pool) for pool in self.pools}
        records = {pool: sum((page.host or 0) < count for page, count in pages) for pool, pages in demoted.items()}
        pinned = {pool: [page for page, _ in pages] for pool, pages in demoted.items()}
        self.copies.append(CopyModel(name, pinned, records, continuation, demoted))

    def begin_restore(self, name: int, target: Target, row: int) -> None:
        """Claim everything that an activation needs, and hold the pages of its source.  (C10.2, C10.3)

        Kept pages of a pool whose records are larger than the arena never leave the Device, so nobody holds them.
        """
        assert row not in self.rows, f"row {row} is leased twice"
        claims, backups = self.claims(target), self.backups(target)
        pinned = {}
        for pool, claim in claims.items():
            pinned[pool] = list(claim.kept) if self.pools[pool].record_bytes <= self.host_bytes else []
            if claim.tail is not None:
                pinned[pool].append(claim.tail)
        records = {pool: int(pool in backups) for pool in self.pools}
        self.copies.append(CopyModel(name, pinned, records, target=target, row=row, claims=claims))

    def end_copies(self, copy: CopyModel) -> SequenceModel | None:
        """Publish what was copied, or give every claim back; return the sequence that is active now, or None."""
        self.copies.remove(copy)
        if copy.is_aborting:
            return None
        if copy.target is not None:
            return self.activate(copy.name, copy.target, copy.row, copy.claims)
        for pool, pages in copy.demoted.items():
            self._demote(pages, pool)
        return None

    def claim_errors(self, continuation: ContinuationModel) -> set[str]:
        """Errors of a change of a continuation: it has ended, or somebody is activating from it.  (C10.2)"""
        is_claimed = any(copy.target.source is continuation for copy in self.restoring if copy.target)
        return self.stale_errors([continuation]) | ({"MisuseError"} if is_claimed else set())

    def is_demoting(self, continuation: ContinuationModel | None) -> bool:
        """Return whether pages of a continuation are on their way to the Host: it holds them until then.  (C7.4)"""
        return any(copy.source is continuation for copy in self.copies if copy.source)

    def cut_errors(self, continuation: ContinuationModel) -> set[str]:
        """Errors of letting pages of a continuation go.  (C7.4, C10.2)"""
        return self.claim_errors(continuation) | ({"MisuseError"} if self.is_demoting(continuation) else set())

    # ---- the Host tier ----------------------------------------------------------------------------

    def host_bytes_free(self) -> int:
        """Return the bytes of the arena that no record holds; records of two sizes may not fit nevertheless.  (C8.2)"""
        used = 0
        for pool, shape in self.pools.items():
            pages = {id(page): page for space in self.spaces(pool) for page in space.pages}
            records = sum(page.host is not None for page in pages.values())
            used += (records + sum(copy.records[pool] for copy in self.copies)) * shape.record_bytes
        return self.host_bytes - used

    def idle_pages(self, continuation: ContinuationModel, pool: str) -> list[tuple[Page, int]]:
        """Return the pages of a continuation on the Device that nobody uses, and their columns.  (C7.7)

        Active spaces use pages, and copies in flight.
        """
        space = continuation.spaces[pool]
        in_use = {id(page) for sequence in self.active for page in sequence.spaces[pool].pages}
        in_use |= {id(page) for copy in self.copies for page in copy.pinned[pool]}
        columns = [min(space.frontier - block * pk.PAGE_TOKENS, pk.PAGE_TOKENS) for block in range(len(space.pages))]
        pairs = zip(space.pages, columns, strict=True)
        return [(page, count) for page, count in pairs if page.is_on_device and id(page) not in in_use]

    def demote_errors(self, continuation: ContinuationModel) -> set[str]:
        """Errors of a demotion: a stale handle, or a store without an arena.  (C5.7, C7.4)"""
        return self.claim_errors(continuation) or (set() if self.host_bytes else {"MisuseError"})

    def demote_refusals(self, continuation: ContinuationModel) -> tuple[list[RightRefusal], bool]:
        """Return every right refusal of a demotion, and whether it must be refused.  (C8.2)"""
        copied = {pool: sum((page.host or 0) < count for page, count in self.idle_pages(continuation, pool))
                  for pool in self.pools}  # fmt: skip
        needed = {pool: count * self.pools[pool].record_bytes for pool, count in copied.items()}
        free = self.host_bytes_free()
        is_sure = sum(needed.values()) > free
        has_one_size = len({shape.record_bytes for shape in self.pools.values()}) == 1
        if not is_sure and (has_one_size or not any(needed.values())):
            return [], False
        return [RightRefusal(pool, copied[pool], None, "host", forever=needed[pool] > self.host_bytes)
                for pool in self.pools if copied[pool]], is_sure

    def demote(self, continuation: ContinuationModel) -> int:
        """Give idle pages a Host replica, and take the Device replica from them; return how many.  (C7.4)"""
        return sum(self._demote(self.idle_pages(continuation, pool), pool) for pool in self.pools)

    def _demote(self, pages: list[tuple[Page, int]], pool: str) -> int:
        """Publish Host replicas; pages that nobody has begun to use leave the Device.  Return how many."""
        in_use = {id(page) for sequence in self.active for page in sequence.spaces[pool].pages}
        left = 0
        for page, count in pages:
            page.host = max(page.host or 0, count)
            if id(page) not in in_use and not self.pins(page, pool):
                self._leave_device(page, pool)
                left += 1
        return left

    def drop_device(self, continuation: ContinuationModel) -> int:
        """Take the Device replica from idle pages whose Host replica covers them; return how many.  (C7.7)"""
        pages = 0
        for pool in self.pools:
            for page, count in self.idle_pages(continuation, pool):
                if (page.host or 0) >= count:
                    self._leave_device(page, pool)
                    pages += 1
        return pages

    def drop_host(self, continuation: ContinuationModel) -> int:
        """Take the Host replica from idle pages; return its bytes.  (C7.7)"""
        freed = 0
        for pool, shape in self.pools.items():
            for page, _ in self.idle_pages(continuation, pool):
                freed += shape.record_bytes * (page.host is not None)
                page.host = None
        return freed

    def release_plan(self, continuation: ContinuationModel, pool: str) -> tuple[int, ...]:
        """Return the numbers of a ReleasePlan."""
        pages, record = continuation.spaces[pool].pages, self.pools[pool].record_bytes
        own = [page for page in pages if self.references(page, pool) == 1]
        idle = self.idle_pages(continuation, pool)
        return (
            len(pages), len(pages) - len(own), sum(not page.is_on_device for page in pages),
            sum(page.is_on_device for page in own), sum(page.host is not None for page in own) * record, len(idle),
            sum((page.host or 0) < count for page, count in idle) * record,
        )

    def taken_tails(self, target: Target) -> dict[str, Page]:
        """Return the tail of each pool whose page group a Fork takes, because it lacks exactly one page.  (C10.8)"""
        taken: dict[str, Page] = {}
        if target.source is None or not target.demotes:
            return taken
        for pool, pages in self.entitlements(target).items():
            block, tail = divmod(self.frontiers(target)[pool], pk.PAGE_TOKENS)
            if tail and self._claim(target, pool, pages) == self.available(pool) + 1:
                page = target.source.spaces[pool].pages[block]
                if page in [idle for idle, _ in self.idle_pages(target.source, pool)]:
                    taken[pool] = page
        return taken

    def _claim(self, target: Target, pool: str, pages: int) -> int:
        """Return the page groups that an activation claims: those that it does not inherit, and those it restores."""
        inherited = self.inherited_pages(target, pool)
        own = [] if target.source is None else target.source.spaces[pool].pages[:inherited]
        return pages - inherited + sum(not page.is_on_device for page in own)

    def _columns(self, continuation: ContinuationModel | None, pool: str, page: Page) -> int:
        """Return the committed columns of a page of a continuation."""
        assert continuation is not None, "no continuation has the page"
        space = continuation.spaces[pool]
        return min(space.frontier - space.pages.index(page) * pk.PAGE_TOKENS, pk.PAGE_TOKENS)

    def _leave_device(self, page: Page, pool: str) -> None:
        assert page.lease is not None, "a page was demoted before it was observed"
        self.retired[f"{pool}.lease"].add(page.lease)
        page.is_on_device, page.page_id, page.lease = False, -1, 0

    # ---- activation -------------------------------------------------------------------------------

    def target_errors(self, target: Target) -> set[str]:
        """Errors of a target: counts, a stale source or one without state, a frontier beyond the source's."""
        source = target.source
        if target.prompt < (source is None) or target.output < 0:
            return {"MisuseError"}
        if target.demotes and (source is None or not target.keeps):
            return {"MisuseError"}
        if source is None:
            return set() if target.frontier is None and target.keeps else {"MisuseError"}
        if not source.is_live:
            return {"StaleHandle"}
        others = [copy.target for copy in self.restoring if copy.target and copy.target.source is source]
        if others and not (target.keeps and all(other.keeps for other in others)):
            return {"MisuseError"}
        frontiers = self.frontiers(target)
        if source.state is None or frontiers.keys() != self.pools.keys():
            return {"MisuseError"}
        main = frontiers["main"]
        is_held = all(0 <= tokens <= min(source.spaces[pool].frontier, main) for pool, tokens in frontiers.items())
        return set() if is_held and main else {"MisuseError"}

    def frontiers(self, target: Target) -> dict[str, int]:
        """Return the frontier that the target takes from its source in each pool, as far as it names pools."""
        if target.source is None:
            return dict.fromkeys(self.pools, 0)
        if target.frontier is None:
            return {pool: space.frontier for pool, space in target.source.spaces.items()}
        return {"main": target.frontier} if isinstance(target.frontier, int) else dict(target.frontier)

    def entitlements(self, target: Target) -> dict[str, int]:
        """Return pages per pool: all of them, or with growth the pages of window and cushion.  (C9.2)"""
        full = self.full_entitlements(target)
        if self.growth is None:
            return full
        near = self.total_tokens(target) - target.output + min(target.output, self.growth.window_tokens)
        return {pool: min(pages, pages_of(near) + self.growth.cushion_pages) for pool, pages in full.items()}

    def full_entitlements(self, target: Target) -> dict[str, int]:
        """Return pages per pool: the budget and the pool's lead, at most L.  (C9.2, C5.6)"""
        ceiling, total = pages_of(self.max_context), self.total_tokens(target)
        return {name: min(pages_of(total + shape.lead_tokens), ceiling) for name, shape in self.pools.items()}

    def total_tokens(self, target: Target) -> int:
        """Return the tokens from the source, prompt and output together."""
        return self.frontiers(target)["main"] + target.prompt + target.output

    def inherited_pages(self, target: Target, pool: str) -> int:
        """Return how many pages of the source become members: full pages, and a partial tail of a Move, unshared."""
        if target.source is None:
            return 0
        full, tail = divmod(self.frontiers(target)[pool], pk.PAGE_TOKENS)
        if target.keeps or not tail:
            return full
        return full + (self.references(target.source.spaces[pool].pages[full], pool) == 1)

    def refusals(self, target: Target) -> tuple[list[RightRefusal], bool]:
        """Return every right refusal, and whether the call must be refused.

        A moved source returns pages.  The contract does not say whether the same activation may reserve them, so a
        target that fits only with them may be granted or refused.
        """
        total = self.total_tokens(target)
        if total > self.max_context:
            ceiling = pages_of(self.max_context)
            return [RightRefusal("main", pages_of(total), ceiling, "context", forever=True)], True
        refusals, is_sure = [], False
        if len(self.rows) == self.max_concurrency:
            refusals.append(RightRefusal("rows", 1, 0, "rows"))
            is_sure = True
        taken = self.taken_tails(target)
        for pool, busy in self.busy_pages(target).items():
            refusals.append(RightRefusal(pool, busy, 0, "copying"))
            is_sure = True
        for pool, pages in self.entitlements(target).items():
            inherited, available, returned = self.inherited_pages(target, pool), self.available(pool), 0
            claim = self._claim(target, pool, pages) - (pool in taken)
            first = claim - (pages - inherited - (pool in taken))  # restored pages, and a copied tail
            first += inherited * pk.PAGE_TOKENS < self.frontiers(target)[pool] and pool not in taken
            if target.source is not None and not target.keeps:
                rest = target.source.spaces[pool].pages[inherited:]
                returned = sum(self.references(page, pool) == 1 and page.is_on_device for page in rest)
            if claim > available or first > available:
                refusals.append(RightRefusal(pool, None if returned else max(claim, first), available, "pages"))
                is_sure = is_sure or claim > available + returned or first > available
        backups = self.backups(target)
        if sum(self.pools[pool].record_bytes for pool in backups) > self.host_bytes_free():
            refusals += [RightRefusal(pool, 1, None, "host", forever=self.host_bytes < self.pools[pool].record_bytes)
                         for pool in backups]  # fmt: skip
            is_sure = True
        elif len(backups) > 1:
            refusals += [RightRefusal(pool, 1, None, "host") for pool in backups]
        return refusals, is_sure

    def move_fits(self, target: Target, answer: bool) -> bool:
        """Return whether a refused Fork would be honoured as a Move; `answer` where either is right.  (C10.9)"""
        moved = replace(target, keeps=False, demotes=False)
        if target.source is None or not target.keeps or self.target_errors(moved):
            return False
        refusals, is_sure = self.refusals(moved)
        return not refusals if is_sure or not refusals else answer

    def busy_pages(self, target: Target) -> dict[str, int]:
        """Return, per pool, pages that an activation needs and that another copy holds; only pools with some.  (C7.4)

        A page on the Host that another activation restores, and the pages of a moved source that is being demoted.
        """
        busy: dict[str, int] = {}
        for pool in self.pools if target.source is not None and self.copies else ():
            assert target.source is not None, "it has a source"
            inherited = self.inherited_pages(target, pool)
            for block, page in enumerate(target.source.spaces[pool].pages):
                is_restored = block < inherited and not page.is_on_device
                is_moved = not target.keeps and self.is_demoting(target.source)
                if self.pins(page, pool) and (is_restored or is_moved):
                    busy[pool] = busy.get(pool, 0) + 1
        return busy

    def activate(self, name: int, target: Target, row: int, claims: Mapping[str, Claim]) -> SequenceModel:
        """Add the sequence, in the row that the store chose; `claims` are of the moment when it was granted."""
        assert 0 <= row < self.max_concurrency, f"row {row} of {self.max_concurrency}"
        assert row not in self.rows, f"row {row} is leased twice"
        spaces: dict[str, Space] = {}
        left: list[tuple[str, Page]] = []  # pages that a moved source loses
        for pool, claim in claims.items():
            spaces[pool] = space = Space(claim.entitlement, list(claim.kept), claim.frontier, full=claim.full)
            if target.source is None:
                continue
            old = target.source.spaces[pool]
            for page in space.pages:
                if not page.is_on_device:
                    page.is_on_device, page.page_id, page.lease = True, None, None
            if claim.tail is not None:
                space.pages.append(Page.new(claim.tail.tags))
                if claim.is_taken:
                    claim.tail.host = max(claim.tail.host or 0, self._columns(target.source, pool, claim.tail))
                    self._leave_device(claim.tail, pool)
            elif space.frontier % pk.PAGE_TOKENS and space.frontier < old.frontier:
                self._renew_content(space.pages[-1], pool, 0)  # moved, and cut inside (C7.6)
            left += [(pool, page) for page in old.pages]
        sequence = SequenceModel(name, row, self.total_tokens(target), spaces)
        self.sequences.append(sequence)
        if target.source is not None and not target.keeps:
            target.source.is_live = False
            self._retire(left)
        return sequence

    # ---- continuations ----------------------------------------------------------------------------

    def snapshot_refusals(self, sequence: SequenceModel) -> list[RightRefusal]:
        """Return every right refusal of a snapshot; empty means that it is granted.  (C10.6)"""
        refusals = []
        for pool, space in sequence.spaces.items():
            provisional = len(space.pages) - pages_of(space.frontier)
            if provisional:
                refusals.append(RightRefusal(pool, provisional, 0, "provisional"))
            elif space.frontier % pk.PAGE_TOKENS and not self.available(pool):
                refusals.append(RightRefusal(pool, 1, 0, "pages"))
        return refusals

    def retain_errors(
        self, sequence: SequenceModel, state: object = pk.STATE_FOLLOWS, frontier: Frontier = None
    ) -> set[str]:
        """Errors of keeping the pages of a sequence: no pool may lead Main, and Main must have tokens.  (C13.2)"""
        errors = self.boundary_errors([sequence]) | self.state_errors(sequence, state, frontier)
        main = sequence.spaces["main"].frontier
        if not main or any(space.frontier > main for space in sequence.spaces.values()):
            errors.add("MisuseError")
        return errors

    def attach_errors(self, continuation: ContinuationModel, state: object, frontier: Frontier) -> set[str]:
        """Errors of attaching a state to a continuation."""
        return self.claim_errors(continuation) | self.state_errors(continuation, state, frontier)

    def state_errors(self, holder: Holder, state: object, frontier: Frontier) -> set[str]:
        """Errors of a state: none at all, or a pool that is behind the frontier the state belongs to.  (C2.2, C9.8)"""
        if state is None:
            return {"MisuseError"}
        if state is pk.STATE_FOLLOWS:
            return set() if frontier is None else {"MisuseError"}
        named = self.state_frontier(holder, state, frontier)
        if named.keys() != self.pools.keys() or not named["main"]:
            return {"MisuseError"}
        is_held = all(0 <= tokens <= min(holder.spaces[pool].frontier, named["main"]) for pool, tokens in named.items())
        return set() if is_held else {"MisuseError"}

    def state_frontier(self, holder: Holder, state: object, frontier: Frontier) -> dict[str, int]:
        """Return the frontier of each pool that a state belongs to: as named, one for all, or Main's for all."""
        if state is pk.STATE_FOLLOWS:
            return {}
        if isinstance(frontier, Mapping):
            return dict(frontier)
        return dict.fromkeys(self.pools, holder.spaces["main"].frontier if frontier is None else frontier)

    def attach(self, continuation: ContinuationModel, state: object, frontier: Frontier) -> None:
        """Set the state of a continuation, or take it back."""
        continuation.state_frontier = self.state_frontier(continuation, state, frontier)
        continuation.state = None if state is pk.STATE_FOLLOWS else state

    def snapshot(
        self, name: int, number: int, sequence: SequenceModel, state: object, frontier: Frontier
    ) -> ContinuationModel:
        """Share full pages; the checkpoint gets a copy of a partial tail.  (C10.6)"""
        spaces = {}
        for pool, space in sequence.spaces.items():
            full, tail = divmod(space.frontier, pk.PAGE_TOKENS)
            pages = space.pages[:full]
            if tail:
                pages.append(Page.new(space.pages[full].tags))
            spaces[pool] = Space(0, pages, space.frontier, space.frontier)
        return self._add_continuation(name, number, spaces, state, frontier)

    def retain(
        self, name: int, number: int, sequence: SequenceModel, state: object, frontier: Frontier
    ) -> ContinuationModel:
        """Trim, return reservation and row, and keep the pages.  (C9.8)"""
        spaces = {}
        for pool, space in sequence.spaces.items():
            self._unmap(sequence, pool, pages_of(space.frontier))
            spaces[pool] = Space(0, space.pages, space.frontier, space.frontier)
        sequence.is_live = False
        return self._add_continuation(name, number, spaces, state, frontier)

    def release(self, holder: Holder) -> None:
        """End a sequence or continuation and return its pages, reservation and row; pages that others hold stay."""
        holder.is_live = False
        self._retire([(pool, page) for pool, space in holder.spaces.items() for page in space.pages])

    def protect_errors(self, continuation: ContinuationModel, pool: str, tokens: int) -> set[str]:
        """Errors of setting a protected frontier.  (C7.8)"""
        errors = self.claim_errors(continuation)
        if pool not in self.pools or not 0 <= tokens <= continuation.spaces[pool].frontier:
            errors.add("MisuseError")
        return errors

    def protect(self, continuation: ContinuationModel, pool: str, tokens: int) -> None:
        """Set a protected frontier, up or down."""
        continuation.spaces[pool].protected = tokens

    # ---- units ------------------------------------------------------------------------------------

    def batch_errors(self, sequences: list[SequenceModel]) -> set[str]:
        """Errors of selecting sequences, each once."""
        errors = self.stale_errors(sequences)
        if not sequences or len({sequence.name for sequence in sequences}) != len(sequences):
            errors.add("MisuseError")
        return errors

    def begin_errors(self, sequences: list[SequenceModel], columns: Mapping[str, Counts]) -> set[str]:
        """Errors of a unit: stale handles, rows in flight, counts, positions from S on, entitlement."""
        errors = self.boundary_errors(sequences)
        if not columns:
            errors.add("MisuseError")
        for pool, argument in columns.items():
            if pool not in self.pools or not _are_counts(argument, len(sequences)):
                errors.add("MisuseError")
                continue
            for sequence, count in zip(sequences, _counts(argument, len(sequences)), strict=True):
                end = sequence.spaces[pool].frontier + count
                if end > self.max_context:
                    errors.add("MisuseError")
                if pages_of(end) > sequence.spaces[pool].entitlement:
                    errors.add("EntitlementExceeded")
        return errors

    def begin(self, name: int, sequences: list[SequenceModel], columns: Mapping[str, Counts]) -> tuple[UnitModel, int]:
        """Map, freeze, and return the unit with the number of table slices to publish."""
        counts = {pool: _counts(argument, len(sequences)) for pool, argument in columns.items()}
        firsts = {pool: [sequence.spaces[pool].frontier for sequence in sequences] for pool in columns}
        slices = 0
        for pool in columns:
            for sequence, first, count in zip(sequences, firsts[pool], counts[pool], strict=True):
                slices += self.ensure(sequence, pool, first + count)
        unit = UnitModel(name, list(sequences), counts, firsts)
        for sequence in sequences:
            sequence.unit = unit
        self.units.append(unit)
        return unit, slices

    def write(self, unit: UnitModel) -> dict[str, list[tuple[int, int, npt.NDArray[np.uint16]]]]:
        """Tag every column that a unit may write; return (row, first position, tags) of each entry, per pool."""
        written: dict[str, list[tuple[int, int, npt.NDArray[np.uint16]]]] = {}
        for pool, counts in unit.columns.items():
            written[pool] = []
            for sequence, first, count in zip(unit.sequences, unit.firsts[pool], counts, strict=True):
                tags = np.arange(self.tags_next, self.tags_next + count).astype(np.uint16)
                self.tags_next += count
                written[pool].append((sequence.row, first, tags))
                pages, position = sequence.spaces[pool].pages, first
                while position < first + count:
                    block, offset = divmod(position, pk.PAGE_TOKENS)
                    end = min((block + 1) * pk.PAGE_TOKENS, first + count)
                    pages[block].tags[offset : offset + end - position] = tags[position - first : end - first]
                    position = end
        return written

    def commit_errors(self, unit: UnitModel, accepted: Mapping[str, Counts]) -> set[str]:
        """Errors of a commit: an ended unit, a pool it did not write, counts it did not write."""
        if not unit.is_live:
            return {"MisuseError"}
        entries = len(unit.sequences)
        for pool, argument in accepted.items():
            if pool not in unit.columns or not _are_counts(argument, entries):
                return {"MisuseError"}
            pairs = zip(_counts(argument, entries), unit.columns[pool], strict=True)
            if any(count > written for count, written in pairs):
                return {"MisuseError"}
        return set()

    def commit(self, unit: UnitModel, accepted: Mapping[str, Counts]) -> None:
        """Advance the frontiers of the pools that are named, and end the unit."""
        for pool, argument in accepted.items():
            for sequence, count in zip(unit.sequences, _counts(argument, len(unit.sequences)), strict=True):
                sequence.spaces[pool].frontier += count
        self.end(unit)

    def end_errors(self, unit: UnitModel) -> set[str]:
        """Errors of ending a unit: it has ended."""
        return set() if unit.is_live else {"MisuseError"}

    def end(self, unit: UnitModel) -> None:
        """Thaw the rows; sequences that were aborted in flight end now."""
        unit.is_live = False
        for sequence in unit.sequences:
            sequence.unit = None
            if sequence.is_aborting:
                self.release(sequence)

    # ---- between units ----------------------------------------------------------------------------

    def begin_round(self, sequences: list[SequenceModel]) -> list[SequenceModel]:
        """Extend every row until it is behind its cushion again, in batch order; return rows that are not.  (C9.2)"""
        short = []
        for sequence in sequences:
            while self.is_thin(sequence) and self._extend(sequence):
                pass
            if self.is_thin(sequence):
                short.append(sequence)
        return short

    def covered_columns(self, sequence: SequenceModel, pool: str, *, forced: bool) -> int:
        """Return the columns that a row may still write below S, those of a forced span or not.  (C9.2)"""
        space = sequence.spaces[pool]
        columns = min(space.entitlement * pk.PAGE_TOKENS, self.max_context) - space.frontier
        return columns if forced else max(columns - self.forced_tokens, 0)

    def is_thin(self, sequence: SequenceModel) -> bool:
        """Return whether less than the cushion is left in some pool that may still grow."""
        if self.growth is None:
            return False
        cushion = self.growth.cushion_pages
        return any(
            space.entitlement < min(pages_of(space.frontier) + cushion, space.full)
            for space in sequence.spaces.values()
        )

    def _extend(self, sequence: SequenceModel) -> bool:
        """Add the first rung that every pool grants, none of them beyond its full entitlement."""
        assert self.growth is not None, "nothing grows"
        for rung in self.growth.ladder_pages:
            gained = {pool: min(rung, space.full - space.entitlement) for pool, space in sequence.spaces.items()}
            if all(pages <= self.available(pool) for pool, pages in gained.items()):
                for pool, pages in gained.items():
                    sequence.spaces[pool].entitlement += pages
                return True
        return False

    def ensure_errors(self, sequence: SequenceModel, pool: str, tokens: int) -> set[str]:
        """Errors of mapping ahead, which a row in flight may do too."""
        errors = self.stale_errors([sequence])
        if pool not in self.pools or tokens < 0:
            errors.add("MisuseError")
        if pool in self.pools and pages_of(tokens) > sequence.spaces[pool].entitlement:
            errors.add("EntitlementExceeded")
        return errors

    @staticmethod
    def ensure(sequence: SequenceModel, pool: str, tokens: int) -> int:
        """Map positions [0, tokens); return how many table slices are to be published."""
        pages = sequence.spaces[pool].pages
        gained = pages_of(tokens) - len(pages)
        pages.extend(Page.new() for _ in range(gained))
        return int(gained > 0)

    def trim_errors(self, sequences: list[SequenceModel], pool: str, provisional: Counts) -> set[str]:
        """Errors of a trim: stale handles, rows in flight, an unknown pool, counts."""
        errors = self.boundary_errors(sequences)
        if pool not in self.pools or not _are_counts(provisional, len(sequences)):
            errors.add("MisuseError")
        return errors

    def trim(self, sequences: list[SequenceModel], pool: str, provisional: Counts) -> int:
        """Keep the pages of max(committed, provisional); return how many went back to their reservation."""
        return sum(
            self._unmap(sequence, pool, pages_of(sequence.spaces[pool].frontier + count))
            for sequence, count in zip(sequences, _counts(provisional, len(sequences)), strict=True)
        )

    def truncate_errors(self, holder: Holder, pool: str, tokens: int) -> set[str]:
        """Errors of a truncate: stale, in flight, another pool, beyond [protected, frontier], inside a shared page."""
        errors = self.boundary_errors([holder]) if isinstance(holder, SequenceModel) else self.cut_errors(holder)
        space = holder.spaces.get(pool)
        if space is None or not space.protected <= tokens <= space.frontier:
            errors.add("MisuseError")
        elif isinstance(holder, ContinuationModel) and pool == "main" and not tokens:
            errors.add("MisuseError")  # nothing could be resumed from what is left
        elif not errors:
            block, tail = divmod(tokens, pk.PAGE_TOKENS)
            is_inside = tail > 0 and tokens < space.frontier and self.references(space.pages[block], pool) > 1
            lost = self.shared_behind(holder, pool, tokens)  # an active space needs another page for each
            if is_inside or (isinstance(holder, SequenceModel) and lost > self.available(pool)):
                errors.add("MisuseError")
        return errors

    def shared_behind(self, holder: Holder, pool: str, tokens: int) -> int:
        """Return how many whole pages behind a cut other spaces hold too."""
        return sum(self.references(page, pool) > 1 for page in holder.spaces[pool].pages[pages_of(tokens) :])

    def truncate(self, holder: Holder, pool: str, tokens: int) -> int:
        """Lower the frontier; the page that is cut inside has other content from now on; then trim.

        A state ends with a token that it belongs to (C2.2).  Returns how many pages stay with other spaces.
        """
        space = holder.spaces[pool]
        shared = self.shared_behind(holder, pool, tokens)
        if isinstance(holder, ContinuationModel) and tokens < holder.state_frontier.get(pool, 0):
            self.attach(holder, pk.STATE_FOLLOWS, None)
        if tokens < space.frontier and tokens % pk.PAGE_TOKENS:
            self._renew_content(space.pages[tokens // pk.PAGE_TOKENS], pool, tokens % pk.PAGE_TOKENS)
        space.frontier = tokens
        self._unmap(holder, pool, pages_of(tokens))
        return shared

    def abort(self, sequence: SequenceModel) -> bool:
        """End now, or with the unit in flight; return whether now."""
        if sequence.unit is not None:
            sequence.is_aborting = True
            return False
        self.release(sequence)
        return True

    # ---- helpers ----------------------------------------------------------------------------------

    def _add_continuation(
        self, name: int, number: int, spaces: dict[str, Space], state: object, frontier: Frontier
    ) -> ContinuationModel:
        continuation = ContinuationModel(name, number, spaces, None)
        self.attach(continuation, state, frontier)
        self.continuations.append(continuation)
        return continuation

    @staticmethod
    def stale_errors(holders: Sequence[Holder]) -> set[str]:
        """Errors of sequences or continuations that have ended."""
        return set() if all(holder.is_live for holder in holders) else {"StaleHandle"}

    def boundary_errors(self, sequences: list[SequenceModel]) -> set[str]:
        """Errors of sequences that have ended or are in flight."""
        is_in_flight = any(sequence.unit is not None for sequence in sequences)
        return self.stale_errors(sequences) | ({"UnitInFlight"} if is_in_flight else set())

    def _unmap(self, holder: Holder, pool: str, pages_min: int) -> int:
        """Unmap all pages but the first `pages_min`; return how many."""
        pages = holder.spaces[pool].pages
        unmapped = pages[pages_min:]
        del pages[pages_min:]
        self._retire([(pool, page) for page in unmapped])
        return len(unmapped)

    def _retire(self, pages: list[tuple[str, Page]]) -> None:
        """Remember the serials of pages that no space holds any more; they must not come back.  (C6.1, C7.3)"""
        held = {id(page) for pool in self.pools for space in self.spaces(pool) for page in space.pages}
        for pool, page in pages:
            if id(page) not in held:
                for what in ("lease", "identity", "content"):
                    value = getattr(page, what)
                    assert value is not None, f"pool {pool}: a page was unmapped before it was observed"
                    self.retired[f"{pool}.{what}"].add(value)

    def _renew_content(self, page: Page, pool: str, columns: int) -> None:
        """Cut a page: its content is another, and only a page on the Host alone keeps its Host replica."""
        assert page.content is not None, "a committed page was never observed"
        self.retired[f"{pool}.content"].add(page.content)
        page.content, page.host = None, None if page.is_on_device else columns


def _are_counts(argument: Counts, entries: int) -> bool:
    """Return whether an argument is a legal count, or one for each entry."""
    has_form = isinstance(argument, int) or len(argument) == entries
    return has_form and all(0 <= count <= COLUMNS_MAX for count in _counts(argument, entries))


def _counts(argument: Counts, entries: int) -> list[int]:
    """Return one count for each entry."""
    return [argument] * entries if isinstance(argument, int) else list(argument)
