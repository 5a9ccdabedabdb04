"""StoreInspection: a copy of the whole state of a ledger, in plain arrays.  (C16)

    before = store.inspect()
    ...                                  # an operation that is refused
    assert not store.inspect().differences(before)

The copy holds state, not history: counters of the next serial are absent, and `content` of a free descriptor is 0.
Writing into the copy changes no ledger.  The parts are tuples of numbers and arrays: compare them with `differences`,
not with `==`.

Cost: linear in pages and table entries, one array copy for each column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pagedkv.ledger.active_spaces import ActiveSpaces
from pagedkv.ledger.kept_spaces import KeptSpaces
from pagedkv.ledger.ledger import Ledger

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class PoolInspection(NamedTuple):
    """One pool: its counters, the active spaces by row, page groups by id, descriptors by number.

    Attributes:
        capacity, allocated, reserved, available, bound: pages (C6.2, C6.5).
        shared_end, committed_end, mapped_end, bound_end, entitled_end: (C,) int32, tokens of each row's space.
        table: (C, L) int32, the host mirror: page group ids, -1 beyond what is bound.
        members: (C, L) int32, descriptors, -1 beyond what is bound.
        lease_serials: (capacity,) int64, 0 for a free page group.
        free_runs: (n, 2) int64, maximal runs [start, end) of free page groups.
        serial, content: (descriptors,) int64, generation and content epoch of a descriptor, 0 when it is free.
        committed, protected: (descriptors,) int32, columns; `committed` of a written page follows its row's frontier.
        references, active, writer, device, host, block, pins: (descriptors,) int32, as `pages.py` says.
    """

    capacity: int
    allocated: int
    reserved: int
    available: int
    bound: int
    shared_end: Int32s
    committed_end: Int32s
    mapped_end: Int32s
    bound_end: Int32s
    entitled_end: Int32s
    table: Int32s
    members: Int32s
    lease_serials: Int64s
    free_runs: Int64s
    serial: Int64s
    content: Int64s
    committed: Int32s
    protected: Int32s
    references: Int32s
    active: Int32s
    writer: Int32s
    device: Int32s
    host: Int32s
    block: Int32s
    pins: Int32s


class SpaceInspection(NamedTuple):
    """One inactive space: (n,) int32 descriptors in block order, and frontiers in tokens."""

    members: Int32s
    frontier: int
    protected: int


class ContinuationInspection(NamedTuple):
    """One retained continuation: its space in each pool, and whether it has the caller's state (C2.2).

    `state_frontier` is the frontier of each pool that the state belongs to, in tokens; empty without a state (C9.8).
    """

    pools: Mapping[str, SpaceInspection]
    has_state: bool
    state_frontier: Mapping[str, int]


FIRST_ARRAY: Final = 5
"""Index of the first array among the fields of PoolInspection: numbers before it, arrays from it on."""
assert PoolInspection._fields[FIRST_ARRAY] == "shared_end", PoolInspection._fields

PARTS = (PoolInspection, SpaceInspection, ContinuationInspection)


@dataclass(frozen=True, eq=False)
class StoreInspection:
    """Every pool, sequence, unit and continuation of a store; made by `Store.inspect`.

    Attributes:
        pools: by name.
        active_rows, rows_in_flight: execution rows in ascending order.
        units_in_flight: labels, in the order of their begin.
        sequence_serials: (C,) int64, 0 for a free row.
        budget_tokens: (C,) int32, tokens that each sequence may hold.
        continuations: by the number of their handle.
    """

    pools: Mapping[str, PoolInspection]
    active_rows: tuple[int, ...]
    rows_in_flight: tuple[int, ...]
    units_in_flight: tuple[str, ...]
    sequence_serials: Int64s
    budget_tokens: Int32s
    continuations: Mapping[int, ContinuationInspection]

    def differences(self, before: StoreInspection) -> list[str]:
        """Return one line for each value that differs from an earlier inspection."""
        return [] if _comparable(before) == _comparable(self) else _differences("", vars(before), vars(self))


def inspect_ledger(ledger: Ledger) -> StoreInspection:
    """Copy the state of a ledger."""
    units, sequences = ledger.units, ledger.sequences
    in_flight = units.rows_in_flight
    return StoreInspection(
        pools={name: _inspect_pool(spaces) for name, spaces in ledger.active.items()},
        active_rows=tuple(sequences.active_rows()),
        rows_in_flight=tuple(row for row in range(in_flight.bit_length()) if in_flight >> row & 1),
        units_in_flight=tuple(unit.label for unit in units.in_flight),
        sequence_serials=sequences.serials.copy(),
        budget_tokens=sequences.budget_tokens.copy(),
        continuations={
            number: ContinuationInspection(
                {pool: _inspect_space(kept, number) for pool, kept in ledger.kept.items()},
                continuation.state is not None, dict(continuation.state_frontier),
            )
            for number, continuation in ledger.continuations.states.items()
        },
    )


def _inspect_pool(spaces: ActiveSpaces) -> PoolInspection:
    pool, pages = spaces.pool, spaces.pages
    return PoolInspection(
        capacity=pool.capacity, allocated=pool.allocated, reserved=pool.reserved, available=pool.available,
        bound=pool.bound, shared_end=spaces.shared_end.copy(), committed_end=spaces.committed_end.copy(),
        mapped_end=spaces.mapped_end.copy(), bound_end=spaces.bound_end.copy(),
        entitled_end=spaces.entitled_end.copy(), table=spaces.table.copy(), members=spaces.members.copy(),
        lease_serials=pool.serials.copy(), free_runs=pool.free_runs.edges(),
        serial=pages.serial.copy(), content=pages.content * (pages.serial != 0),
        committed=spaces.committed_columns(slice(0, pages.capacity)), protected=pages.protected.copy(),
        references=pages.references.copy(), active=pages.active.copy(), writer=pages.writer.copy(),
        device=pages.device.copy(), host=pages.host.copy(), block=pages.block.copy(), pins=pages.pins.copy(),
    )  # fmt: skip


def _inspect_space(kept: KeptSpaces, number: int) -> SpaceInspection:
    space = kept.by_number[number]
    return SpaceInspection(space.members.copy(), space.frontier, space.protected_frontier)


def _comparable(inspection: StoreInspection) -> object:
    """Return an inspection as tuples of numbers and bytes, which `==` compares fast.

    The arrays of a pool become one string of bytes.  That is unambiguous: only one of them varies in length.
    """
    return (
        inspection.active_rows, inspection.rows_in_flight, inspection.units_in_flight,
        inspection.sequence_serials.tobytes(), inspection.budget_tokens.tobytes(),
        [
            (name, pool[:FIRST_ARRAY], b"".join(cast("Any", pool[FIRST_ARRAY:])))
            for name, pool in inspection.pools.items()
        ],
        [
            (number, continuation.has_state, continuation.state_frontier.get(pool), pool, space.members.tobytes(),
             space.frontier, space.protected)
            for number, continuation in inspection.continuations.items() for pool, space in continuation.pools.items()
        ],
    )  # fmt: skip


def _differences(path: str, before: Any, after: Any) -> list[str]:
    kind = type(after)
    if kind is np.ndarray:
        if before.shape == after.shape and before.tobytes() == after.tobytes():
            return []
        return [f"{path}: {before.tolist()} became {after.tolist()}"]
    if kind in PARTS:
        pairs = list(zip(kind._fields, before, after, strict=True))
    elif kind is dict and before.keys() == after.keys():
        pairs = [(key, before[key], after[key]) for key in after]
    else:
        return [] if before == after else [f"{path}: {before!r} became {after!r}"]
    differences = []
    for name, old, new in pairs:
        differences += _differences(f"{path}.{name}" if path else str(name), old, new)
    return differences
