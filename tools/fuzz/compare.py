"""Whether a store shows what the model says.  (C5 to C13, C16)

    inspection (`Store.inspect`)      spaces in the model, each a list of pages
        rows, continuations      ==   frontiers, memberships, entitlements, protected frontiers
        columns over pages       ==   what follows from who holds a page: references, writers, committed columns
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
    """What follows from the spaces that hold one page.

    Attributes:
        references, active: spaces, and those of them that are active.
        committed, protected: columns, the most that any space has.
        row: the row of the active space when it is the only holder, else -1.
    """

    page: Page
    block: int
    references: int
    active: int
    committed: int
    protected: int
    row: int


Held = dict[str, dict[int, Holding]]
"""Per pool, what the spaces say of each page that one of them holds, by the identity of the object."""


def compare(model: LedgerModel, shown: pk.StoreInspection) -> Held:
    """Assert that the store shows what the model says, and learn ids that appear for the first time.

    Returns:
        What follows from the model, until it changes.
    """
    active, retained = model.active, model.retained
    by_row = {sequence.row: sequence for sequence in active}
    _same("active rows", sorted(by_row), list(shown.active_rows))
    _same("rows in flight", sorted(row for row, one in by_row.items() if one.unit), list(shown.rows_in_flight))
    _same("units in flight", len(model.open_units), len(shown.units_in_flight))
    budgets = [by_row[row].budget if row in by_row else 0 for row in range(model.max_concurrency)]
    _same("budgets", budgets, shown.budget_tokens.tolist())
    states = {continuation.number: continuation.state is not None for continuation in retained}
    shown_states = {number: kept.has_state for number, kept in shown.continuations.items()}
    _same("continuations, and which have a state", states, shown_states)
    return {pool: _compare_pool(model, pool, shown, by_row, retained) for pool in model.pools}


def committed_bytes(
    held: Mapping[int, Holding],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.uint16]]:
    """Return the ids of page groups, (n,), which of their columns are committed, (n, 64), and their tags, (n, 64)."""
    written = [holding for holding in held.values() if holding.committed]
    page_ids = np.array([holding.page.page_id for holding in written], np.int64)
    counts = np.array([holding.committed for holding in written], np.int64)
    tags = np.array([holding.page.tags for holding in written], np.uint16).reshape(-1, pk.PAGE_TOKENS)
    return page_ids, COLUMNS < counts[:, None], tags


def _holdings(pool: str, active: Iterable[SequenceModel], retained: list[ContinuationModel]) -> dict[int, Holding]:
    found: dict[int, Holding] = {}
    for sequence in active:
        _count(found, sequence.spaces[pool], sequence.row)
    for continuation in retained:
        _count(found, continuation.spaces[pool], -1)
    return found


def _count(found: dict[int, Holding], space: Space, row: int) -> None:
    committed, protected, full = space.frontier, space.protected, pk.PAGE_TOKENS
    for block, page in enumerate(space.pages):
        columns = 0 if committed < 0 else min(committed, full)
        kept = 0 if protected < 0 else min(protected, full)
        committed, protected = committed - full, protected - full
        holding = found.get(id(page))
        if holding is None:
            found[id(page)] = Holding(page, block, 1, int(row >= 0), columns, kept, row)
            continue
        assert holding.block == block, "the model holds a page at two blocks"
        holding.references += 1
        holding.active += row >= 0
        holding.committed = max(holding.committed, columns)
        holding.protected = max(holding.protected, kept)
        holding.row = -1


def _compare_pool(
    model: LedgerModel, pool: str, shown: pk.StoreInspection, by_row: Mapping[int, SequenceModel],
    retained: list[ContinuationModel],
) -> dict[int, Holding]:  # fmt: skip
    view, capacity = shown.pools[pool], model.pools[pool].capacity
    spaces = [by_row[row].spaces[pool] if row in by_row else NO_SPACE for row in range(model.max_concurrency)]
    wanted = [
        (space.frontier, len(space.pages) * pk.PAGE_TOKENS, space.entitlement * pk.PAGE_TOKENS) for space in spaces
    ]
    ends = zip(view.frontier.tolist(), view.mapped_end.tolist(), view.limit.tolist(), strict=True)
    _same(f"pool {pool}: (frontier, mapped, limit) by row", wanted, list(ends))
    device = view.device.tolist()
    bound: list[int] = []
    rows = zip(spaces, view.table.tolist(), view.members.tolist(), strict=True)
    for row, (space, page_ids, members) in enumerate(rows):
        count, named = len(space.pages), len(page_ids) - page_ids.count(-1)
        _learn_members(pool, row, space, members)
        if page_ids[:count] != [device[page] for page in members[:count]]:
            raise AssertionError(f"pool {pool} row {row}: the table names {page_ids}, the descriptors other ids")
        if -1 in page_ids[:named]:
            raise AssertionError(f"pool {pool} row {row}: a hole: {page_ids}")
        if not count <= named <= space.entitlement:
            raise AssertionError(f"pool {pool} row {row}: {named} ids, model {count} of {space.entitlement}")
        bound += page_ids[count:named]
    for continuation in retained:
        space, kept = continuation.spaces[pool], shown.continuations[continuation.number].pools[pool]
        where = f"pool {pool} continuation {continuation.number}"
        count = len(space.pages)
        _same(f"{where}: (frontier, protected)", (space.frontier, space.protected), (kept.frontier, kept.protected))
        _same(f"{where}: pages", count, kept.members.size)
        _learn_members(pool, continuation, space, kept.members.tolist())
    held = _holdings(pool, by_row.values(), retained)
    _compare_pages(model, pool, view, held)
    allocated, reserved = len(held), sum(space.entitlement - len(space.pages) for space in spaces)
    wanted_counts = (allocated, reserved, capacity - allocated - reserved, len(bound))
    _same(
        f"pool {pool}: (allocated, reserved, available, bound)", wanted_counts,
        (view.allocated, view.reserved, view.available, view.bound),
    )  # fmt: skip
    ids = bound + [holding.page.page_id for holding in held.values() if holding.page.page_id is not None]
    if len(set(ids)) != len(ids):
        raise AssertionError(f"pool {pool}: one id in two places: {ids}")
    live = view.lease_serials.nonzero()[0].tolist()
    if sorted(ids) != live:
        raise AssertionError(f"pool {pool}: held ids {sorted(ids)}, ids with a serial {live}")
    edges = [-1, *live, capacity]
    runs = [[low + 1, high] for low, high in itertools.pairwise(edges) if low + 1 < high]
    _same(f"pool {pool}: free runs", runs, view.free_runs.tolist())
    pins, page_pins = view.pins.tolist(), view.page_pins.tolist()
    if any(pins) or any(page_pins):
        raise AssertionError(f"pool {pool}: a page is pinned at rest: {pins} {page_pins}")
    return held


def _learn_members(pool: str, holder: int | ContinuationModel, space: Space, members: list[int]) -> None:
    """Demand that each page has the descriptor it had; learn that of a new one."""
    known = [page.logical for page in space.pages]
    if known == members[: len(known)]:
        return
    where = f"pool {pool} " + (f"row {holder}" if isinstance(holder, int) else f"continuation {holder.number}")
    for block, page in enumerate(space.pages):
        if page.logical is None:
            page.logical = members[block]
        elif page.logical != members[block]:
            raise AssertionError(f"{where} block {block}: descriptor was {page.logical} and is {members[block]}")


def _compare_pages(model: LedgerModel, pool: str, view: pk.PoolInspection, held: dict[int, Holding]) -> None:
    """Compare every column of every page, in one tuple each; look closer only where they differ."""
    serials = [*view.lease_serials.tolist(), 0]  # the last one is of page group -1
    device = view.device.tolist()
    columns = zip(
        device, [serials[page_id] for page_id in device], view.serial.tolist(), view.content.tolist(),
        view.references.tolist(), view.active.tolist(), view.committed.tolist(), view.protected.tolist(),
        view.block.tolist(), strict=True,
    )  # fmt: skip
    rows, writers = list(columns), view.writer.tolist()
    for holding in held.values():
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
            follows = (holding.references, holding.active, committed, holding.protected, holding.block)
            _same(f"{where}: (references, active, committed, protected, block)", follows, row[len(LEARNED) :])
        # A page that may still be written has its row as writer; a page of several spaces or of none active has none.
        # A full page of one active space may have one or not: nothing is appended to it either way.
        if writer != holding.row and (writer != -1 or committed < pk.PAGE_TOKENS):
            raise AssertionError(f"pool {pool} descriptor {logical}: writer {writer}, model {holding}")
    identities = [identity_of(holding.page) for holding in held.values()]
    for what, *values in zip(IDENTITY, *identities, strict=True):
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
