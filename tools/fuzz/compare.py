"""Compare the inspection of a store with the model.  (C5 to C13, C16)

    inspection (`Store.inspect`)      spaces in the model, each a list of pages
        rows, continuations      ==   frontiers, memberships, entitlements, protected frontiers
        columns over pages       ==   what follows from the holders of a page: references, writers, committed columns
        page group ids, serials  ->   learned when they first appear, then constant, and never twice
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.tools.fuzz.ledger_model import ContinuationModel, LedgerModel, Page, SequenceModel, Space

LEARNED = ("page_id", "lease", "identity", "content")
IDENTITY = ("logical", *LEARNED)
identity_of = attrgetter(*IDENTITY)
COLUMNS = np.arange(pk.PAGE_TOKENS)
NO_SPACE = Space(0)


@dataclass(slots=True)
class Holding:
    """The facts about one page that follow from the spaces that hold it.

    Attributes:
        references, active: number of spaces, and of active ones.
        committed, protected: columns, the most of any space.
        row: the row of the active space when it is the only holder, else -1.
    """

    page: Page
    block: int
    references: int
    active: int
    committed: int
    protected: int
    row: int


Holdings = dict[str, dict[int, Holding]]
"""Per pool, the holding of each page that a space holds, by the identity of the page object."""


def compare(model: LedgerModel, inspection: pk.StoreInspection) -> Holdings:
    """Require that the store shows the state of the model, and learn ids that appear for the first time.

    Returns:
        The holdings of the model, until it changes.
    """
    active, retained = model.active, model.retained
    by_row = {sequence.row: sequence for sequence in active}
    require_same("active rows", sorted(by_row), list(inspection.active_rows))
    in_flight = sorted(row for row, sequence in by_row.items() if sequence.unit)
    require_same("rows in flight", in_flight, list(inspection.rows_in_flight))
    require_same("units in flight", len(model.open_units), len(inspection.units_in_flight))
    budgets = [by_row[row].budget if row in by_row else 0 for row in range(model.max_concurrency)]
    require_same("budgets", budgets, inspection.budget_tokens.tolist())
    states = {one.number: (one.state is not None, one.state_frontier) for one in retained}
    store_states = {number: (one.has_state, one.state_frontier) for number, one in inspection.continuations.items()}
    require_same("continuations, which have a state, and its frontier", states, store_states)
    return {pool: _compare_pool(model, pool, inspection, by_row, retained) for pool in model.pools}


def committed_bytes(
    holdings: Mapping[int, Holding],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.uint16]]:
    """Return the ids of page groups, (n,), which of their columns are committed, (n, 64), and their tags, (n, 64)."""
    written = [holding for holding in holdings.values() if holding.committed and holding.page.is_on_device]
    page_ids = np.array([holding.page.page_id for holding in written], np.int64)
    counts = np.array([holding.committed for holding in written], np.int64)
    tags = np.array([holding.page.tags for holding in written], np.uint16).reshape(-1, pk.PAGE_TOKENS)
    return page_ids, COLUMNS < counts[:, None], tags


def require_same(what: str, expected: object, got: object) -> None:
    """Require that a value of the store equals the model's."""
    if expected != got:
        raise AssertionError(f"{what}: {got}, model {expected}")


def _holdings(pool: str, active: Iterable[SequenceModel], retained: list[ContinuationModel]) -> dict[int, Holding]:
    holdings: dict[int, Holding] = {}
    for sequence in active:
        _count(holdings, sequence.spaces[pool], sequence.row)
    for continuation in retained:
        _count(holdings, continuation.spaces[pool], -1)
    return holdings


def _count(holdings: dict[int, Holding], space: Space, row: int) -> None:
    """Count a space as holder of its pages; `row` is -1 for a continuation."""
    committed, protected, full = space.frontier, space.protected, pk.PAGE_TOKENS
    for block, page in enumerate(space.pages):
        columns = 0 if committed < 0 else min(committed, full)
        protected_columns = 0 if protected < 0 else min(protected, full)
        committed, protected = committed - full, protected - full
        holding = holdings.get(id(page))
        if holding is None:
            holdings[id(page)] = Holding(page, block, 1, int(row >= 0), columns, protected_columns, row)
            continue
        assert holding.block == block, "the model holds a page at two blocks"
        holding.references += 1
        holding.active += row >= 0
        holding.committed = max(holding.committed, columns)
        holding.protected = max(holding.protected, protected_columns)
        holding.row = -1


def _compare_pool(
    model: LedgerModel, pool: str, inspection: pk.StoreInspection, by_row: Mapping[int, SequenceModel],
    retained: list[ContinuationModel],
) -> dict[int, Holding]:  # fmt: skip
    view, capacity = inspection.pools[pool], model.pools[pool].capacity
    spaces = [by_row[row].spaces[pool] if row in by_row else NO_SPACE for row in range(model.max_concurrency)]
    bound = _compare_rows(pool, view, spaces)
    for continuation in retained:
        space, retained_space = continuation.spaces[pool], inspection.continuations[continuation.number].pools[pool]
        where = f"pool {pool} continuation {continuation.number}"
        frontiers = (retained_space.frontier, retained_space.protected)
        require_same(f"{where}: (frontier, protected)", (space.frontier, space.protected), frontiers)
        require_same(f"{where}: pages", len(space.pages), retained_space.members.size)
        _learn_members(where, space, retained_space.members.tolist())
    holdings = _holdings(pool, by_row.values(), retained)
    _compare_pages(model, pool, view, holdings)
    allocated = sum(holding.page.is_on_device for holding in holdings.values())
    reserved = model.reserved(pool)
    restored = [page for copy in model.restoring for page in copy.claims[pool].kept if not page.is_on_device]
    tails = [copy for copy in model.restoring if copy.claims[pool].tail and not copy.claims[pool].is_taken]
    require_same(
        f"pool {pool}: (allocated, reserved, available, bound)",
        (allocated, reserved, capacity - allocated - reserved, len(bound) + len(restored) + len(tails)),
        (view.allocated, view.reserved, view.available, view.bound),
    )
    ids = bound + [holding.page.page_id for holding in holdings.values()
                   if holding.page.is_on_device and holding.page.page_id is not None]  # fmt: skip
    if len(set(ids)) != len(ids):
        raise AssertionError(f"pool {pool}: one id in two places: {ids}")
    leased = view.lease_serials.nonzero()[0].tolist()
    if restored or tails:  # their page groups are in no space and in no table yet
        require_same(f"pool {pool}: ids with a serial", len(ids) + len(restored) + len(tails), len(leased))
        require_same(f"pool {pool}: ids without a serial", set(), {*ids} - {*leased})
    else:
        require_same(f"pool {pool}: ids with a serial", sorted(ids), leased)
    edges = [-1, *leased, capacity]
    runs = [[low + 1, high] for low, high in itertools.pairwise(edges) if low + 1 < high]
    require_same(f"pool {pool}: free runs", runs, view.free_runs.tolist())
    if model.copies:
        pins = {holding.page.logical: model.pins(holding.page, pool) for holding in holdings.values()}
        require_same(f"pool {pool}: pins of pages", pins, {logical: int(view.pins[logical]) for logical in pins})
        require_same(f"pool {pool}: pins", sum(pins.values()) + len(tails), int(view.pins.sum()))
    elif view.pins.any():
        raise AssertionError(f"pool {pool}: a page is pinned at rest: {view.pins.tolist()}")
    return holdings


def _compare_rows(pool: str, view: pk.PoolInspection, spaces: list[Space]) -> list[int]:
    """Compare the columns and tables of every row; return the ids that are bound ahead of their mapping."""
    expected = [
        (space.frontier, len(space.pages) * pk.PAGE_TOKENS, space.entitlement * pk.PAGE_TOKENS) for space in spaces
    ]
    ends = zip(view.committed_end.tolist(), view.mapped_end.tolist(), view.entitled_end.tolist(), strict=True)
    require_same(f"pool {pool}: (frontier, mapped, limit) by row", expected, list(ends))
    device = view.device.tolist()
    bound: list[int] = []
    rows = zip(spaces, view.table.tolist(), view.members.tolist(), strict=True)
    for row, (space, page_ids, members) in enumerate(rows):
        where = f"pool {pool} row {row}"
        count, named = len(space.pages), len(page_ids) - page_ids.count(-1)
        _learn_members(where, space, members)
        if page_ids[:count] != [device[page] for page in members[:count]]:
            raise AssertionError(f"{where}: the table names {page_ids}, the descriptors other ids")
        if -1 in page_ids[:named]:
            raise AssertionError(f"{where}: a hole: {page_ids}")
        if not count <= named <= space.entitlement:
            raise AssertionError(f"{where}: {named} ids, model {count} of {space.entitlement}")
        bound += page_ids[count:named]
    return bound


def _learn_members(where: str, space: Space, members: list[int]) -> None:
    """Require that each page has the descriptor it had; learn the descriptor of a new page."""
    known = [page.logical for page in space.pages]
    if known == members[: len(known)]:
        return
    for block, page in enumerate(space.pages):
        if page.logical is None:
            page.logical = members[block]
        elif page.logical != members[block]:
            raise AssertionError(f"{where} block {block}: descriptor was {page.logical} and is {members[block]}")


def _compare_pages(model: LedgerModel, pool: str, view: pk.PoolInspection, holdings: dict[int, Holding]) -> None:
    """Compare every column of every page, in one tuple each; look closer only where they differ."""
    serials = [*view.lease_serials.tolist(), 0]  # the last one is of page group -1
    device = view.device.tolist()
    columns = zip(
        device, [serials[page_id] for page_id in device], view.serial.tolist(), view.content.tolist(),
        view.references.tolist(), view.active.tolist(), view.committed.tolist(), view.protected.tolist(),
        view.block.tolist(), strict=True,
    )  # fmt: skip
    rows, writers = list(columns), view.writer.tolist()
    for holding in holdings.values():
        page, committed, logical = holding.page, holding.committed, holding.page.logical
        assert logical is not None, "a page was not learned"
        row, writer = rows[logical], writers[logical]
        if row != (
            page.page_id, page.lease, page.identity, page.content,
            holding.references, holding.active, committed, holding.protected, holding.block,
        ):  # fmt: skip
            where = f"pool {pool} descriptor {logical}"
            for what, value in zip(LEARNED, row, strict=False):
                _learn(model, pool, where, page, what, value)
            derived = (holding.references, holding.active, committed, holding.protected, holding.block)
            require_same(f"{where}: (references, active, committed, protected, block)", derived, row[len(LEARNED) :])
        # A page that may still be written has its row as writer; a page of several spaces or of none active has none.
        # A full page of one active space may have one or not: nothing is appended to it either way.
        if writer != holding.row and (writer != -1 or committed < pk.PAGE_TOKENS):
            raise AssertionError(f"pool {pool} descriptor {logical}: writer {writer}, model {holding}")
    hosts = view.host.tolist()
    for holding in holdings.values():
        page, logical = holding.page, holding.page.logical
        assert logical is not None, "a page was not learned"
        require_same(f"pool {pool} descriptor {logical}: Host replica", page.host is not None, hosts[logical] >= 0)
    identities = [identity_of(holding.page) for holding in holdings.values()]
    for what, *values in zip(IDENTITY, *identities, strict=True):
        distinct = [value for value in values if what not in ("page_id", "lease") or value > 0]
        if len(set(distinct)) != len(distinct):
            raise AssertionError(f"pool {pool}: one {what} in two places: {values}")


def _learn(model: LedgerModel, pool: str, where: str, page: Page, what: str, value: int) -> None:
    known = getattr(page, what)
    if known is None:
        if what != "page_id" and value in model.retired[f"{pool}.{what}"]:
            raise AssertionError(f"{where}: {what} {value} came back")
        if what == "page_id" and not 0 <= value < model.pools[pool].capacity:
            raise AssertionError(f"{where}: page group {value} of {model.pools[pool].capacity}")
        setattr(page, what, value)
    elif known != value:
        raise AssertionError(f"{where}: {what} was {known} and is {value}")
