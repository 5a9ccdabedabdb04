"""Whether a store shows what the model says.  (C5 to C13, C16)

    inspection (`Store.inspect`)      spaces in the model, each a list of pages
        rows, continuations      ==   frontiers, memberships, entitlements, protected frontiers
        columns over pages       ==   what follows from who holds a page: references, writers, committed columns
        page group ids, serials  ->   learned when they first appear, then constant, and never twice

Read next: `fuzz.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.tools.ledger_model import LedgerModel, Page, SequenceModel, Space

LEARNED = ("page_id", "lease", "identity", "content")


@dataclass(slots=True)
class Holding:
    """What follows from the spaces that hold one page.

    Attributes:
        references, active: spaces, and those of them that are active.
        committed, protected: columns, the most that any space has.
        row: the row of the active space when it is the only holder, else -1.
    """

    page: Page
    block: int
    references: int = 0
    active: int = 0
    committed: int = 0
    protected: int = 0
    row: int = -1


def compare(model: LedgerModel, shown: pk.StoreInspection) -> None:
    """Assert that the store shows what the model says, and learn ids that appear for the first time."""
    by_row = {sequence.row: sequence for sequence in model.active}
    _same("active rows", sorted(by_row), list(shown.active_rows))
    _same("rows in flight", sorted(row for row, one in by_row.items() if one.unit), list(shown.rows_in_flight))
    _same("units in flight", len(model.open_units), len(shown.units_in_flight))
    budgets = [by_row[row].budget if row in by_row else 0 for row in range(model.max_concurrency)]
    _same("budgets", budgets, shown.budget_tokens.tolist())
    by_number = {continuation.number: continuation for continuation in model.retained}
    _same("continuations", sorted(by_number), sorted(shown.continuations))
    for number, continuation in by_number.items():
        has_state = continuation.state is not None
        _same(f"continuation {number}: has a state", has_state, shown.continuations[number].has_state)
    for pool in model.pools:
        _compare_pool(model, pool, shown, by_row)


def holdings(model: LedgerModel, pool: str) -> dict[int, Holding]:
    """Return what the spaces of a pool say of each page that one of them holds, by the identity of the object."""
    found: dict[int, Holding] = {}
    for sequence in model.active:
        _count(found, sequence.spaces[pool], sequence.row)
    for continuation in model.retained:
        _count(found, continuation.spaces[pool], -1)
    return found


def committed_bytes(
    model: LedgerModel, pool: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.uint16]]:
    """Return the ids of page groups, (n,), which of their columns are committed, (n, 64), and their tags, (n, 64)."""
    held = [holding for holding in holdings(model, pool).values() if holding.committed]
    page_ids = np.array([holding.page.page_id for holding in held], np.int64)
    counts = np.array([holding.committed for holding in held], np.int64)
    tags = np.array([holding.page.tags for holding in held], np.uint16).reshape(-1, pk.PAGE_TOKENS)
    return page_ids, np.arange(pk.PAGE_TOKENS) < counts[:, None], tags


def _count(found: dict[int, Holding], space: Space, row: int) -> None:
    frontier, protected, is_active = space.frontier, space.protected, row >= 0
    for block, page in enumerate(space.pages):
        holding = found.get(id(page))
        if holding is None:
            found[id(page)] = holding = Holding(page, block)
        start = block * pk.PAGE_TOKENS
        holding.references += 1
        holding.active += is_active
        holding.committed = max(holding.committed, min(frontier - start, pk.PAGE_TOKENS))
        holding.protected = max(holding.protected, min(protected - start, pk.PAGE_TOKENS))
        holding.row = row if holding.references == 1 else -1
        assert holding.block == block, "the model holds a page at two blocks"


def _compare_pool(
    model: LedgerModel, pool: str, shown: pk.StoreInspection, by_row: Mapping[int, SequenceModel]
) -> None:
    view, capacity = shown.pools[pool], model.pools[pool].capacity
    table, members = view.table.tolist(), view.members.tolist()
    device = view.device.tolist()
    bound: list[int] = []
    rows = list(zip(view.frontier.tolist(), view.mapped_end.tolist(), view.limit.tolist(), strict=True))
    for row in range(model.max_concurrency):
        space = by_row[row].spaces[pool] if row in by_row else Space(0)
        count, where = len(space.pages), f"pool {pool} row {row}"
        wanted = (space.frontier, count * pk.PAGE_TOKENS, space.entitlement * pk.PAGE_TOKENS)
        if rows[row] != wanted:
            _same(f"{where}: (frontier, mapped, limit)", wanted, rows[row])
        _learn_members(where, space, members[row])
        if table[row][:count] != [device[page] for page in members[row][:count]]:
            raise AssertionError(f"{where}: the table names {table[row]}, the descriptors other page groups")
        named = [entry for entry in table[row] if entry != -1]
        if table[row] != named + [-1] * (len(table[row]) - len(named)):
            raise AssertionError(f"{where}: a hole: {table[row]}")
        if not count <= len(named) <= space.entitlement:
            raise AssertionError(f"{where}: {len(named)} ids, model {wanted}")
        bound += named[count:]
    for continuation in model.retained:
        space, kept = continuation.spaces[pool], shown.continuations[continuation.number].pools[pool]
        where = f"pool {pool} continuation {continuation.number}"
        _same(f"{where}: (frontier, protected)", (space.frontier, space.protected), (kept.frontier, kept.protected))
        _same(f"{where}: pages", len(space.pages), kept.members.size)
        _learn_members(where, space, kept.members.tolist())
    held = holdings(model, pool)
    _compare_pages(model, pool, view, held)
    allocated, reserved = len(held), model.reserved(pool)
    wanted_counts = (allocated, reserved, capacity - allocated - reserved, len(bound))
    _same(
        f"pool {pool}: (allocated, reserved, available, bound)", wanted_counts,
        (view.allocated, view.reserved, view.available, view.bound),
    )  # fmt: skip
    ids = bound + [holding.page.page_id for holding in held.values() if holding.page.page_id is not None]
    if len(set(ids)) != len(ids):
        raise AssertionError(f"pool {pool}: one id in two places: {ids}")
    live = np.flatnonzero(view.lease_serials).tolist()
    if sorted(ids) != live:
        raise AssertionError(f"pool {pool}: held ids {sorted(ids)}, ids with a serial {live}")
    edges = [-1, *live, capacity]
    runs = [[low + 1, high] for low, high in itertools.pairwise(edges) if low + 1 < high]
    _same(f"pool {pool}: free runs", runs, view.free_runs.tolist())
    if view.pins.any() or view.page_pins.any():
        raise AssertionError(f"pool {pool}: a page is pinned at rest: {view.pins.tolist()} {view.page_pins.tolist()}")


def _learn_members(where: str, space: Space, members: list[int]) -> None:
    """Demand that each page has the descriptor it had; learn that of a new one."""
    known = [page.logical for page in space.pages]
    if known == members[: len(known)]:
        return
    for block, page in enumerate(space.pages):
        if page.logical is None:
            page.logical = members[block]
        elif page.logical != members[block]:
            raise AssertionError(f"{where} block {block}: descriptor was {page.logical} and is {members[block]}")


def _compare_pages(model: LedgerModel, pool: str, view: pk.PoolInspection, held: dict[int, Holding]) -> None:
    """Compare every column of every page, in one tuple each; look closer only where they differ."""
    numbers = [holding.page.logical for holding in held.values()]
    if len(set(numbers)) != len(numbers):
        raise AssertionError(f"pool {pool}: one descriptor is two pages: {numbers}")
    logical = np.array(numbers, np.int64)
    page_ids = view.device[logical]
    shown = zip(
        page_ids.tolist(), view.lease_serials[page_ids].tolist(), view.serial[logical].tolist(),
        view.content[logical].tolist(), view.references[logical].tolist(), view.active[logical].tolist(),
        view.committed[logical].tolist(), view.protected[logical].tolist(), view.block[logical].tolist(),
        strict=True,
    )  # fmt: skip
    writers = view.writer[logical].tolist()
    for holding, row, writer in zip(held.values(), shown, writers, strict=True):
        page, committed, protected = holding.page, max(holding.committed, 0), max(holding.protected, 0)
        follows = (holding.references, holding.active, committed, protected, holding.block)
        if row != (page.page_id, page.lease, page.identity, page.content, *follows):
            where = f"pool {pool} descriptor {page.logical}"
            for what, value in zip(LEARNED, row[: len(LEARNED)], strict=True):
                _learn(model, pool, where, page, what, value)
            _same(f"{where}: (references, active, committed, protected, block)", follows, row[len(LEARNED) :])
        # A page that may still be written has its row as writer; a page of several spaces or of none active has none.
        # A full page of one active space may have one or not: nothing is appended to it either way.
        right = {-1} if holding.references > 1 or not holding.active else {holding.row}
        if committed == pk.PAGE_TOKENS:
            right = {-1, holding.row}
        if writer not in right:
            raise AssertionError(
                f"pool {pool} descriptor {page.logical}: writer {writer}, model one of {sorted(right)} ({holding})"
            )
    for what in LEARNED:
        values = [getattr(holding.page, what) for holding in held.values()]
        if len(set(values)) != len(values):
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


def _same(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise AssertionError(f"{what}: {got}, model {expected}")
