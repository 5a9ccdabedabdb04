"""`Store.inspect`: a copy of what the ledger shows, and nothing that only grows.  (C16)"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tools.fuzz.events import WalkShape
from pagedkv.tools.fuzz.faulty_device import FaultyDevice, InjectedFault

SHAPE = WalkShape(max_context=256, max_concurrency=2, pages=8, backend="", draft_window=0, role="k_code")


@pytest.fixture
def store() -> pk.Store:
    """A store with 8 pages and two rows."""
    return pk.open_store(SHAPE.config(), "cpu")


def write(store: pk.Store, sequence: pk.Sequence, tokens: int) -> None:
    unit = store.begin_unit(store.batch([sequence]), tokens)
    store.wait(unit)
    store.commit(unit)


def test_every_value_that_moved_is_named(store: pk.Store) -> None:
    """With what it was and what it is."""
    sequence = store.activate(prompt_tokens=100, output_tokens=0)
    before = store.inspect()
    write(store, sequence, 100)

    changed = dict(line.split(": ", 1) for line in store.inspect().differences(before))
    assert "[0, 0] became [100, 0]" == changed["pools.main.committed_end"]
    assert "0 became 2" == changed["pools.main.allocated"]
    assert "pools.main.entitled_end" not in changed


def other(value: Any) -> Any:
    """Return a value of the same form that differs in one place."""
    if isinstance(value, np.ndarray):
        changed = value.copy()
        changed.flat[-1] += 1
        return changed
    if isinstance(value, tuple):
        return (*value, "another")
    return not value if isinstance(value, bool) else value + 1


def test_no_value_changes_unseen(store: pk.Store) -> None:
    """One value of each field of each part, of the store, a pool, a continuation and a space of it.  (C16)"""
    write(store, kept := store.activate(prompt_tokens=100, output_tokens=0), 100)
    store.finish(kept, retain=True, state="s")
    write(store, store.activate(prompt_tokens=30, output_tokens=0), 30)
    before = store.inspect()
    (number, continuation), pool = next(iter(before.continuations.items())), before.pools["main"]
    space = continuation.pools["main"]
    changed: dict[str, pk.StoreInspection] = {}
    for field in dataclasses.fields(before):
        value = getattr(before, field.name)
        different: Any = {} if isinstance(value, dict) else other(value)
        changed[field.name] = dataclasses.replace(before, **{field.name: different})
    for name in pool._fields:
        different = pool._replace(**{name: other(getattr(pool, name))})
        changed[f"pools.main.{name}"] = dataclasses.replace(before, pools={"main": different})
    for name in space._fields:
        different = continuation._replace(pools={"main": space._replace(**{name: other(getattr(space, name))})})
        changed[f"continuations.{number}.pools.main.{name}"] = dataclasses.replace(
            before, continuations={number: different}
        )
    for name, value in {"has_state": not continuation.has_state, "state_frontier": {"main": 99}}.items():
        at = f"continuations.{number}.{name}" + ".main" * (name == "state_frontier")
        different = continuation._replace(**{name: value})  # type: ignore[arg-type]
        changed[at] = dataclasses.replace(before, continuations={number: different})

    told = {name: [line.split(": ")[0] for line in after.differences(before)] for name, after in changed.items()}
    assert {name: [name] for name in changed} == told


def test_an_inspection_is_a_copy(store: pk.Store) -> None:
    """It stays as it was, and what is written into it reaches no ledger."""
    before = store.inspect()
    before.pools["main"].references[:] = 7
    store.activate(prompt_tokens=100, output_tokens=0)

    assert [0, 0] == before.pools["main"].entitled_end.tolist()
    store.check()


def test_what_a_free_descriptor_was_is_not_shown(store: pk.Store) -> None:
    """State, not history: neither a refusal nor an activation that ends leaves anything, although serials moved on."""
    before = store.inspect()
    assert isinstance(store.try_activate(prompt_tokens=257, output_tokens=0), pk.Refusal)
    assert [] == store.inspect().differences(before)
    sequence = store.activate(prompt_tokens=100, output_tokens=0)
    write(store, sequence, 100)
    store.finish(sequence)

    assert [] == store.inspect().differences(before)


def test_continuations_are_shown_by_their_number(store: pk.Store) -> None:
    """Members, frontiers, whether the caller's state is there, and the frontier that it belongs to.  (C2.2, C9.8)"""
    sequence = store.activate(prompt_tokens=100, output_tokens=0)
    write(store, sequence, 100)
    kept = store.finish(sequence, retain=True, state=pk.STATE_FOLLOWS)
    assert kept is not None
    store.protect(kept, 70)
    shown = store.inspect().continuations[kept.number]

    assert (shown.has_state, shown.state_frontier) == (False, {})
    space = shown.pools["main"]
    assert (2, 100, 70) == (space.members.size, space.frontier, space.protected)
    before = store.inspect()
    store.attach_state(kept, "state", state_frontier=90)
    at = f"continuations.{kept.number}"
    assert store.inspect().differences(before) == [f"{at}.has_state: False became True",
                                                   f"{at}.state_frontier: {{}} became {{'main': 90}}"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_chosen_submission_of_a_faulty_device_fails(number: int) -> None:
    """And no other, launches and copies counted together; nothing of it happens."""
    device = FaultyDevice(pk.open_device("cpu"))
    stream = device.stream()
    array = device.zeros(4, np.int32)
    host = np.arange(4, dtype=np.int32)
    done = []
    with device.failing_at(number):
        for index in range(4):
            try:
                device.copy(array[index : index + 1], host[index : index + 1] + 1, stream)
            except InjectedFault:
                continue
            done.append(index)
    device.copy(host, array, stream)

    assert [index for index in range(4) if index != number - 1] == done
    assert [0 if index == number - 1 else index + 1 for index in range(4)] == host.tolist()
    assert device.faults == 1
