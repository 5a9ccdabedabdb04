"""Refusals that prove nothing changed.

`snapshot` walks every attribute of an object, public or not, into plain Python, so a test that compares two of
them needs no list of columns that could fall behind the code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pagedkv.errors import PagedKVError
from pagedkv.ledger.free_runs import FreeRuns
from pagedkv.ledger.ledger import Ledger

PLAIN = frozenset({type(None), bool, int, float, str, bytes, slice})

UNSEEN = frozenset({"config", "_crossing", "_unit_ends", "_is_beyond", "is_beyond", "_last_batch", "_uniform",
                    "_last_entry", "_is_repeated", "_mapped_left", "_ready_left", "new_windows"})
"""Attributes that no snapshot holds: a frozen value, buffers that no call reads before it writes, and caches."""


def runs_of(free: FreeRuns) -> list[tuple[int, int]]:
    """Return the runs of a set of free ids as (start, end) pairs in ascending order."""
    return [(start, end) for start, end in free.edges().tolist()]


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


def observables(ledger: Ledger) -> object:
    """Return the state of a ledger but for what only ever grows or lies behind a count.

    A claim that is given back leaves exactly this as it was; serials that were handed out stay handed out.
    """
    hidden = {"_serial_next", "_stamp_next", "_starts", "_ends", "_content", "unsettled"}

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {name: strip(item) for name, item in value.items() if name not in hidden}
        return [strip(item) for item in value] if isinstance(value, list) else value

    live = [[runs_of(spaces.pool.free_runs), runs_of(spaces.pages.free_runs),
             spaces.pages.content[spaces.pages.serial > 0].tolist()] for spaces in ledger.active.values()]
    return [strip(snapshot(ledger)), live]


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
def broken(*state: object, match: str | None = None) -> Iterator[None]:
    """Expect a broken precondition, which only a bug above the ledger's classes reaches, and no change in `state`."""
    before = [snapshot(value) for value in state]
    with pytest.raises(AssertionError, match=match):
        yield
    for value, taken in zip(state, before, strict=True):
        assert_unchanged(taken, value)


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
    if kind in {list, tuple, deque}:
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
