"""A slow, obvious model of what a store shows: lists, dicts and plain integers.  (C5 to C13, C16)

It is written from the contract, apart from the code under test, of which it imports public names only.  It says for
each call which errors are right (none: the call must succeed), what the call answers, and what every observable must
be afterwards.  Pages are objects, and two spaces that share a page hold the same object, so references are counted by
looking.  The model does not predict which ids a store hands out: it learns them when they first appear, and then
demands that they are in range, distinct, and stable for as long as they are mapped.

    errors = model.begin_errors(...)     names of acceptable errors; empty means that the call must succeed
    answer = model.begin(...)            the expected answer; the model moves on
    model.compare(inspection)            every observable, `model_view.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Wanted = int | Sequence[int]
Frontier = int | Mapping[str, int] | None

COLUMNS_MAX = (1 << 30) - 1


def pages_of(tokens: int) -> int:
    """Return how many pages hold that many tokens."""
    return -(-tokens // pk.PAGE_TOKENS)


@dataclass(frozen=True)
class PoolShape:
    """What the model must know of a pool: its pages, and how far a row may lead its budget in it."""

    capacity: int
    lead_tokens: int


@dataclass(frozen=True)
class GrowthShape:
    """What the model must know of lease growth: its window, and the next launch with one forced span.  (C9.2)"""

    window_tokens: int
    widest_tokens: int

    @property
    def cushion_pages(self) -> int:
        """Pages behind the window that a row which was not extended runs on."""
        return pages_of(self.widest_tokens) + 1

    @property
    def ladder_pages(self) -> list[int]:
        """What a round tries to add: the window, then less of it."""
        return sorted({pages_of(min(tokens, self.window_tokens)) for tokens in (self.window_tokens, 128, 64)})[::-1]


@dataclass(eq=False, slots=True)
class Page:
    """One page that belongs to a space, as observed; None until it is observed for the first time.

    Attributes:
        logical, page_id: which descriptor, and which page group.
        lease, identity, content: serial of the page group, generation of the descriptor, content epoch.
        tags: (64,) uint16, what was last written into each column.
    """

    tags: npt.NDArray[np.uint16]
    logical: int | None = None
    page_id: int | None = None
    lease: int | None = None
    identity: int | None = None
    content: int | None = None

    @classmethod
    def new(cls, tags: npt.NDArray[np.uint16] | None = None) -> Page:
        """Return a page that nothing was observed of."""
        return cls(np.zeros(pk.PAGE_TOKENS, np.uint16) if tags is None else tags.copy())


@dataclass(eq=False)
class Space:
    """One address space: pages it is entitled to, pages that belong to it, tokens committed and protected.

    Attributes:
        full: pages that its entitlement may grow to; the entitlement itself without lease growth.
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
    is_active: bool = True
    is_aborting: bool = False
    unit: UnitModel | None = None


@dataclass(eq=False)
class ContinuationModel:
    """One retained continuation, until it is released or moved; `number` is in its handle."""

    name: int
    number: int
    spaces: dict[str, Space]
    state: object
    is_current: bool = True


@dataclass(eq=False)
class UnitModel:
    """One unit: its sequences in batch order and the columns each may write, per pool."""

    name: int
    sequences: list[SequenceModel]
    columns: dict[str, list[int]]
    firsts: dict[str, list[int]]
    is_open: bool = True


@dataclass(frozen=True)
class Target:
    """What an activation asks for."""

    prompt: int
    output: int
    source: ContinuationModel | None = None
    frontier: Frontier = None
    keeps: bool = True


@dataclass(frozen=True)
class RightRefusal:
    """A right answer of a refused call; `needed` lists the numbers that are right, all when it is empty."""

    pool: str
    needed: frozenset[int]
    available: int
    reason: str
    forever: bool = False

    def is_told_by(self, refusal: pk.Refusal) -> bool:
        """Say whether a store's refusal is this one."""
        told = (refusal.pool, refusal.available, refusal.reason, refusal.forever)
        is_same = told == (self.pool, self.available, self.reason, self.forever)
        return is_same and (not self.needed or refusal.needed in self.needed)


class LedgerModel:
    """What a store with these pools shows."""

    def __init__(
        self, pools: Mapping[str, PoolShape], *, max_context: int, max_concurrency: int,
        growth: GrowthShape | None = None,
    ) -> None:  # fmt: skip
        self.pools = dict(pools)
        self.growth = growth
        self.max_context = max_context
        self.max_concurrency = max_concurrency
        self.sequences: list[SequenceModel] = []
        self.continuations: list[ContinuationModel] = []
        self.units: list[UnitModel] = []
        self.retired: dict[str, set[int]] = {
            f"{pool}.{what}": set() for pool in pools for what in ("lease", "identity", "content")
        }
        self.tags_next = 1

    # ---- what is ----------------------------------------------------------------------------------

    @property
    def active(self) -> list[SequenceModel]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.is_active]

    @property
    def retained(self) -> list[ContinuationModel]:
        """Continuations that were neither released nor moved."""
        return [continuation for continuation in self.continuations if continuation.is_current]

    @property
    def open_units(self) -> list[UnitModel]:
        """Units in flight."""
        return [unit for unit in self.units if unit.is_open]

    def spaces(self, pool: str) -> list[Space]:
        """Return every space of a pool, active ones first."""
        active = [sequence.spaces[pool] for sequence in self.active]
        return active + [continuation.spaces[pool] for continuation in self.retained]

    def references(self, page: Page, pool: str) -> int:
        """Return how many spaces hold a page."""
        return sum(page in space.pages for space in self.spaces(pool))

    def allocated(self, pool: str) -> int:
        """Return how many pages belong to some space, each counted once.  (C6.4)"""
        return len({id(page) for space in self.spaces(pool) for page in space.pages})

    def reserved(self, pool: str) -> int:
        """Return what active spaces may still map."""
        spaces = [sequence.spaces[pool] for sequence in self.active]
        return sum(space.entitlement - len(space.pages) for space in spaces)

    def available(self, pool: str) -> int:
        """Return what anyone may still reserve."""
        return self.pools[pool].capacity - self.allocated(pool) - self.reserved(pool)

    # ---- activation -------------------------------------------------------------------------------

    def target_errors(self, target: Target) -> set[str]:
        """Errors of a target: counts, a stale source, one without state, a frontier it does not hold."""
        source = target.source
        if target.prompt < (source is None) or target.output < 0:
            return {"MisuseError"}
        if source is None:
            return set() if target.frontier is None and target.keeps else {"MisuseError"}
        if not source.is_current:
            return {"StaleHandle"}
        frontiers = self.frontiers(target)
        if source.state is None or frontiers.keys() != self.pools.keys():
            return {"MisuseError"}
        main = frontiers["main"]
        is_held = all(0 <= tokens <= min(source.spaces[pool].frontier, main) for pool, tokens in frontiers.items())
        return set() if is_held and main else {"MisuseError"}

    def frontiers(self, target: Target) -> dict[str, int]:
        """Return where the target begins in each pool, as far as it says."""
        if target.source is None:
            return dict.fromkeys(self.pools, 0)
        if target.frontier is None:
            return {pool: space.frontier for pool, space in target.source.spaces.items()}
        return {"main": target.frontier} if isinstance(target.frontier, int) else dict(target.frontier)

    def entitlements(self, target: Target) -> dict[str, int]:
        """Return pages per pool: all of them, or with growth those of the window and the cushion.  (C9.2)"""
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
        """Return what comes from the source, prompt and output."""
        return self.frontiers(target)["main"] + target.prompt + target.output

    def kept_pages(self, target: Target, pool: str) -> int:
        """Return how many pages of the source become members: full ones, and a partial tail that moves alone."""
        if target.source is None:
            return 0
        full, tail = divmod(self.frontiers(target)[pool], pk.PAGE_TOKENS)
        if target.keeps or not tail:
            return full
        return full + (self.references(target.source.spaces[pool].pages[full], pool) == 1)

    def refusals(self, target: Target) -> tuple[list[RightRefusal], bool]:
        """Return every right answer of a refusal, and whether the call must be refused.

        A moved source gives pages back.  Whether a store takes them into the reservation of the same activation is
        not said, so a target that fits with them alone may be granted or refused.
        """
        total = self.total_tokens(target)
        if total > self.max_context:
            needed = frozenset({pages_of(total)})
            return [RightRefusal("main", needed, pages_of(self.max_context), "context", forever=True)], True
        found, is_sure = [], False
        if len(self.active) == self.max_concurrency:
            found.append(RightRefusal("rows", frozenset({1}), 0, "rows"))
            is_sure = True
        for pool, pages in self.entitlements(target).items():
            kept, available, given = self.kept_pages(target, pool), self.available(pool), 0
            is_copied = kept * pk.PAGE_TOKENS < self.frontiers(target)[pool]
            if target.source is not None and not target.keeps:
                given = sum(self.references(page, pool) == 1 for page in target.source.spaces[pool].pages[kept:])
            claim = pages - kept
            if claim > available or is_copied > available:
                right = frozenset({claim}) if not given else frozenset()
                found.append(RightRefusal(pool, right, available, "pages"))
                is_sure = is_sure or claim > available + given
        return found, is_sure

    def activate(self, name: int, target: Target, row: int) -> SequenceModel:
        """Add the sequence that the store put in `row`."""
        assert 0 <= row < self.max_concurrency, f"row {row} of {self.max_concurrency}"
        assert row not in [sequence.row for sequence in self.active], f"row {row} is leased twice"
        spaces: dict[str, Space] = {}
        left: list[tuple[str, Page]] = []
        full = self.full_entitlements(target)
        for pool, entitlement in self.entitlements(target).items():
            spaces[pool] = space = Space(entitlement, frontier=self.frontiers(target)[pool], full=full[pool])
            if target.source is None:
                continue
            old = target.source.spaces[pool]
            kept = self.kept_pages(target, pool)
            space.pages = old.pages[:kept]
            if kept * pk.PAGE_TOKENS < space.frontier:
                space.pages.append(Page.new(old.pages[kept].tags))
            elif space.frontier % pk.PAGE_TOKENS and space.frontier < old.frontier:
                self._renew_content(space.pages[-1], pool)  # moved, and cut inside (C7.6)
            left += [(pool, page) for page in old.pages]
        sequence = SequenceModel(name, row, self.total_tokens(target), spaces)
        self.sequences.append(sequence)
        if target.source is not None and not target.keeps:
            target.source.is_current = False
            self._retire(left)
        return sequence

    # ---- continuations ----------------------------------------------------------------------------

    def snapshot_refusals(self, sequence: SequenceModel) -> list[RightRefusal]:
        """Return every right answer of a refused snapshot; empty: it is granted.  (C10.6)"""
        found = []
        for pool, space in sequence.spaces.items():
            provisional = len(space.pages) - pages_of(space.frontier)
            if provisional:
                found.append(RightRefusal(pool, frozenset({provisional}), 0, "provisional"))
            elif space.frontier % pk.PAGE_TOKENS and not self.available(pool):
                found.append(RightRefusal(pool, frozenset({1}), 0, "pages"))
        return found

    def retain_errors(self, sequence: SequenceModel) -> set[str]:
        """Errors of keeping what a sequence has: none may lead Main, and there must be something.  (C13.2)"""
        errors = self.finish_errors(sequence)
        main = sequence.spaces["main"].frontier
        if not main or any(space.frontier > main for space in sequence.spaces.values()):
            errors.add("MisuseError")
        return errors

    def snapshot(self, name: int, number: int, sequence: SequenceModel, state: object) -> ContinuationModel:
        """Share full pages; the copy of a partial tail is the checkpoint's.  (C10.6)"""
        spaces = {}
        for pool, space in sequence.spaces.items():
            full, tail = divmod(space.frontier, pk.PAGE_TOKENS)
            pages = space.pages[:full]
            if tail:
                pages.append(Page.new(space.pages[full].tags))
            spaces[pool] = Space(0, pages, space.frontier, space.frontier)
        return self._keep(name, number, spaces, state)

    def retain(self, name: int, number: int, sequence: SequenceModel, state: object) -> ContinuationModel:
        """Trim, give up reservation and row, and keep the pages.  (C9.8)"""
        spaces = {}
        for pool, space in sequence.spaces.items():
            self._unmap(sequence, pool, pages_of(space.frontier))
            spaces[pool] = Space(0, space.pages, space.frontier, space.frontier)
        sequence.is_active = False
        return self._keep(name, number, spaces, state)

    def release(self, continuation: ContinuationModel) -> None:
        """Give up every page of a continuation; those that others hold stay."""
        continuation.is_current = False
        self._retire([(pool, page) for pool, space in continuation.spaces.items() for page in space.pages])

    def protect_errors(self, continuation: ContinuationModel, pool: str, tokens: int) -> set[str]:
        """Errors of moving a protected frontier.  (C7.8)"""
        errors = self.handle_errors(continuation)
        if pool not in self.pools or not 0 <= tokens <= continuation.spaces[pool].frontier:
            errors.add("MisuseError")
        return errors

    def protect(self, continuation: ContinuationModel, pool: str, tokens: int) -> None:
        """Set a protected frontier, up or down."""
        continuation.spaces[pool].protected = tokens

    def handle_errors(self, continuation: ContinuationModel) -> set[str]:
        """Errors of any use of a handle."""
        return set() if continuation.is_current else {"StaleHandle"}

    # ---- units ------------------------------------------------------------------------------------

    def batch_errors(self, sequences: list[SequenceModel]) -> set[str]:
        """Errors of selecting sequences, each once."""
        errors = self._stale(sequences)
        if not sequences or len({sequence.name for sequence in sequences}) != len(sequences):
            errors.add("MisuseError")
        return errors

    def begin_errors(self, sequences: list[SequenceModel], columns: Mapping[str, Wanted]) -> set[str]:
        """Errors of a unit: stale handles, rows in flight, counts, positions from S on, entitlement."""
        errors = self._stale(sequences) | self._in_flight(sequences)
        if not columns:
            errors.add("MisuseError")
        for pool, wanted in columns.items():
            counts = self._counts(wanted, len(sequences))
            if pool not in self.pools or counts is None:
                errors.add("MisuseError")
                continue
            for sequence, count in zip(sequences, counts, strict=True):
                end = sequence.spaces[pool].frontier + count
                if end > self.max_context:
                    errors.add("MisuseError")
                if pages_of(end) > sequence.spaces[pool].entitlement:
                    errors.add("EntitlementExceeded")
        return errors

    def begin(self, name: int, sequences: list[SequenceModel], columns: Mapping[str, Wanted]) -> tuple[UnitModel, int]:
        """Map, freeze, and return the unit with the number of table slices to publish."""
        taken: dict[str, list[int]] = {}
        firsts: dict[str, list[int]] = {}
        slices = 0
        for pool, wanted in columns.items():
            counts = self._counts(wanted, len(sequences))
            assert counts is not None, wanted
            taken[pool] = counts
            firsts[pool] = [sequence.spaces[pool].frontier for sequence in sequences]
            for sequence, first, count in zip(sequences, firsts[pool], counts, strict=True):
                slices += self._map(sequence, pool, first + count)
        unit = UnitModel(name, list(sequences), taken, firsts)
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

    def commit_errors(self, unit: UnitModel, accepted: Mapping[str, Wanted]) -> set[str]:
        """Errors of a commit: an ended unit, a pool it did not write, counts it did not write."""
        if not unit.is_open:
            return {"MisuseError"}
        for pool, wanted in accepted.items():
            counts = self._counts(wanted, len(unit.sequences))
            if pool not in unit.columns or counts is None:
                return {"MisuseError"}
            if any(count > written for count, written in zip(counts, unit.columns[pool], strict=True)):
                return {"MisuseError"}
        return set()

    def commit(self, unit: UnitModel, accepted: Mapping[str, Wanted]) -> None:
        """Advance the frontiers of the pools that are named, and end the unit."""
        for pool, wanted in accepted.items():
            counts = self._counts(wanted, len(unit.sequences))
            assert counts is not None, wanted
            for sequence, count in zip(unit.sequences, counts, strict=True):
                sequence.spaces[pool].frontier += count
        self.end(unit)

    def end_errors(self, unit: UnitModel) -> set[str]:
        """Errors of ending a unit: it has ended."""
        return set() if unit.is_open else {"MisuseError"}

    def end(self, unit: UnitModel) -> None:
        """Thaw the rows; sequences that were aborted in flight end now."""
        unit.is_open = False
        for sequence in unit.sequences:
            sequence.unit = None
            if sequence.is_aborting:
                self.finish(sequence)

    # ---- between units ----------------------------------------------------------------------------

    def round_errors(self, sequences: list[SequenceModel]) -> set[str]:
        """Errors of the beginning of a round: stale handles, rows in flight."""
        return self._stale(sequences) | self._in_flight(sequences)

    def begin_round(self, sequences: list[SequenceModel]) -> list[SequenceModel]:
        """Extend every row that has reached its cushion, in batch order; return those that got nothing.  (C9.2)"""
        return [sequence for sequence in sequences if self.is_thin(sequence) and not self._extend(sequence)]

    def is_thin(self, sequence: SequenceModel) -> bool:
        """Say whether less than the cushion is left in some pool that may still grow."""
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
        """Errors of mapping ahead; a row in flight may be mapped beyond its range."""
        errors = self._stale([sequence])
        if pool not in self.pools or not 0 <= tokens <= self.max_context:
            errors.add("MisuseError")
        if pool in self.pools and pages_of(tokens) > sequence.spaces[pool].entitlement:
            errors.add("EntitlementExceeded")
        return errors

    def ensure(self, sequence: SequenceModel, pool: str, tokens: int) -> int:
        """Map positions [0, tokens) and return how many table slices are to be published."""
        return self._map(sequence, pool, tokens)

    def trim_errors(self, sequences: list[SequenceModel], pool: str, provisional: Wanted) -> set[str]:
        """Errors of a trim: stale handles, rows in flight, an unknown pool, counts."""
        errors = self._stale(sequences) | self._in_flight(sequences)
        if pool not in self.pools or self._counts(provisional, len(sequences)) is None:
            errors.add("MisuseError")
        return errors

    def trim(self, sequences: list[SequenceModel], pool: str, provisional: Wanted) -> int:
        """Keep the pages of max(committed, provisional); return how many went back to their reservation."""
        counts = self._counts(provisional, len(sequences))
        assert counts is not None, provisional
        trimmed = 0
        for sequence, count in zip(sequences, counts, strict=True):
            space = sequence.spaces[pool]
            trimmed += self._unmap(sequence, pool, pages_of(space.frontier + count))
        return trimmed

    def truncate_errors(self, holder: SequenceModel | ContinuationModel, pool: str, tokens: int) -> set[str]:
        """Errors of a truncate: stale, in flight, an unknown pool, beyond [protected, frontier], a shared page cut."""
        if isinstance(holder, SequenceModel):
            errors = self._stale([holder]) | self._in_flight([holder])
        else:
            errors = self.handle_errors(holder)
        space = holder.spaces.get(pool)
        if space is None or not space.protected <= tokens <= space.frontier:
            errors.add("MisuseError")
        elif isinstance(holder, ContinuationModel) and pool == "main" and not tokens:
            errors.add("MisuseError")  # nothing could be resumed from what is left
        elif not errors and any(self.references(page, pool) > 1 for page in space.pages[tokens // pk.PAGE_TOKENS :]):
            errors.add("MisuseError")
        return errors

    def truncate(self, holder: SequenceModel | ContinuationModel, pool: str, tokens: int) -> None:
        """Lower the frontier; the page that is cut inside has other content from now on; then trim.

        A state is complete at the frontier of Main that it was attached at, and no other (C2.2).
        """
        space = holder.spaces[pool]
        if isinstance(holder, ContinuationModel) and pool == "main" and tokens < space.frontier:
            holder.state = None
        if tokens < space.frontier and tokens % pk.PAGE_TOKENS:
            self._renew_content(space.pages[tokens // pk.PAGE_TOKENS], pool)
        space.frontier = tokens
        self._unmap(holder, pool, pages_of(tokens))

    def finish_errors(self, sequence: SequenceModel) -> set[str]:
        """Errors of a finish: it has ended, or is in flight."""
        return self._stale([sequence]) | self._in_flight([sequence])

    def finish(self, sequence: SequenceModel) -> None:
        """Give up every page, the reservation and the row."""
        sequence.is_active = False
        self._retire([(pool, page) for pool, space in sequence.spaces.items() for page in space.pages])

    def abort_errors(self, sequence: SequenceModel) -> set[str]:
        """Errors of an abort: it has ended."""
        return self._stale([sequence])

    def abort(self, sequence: SequenceModel) -> bool:
        """End now, or with the unit in flight; say which."""
        if sequence.unit is not None:
            sequence.is_aborting = True
            return False
        self.finish(sequence)
        return True

    # ---- helpers ----------------------------------------------------------------------------------

    def _keep(self, name: int, number: int, spaces: dict[str, Space], state: object) -> ContinuationModel:
        continuation = ContinuationModel(name, number, spaces, state)
        self.continuations.append(continuation)
        return continuation

    @staticmethod
    def _stale(sequences: list[SequenceModel]) -> set[str]:
        return {"StaleHandle"} if any(not sequence.is_active for sequence in sequences) else set()

    @staticmethod
    def _in_flight(sequences: list[SequenceModel]) -> set[str]:
        return {"UnitInFlight"} if any(sequence.unit is not None for sequence in sequences) else set()

    @staticmethod
    def _counts(wanted: Wanted, entries: int) -> list[int] | None:
        """Return one count per entry, or None where the caller gave no such thing."""
        counts = [wanted] * entries if isinstance(wanted, int) else list(wanted)
        if len(counts) != entries or any(not 0 <= count <= COLUMNS_MAX for count in counts):
            return None
        return counts

    @staticmethod
    def _map(sequence: SequenceModel, pool: str, tokens: int) -> int:
        pages = sequence.spaces[pool].pages
        gained = pages_of(tokens) - len(pages)
        pages.extend(Page.new() for _ in range(gained))
        return int(gained > 0)

    def _unmap(self, holder: SequenceModel | ContinuationModel, pool: str, keep: int) -> int:
        pages = holder.spaces[pool].pages
        gone = pages[keep:]
        del pages[keep:]
        self._retire([(pool, page) for page in gone])
        return len(gone)

    def _retire(self, pages: list[tuple[str, Page]]) -> None:
        """Remember what pages that no space holds any more were; it must not come back.  (C6.1, C7.3)"""
        held = {id(page) for pool in self.pools for space in self.spaces(pool) for page in space.pages}
        for pool, page in pages:
            if id(page) not in held:
                for what in ("lease", "identity", "content"):
                    value = getattr(page, what)
                    assert value is not None, f"pool {pool}: a page was unmapped before it was observed"
                    self.retired[f"{pool}.{what}"].add(value)

    def _renew_content(self, page: Page, pool: str) -> None:
        assert page.content is not None, "a committed page was never observed"
        self.retired[f"{pool}.content"].add(page.content)
        page.content = None
