"""The invariants of C16, one function each, checkable at any boundary.

Every function recomputes from the columns what the ledgers keep as counters or derive, and asserts
the law with both sides in the message.  `check_ledgers` runs all of them; `Store.check` adds what
only the device knows.  Cost: linear in pages, so it runs at boundaries, never in a step.

Without a function: 9 and 16, because no page has a host replica and `activation.py` refuses KV without the caller's
state; 14 and 15, because views and kernels are no ledger and have tests of their own.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.ledger.active_spaces import AddressSpaces
from pagedkv.ledger.block_tables import UNMAPPED
from pagedkv.ledger.growth import NEVER
from pagedkv.ledger.kept_spaces import RetainedSpaces
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.values.config import PoolConfig
from pagedkv.values.planes import PlaneGeometry
from pagedkv.values.quantities import PAGE_SHIFT, PAGE_TOKENS, pages_for_tokens


def check_ledgers(ledgers: StoreLedgers) -> None:
    """Assert every invariant that the ledgers can answer; raises AssertionError with the numbers."""
    for pool in ledgers.config.pools:
        spaces = ledgers.spaces[pool.name]
        check_2_planes_share_one_frontier(pool)
        check_1_one_replica_per_lease(spaces)
        check_3_one_id_for_all_planes(pool, spaces)
        check_4_occupancy(spaces)
        check_5_identities_are_independent(spaces)
        check_6_frontiers(spaces)
        retained = ledgers.continuations.retained[pool.name]
        check_7_one_writer(spaces, retained)
        check_8_shared_pages_are_immutable(spaces, retained)
        check_10_entitlement_is_reserved(spaces)
        check_12_rows(ledgers, spaces)
    check_11_units_are_covered(ledgers)
    check_13_pools_are_separate(ledgers)
    check_17_launches_are_covered(ledgers)


def check_1_one_replica_per_lease(spaces: AddressSpaces) -> None:
    """C16.1: a page group carries at most one logical page, and each knows the other."""
    held = spaces.pages.device[spaces.pages.device >= 0]
    assert _are_distinct(held), f"{_name(spaces)}: one page group carries two logical pages"
    bound = spaces.columns_below(spaces.bound_end)
    page_ids, logical = spaces.table.mirror[bound], spaces.members[bound]
    assert (spaces.pages.device[logical] == page_ids).all(), f"{_name(spaces)}: table and descriptors disagree"


def check_2_planes_share_one_frontier(pool: PoolConfig) -> None:
    """C16.2: all planes of a pool have the same pages, the guard page included, and the same order."""
    shared = {(plane.pages, plane.order) for plane in pool.planes}
    assert shared == {(pool.pages + pool.guard_pages, pool.order)}, f"pool {pool.name}: planes differ: {shared}"


def check_3_one_id_for_all_planes(pool: PoolConfig, spaces: AddressSpaces) -> None:
    """C16.3: every id that a table may name exists in every plane."""
    planes: tuple[PlaneGeometry, ...] = pool.planes
    capacity = spaces.pool.capacity + pool.guard_pages
    assert all(plane.pages == capacity for plane in planes), f"{_name(spaces)}: a plane lacks pages"
    mirror = spaces.table.mirror
    assert mirror.min() >= UNMAPPED, f"{_name(spaces)}: a negative id in the table"
    assert mirror.max() < spaces.pool.capacity, f"{_name(spaces)}: an id beyond the planes in the table"


def check_4_occupancy(spaces: AddressSpaces) -> None:
    """C16.4, C6.2: leases + reservations + available = capacity, and the ids behind them add up (S31)."""
    pool = spaces.pool
    members = int(spaces.mapped_end.sum()) >> PAGE_SHIFT
    bound = (int(spaces.bound_end.sum()) >> PAGE_SHIFT) - members
    reserved = (int(spaces.limit.sum()) >> PAGE_SHIFT) - members
    leased = int(np.count_nonzero(spaces.pages.references)) - bound
    assert pool.allocated == leased, f"{_name(spaces)}: allocated {pool.allocated}, leases {leased}"
    assert pool.bound == bound, f"{_name(spaces)}: bound {pool.bound}, ids bound {bound}"
    assert pool.reserved == reserved, f"{_name(spaces)}: reserved {pool.reserved}, reservations {reserved}"
    assert 0 <= pool.available <= pool.capacity, f"{_name(spaces)}: available {pool.available} of {pool.capacity}"
    held = spaces.held_mask()
    assert (held == (pool.serials != 0)).all(), f"{_name(spaces)}: serials and held ids disagree"
    free = pool.free_runs.mask()
    assert (free ^ held).all(), f"{_name(spaces)}: an id is both free and held, or neither"
    assert pool.free_runs.id_count == int(free.sum()), f"{_name(spaces)}: the free count drifted"
    pins = int(pool.pins.sum())
    assert pool.pins_total == pins, f"{_name(spaces)}: {pool.pins_total} pins counted, {pins} on pages"
    assert not pool.pins[~held].any(), f"{_name(spaces)}: a free page is pinned (C7.4)"


def check_5_identities_are_independent(spaces: AddressSpaces) -> None:
    """C16.5, C7.3: a live descriptor has its own serial and content epoch; every other one is free."""
    live = spaces.pages.serial != 0
    assert (live == (spaces.pages.references + spaces.pages.pins > 0)).all(), (
        f"{_name(spaces)}: a descriptor lives without references and pins"
    )
    assert (live ^ spaces.pages.free_runs.mask()).all(), f"{_name(spaces)}: a descriptor is free and live, or neither"
    assert (live == (spaces.pages.device >= 0)).all(), f"{_name(spaces)}: a live descriptor without a replica"
    for what, column in (("serial", spaces.pages.serial), ("content epoch", spaces.pages.content)):
        assert _are_distinct(column[live]), f"{_name(spaces)}: two pages share a {what}"


def check_6_frontiers(spaces: AddressSpaces) -> None:
    """C16.6, C9.1: 0 <= shared_end <= frontier <= mapped_end <= bound_end <= limit; all whole pages but frontier."""
    order = (spaces.shared_end, spaces.frontier, spaces.mapped_end, spaces.bound_end, spaces.limit)
    assert (spaces.shared_end >= 0).all(), f"{_name(spaces)}: a negative shared_end"
    assert not (spaces.shared_end % PAGE_TOKENS).any(), f"{_name(spaces)}: shared_end is inside a page"
    for low, high in itertools.pairwise(order):
        assert (low <= high).all(), f"{_name(spaces)}: {low.tolist()} exceeds {high.tolist()}"
    for column in order[2:]:
        assert not (column % PAGE_TOKENS).any(), f"{_name(spaces)}: {column.tolist()} are not whole pages"
    ceiling = np.minimum(spaces.limit, spaces.max_context)
    assert (spaces.ceiling == ceiling).all(), f"{_name(spaces)}: ceilings {spaces.ceiling.tolist()}, {ceiling.tolist()}"
    assert int(spaces.limit.max()) <= spaces.table.blocks * PAGE_TOKENS, f"{_name(spaces)}: entitlement beyond L"


def check_7_one_writer(spaces: AddressSpaces, retained: RetainedSpaces) -> None:
    """C16.7, C7.5: a row writes its own pages alone, and protected columns are as the inactive spaces say (C7.8)."""
    pages = spaces.pages
    rows, blocks = np.nonzero(spaces.columns_below(spaces.bound_end) & ~spaces.columns_below(spaces.shared_end))
    logical = spaces.members[rows, blocks]
    assert _are_distinct(logical), f"{_name(spaces)}: a written page is in two places"
    assert (pages.writer[logical] == rows).all(), f"{_name(spaces)}: a page's writer is another row"
    assert np.count_nonzero(pages.writer >= 0) == logical.size, f"{_name(spaces)}: a page has a writer elsewhere"
    protected, protectors = np.zeros_like(pages.protected), np.zeros_like(pages.protectors)
    for space in retained.spaces.values():
        assert 0 <= space.protected_frontier <= space.frontier, f"{_name(spaces)}: protection beyond the frontier"
    members, _, columns = _inactive_pages(retained, [space.protected_frontier for space in retained.spaces.values()])
    np.maximum.at(protected, members, columns)
    np.add.at(protectors, members, columns == PAGE_TOKENS)
    assert (pages.protected == protected).all(), f"{_name(spaces)}: protected columns drifted"
    assert (pages.protectors == protectors).all(), f"{_name(spaces)}: protectors drifted"
    assert (pages.protected <= PAGE_TOKENS * (pages.references > pages.active)).all(), (
        f"{_name(spaces)}: a page that no inactive space holds is protected"
    )


def check_8_shared_pages_are_immutable(spaces: AddressSpaces, retained: RetainedSpaces) -> None:
    """C16.8, C7.5: references are counted, a writer implies one, and what several spaces hold is full."""
    pages = spaces.pages
    references, active = np.zeros_like(pages.references), np.zeros_like(pages.active)
    rows, blocks = np.nonzero(spaces.columns_below(spaces.bound_end))
    bound = spaces.members[rows, blocks]
    np.add.at(active, bound, 1)
    assert (pages.block[bound] == blocks).all(), f"{_name(spaces)}: a page at another block"
    for space in retained.spaces.values():
        count = pages_for_tokens(space.frontier)
        assert space.members.size == count, f"{_name(spaces)}: {space.members.size} pages, {space.frontier}"
        assert _are_distinct(space.members), f"{_name(spaces)}: a page twice in one space"
    members, places, columns = _inactive_pages(retained, [space.frontier for space in retained.spaces.values()])
    np.add.at(references, members, 1)
    assert (pages.block[members] == places).all(), f"{_name(spaces)}: another block"
    assert (pages.committed[members] == columns).all(), f"{_name(spaces)}: a page is not full, or another tail"
    assert (pages.active == active).all(), f"{_name(spaces)}: active references drifted"
    assert (pages.references == references + active).all(), f"{_name(spaces)}: references drifted"
    shared = pages.references > 1
    assert (pages.writer[shared] < 0).all(), f"{_name(spaces)}: a shared page has a writer"
    assert (pages.committed[shared] == PAGE_TOKENS).all(), f"{_name(spaces)}: a shared page is not full"
    immutable = spaces.members[spaces.columns_below(spaces.shared_end)]
    assert (pages.writer[immutable] < 0).all(), f"{_name(spaces)}: a writer below shared_end"
    assert (pages.committed[immutable] == PAGE_TOKENS).all(), f"{_name(spaces)}: a page below shared_end is not full"
    assert pages.pins_total == int(pages.pins.sum()), f"{_name(spaces)}: the count of pins drifted"


def check_10_entitlement_is_reserved(spaces: AddressSpaces) -> None:
    """C16.10: what active rows are guaranteed is in no one's available capacity."""
    promised = (int(spaces.limit.sum()) - int(spaces.mapped_end.sum())) >> PAGE_SHIFT
    leased = int(np.count_nonzero(spaces.mapped_mask()))
    assert spaces.pool.available == spaces.pool.capacity - promised - leased, f"{_name(spaces)}: entitlement available"


def check_11_units_are_covered(ledgers: StoreLedgers) -> None:
    """C16.11: what a unit in flight may touch is still mapped and its frontiers are as at its start."""
    mask = 0
    for unit in ledgers.guard.units:
        assert not mask & unit.rows_mask, f"{unit.label}: a row is in flight twice"
        mask |= unit.rows_mask
        for pool, columns in unit.columns.items():
            spaces = ledgers.spaces[pool]
            first = unit.first_positions[pool]
            assert (spaces.frontier[unit.rows] == first).all(), f"{unit.label}: a frontier moved in flight"
            assert (first + columns <= spaces.mapped_end[unit.rows]).all(), f"{unit.label}: a page left in flight"
    assert mask == ledgers.guard.rows_in_flight, "the guard's rows and its units disagree"


def check_12_rows(ledgers: StoreLedgers, spaces: AddressSpaces) -> None:
    """C16.12: a row without a sequence holds nothing."""
    idle = ledgers.sequences.serials == 0
    assert not spaces.limit[idle].any(), f"{_name(spaces)}: an idle row has an entitlement"
    beyond = spaces.table.mirror[~spaces.columns_below(spaces.bound_end)]
    assert (beyond == UNMAPPED).all(), f"{_name(spaces)}: stale ids beyond a row's pages"
    assert ledgers.sequences.free_rows() == np.flatnonzero(idle).tolist(), "free rows and sequences disagree"


def check_13_pools_are_separate(ledgers: StoreLedgers) -> None:
    """C16.13: pools share no counter, id or descriptor."""
    spaces = list(ledgers.spaces.values())
    assert len({id(space.pool) for space in spaces}) == len(spaces), "two pools share a ledger"
    assert len({id(space.pages) for space in spaces}) == len(spaces), "two pools share descriptors"


def check_17_launches_are_covered(ledgers: StoreLedgers) -> None:
    """C16.17: the budget of every active sequence, or with growth its next launch, lies within its entitlement.

    With growth a row that its last round could not extend may be short of it, and one that went farther than a launch
    and a forced span since then has its next round to come; every other one is covered.
    """
    growth = ledgers.growth
    assert not growth.short[ledgers.sequences.serials == 0].any(), "an idle row is short"
    for name, spaces in ledgers.spaces.items():
        if growth.is_on:
            full = growth.full_pages[name] * PAGE_TOKENS
            assert (spaces.limit <= full).all(), f"pool {name}: limits {spaces.limit.tolist()} beyond {full.tolist()}"
            grow_at = np.where(spaces.limit < full, spaces.limit - growth.cushion_pages * PAGE_TOKENS, NEVER)
            assert (growth.grow_at[name] == grow_at).all(), f"pool {name}: rows grow at {growth.grow_at[name].tolist()}"
            needed = np.minimum(spaces.frontier + ledgers.config.decode_columns, full)
            widest = ledgers.config.decode_columns + ledgers.config.forced_span_tokens
            is_due = spaces.frontier - growth.round_frontier[name] > widest
            short = (needed > spaces.limit) & ~growth.short & ~is_due
        else:
            short = ledgers.sequences.budget_tokens > spaces.limit
        assert not short.any(), f"pool {name}: rows {np.flatnonzero(short).tolist()} are not covered"


def _are_distinct(values: npt.NDArray[Any]) -> bool:
    return len(set(values.tolist())) == values.size


def _inactive_pages(
    retained: RetainedSpaces, ends: list[int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return of every page of every inactive space descriptor, block, and its columns below the end of its space."""
    parts = [space.members for space in retained.spaces.values()]
    sizes = np.array([members.size for members in parts], np.int64)
    members = np.concatenate([np.empty(0, np.int32), *parts])
    blocks = np.array([block for size in sizes.tolist() for block in range(size)], np.int32)
    columns = np.repeat(np.array(ends, np.int32), sizes) - (blocks << PAGE_SHIFT)
    return members, blocks, np.minimum(np.maximum(columns, 0), PAGE_TOKENS)


def _name(spaces: AddressSpaces) -> str:
    return f"pool {spaces.pool.name}"
