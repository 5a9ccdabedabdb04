"""Every invariant of C16 that the ledgers can answer fails when its law is broken.  (C16)

A check that cannot fail is worse than none.  Each case below breaks one law in one column of a store that is in use,
two pools and a unit in flight included, and names the check that must see it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import numpy as np
import pytest

from pagedkv.ledger import check
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.values.config import MTPBackend, PoolConfig
from tests.host.builders import activate, begin, make_ledgers, trim, write
from tests.host.sharing import MTP, SharedLedgers

Corruption = Callable[[StoreLedgers], None]


def store_in_use() -> StoreLedgers:
    """Row 0: 130 tokens and a trimmed page; row 1: a unit in flight; row 2: free.  Two pools, nothing shared."""
    ledgers = make_ledgers(max_context=256, max_concurrency=3, backend=MTPBackend(5))
    first, second = activate(ledgers, 200, 56), activate(ledgers, 100)
    write(ledgers, first, {"main": 200, "mtp": 130}, accepted={"main": 130, "mtp": 120})
    trim(ledgers, first)
    begin(ledgers, second, {"main": 70, "mtp": 3})
    return ledgers


def store_that_shares() -> StoreLedgers:
    """Everything that may hold a page, in two pools; continuation 1 holds 130 tokens, protected whole.

    Row 0 is its fork, and so is continuation 2, at 128; row 1 was moved and holds an immutable page alone; rows 2
    and 3 share two pages that no continuation holds; row 4 is free.
    """
    store = SharedLedgers(max_concurrency=5, backend=MTP)
    kept = store.retain({"main": 130, "mtp": 130})
    running = store.go_on(kept, 60)
    store.append(running, {"main": 10, "mtp": 10})
    store.finish(store.go_on(kept, frontier={"main": 128, "mtp": 128}))
    store.go_on(store.retain({"main": 70, "mtp": 70}), keep_source=False)
    gone = store.retain({"main": 128, "mtp": 128})
    store.go_on(gone, 5)
    store.go_on(gone, 5)
    store.release(gone)
    return store.ledgers


def run(name: str, ledgers: StoreLedgers) -> None:
    """Call one check function with what it takes, for every pool."""
    function = getattr(check, name)
    takes = list(inspect.signature(function).parameters)
    for pool in ledgers.config.pools:
        offered = {
            "ledgers": ledgers, "spaces": ledgers.spaces[pool.name], "pool": pool,
            "retained": ledgers.continuations.retained[pool.name],
        }  # fmt: skip
        function(*(offered[parameter] for parameter in takes))


def set_in(pool: str, part: str, column: str, index: object, value: int) -> Corruption:
    """Return a corruption that writes one entry of a column of `spaces`, its `pages` or its `pool`."""

    def corrupt(ledgers: StoreLedgers) -> None:
        spaces = ledgers.spaces[pool]
        owner = spaces if part == "spaces" else getattr(spaces, part)
        getattr(owner, column)[index] = value

    return corrupt


def add_to_counter(counter: str, amount: int) -> Corruption:
    """Return a corruption of one counter of the Main pool."""

    def corrupt(ledgers: StoreLedgers) -> None:
        pool = ledgers.spaces["main"].pool
        setattr(pool, counter, getattr(pool, counter) + amount)

    return corrupt


def two_pages_in_one_group(ledgers: StoreLedgers) -> None:
    spaces = ledgers.spaces["main"]
    logical = spaces.members[0, :2]
    spaces.pages.device[logical] = spaces.pages.device[logical[0]]


def table_names_another_page(ledgers: StoreLedgers) -> None:
    mirror = ledgers.spaces["main"].table.mirror
    mirror[0, :2] = mirror[0, 1::-1].copy()


def a_replica_without_a_place(ledgers: StoreLedgers) -> None:
    pages = ledgers.spaces["main"].pages
    free = int(np.flatnonzero(pages.device < 0)[0])
    pages.device[free] = int(ledgers.spaces["main"].table.mirror[0, 0])


def a_held_id_is_free(ledgers: StoreLedgers) -> None:
    runs = ledgers.spaces["mtp"].pool.free_runs
    runs._starts[0] -= 1


def a_held_descriptor_is_free(ledgers: StoreLedgers) -> None:
    runs = ledgers.spaces["mtp"].pages.free_runs
    runs._starts[0] -= 1


def a_descriptor_leaked(ledgers: StoreLedgers) -> None:
    ledgers.spaces["main"].pages.free_runs.take(1)


def the_free_count_drifted(ledgers: StoreLedgers) -> None:
    ledgers.spaces["main"].pool.free_runs.id_count += 1


def a_free_page_is_pinned(ledgers: StoreLedgers) -> None:
    pool = ledgers.spaces["main"].pool
    pool.pins[np.flatnonzero(pool.serials == 0)[0]] = 1
    pool.pins_total += 1


def two_pages_share(column: str) -> Corruption:
    def corrupt(ledgers: StoreLedgers) -> None:
        spaces = ledgers.spaces["main"]
        values = getattr(spaces.pages, column)
        values[spaces.members[0, 0]] = values[spaces.members[1, 0]]

    return corrupt


def a_page_in_two_places(ledgers: StoreLedgers) -> None:
    members = ledgers.spaces["main"].members
    members[1, 0] = members[0, 0]


def the_writer_is_another_row(ledgers: StoreLedgers) -> None:
    spaces = ledgers.spaces["main"]
    spaces.pages.writer[spaces.members[0, 1]] = 1


def the_page_stands_elsewhere(ledgers: StoreLedgers) -> None:
    spaces = ledgers.spaces["main"]
    spaces.pages.block[spaces.members[0, 1]] = 0


def a_written_page_is_shared(ledgers: StoreLedgers) -> None:
    spaces = ledgers.spaces["main"]
    spaces.pages.references[spaces.members[0, 0]] = 2


def the_frontier_moved_in_flight(ledgers: StoreLedgers) -> None:
    ledgers.spaces["main"].frontier[1] += 1


def a_page_left_in_flight(ledgers: StoreLedgers) -> None:
    ledgers.spaces["main"].mapped_end[1] -= 64


def a_row_in_flight_was_thawed(ledgers: StoreLedgers) -> None:
    ledgers.guard.rows_in_flight = 0


def a_row_is_in_flight_twice(ledgers: StoreLedgers) -> None:
    ledgers.guard.units.append(dataclasses.replace(ledgers.guard.units[0], number=99))


def a_sequence_vanished(ledgers: StoreLedgers) -> None:
    ledgers.sequences.serials[1] = 0


def a_free_row_is_listed_twice(ledgers: StoreLedgers) -> None:
    ledgers.sequences._free_rows.append(2)


def an_idle_row_is_entitled(ledgers: StoreLedgers) -> None:
    ledgers.spaces["mtp"].limit[2] = 64


def two_pools_share_a_ledger(ledgers: StoreLedgers) -> None:
    ledgers.spaces["mtp"].pool = ledgers.spaces["main"].pool


def two_pools_share_descriptors(ledgers: StoreLedgers) -> None:
    ledgers.spaces["mtp"].pages = ledgers.spaces["main"].pages


def a_budget_is_not_covered(ledgers: StoreLedgers) -> None:
    ledgers.sequences.budget_tokens[1] = 129


def in_kept(column: str, block: int, value: int, pool: str = "main") -> Corruption:
    """Return a corruption of one column of a page of continuation 1."""

    def corrupt(ledgers: StoreLedgers) -> None:
        members = ledgers.continuations.retained[pool].spaces[1].members
        getattr(ledgers.spaces[pool].pages, column)[members[block]] = value

    return corrupt


def in_row(column: str, row: int, block: int, value: int) -> Corruption:
    """Return a corruption of one column of a page that a row of Main maps."""

    def corrupt(ledgers: StoreLedgers) -> None:
        spaces = ledgers.spaces["main"]
        getattr(spaces.pages, column)[spaces.members[row, block]] = value

    return corrupt


def kept_space(attribute: str, value: int) -> Corruption:
    """Return a corruption of continuation 1's own limits in Main."""

    def corrupt(ledgers: StoreLedgers) -> None:
        setattr(ledgers.continuations.retained["main"].spaces[1], attribute, value)

    return corrupt


def a_page_stands_twice_in_a_continuation(ledgers: StoreLedgers) -> None:
    members = ledgers.continuations.retained["main"].spaces[1].members
    members[1] = members[0]


def the_pages_pins_drifted(ledgers: StoreLedgers) -> None:
    ledgers.spaces["mtp"].pages.pins_total += 1


def more_is_promised_than_there_is(ledgers: StoreLedgers) -> None:
    pool = ledgers.spaces["mtp"].pool
    pool.capacity = pool.allocated + pool.reserved - 1


def a_continuation_vanished(ledgers: StoreLedgers) -> None:
    """Its pages keep their references: every count of them is one too high."""
    del ledgers.continuations.retained["mtp"].spaces[2]


def a_page_is_immutable_and_writable(ledgers: StoreLedgers) -> None:
    ledgers.spaces["main"].shared_end[0] += 64


def a_shared_page_counts_as_the_row_s_own(ledgers: StoreLedgers) -> None:
    ledgers.spaces["main"].shared_end[0] -= 64


BROKEN_SHARING: list[tuple[str, str, Corruption]] = [
    ("check_1_one_replica_per_lease", "one page group carries two", in_kept("device", 2, 0)),
    ("check_1_one_replica_per_lease", "table and descriptors disagree", in_kept("device", 0, 15)),
    ("check_4_occupancy", "available -1 of", more_is_promised_than_there_is),
    ("check_4_occupancy", "allocated", in_kept("references", 2, 0)),
    ("check_5_identities_are_independent", "without references and pins", in_kept("references", 2, 0)),
    ("check_5_identities_are_independent", "without a replica", in_kept("device", 2, -1)),
    ("check_6_frontiers", "exceeds", set_in("main", "spaces", "shared_end", 0, 192)),
    ("check_7_one_writer", "writer elsewhere", a_page_is_immutable_and_writable),
    ("check_7_one_writer", "another row", a_shared_page_counts_as_the_row_s_own),
    ("check_7_one_writer", "writer elsewhere", in_kept("writer", 2, 0)),
    ("check_7_one_writer", "writer elsewhere", in_row("writer", 1, 0, 1)),
    ("check_7_one_writer", "beyond the frontier", kept_space("protected_frontier", 131)),
    ("check_7_one_writer", "beyond the frontier", kept_space("protected_frontier", -1)),
    ("check_7_one_writer", "protected columns drifted", kept_space("protected_frontier", 129)),
    ("check_7_one_writer", "protected columns drifted", in_kept("protected", 2, 3)),
    ("check_7_one_writer", "protectors drifted", in_kept("protectors", 0, 1)),
    ("check_7_one_writer", "protectors drifted", in_kept("protectors", 1, 3, "mtp")),
    ("check_7_one_writer", "no inactive space holds", in_kept("references", 0, 1)),
    ("check_8_shared_pages_are_immutable", "a page at another block", in_row("block", 1, 1, 0)),
    ("check_8_shared_pages_are_immutable", "main: another block", in_kept("block", 2, 0)),
    ("check_8_shared_pages_are_immutable", "3 pages, 128", kept_space("frontier", 128)),
    ("check_8_shared_pages_are_immutable", "3 pages, 193", kept_space("frontier", 193)),
    ("check_8_shared_pages_are_immutable", "twice in one space", a_page_stands_twice_in_a_continuation),
    ("check_8_shared_pages_are_immutable", "a page is not full", in_kept("committed", 1, 63)),
    ("check_8_shared_pages_are_immutable", "another tail", in_kept("committed", 2, 3)),
    ("check_8_shared_pages_are_immutable", "active references drifted", in_kept("active", 0, 0)),
    ("check_8_shared_pages_are_immutable", "active references drifted", in_row("active", 1, 1, 0)),
    ("check_8_shared_pages_are_immutable", "main: references drifted", in_kept("references", 0, 2)),
    ("check_8_shared_pages_are_immutable", "mtp: references drifted", a_continuation_vanished),
    ("check_8_shared_pages_are_immutable", "a shared page has a writer", in_kept("writer", 0, 0)),
    ("check_8_shared_pages_are_immutable", "a shared page is not full", in_row("committed", 2, 1, 63)),
    ("check_8_shared_pages_are_immutable", "a writer below shared_end", in_row("writer", 1, 0, 1)),
    ("check_8_shared_pages_are_immutable", "below shared_end is not full", in_row("committed", 1, 0, 63)),
    ("check_8_shared_pages_are_immutable", "count of pins drifted", the_pages_pins_drifted),
    ("check_10_entitlement_is_reserved", "entitlement available", set_in("mtp", "spaces", "limit", 3, 256)),
    ("check_12_rows", "idle row has an entitlement", set_in("main", "spaces", "limit", 4, 64)),
]

BROKEN: list[tuple[str, str, Corruption]] = [
    ("check_1_one_replica_per_lease", "one page group carries two", two_pages_in_one_group),
    ("check_1_one_replica_per_lease", "table and descriptors disagree", table_names_another_page),
    ("check_1_one_replica_per_lease", "one page group carries two", a_replica_without_a_place),
    ("check_3_one_id_for_all_planes", "beyond the planes", set_in("main", "table", "mirror", (0, 0), 12)),
    ("check_3_one_id_for_all_planes", "negative id", set_in("mtp", "table", "mirror", (2, 3), -2)),
    ("check_4_occupancy", "allocated 6, leases 5", add_to_counter("allocated", 1)),
    ("check_4_occupancy", "reserved 0, reservations 1", add_to_counter("reserved", -1)),
    ("check_4_occupancy", "bound 2, ids bound 1", add_to_counter("bound", 1)),
    ("check_4_occupancy", "serials and held ids", set_in("main", "pool", "serials", 0, 0)),
    ("check_4_occupancy", "both free and held", a_held_id_is_free),
    ("check_4_occupancy", "free count drifted", the_free_count_drifted),
    ("check_4_occupancy", "1 pins counted, 0 on pages", add_to_counter("pins_total", 1)),
    ("check_4_occupancy", "a free page is pinned", a_free_page_is_pinned),
    ("check_5_identities_are_independent", "share a serial", two_pages_share("serial")),
    ("check_5_identities_are_independent", "share a content epoch", two_pages_share("content")),
    ("check_5_identities_are_independent", "without a replica", set_in("main", "pages", "device", 0, -1)),
    ("check_5_identities_are_independent", "free and live", a_held_descriptor_is_free),
    ("check_5_identities_are_independent", "free and live", a_descriptor_leaked),
    ("check_6_frontiers", "negative shared_end", set_in("main", "spaces", "shared_end", 0, -64)),
    ("check_6_frontiers", "exceeds", set_in("main", "spaces", "frontier", 0, 193)),
    ("check_6_frontiers", "exceeds", set_in("mtp", "spaces", "mapped_end", 0, 320)),
    ("check_6_frontiers", "exceeds", set_in("mtp", "spaces", "bound_end", 0, 320)),
    ("check_6_frontiers", "not whole pages", set_in("main", "spaces", "mapped_end", 0, 191)),
    ("check_6_frontiers", "not whole pages", set_in("main", "spaces", "bound_end", 0, 255)),
    ("check_6_frontiers", "not whole pages", set_in("main", "spaces", "limit", 2, 1)),
    ("check_6_frontiers", "ceilings", set_in("mtp", "spaces", "ceiling", 0, 192)),
    ("check_6_frontiers", "beyond L", set_in("main", "spaces", "limit", 0, 320)),
    ("check_6_frontiers", "inside a page", set_in("main", "spaces", "shared_end", 0, 63)),
    ("check_7_one_writer", "two places", a_page_in_two_places),
    ("check_7_one_writer", "another row", the_writer_is_another_row),
    ("check_7_one_writer", "writer elsewhere", set_in("main", "pages", "writer", 11, 1)),
    ("check_8_shared_pages_are_immutable", "another block", the_page_stands_elsewhere),
    ("check_8_shared_pages_are_immutable", "references drifted", a_written_page_is_shared),
    ("check_10_entitlement_is_reserved", "entitlement available", set_in("main", "spaces", "limit", 2, 64)),
    ("check_11_units_are_covered", "frontier moved", the_frontier_moved_in_flight),
    ("check_11_units_are_covered", "page left", a_page_left_in_flight),
    ("check_11_units_are_covered", "guard's rows", a_row_in_flight_was_thawed),
    ("check_11_units_are_covered", "in flight twice", a_row_is_in_flight_twice),
    ("check_12_rows", "idle row has an entitlement", a_sequence_vanished),
    ("check_12_rows", "idle row has an entitlement", an_idle_row_is_entitled),
    ("check_12_rows", "free rows", a_free_row_is_listed_twice),
    ("check_12_rows", "stale ids", set_in("main", "table", "mirror", (1, 3), 7)),
    ("check_13_pools_are_separate", "share a ledger", two_pools_share_a_ledger),
    ("check_13_pools_are_separate", "share descriptors", two_pools_share_descriptors),
    ("check_17_launches_are_covered", "not covered", a_budget_is_not_covered),
]


def check_functions() -> list[str]:
    return [
        name
        for name, value in vars(check).items()
        if name.startswith("check_") and name != "check_ledgers" and inspect.isfunction(value)
    ]


def test_a_store_in_use_passes_every_check() -> None:
    """So that a failure below is the corruption's and nothing else's."""
    for ledgers in (store_in_use(), store_that_shares()):
        for name in check_functions():
            run(name, ledgers)
        check_ledgers(ledgers)


@pytest.mark.parametrize(("name", "message", "corrupt"), BROKEN, ids=[f"{case[0]}-{case[1]}" for case in BROKEN])
def test_a_broken_law_is_seen(name: str, message: str, corrupt: Corruption) -> None:
    """By the function named after it, and by the sum of all checks.  (C16)"""
    ledgers = store_in_use()
    corrupt(ledgers)

    with pytest.raises(AssertionError, match=message):
        run(name, ledgers)
    with pytest.raises(AssertionError):
        check_ledgers(ledgers)


@pytest.mark.parametrize(
    ("name", "message", "corrupt"), BROKEN_SHARING, ids=[f"{case[0]}-{case[1]}" for case in BROKEN_SHARING]
)
def test_a_law_of_sharing_that_is_broken_is_seen(name: str, message: str, corrupt: Corruption) -> None:
    """Among pages that forks, continuations and a moved row hold.  (C16.7, C16.8)"""
    ledgers = store_that_shares()
    corrupt(ledgers)

    with pytest.raises(AssertionError, match=message):
        run(name, ledgers)
    with pytest.raises(AssertionError):
        check_ledgers(ledgers)


@pytest.mark.parametrize("changed", [{"pages": 5}, {"order": "head-major"}])
def test_planes_that_differ_inside_a_pool_are_seen(changed: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """One plane has other pages or another order.  (C16.2, C16.3)"""
    ledgers = store_in_use()
    (first, *others) = ledgers.config.pools[0].planes
    planes = (dataclasses.replace(first, **changed), *others)  # type: ignore[arg-type]
    monkeypatch.setattr(PoolConfig, "planes", property(lambda self: planes))

    with pytest.raises(AssertionError, match="planes differ"):
        run("check_2_planes_share_one_frontier", ledgers)
    if "pages" in changed:
        with pytest.raises(AssertionError, match="a plane lacks pages"):
            run("check_3_one_id_for_all_planes", ledgers)


def test_no_check_is_hollow() -> None:
    """Every check function has a corruption here, and the sum of all checks calls it."""
    called = inspect.getsource(check_ledgers)

    assert {name for name, _, _ in BROKEN} | {"check_2_planes_share_one_frontier"} == set(check_functions())
    assert [name for name in check_functions() if f"{name}(" not in called] == []


@pytest.mark.parametrize("name", sorted({name for name, _, _ in BROKEN_SHARING}))
def test_every_assertion_of_a_check_has_a_corruption(name: str) -> None:
    """By the messages: each `assert` of the checks that sharing touches is tripped by a case above."""
    source = inspect.getsource(getattr(check, name))
    tripped = set()
    for case, _, corrupt in (*BROKEN_SHARING, *BROKEN):
        if case == name:
            ledgers = store_that_shares() if (case, _, corrupt) in BROKEN_SHARING else store_in_use()
            corrupt(ledgers)
            with pytest.raises(AssertionError) as caught:
                run(name, ledgers)
            tripped.add(caught.traceback[-1].lineno + 1 - inspect.getsourcelines(getattr(check, name))[1])
    asserts = {number for number, line in enumerate(source.splitlines()) if line.strip().startswith("assert ")}

    assert asserts - tripped == set()
