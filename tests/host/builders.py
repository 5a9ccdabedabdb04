"""What the ledger tests share: small stores, one-line units, and what a row holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pagedkv.ledger.active_spaces import TableSlices
from pagedkv.ledger.batch import Columns
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.ledger import Ledger, PoolSlices
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget, Refusal
from pagedkv.ledger.units import Submission
from pagedkv.values.config import Backend, ExplicitCapacity, KVGeometry, StoreConfig
from pagedkv.values.quantities import PAGE_TOKENS, ceil_div
from tests.host.refusals import assert_unchanged, snapshot

GEOMETRY = KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64)
DRAFT_GEOMETRY = KVGeometry(layers=1, query_heads=8, kv_heads=4, head_dim=128)

BUILT: list[Ledger] = []
"""Ledgers of the running test, which `conftest.py` checks at its end."""


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def make_config(
    *, max_context: int = 256, max_concurrency: int = 2, tokens: int | None = None, backend: Backend | None = None,
    **options: Any,
) -> StoreConfig:
    """Return a configuration with one layer; Main holds every sequence at its ceiling unless `tokens` says less."""
    if tokens is None:
        tokens = max_concurrency * ceil_div(max_context, PAGE_TOKENS) * PAGE_TOKENS
    return StoreConfig(GEOMETRY, profile="bf16", max_context=max_context, max_concurrency=max_concurrency,
                       kv_capacity=ExplicitCapacity(tokens), backend=backend, **options)


def make_ledger(config: StoreConfig | None = None, *, store_id: int = 1, **options: Any) -> Ledger:
    """Return the ledger of a small store, which is checked at the end of the test; options as of `make_config`."""
    BUILT.append(Ledger(make_config(**options) if config is None else config, store_id))
    return BUILT[-1]


def leave_broken(ledger: Ledger) -> Ledger:
    """Do not check a ledger at the end of the test, which breaks a law or leaves a transaction open."""
    BUILT.remove(ledger)
    return ledger


def growing(
    *, max_context: int = 4096, window: int = 256, forced: int = 0, columns: int | None = None, **options: Any
) -> Ledger:
    """Return the ledger of a store with lease growth; further options as of `make_config`."""
    return make_ledger(replace(make_config(max_context=max_context, **options), kv_lease_growth=True,
                               lease_window_tokens=window, forced_span_tokens=forced, decode_columns_max=columns))


def activate(
    ledger: Ledger, prompt_tokens: int, output_tokens: int = 0, *, written: Columns | Mapping[str, Columns] = 0
) -> Sequence:
    """Activate a sequence that must fit, and commit what it has written."""
    answer = ledger.try_activate(ActivationTarget(prompt_tokens, output_tokens))
    assert isinstance(answer, Sequence), answer
    if written != 0:
        write(ledger, answer, written)
    return answer


def running(
    prompt_tokens: int, output_tokens: int = 0, *, written: Columns | Mapping[str, Columns] = 0, **options: Any
) -> tuple[Ledger, Sequence]:
    """Return a small ledger, options as of `make_config`, and a sequence in it, as of `activate`."""
    ledger = make_ledger(**options)
    return ledger, activate(ledger, prompt_tokens, output_tokens, written=written)


def refuse(ledger: Ledger, prompt_tokens: int, output_tokens: int = 0) -> Refusal:
    """Ask for a sequence that must not fit; the ledger must not change."""
    before = snapshot(ledger)
    answer = ledger.try_activate(ActivationTarget(prompt_tokens, output_tokens))
    assert isinstance(answer, Refusal), answer
    assert_unchanged(before, ledger)
    return answer


def begin(
    ledger: Ledger, sequences: Sequence | list[Sequence], columns: Columns | Mapping[str, Columns]
) -> tuple[Submission, PoolSlices]:
    """Begin a unit over sequences; plain `columns` are Main's."""
    chosen = sequences if isinstance(sequences, list) else [sequences]
    return ledger.begin_unit("step", ledger.batch(chosen),
                              columns if isinstance(columns, Mapping) else {"main": columns})


def write(
    ledger: Ledger,
    sequences: Sequence | list[Sequence],
    columns: Columns | Mapping[str, Columns],
    accepted: Columns | Mapping[str, Columns] | None = None,
) -> PoolSlices:
    """Run one unit to its end and commit what it wrote, or `accepted`; return the slices it published."""
    unit, slices = begin(ledger, sequences, columns)
    taken = columns if accepted is None else accepted
    ledger.commit_unit(unit, taken if isinstance(taken, Mapping) else {"main": taken})
    return slices


def trim(ledger: Ledger, sequence: Sequence, pool: str = "main", provisional: Columns = 0) -> int:
    """Trim one sequence and return the count of pages that went back."""
    return ledger.trim(ledger.batch([sequence]), pool, provisional)


def mapped(ledger: Ledger, sequence: Sequence, pool: str = "main") -> list[int]:
    """Return the page ids that a sequence maps in a pool."""
    ids: list[int] = ledger.active[pool].mapped_ids(sequence.row).tolist()
    return ids


def frontier(ledger: Ledger, sequence: Sequence, pool: str = "main") -> int:
    """Return a committed frontier in tokens."""
    return int(ledger.active[pool].committed_end[sequence.row])


def counts(ledger: Ledger, pool: str = "main") -> tuple[int, int, int]:
    """Return (allocated, reserved, available) pages of a pool."""
    counters = ledger.active[pool].pool
    return counters.allocated, counters.reserved, counters.available


def slices_of(slices: TableSlices | None) -> list[tuple[int, int, int]]:
    """Return table slices as (row, first block, count) in row order."""
    if slices is None:
        return []
    return sorted(zip(slices.rows.tolist(), slices.first_blocks.tolist(), slices.block_counts.tolist(), strict=True))
