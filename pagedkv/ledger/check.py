"""The invariants of C16, one function each, checkable at any boundary.

Each function computes the counters and the derived columns of the ledgers again.  If they differ, it raises
AssertionError with both values, also under `python -O`.  `check_ledger` calls all of them; `Store.check` also compares
the device tables.  Cost: linear in pages, so a check runs between units, never in a step.

Invariants without a function: tests of views and kernels cover 14 and 15.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.ledger.active_spaces import UNMAPPED, ActiveSpaces
from pagedkv.ledger.growth import NO_GROWTH
from pagedkv.ledger.kept_spaces import KeptSpaces
from pagedkv.ledger.ledger import Ledger
from pagedkv.values.config import PoolConfig
from pagedkv.values.quantities import PAGE_SHIFT, PAGE_TOKENS, pages_for_tokens


def check_ledger(ledger: Ledger) -> None:
    """Check every invariant of the ledgers; AssertionError gives the numbers."""
    for pool in ledger.config.pools:
        spaces, kept = ledger.active[pool.name], ledger.kept[pool.name]
        check_1_one_replica_per_lease(spaces)
        check_2_planes_share_one_frontier(pool)
        check_3_one_id_for_all_planes(pool, spaces)
        check_4_occupancy(ledger, spaces)
        check_5_identities_are_independent(spaces)
        check_6_frontiers(spaces)
        check_7_one_writer(spaces, kept)
        check_8_shared_pages_are_immutable(spaces, kept)
        check_10_entitlement_is_reserved(ledger, spaces)
        check_12_rows(ledger, spaces)
    check_9_replicas_are_valid(ledger)
    check_11_units_are_covered(ledger)
    check_13_pools_are_separate(ledger)
    check_16_states_are_complete(ledger)
    check_17_launches_are_covered(ledger)


def check_1_one_replica_per_lease(spaces: ActiveSpaces) -> None:
    """C16.1: a page group or a host page carries at most one logical page, and tables and descriptors agree."""
    for what, column in (("page group", spaces.pages.device), ("Host record", spaces.pages.host)):
        _demand(_are_distinct(column[column >= 0]), spaces, f"one {what} carries two logical pages")
    bound = spaces.columns_below(spaces.bound_end)
    page_ids = spaces.pages.device[spaces.members[bound]]
    _demand((page_ids == spaces.table[bound]).all(), spaces, "table and descriptors disagree")


def check_2_planes_share_one_frontier(pool: PoolConfig) -> None:
    """C16.2: all planes of a pool have the same pages, the guard page included, and the same order."""
    shared = {(plane.pages, plane.order) for plane in pool.planes}
    _demand(shared == {(pool.pages + pool.guard_pages, pool.order)}, pool.name, f"planes differ: {shared}")


def check_3_one_id_for_all_planes(pool: PoolConfig, spaces: ActiveSpaces) -> None:
    """C16.3: every id that a table may name exists in every plane."""
    capacity = spaces.pool.capacity + pool.guard_pages
    _demand(all(plane.pages == capacity for plane in pool.planes), spaces, "a plane lacks pages")
    _demand(spaces.table.min() >= UNMAPPED, spaces, "a negative id in the table")
    _demand(spaces.table.max() < spaces.pool.capacity, spaces, "an id beyond the planes in the table")


def check_4_occupancy(ledger: Ledger, spaces: ActiveSpaces) -> None:
    """C16.4, C6.2: leases + reservations + available = capacity, and the ids behind them add up (S31).

    What a transaction that has not ended claims is reserved, and its page groups are bound.
    """
    pool, pages = spaces.pool, spaces.pages
    claims = ledger.transactions.open
    claimed = np.concatenate([np.empty(0, np.int32), *(one.claimed_ids(pool.name) for one in claims)])
    members = int(spaces.mapped_end.sum()) >> PAGE_SHIFT
    bound = (int(spaces.bound_end.sum()) >> PAGE_SHIFT) - members
    reserved = (int(spaces.entitled_end.sum()) >> PAGE_SHIFT) - members
    leased = int(np.count_nonzero((pages.references > 0) & (pages.device >= 0))) - bound
    _demand(pool.allocated == leased, spaces, f"allocated {pool.allocated}, leases {leased}")
    bound, reserved = bound + claimed.size, reserved + sum(one.reserved.get(pool.name, 0) for one in claims)
    _demand(pool.bound == bound, spaces, f"bound {pool.bound}, ids bound {bound}")
    _demand(pool.reserved == reserved, spaces, f"reserved {pool.reserved}, reservations {reserved}")
    _demand(0 <= pool.available <= pool.capacity, spaces, f"available {pool.available} of {pool.capacity}")
    held = spaces.held_mask()
    _demand(_are_distinct(claimed) and not held[claimed].any(), spaces, "a claimed page group is held already")
    held[claimed] = True
    _demand((held == (pool.serials != 0)).all(), spaces, "serials and held ids disagree")
    free = pool.free_runs.mask()
    _demand((free ^ held).all(), spaces, "an id is both free and held, or neither")
    _demand(pool.free_runs.id_count == int(free.sum()), spaces, "the free count drifted")


def check_5_identities_are_independent(spaces: ActiveSpaces) -> None:
    """C16.5, C7.3: a live descriptor has a replica, and its own serial and content epoch; every other one is free."""
    pages = spaces.pages
    live = pages.serial != 0
    _demand((live == (pages.references + pages.pins > 0)).all(), spaces,
            "a descriptor lives without references and pins")
    _demand((live ^ pages.free_runs.mask()).all(), spaces, "a descriptor is free and live, or neither")
    _demand((live == ((pages.device >= 0) | (pages.host >= 0))).all(), spaces, "a live descriptor without a replica")
    for what, column in (("serial", pages.serial), ("content epoch", pages.content)):
        _demand(_are_distinct(column[live]), spaces, f"two pages share a {what}")


def check_6_frontiers(spaces: ActiveSpaces) -> None:
    """C16.6, C9.1: the ends of a row are in order, as `active_spaces.py` draws them; only the frontier is any token."""
    ends = (spaces.shared_end, spaces.committed_end, spaces.mapped_end, spaces.bound_end, spaces.entitled_end)
    _demand((spaces.shared_end >= 0).all(), spaces, "a negative shared_end")
    _demand(not (spaces.shared_end % PAGE_TOKENS).any(), spaces, "shared_end is inside a page")
    for low, high in itertools.pairwise(ends):
        _demand((low <= high).all(), spaces, f"{low.tolist()} exceeds {high.tolist()}")
    for column in ends[2:]:
        _demand(not (column % PAGE_TOKENS).any(), spaces, f"{column.tolist()} are not whole pages")
    writable = np.minimum(spaces.entitled_end, spaces.max_context)
    _demand((spaces.writable_end == writable).all(), spaces,
            f"writable ends {spaces.writable_end.tolist()}, {writable.tolist()}")
    _demand(int(spaces.entitled_end.max()) <= spaces.blocks * PAGE_TOKENS, spaces, "entitlement beyond L")
    _demand(spaces.margins_hold(), spaces, "the last unit's rows are nearer to their next page than was noted")


def check_7_one_writer(spaces: ActiveSpaces, kept: KeptSpaces) -> None:
    """C16.7, C7.5: a row writes its own pages alone, and protected columns are as the inactive spaces say (C7.8)."""
    pages = spaces.pages
    rows, blocks = np.nonzero(spaces.columns_below(spaces.bound_end) & ~spaces.columns_below(spaces.shared_end))
    logical = spaces.members[rows, blocks]
    _demand(_are_distinct(logical), spaces, "a written page is in two places")
    _demand((pages.writer[logical] == rows).all(), spaces, "a page's writer is another row")
    _demand(np.count_nonzero(pages.writer >= 0) == logical.size, spaces, "a page has a writer elsewhere")
    protected, protectors = np.zeros_like(pages.protected), np.zeros_like(pages.protectors)
    for space in kept.by_number.values():
        _demand(0 <= space.protected_frontier <= space.frontier, spaces, "protection beyond the frontier")
    members, _, columns = _inactive_pages(kept, [space.protected_frontier for space in kept.by_number.values()])
    np.maximum.at(protected, members, columns)
    np.add.at(protectors, members, columns == PAGE_TOKENS)
    _demand((pages.protected == protected).all(), spaces, "protected columns drifted")
    _demand((pages.protectors == protectors).all(), spaces, "protectors drifted")
    _demand((pages.protected <= PAGE_TOKENS * (pages.references > pages.active)).all(), spaces,
            "a page that no inactive space holds is protected")


def check_8_shared_pages_are_immutable(spaces: ActiveSpaces, kept: KeptSpaces) -> None:
    """C16.8, C7.5: references are counted, a writer implies one, and what several spaces hold is full."""
    pages = spaces.pages
    references, active = np.zeros_like(pages.references), np.zeros_like(pages.active)
    rows, blocks = np.nonzero(spaces.columns_below(spaces.bound_end))
    bound = spaces.members[rows, blocks]
    np.add.at(active, bound, 1)
    _demand((pages.block[bound] == blocks).all(), spaces, "a page at another block")
    for space in kept.by_number.values():
        count = pages_for_tokens(space.frontier)
        _demand(space.members.size == count, spaces, f"{space.members.size} pages, {space.frontier} tokens")
        _demand(_are_distinct(space.members), spaces, "a page twice in one space")
    members, places, columns = _inactive_pages(kept, [space.frontier for space in kept.by_number.values()])
    np.add.at(references, members, 1)
    _demand((pages.block[members] == places).all(), spaces, "another block")
    _demand((pages.committed[members] == columns).all(), spaces, "a page is not full, or another tail")
    _demand((pages.active == active).all(), spaces, "active references drifted")
    _demand((pages.references == references + active).all(), spaces, "references drifted")
    shared = pages.references > 1
    _demand((pages.writer[shared] < 0).all(), spaces, "a shared page has a writer")
    _demand((pages.committed[shared] == PAGE_TOKENS).all(), spaces, "a shared page is not full")
    immutable = spaces.members[spaces.columns_below(spaces.shared_end)]
    _demand((pages.writer[immutable] < 0).all(), spaces, "a writer below shared_end")
    _demand((pages.committed[immutable] == PAGE_TOKENS).all(), spaces, "a page below shared_end is not full")
    _demand(pages.pins_total == int(pages.pins.sum()), spaces, "the count of pins drifted")
    _demand((pages.device[pages.active > 0] >= 0).all(), spaces, "an active page without a Device replica (C7.7)")


def check_9_replicas_are_valid(ledger: Ledger) -> None:
    """C16.9, C7.2, C8.2: what is on the Host alone has its content there, and every record has one owner.

    The records of pages and of copies under way, and the free ranges, fill the arena without overlap.
    """
    copies = [copy for one in ledger.demotions.open for copy in one.copies]
    copies += [copy for one in ledger.transactions.open for copy in one.backups]
    arena, ranges = ledger.arena, [np.stack((ledger.arena.starts, ledger.arena.ends), axis=1)]
    for name, spaces in ledger.active.items():
        pages = spaces.pages
        host_only = np.flatnonzero((pages.serial != 0) & (pages.device < 0))
        _demand(pages.is_on_host(host_only).all(), spaces, "a page on the Host alone whose replica is not valid")
        _demand(pages.hosted == np.count_nonzero(pages.host >= 0), spaces, "the count of Host replicas drifted")
        held = [pages.host[pages.host >= 0], *(copy.places for copy in copies if copy.pool == name)]
        first = np.concatenate(held).astype(np.int64)
        ranges.append(np.stack((first, first + pages.record_units), axis=1))
    edges = np.concatenate(ranges)
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    ends, starts = np.append(0, edges[:, 1]), np.append(edges[:, 0], arena.units)
    _demand((starts == ends).all(), "the Host arena", f"units are held twice, or by nobody: {edges.tolist()}")
    _demand((arena.starts[1:] > arena.ends[:-1]).all(), "the Host arena", "free ranges touch")


def check_10_entitlement_is_reserved(ledger: Ledger, spaces: ActiveSpaces) -> None:
    """C16.10: the entitlements of active rows, and claims, are not part of the available capacity."""
    claimed = sum(one.reserved.get(spaces.pool.name, 0) for one in ledger.transactions.open)
    promised = (int(spaces.entitled_end.sum()) - int(spaces.mapped_end.sum())) >> PAGE_SHIFT
    leased = int(np.count_nonzero(spaces.mapped_mask()))
    available = spaces.pool.capacity - promised - leased - claimed
    _demand(spaces.pool.available == available, spaces, f"available {spaces.pool.available}, not promised {available}")


def check_11_units_are_covered(ledger: Ledger) -> None:
    """C16.11: the pages that a unit in flight may write are mapped, and its frontiers have not moved."""
    mask = 0
    for unit in ledger.units.in_flight:
        _demand(not mask & unit.rows_mask, unit.label, "a row is in flight twice")
        mask |= unit.rows_mask
        for pool, columns in unit.columns.items():
            spaces = ledger.active[pool]
            first = unit.first_positions[pool]
            _demand((spaces.committed_end[unit.rows] == first).all(), unit.label, "a frontier moved in flight")
            _demand((first + columns <= spaces.mapped_end[unit.rows]).all(), unit.label, "a page left in flight")
    _demand(mask == ledger.units.rows_in_flight, "units", "rows in flight and units disagree")


def check_12_rows(ledger: Ledger, spaces: ActiveSpaces) -> None:
    """C16.12: a row without a sequence holds nothing."""
    idle = ledger.sequences.serials == 0
    _demand(not spaces.entitled_end[idle].any(), spaces, "an idle row has an entitlement")
    beyond = spaces.table[~spaces.columns_below(spaces.bound_end)]
    _demand((beyond == UNMAPPED).all(), spaces, "stale ids beyond a row's pages")
    leased = {one.row for one in ledger.transactions.open if one.target is not None}
    free = [row for row in np.flatnonzero(idle).tolist() if row not in leased]
    _demand(ledger.sequences.free_rows() == free, "rows", "free rows and sequences disagree")
    announced = {one.row: one.handle for one in ledger.transactions.open if one.handle is not None}
    _demand(ledger.sequences.announced == announced, "rows", "announced sequences and transactions disagree")


def check_13_pools_are_separate(ledger: Ledger) -> None:
    """C16.13: pools share no counter, id or descriptor."""
    spaces = list(ledger.active.values())
    _demand(len({id(space.pool) for space in spaces}) == len(spaces), "pools", "two of them share a ledger")
    _demand(len({id(space.pages) for space in spaces}) == len(spaces), "pools", "two of them share descriptors")


def check_16_states_are_complete(ledger: Ledger) -> None:
    """C16.16, C9.8: no pool of a continuation with a state is behind the frontier of that state."""
    for number, continuation in ledger.continuations.states.items():
        expected = () if continuation.state is None else tuple(ledger.kept)
        found = tuple(continuation.state_frontier)
        _demand(found == expected, f"continuation {number}", f"its state names {found}, expected {expected}")
        for pool, tokens in continuation.state_frontier.items():
            held = ledger.kept[pool].by_number[number].frontier
            _demand(tokens <= held, ledger.active[pool], f"a state at {tokens} of {held} tokens")


def check_17_launches_are_covered(ledger: Ledger) -> None:
    """C16.17: the budget of every active sequence lies within its entitlement.

    With growth the widest launch and one forced span from `round_frontier` do, of short rows too: a row that ends there
    or one launch later has room for its forced span.
    """
    growth = ledger.growth
    _demand(not growth.short[ledger.sequences.serials == 0].any(), "rows", "an idle row is short")
    for name, spaces in ledger.active.items():
        if growth.is_on:
            full = growth.full_pages[name] * PAGE_TOKENS
            _demand((spaces.entitled_end <= full).all(), spaces,
                    f"entitlements {spaces.entitled_end.tolist()} beyond {full.tolist()}")
            cushion = growth.cushion_pages * PAGE_TOKENS
            grow_at = np.where(spaces.entitled_end < full, spaces.entitled_end - cushion, NO_GROWTH)
            _demand((growth.grow_at[name] == grow_at).all(), spaces, f"rows grow at {growth.grow_at[name].tolist()}")
            widest = ledger.config.decode_columns + ledger.config.forced_span_tokens
            needed = np.minimum(growth.round_frontier[name] + widest, full)
        else:
            needed = ledger.sequences.budget_tokens
        uncovered = np.flatnonzero(needed > spaces.entitled_end)
        _demand(not uncovered.size, spaces, f"rows {uncovered.tolist()} are not covered")


def _demand(holds: object, where: ActiveSpaces | str, what: str) -> None:
    """Raise AssertionError unless a condition holds; `python -O` would remove an `assert`."""
    if not holds:
        raise AssertionError(f"{where if isinstance(where, str) else f'pool {where.pool.name}'}: {what}")


def _are_distinct(values: npt.NDArray[Any]) -> bool:
    return len(set(values.tolist())) == values.size


def _inactive_pages(
    kept: KeptSpaces, ends: list[int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return, for every page of every inactive space, descriptor, block, and columns below the end of its space."""
    parts = [space.members for space in kept.by_number.values()]
    sizes = np.array([members.size for members in parts], np.int64)
    members = np.concatenate([np.empty(0, np.int32), *parts])
    blocks = (np.arange(members.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)).astype(np.int32)
    columns = np.repeat(np.array(ends, np.int32), sizes) - (blocks << PAGE_SHIFT)
    return members, blocks, np.minimum(np.maximum(columns, 0), PAGE_TOKENS)
