"""The Host arena: records are named by their first unit, free ranges join, and a sum proves nothing.  (C8)"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np
import pytest

from pagedkv.ledger.host_arena import UNIT_BYTES, ArenaPlan, HostArena
from tests.host.refusals import assert_unchanged, snapshot

OPERATIONS = 10_000


def arena_of(units: int) -> HostArena:
    """Return an arena of so many units."""
    return HostArena(units * UNIT_BYTES)


def ranges_of(arena: HostArena) -> list[tuple[int, int]]:
    """Return the free ranges, half-open."""
    return [*zip(arena.starts.tolist(), arena.ends.tolist(), strict=True)]


def ids(places: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return first units as an arena takes them."""
    return np.array(places, np.int32)


def take(arena: HostArena, records: int, record_units: int) -> list[int]:
    """Take records that must fit, and return their first units."""
    plan = arena.plan([(records, record_units)])
    assert isinstance(plan, ArenaPlan)
    arena.apply(plan)
    places: list[int] = plan.places[0].tolist()
    return places


# ---- takes and releases --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity_bytes", "expected"), [
    (0, []), (UNIT_BYTES - 1, []), (UNIT_BYTES, [(0, 1)]), (10 * UNIT_BYTES + 255, [(0, 10)]),
])  # fmt: skip
def test_an_arena_is_free_at_first(capacity_bytes: int, expected: list[tuple[int, int]]) -> None:
    """In whole units; an arena of none holds nothing.  (C8.1)"""
    arena = HostArena(capacity_bytes)

    assert ranges_of(arena) == expected
    assert (arena.free_units, arena.room(1)) == (arena.units, arena.units)
    assert arena.plan([(1, arena.units + 1)]) == 0


@pytest.mark.parametrize(("released", "expected"), [
    ([4], [(4, 6)]), ([4, 6], [(4, 8)]), ([6, 4], [(4, 8)]), ([0, 2, 4, 6, 8, 10], [(0, 12)]),
    ([0, 4, 8], [(0, 2), (4, 6), (8, 10)]), ([10], [(10, 12)]), ([], []),
])  # fmt: skip
def test_any_part_of_what_was_taken_together_is_released(
    released: list[int], expected: list[tuple[int, int]]
) -> None:
    """The middle, an end, every second one, all: the others stay as they are.  (C8.1, S25, S26)"""
    arena = arena_of(12)
    assert take(arena, 6, 2) == [0, 2, 4, 6, 8, 10]

    arena.release(ids(released), 2)
    assert ranges_of(arena) == expected
    arena.release(ids([place for place in range(0, 12, 2) if place not in released]), 2)
    assert ranges_of(arena) == [(0, 12)]


@pytest.mark.parametrize(("records", "places"), [(1, [2]), (2, [2, 4]), (3, [10, 12, 14]), (5, [2, 4, 10, 12, 14])])
def test_the_first_range_that_takes_all_records_is_used(records: int, places: list[int]) -> None:
    """Else they lie in pieces, from the lowest range upward.  (C8.1)"""
    arena = arena_of(16)
    take(arena, 8, 2)
    arena.release(ids([2, 4, 10, 12, 14]), 2)

    assert take(arena, records, 2) == places


def test_records_of_two_sizes_share_the_arena() -> None:
    """Alternating takes and releases join ranges again, whoever's records lay there.  (C8.1)"""
    arena = arena_of(30)
    small, large = take(arena, 4, 3), take(arena, 3, 5)
    assert (small, large) == ([0, 3, 6, 9], [12, 17, 22])

    arena.release(ids([9]), 3)
    arena.release(ids([12]), 5)
    assert ranges_of(arena) == [(9, 17), (27, 30)]
    assert (arena.room(3), arena.room(5)) == (3, 1)
    assert take(arena, 1, 5) == [9]
    assert take(arena, 2, 3) == [14, 27]  # no range takes both
    assert ranges_of(arena) == []


@pytest.mark.parametrize("released", [[2], [4, 4], [0, 2], [3], [1], [12], [11]])
def test_a_record_that_is_free_already_is_an_internal_error(released: list[int]) -> None:
    """Also in part, twice in one call, and beyond the arena; nothing changes.  (S25)"""
    arena = arena_of(12)
    take(arena, 6, 2)
    arena.release(ids([2]), 2)
    before = snapshot(arena)

    with pytest.raises(AssertionError, match="released"):
        arena.release(ids(released), 2)
    assert_unchanged(before, arena)


# ---- plans ---------------------------------------------------------------------------------------------------


def test_a_request_beyond_the_room_changes_nothing() -> None:
    """25 records against room for 24; the answer names the request, and those before it take nothing.  (C8.2)"""
    arena = arena_of(24 * 3 + 2)
    before = snapshot(arena)

    assert arena.plan([(25, 3)]) == 0
    assert arena.plan([(24, 3), (1, 3)]) == 1
    assert arena.plan([(24, 3), (2, 1), (1, 1)]) == 2
    assert isinstance(arena.plan([(24, 3), (2, 1)]), ArenaPlan)
    assert_unchanged(before, arena)


def test_a_sum_of_free_units_does_not_hold_a_record() -> None:
    """Two free ranges of three units take no record of four, and the plan says so.  (C8.2, S52)"""
    arena = arena_of(9)
    take(arena, 3, 3)
    arena.release(ids([0, 6]), 3)

    assert (arena.free_units, arena.room(4), arena.plan([(1, 4)])) == (6, 0, 0)


@pytest.mark.parametrize(("released", "fits"), [([0, 3], True), ([3, 0], True), ([0, 6], False), ([3, 6], True)])
def test_a_plan_counts_on_its_releases_as_they_lie(released: list[int], fits: bool) -> None:
    """Two records that are released make room for a larger one only if they are neighbours.  (C8.2)"""
    arena = arena_of(9)
    take(arena, 3, 3)
    plan = arena.plan([(1, 6)], [(ids([place]), 3) for place in released])

    assert isinstance(plan, ArenaPlan) == fits
    assert arena.free_units == 0
    if isinstance(plan, ArenaPlan):
        arena.apply(plan)
        assert plan.places[0].tolist() == [min(released)]
        arena.release(plan.places[0], 6)
        assert ranges_of(arena) == [(min(released), min(released) + 6)]


def test_a_release_in_a_plan_is_credited_once() -> None:
    """Six records are free and one is released: seven fit, and eight do not.  (C8.2)"""
    arena = arena_of(16)
    take(arena, 2, 2)

    assert arena.plan([(8, 2)], [(ids([2]), 2)]) == 0
    plan = arena.plan([(7, 2)], [(ids([2]), 2)])
    assert isinstance(plan, ArenaPlan)
    assert plan.places[0].tolist() == [*range(2, 16, 2)]


@pytest.mark.parametrize("change", ["a take", "a release", "its own apply"])
def test_a_plan_of_an_earlier_revision_is_an_internal_error(change: str) -> None:
    """Whatever came between, and nothing changes.  (C8.2)"""
    arena = arena_of(12)
    take(arena, 2, 2)
    plan = arena.plan([(1, 2)])
    assert isinstance(plan, ArenaPlan)
    if change == "a take":
        take(arena, 1, 2)
    elif change == "a release":
        arena.release(ids([0]), 2)
    else:
        arena.apply(plan)
    before = snapshot(arena)

    with pytest.raises(AssertionError, match=r"a plan of revision \d+ at revision \d+"):
        arena.apply(plan)
    assert_unchanged(before, arena)


# ---- at random -----------------------------------------------------------------------------------------------


class SlowArena:
    """One byte for each unit, 1 where a record lies."""

    def __init__(self, units: int) -> None:
        self.taken = bytearray(units)

    def free(self) -> list[tuple[int, int]]:
        """Return the free ranges, half-open."""
        return [match.span() for match in re.finditer(rb"\x00+", self.taken)]

    def set(self, places: Sequence[int], record_units: int, value: int) -> None:
        """Take records, or with 0 give them back."""
        for place in places:
            assert set(self.taken[place : place + record_units]) == {1 - value}
            self.taken[place : place + record_units] = bytes([value]) * record_units

    def places(self, records: int, record_units: int) -> list[int] | None:
        """Return where so many records go, or None."""
        pieces = [[*range(start, end - record_units + 1, record_units)] for start, end in self.free()]
        for piece in pieces:
            if len(piece) >= records:
                return piece[:records]
        low = [place for piece in pieces for place in piece][:records]
        return low if len(low) == records else None

    def plan(self, requests: Sequence[tuple[int, int]]) -> list[list[int]] | int:
        """Take all requests and return where they lie, or the index of the first that does not fit."""
        answer = []
        for index, (records, record_units) in enumerate(requests):
            places = self.places(records, record_units)
            if places is None:
                return index
            self.set(places, record_units, 1)
            answer.append(places)
        return answer


def test_an_arena_agrees_with_one_byte_for_each_unit(seed: int) -> None:
    """Takes, releases and plans of both, over three sizes of records: the same places, ranges and refusals.  (C8)"""
    rng, refused = random.Random(seed), 0
    for sizes in ((1,), (2, 3), (4, 7), (12, 5), (2, 3, 8)):
        units = rng.randint(60, 240)
        arena, slow, held = arena_of(units), SlowArena(units), list[tuple[int, int]]()
        for _ in range(OPERATIONS // 5):
            size = rng.choice(sizes)
            own = [place for place, units in held if units == size]
            released = rng.sample(own, rng.randint(0, min(len(own), 8)))
            before = bytes(slow.taken)
            if rng.random() < 0.4:
                arena.release(ids(released), size)
                slow.set(released, size, 0)
                held = [record for record in held if record[1] != size or record[0] not in released]
            else:
                if rng.random() < 0.5:
                    released = []
                requests = [(rng.randint(1, 12), rng.choice(sizes)) for _ in range(rng.randint(1, 3))]
                answer = arena.plan(requests, [(ids(released), size)] if released else [])
                slow.set(released, size, 0)
                expected = slow.plan(requests)
                if isinstance(answer, int):
                    assert answer == expected
                    slow.taken[:] = before
                    refused += 1
                    continue
                assert [places.tolist() for places in answer.places] == expected
                arena.apply(answer)
                held = [record for record in held if record[1] != size or record[0] not in released]
                held += [(place, units) for places, (_, units) in zip(answer.places, requests, strict=True)
                         for place in places.tolist()]  # fmt: skip
            assert ranges_of(arena) == slow.free()
            assert arena.free_units == slow.taken.count(0)
            assert arena.room(size) == sum((end - first) // size for first, end in slow.free())

    assert 0 < refused < OPERATIONS
