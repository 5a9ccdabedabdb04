"""A slow, obvious model of what the ledgers of a store show: lists, dicts and plain integers.

It is written from the contract, apart from the code under test, of which it imports one constant.  It says for each
call which errors are right (none: the call must succeed), what the call answers, and what every observable must be
afterwards.  It does not predict which page ids a store hands out: it learns them when they first appear, and then
demands that they are in range, distinct, and stable for as long as they are mapped.

    errors = model.begin_errors(...)     names of acceptable errors; empty means that the call must succeed
    answer = model.begin(...)            the expected answer; the model moves on
    model.compare(view)                  every observable, as plain lists

Read next: `tests/host/ledger_fuzz.py`, which drives a store and this model with the same events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagedkv.quantities import PAGE_TOKENS

Wanted = int | Sequence[int]

COLUMNS_MAX = (1 << 30) - 1


def pages_of(tokens: int) -> int:
    """Return how many pages hold that many tokens."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class PoolShape:
    """What the model must know of a pool: its pages, and how far a row may lead its budget in it."""

    capacity: int
    lead_tokens: int


@dataclass
class Page:
    """One mapped page as observed; None until it is observed for the first time."""

    page_id: int | None = None
    lease: int | None = None
    identity: int | None = None
    content: int | None = None


@dataclass
class Space:
    """One address space: pages it is entitled to, pages that belong to it, tokens that are committed."""

    entitlement: int
    pages: list[Page] = field(default_factory=list)
    frontier: int = 0


@dataclass(eq=False)
class SequenceModel:
    """One sequence, from activation to its end."""

    key: int
    row: int
    spaces: dict[str, Space]
    is_active: bool = True
    is_aborting: bool = False
    unit: UnitModel | None = None


@dataclass(eq=False)
class UnitModel:
    """One unit: its sequences in batch order and the columns each may write, per pool."""

    key: int
    sequences: list[SequenceModel]
    columns: dict[str, list[int]]
    firsts: dict[str, list[int]]
    is_open: bool = True


@dataclass(frozen=True)
class PoolView:
    """Everything observable of one pool, as plain lists over rows (and blocks)."""

    allocated: int
    reserved: int
    available: int
    frontier: list[int]
    mapped_end: list[int]
    limit: list[int]
    mirror: list[list[int]]
    leases: list[list[int]]
    identities: list[list[int]]
    contents: list[list[int]]
    committed: list[list[int]]


@dataclass(frozen=True)
class StoreView:
    """Everything observable of a store."""

    pools: dict[str, PoolView]
    active_rows: list[int]
    rows_in_flight: int
    units_in_flight: int


class LedgerModel:
    """What a store with these pools shows."""

    def __init__(self, pools: Mapping[str, PoolShape], *, max_context: int, max_concurrency: int) -> None:
        self.pools = dict(pools)
        self.max_context = max_context
        self.max_concurrency = max_concurrency
        self.sequences: list[SequenceModel] = []
        self.units: list[UnitModel] = []
        self.retired: dict[str, set[int]] = {
            f"{pool}.{what}": set() for pool in pools for what in ("lease", "identity", "content")
        }
        self._key_next = 0

    # ---- what is ----------------------------------------------------------------------------------

    @property
    def active(self) -> list[SequenceModel]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.is_active]

    @property
    def open_units(self) -> list[UnitModel]:
        """Units in flight."""
        return [unit for unit in self.units if unit.is_open]

    def available(self, pool: str) -> int:
        """Return what anyone may still reserve."""
        entitled = sum(sequence.spaces[pool].entitlement for sequence in self.active)
        return self.pools[pool].capacity - entitled

    # ---- activation -------------------------------------------------------------------------------

    def entitlements(self, total_tokens: int) -> dict[str, int]:
        """Return pages per pool: the budget and the pool's lead, at most L."""
        ceiling = pages_of(self.max_context)
        return {name: min(pages_of(total_tokens + shape.lead_tokens), ceiling) for name, shape in self.pools.items()}

    def refusals(self, total_tokens: int) -> list[tuple[str, int, int, bool]]:
        """Return every right answer (pool, needed, available, forever) of a refusal; empty: it is granted."""
        if total_tokens > self.max_context:
            return [("main", pages_of(total_tokens), pages_of(self.max_context), True)]
        found = []
        if len(self.active) == self.max_concurrency:
            found.append(("rows", 1, 0, False))
        for pool, pages in self.entitlements(total_tokens).items():
            if pages > self.available(pool):
                found.append((pool, pages, self.available(pool), False))
        return found

    def activate(self, total_tokens: int, row: int) -> SequenceModel:
        """Add the sequence that the store put in `row`."""
        assert 0 <= row < self.max_concurrency, f"row {row} of {self.max_concurrency}"
        assert row not in [sequence.row for sequence in self.active], f"row {row} is leased twice"
        spaces = {name: Space(pages) for name, pages in self.entitlements(total_tokens).items()}
        sequence = SequenceModel(self._new_key(), row, spaces)
        self.sequences.append(sequence)
        return sequence

    # ---- units ------------------------------------------------------------------------------------

    def batch_errors(self, sequences: list[SequenceModel]) -> set[str]:
        """Errors of selecting sequences, each once."""
        errors = self._stale(sequences)
        if not sequences or len({sequence.key for sequence in sequences}) != len(sequences):
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

    def begin(
        self, sequences: list[SequenceModel], columns: Mapping[str, Wanted]
    ) -> tuple[UnitModel, dict[str, list[tuple[int, int, int]]]]:
        """Map, freeze, and return the unit with the slices (row, first block, count) to publish in each pool."""
        taken: dict[str, list[int]] = {}
        firsts: dict[str, list[int]] = {}
        slices: dict[str, list[tuple[int, int, int]]] = {}
        for pool, wanted in columns.items():
            counts = self._counts(wanted, len(sequences))
            assert counts is not None, wanted
            taken[pool] = counts
            firsts[pool] = [sequence.spaces[pool].frontier for sequence in sequences]
            for sequence, first, count in zip(sequences, firsts[pool], counts, strict=True):
                slices.setdefault(pool, []).extend(self._map(sequence, pool, first + count))
        unit = UnitModel(self._new_key(), list(sequences), taken, firsts)
        for sequence in sequences:
            sequence.unit = unit
        self.units.append(unit)
        return unit, {pool: sorted(gained) for pool, gained in slices.items() if gained}

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

    def ensure_errors(self, sequence: SequenceModel, pool: str, tokens: int) -> set[str]:
        """Errors of mapping ahead; a row in flight may be mapped beyond its range."""
        errors = self._stale([sequence])
        if pool not in self.pools or not 0 <= tokens <= self.max_context:
            errors.add("MisuseError")
        if pool in self.pools and pages_of(tokens) > sequence.spaces[pool].entitlement:
            errors.add("EntitlementExceeded")
        return errors

    def ensure(self, sequence: SequenceModel, pool: str, tokens: int) -> dict[str, list[tuple[int, int, int]]]:
        """Map positions [0, tokens) and return the slice to publish, if one."""
        gained = self._map(sequence, pool, tokens)
        return {pool: gained} if gained else {}

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

    def truncate_errors(self, sequence: SequenceModel, pool: str, tokens: int) -> set[str]:
        """Errors of a truncate: stale, in flight, an unknown pool, a target outside [0, frontier]."""
        errors = self._stale([sequence]) | self._in_flight([sequence])
        if pool not in self.pools or not 0 <= tokens <= sequence.spaces[pool].frontier:
            errors.add("MisuseError")
        return errors

    def truncate(self, sequence: SequenceModel, pool: str, tokens: int) -> None:
        """Lower the frontier; the page that is cut inside has other content from now on; then trim."""
        space = sequence.spaces[pool]
        if tokens < space.frontier and tokens % PAGE_TOKENS:
            cut = space.pages[tokens // PAGE_TOKENS]
            assert cut.content is not None, "a committed page was never observed"
            self.retired[f"{pool}.content"].add(cut.content)
            cut.content = None
        space.frontier = tokens
        self._unmap(sequence, pool, pages_of(tokens))

    def finish_errors(self, sequence: SequenceModel) -> set[str]:
        """Errors of a finish: it has ended, or is in flight."""
        return self._stale([sequence]) | self._in_flight([sequence])

    def finish(self, sequence: SequenceModel) -> None:
        """Give up every page, the reservation and the row."""
        for pool in self.pools:
            self._unmap(sequence, pool, 0)
        sequence.is_active = False

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

    # ---- comparison -------------------------------------------------------------------------------

    def compare(self, view: StoreView) -> None:
        """Assert that the store shows what the model says, and learn ids that appear for the first time."""
        by_row = {sequence.row: sequence for sequence in self.active}
        assert view.active_rows == sorted(by_row), f"active rows {view.active_rows}, model {sorted(by_row)}"
        frozen = sum(1 << row for row, sequence in by_row.items() if sequence.unit is not None)
        assert view.rows_in_flight == frozen, f"rows in flight {view.rows_in_flight:b}, model {frozen:b}"
        in_flight = len(self.open_units)
        assert view.units_in_flight == in_flight, f"units in flight {view.units_in_flight}, model {in_flight}"
        for pool, shown in view.pools.items():
            self._compare_pool(pool, shown, by_row)

    def _compare_pool(self, pool: str, shown: PoolView, by_row: Mapping[int, SequenceModel]) -> None:
        spaces = [sequence.spaces[pool] for sequence in by_row.values()]
        capacity = self.pools[pool].capacity
        allocated = sum(len(space.pages) for space in spaces)
        reserved = sum(space.entitlement for space in spaces) - allocated
        expected = (allocated, reserved, capacity - allocated - reserved)
        got = (shown.allocated, shown.reserved, shown.available)
        assert got == expected, f"pool {pool}: (allocated, reserved, available) {got}, model {expected}"
        held: list[int] = []
        seen: dict[str, list[int]] = {"lease": [], "identity": [], "content": []}
        for row in range(self.max_concurrency):
            space = by_row[row].spaces[pool] if row in by_row else Space(0)
            columns = (shown.frontier[row], shown.mapped_end[row], shown.limit[row])
            wanted = (space.frontier, len(space.pages) * PAGE_TOKENS, space.entitlement * PAGE_TOKENS)
            assert columns == wanted, f"pool {pool} row {row}: (frontier, mapped, limit) {columns}, model {wanted}"
            entries = shown.mirror[row]
            for block, page in enumerate(space.pages):
                where = f"pool {pool} row {row} block {block}"
                page.page_id = _same(f"{where}: page id", page.page_id, entries[block])
                for what, columns_of in (
                    ("lease", shown.leases), ("identity", shown.identities), ("content", shown.contents),
                ):  # fmt: skip
                    value = columns_of[row][block]
                    setattr(page, what, _same(f"{where}: {what}", getattr(page, what), value))
                    assert value not in self.retired[f"{pool}.{what}"], f"{where}: {what} {value} came back"
                    seen[what].append(value)
                committed = min(max(space.frontier - block * PAGE_TOKENS, 0), PAGE_TOKENS)
                got_columns = shown.committed[row][block]
                assert got_columns == committed, f"{where}: {got_columns} committed columns, model {committed}"
            named = [entry for entry in entries if entry != -1]
            assert entries == named + [-1] * (len(entries) - len(named)), f"pool {pool} row {row}: a hole: {entries}"
            count = f"pool {pool} row {row}: {len(named)} ids"
            assert len(space.pages) <= len(named) <= space.entitlement, f"{count}, model {wanted}"
            held += named
        assert all(0 <= page_id < capacity for page_id in held), f"pool {pool}: ids out of range: {held}"
        assert len(set(held)) == len(held), f"pool {pool}: one id in two places: {held}"
        for what, values in seen.items():
            assert len(set(values)) == len(values), f"pool {pool}: one {what} in two places: {values}"

    # ---- helpers ----------------------------------------------------------------------------------

    def _new_key(self) -> int:
        self._key_next += 1
        return self._key_next

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
    def _map(sequence: SequenceModel, pool: str, tokens: int) -> list[tuple[int, int, int]]:
        pages = sequence.spaces[pool].pages
        first, needed = len(pages), pages_of(tokens)
        pages.extend(Page() for _ in range(needed - first))
        return [(sequence.row, first, needed - first)] if needed > first else []

    def _unmap(self, sequence: SequenceModel, pool: str, keep: int) -> int:
        pages = sequence.spaces[pool].pages
        gone = pages[keep:]
        del pages[keep:]
        for page in gone:
            for what in ("lease", "identity", "content"):
                value = getattr(page, what)
                assert value is not None, f"pool {pool}: a page was unmapped before it was observed"
                self.retired[f"{pool}.{what}"].add(value)
        return len(gone)


def _same(what: str, known: int | None, shown: int) -> int:
    assert known is None or known == shown, f"{what} was {known} and is {shown}"
    return shown
