"""What the ledger tests share: small stores, one-line units, and refusals that prove nothing changed.

`snapshot` walks every attribute of an object, public or not, into plain Python, so a test that compares two of
them needs no list of columns that could fall behind the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import PagedKVError
from pagedkv.ledger.activation import ActivationTarget, Refusal
from pagedkv.ledger.active_spaces import AddressSpaces
from pagedkv.ledger.block_tables import BlockTable, TableSlices
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.free_runs import FreeRuns
from pagedkv.ledger.ledger import Columns, PoolSlices, StoreLedgers
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.units import Submission
from pagedkv.values.config import Backend, ExplicitCapacity, KVGeometry, StoreConfig
from pagedkv.values.quantities import PAGE_TOKENS, ceil_div

GEOMETRY = KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64)
DRAFT_GEOMETRY = KVGeometry(layers=1, query_heads=8, kv_heads=4, head_dim=128)

PLAIN = frozenset({type(None), bool, int, float, str, bytes, slice})

UNSEEN = frozenset({"config", "_crossing"})
"""Attributes that no snapshot holds: a frozen value, and a scratch buffer that no call reads before it writes."""


def runs_of(free: FreeRuns) -> list[tuple[int, int]]:
    """Return the runs of a set of free ids as (start, end) pairs in ascending order."""
    return [(start, end) for start, end in free.edges().tolist()]


def make_config(
    *, max_context: int = 256, max_concurrency: int = 2, tokens: int | None = None, backend: Backend | None = None
) -> StoreConfig:
    """Return a configuration with one layer; Main holds every sequence at its ceiling unless `tokens` says less."""
    if tokens is None:
        tokens = max_concurrency * ceil_div(max_context, PAGE_TOKENS) * PAGE_TOKENS
    return StoreConfig(
        GEOMETRY, profile="bf16", max_context=max_context, max_concurrency=max_concurrency,
        kv_capacity=ExplicitCapacity(tokens), backend=backend,
    )  # fmt: skip


def make_ledgers(
    *,
    max_context: int = 256,
    max_concurrency: int = 2,
    tokens: int | None = None,
    backend: Backend | None = None,
    store_id: int = 1,
) -> StoreLedgers:
    """Return the ledgers of a small store."""
    config = make_config(max_context=max_context, max_concurrency=max_concurrency, tokens=tokens, backend=backend)
    return StoreLedgers(config, store_id)


def make_spaces(*, pages: int = 8, rows: int = 2, blocks: int = 4) -> AddressSpaces:
    """Return the address spaces of a pool that belongs to no store."""
    return AddressSpaces(
        PagePool("main", pages),
        LogicalPages(pages),
        BlockTable(rows=rows, blocks=blocks),
        max_context=blocks * PAGE_TOKENS,
    )


def activate(ledgers: StoreLedgers, prompt_tokens: int, output_tokens: int = 0) -> Sequence:
    """Activate a sequence that must fit."""
    answer = ledgers.try_activate(ActivationTarget(prompt_tokens, output_tokens))
    assert isinstance(answer, Sequence), answer
    return answer


def refuse(ledgers: StoreLedgers, prompt_tokens: int, output_tokens: int = 0) -> Refusal:
    """Ask for a sequence that must not fit; the ledgers must not change."""
    before = snapshot(ledgers)
    answer = ledgers.try_activate(ActivationTarget(prompt_tokens, output_tokens))
    assert isinstance(answer, Refusal), answer
    assert_unchanged(before, ledgers)
    return answer


def begin(
    ledgers: StoreLedgers, sequences: Sequence | list[Sequence], columns: Columns | Mapping[str, Columns]
) -> tuple[Submission, PoolSlices]:
    """Begin a unit over sequences; plain `columns` are Main's."""
    chosen = sequences if isinstance(sequences, list) else [sequences]
    return ledgers.begin_unit(
        "step", ledgers.batch(chosen), columns if isinstance(columns, Mapping) else {"main": columns}
    )


def write(
    ledgers: StoreLedgers,
    sequences: Sequence | list[Sequence],
    columns: Columns | Mapping[str, Columns],
    accepted: Columns | Mapping[str, Columns] | None = None,
) -> PoolSlices:
    """Run one unit to its end and commit what it wrote, or `accepted`; return the slices it published."""
    unit, slices = begin(ledgers, sequences, columns)
    taken = columns if accepted is None else accepted
    ledgers.commit_unit(unit, taken if isinstance(taken, Mapping) else {"main": taken})
    return slices


def trim(ledgers: StoreLedgers, sequence: Sequence, pool: str = "main", provisional: Columns = 0) -> int:
    """Trim one sequence and return the count of pages that went back."""
    return ledgers.trim(ledgers.batch([sequence]), pool, provisional)


def mapped(ledgers: StoreLedgers, sequence: Sequence, pool: str = "main") -> list[int]:
    """Return the page ids that a sequence maps in a pool."""
    ids: list[int] = ledgers.spaces[pool].mapped_ids(sequence.row).tolist()
    return ids


def frontier(ledgers: StoreLedgers, sequence: Sequence, pool: str = "main") -> int:
    """Return a committed frontier in tokens."""
    return int(ledgers.spaces[pool].frontier[sequence.row])


def counts(ledgers: StoreLedgers, pool: str = "main") -> tuple[int, int, int]:
    """Return (allocated, reserved, available) pages of a pool."""
    ledger = ledgers.spaces[pool].pool
    return ledger.allocated, ledger.reserved, ledger.available


def slices_of(slices: TableSlices | None) -> list[tuple[int, int, int]]:
    """Return table slices as (row, first block, count) in row order."""
    if slices is None:
        return []
    return sorted(zip(slices.rows.tolist(), slices.first_blocks.tolist(), slices.block_counts.tolist(), strict=True))


def span(spaces: AddressSpaces, values: Mapping[int, int], neutral: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a value for each execution row: `neutral` where `values` names none."""
    filled = np.full(spaces.frontier.size, neutral, np.int32)
    for row, value in values.items():
        filled[row] = value
    return filled


def snapshot(value: object) -> object:
    """Copy every attribute below `value` into plain Python: equal snapshots mean equal state."""
    return _snapshot(value, {})


def differences(before: object, after: object, path: str = "") -> list[str]:
    """Return the paths at which two snapshots differ."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return [line for key in before for line in differences(before[key], after[key], f"{path}.{key}")]
    return [f"{path}: {_readable(before)} became {_readable(after)}"]


def assert_unchanged(before: object, value: object) -> None:
    """Assert that `value` is as it was when `before` was taken; the message names every column that moved."""
    after = snapshot(value)
    if before != after:
        changed = differences(before, after)
        raise AssertionError(f"state changed in {len(changed)} places: " + "; ".join(changed[:5]))


def observables(ledgers: StoreLedgers) -> object:
    """Return the ledgers' state but for what only ever grows or lies behind a count.

    A claim that is given back leaves exactly this as it was; serials that were handed out stay handed out.
    """
    hidden = {"_serial_next", "_stamp_next", "_starts", "_ends", "content"}

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {name: strip(item) for name, item in value.items() if name not in hidden}
        return [strip(item) for item in value] if isinstance(value, list) else value

    live = {
        name: [runs_of(spaces.pool.free_runs), runs_of(spaces.pages.free_runs),
               spaces.pages.content[spaces.pages.serial > 0].tolist()]
        for name, spaces in ledgers.spaces.items()
    }  # fmt: skip
    return [strip(snapshot(ledgers)), live]


@contextmanager
def refused(
    error: type[PagedKVError], clause: str, *state: object, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[PagedKVError]]:
    """Expect exactly this refusal, citing this clause, and no change in any of `state`."""
    before = [snapshot(value) for value in state]
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert caught.type is error
    assert caught.value.clause == clause
    assert f"({clause})" in str(caught.value)
    for value, taken in zip(state, before, strict=True):
        assert_unchanged(taken, value)


@contextmanager
def boundary_checked(ledgers: StoreLedgers) -> Iterator[StoreLedgers]:
    """Check every invariant when the block ends well.  (C16)"""
    yield ledgers
    check_ledgers(ledgers)


def _readable(value: object) -> object:
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes):
        return np.frombuffer(value[2], value[0]).tolist()
    return value


def _snapshot(value: object, met: dict[int, int]) -> object:
    """Copy one value; an object that was met before is named by its number, so that sharing is part of the state."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is np.ndarray:
        assert isinstance(value, np.ndarray)
        return (value.dtype.str, value.shape, value.tobytes())
    if kind is memoryview:  # another way to read an array that is an attribute too
        return None
    if kind is list or kind is tuple:
        return [_snapshot(item, met) for item in value]  # type: ignore[attr-defined]
    if kind is dict:
        return {key: _snapshot(item, met) for key, item in value.items()}  # type: ignore[attr-defined]
    if isinstance(value, np.generic):
        return value.item()
    if id(value) in met:
        return f"object {met[id(value)]}"
    met[id(value)] = len(met)
    return {name: _snapshot(item, met) for name, item in _attributes(value) if name not in UNSEEN}


def _attributes(value: object) -> Iterable[tuple[str, object]]:
    slots: tuple[str, ...] | None = getattr(type(value), "__slots__", None)
    return vars(value).items() if slots is None else ((name, getattr(value, name)) for name in slots)
