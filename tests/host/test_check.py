"""Every invariant of C16 that the ledger can answer fails when its law is broken.  (C16)

A check that cannot fail is worse than none.  Each case below breaks one law in one column of a store that is in use,
and names the check that must see it.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.ledger import check
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.demotions import Demotion
from pagedkv.ledger.host_arena import HostArena
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.transaction import ActivationTarget, Transaction
from pagedkv.values.config import MTPBackend
from tests.checkout import ROOT
from tests.host.builders import activate, begin, growing, leave_broken, make_ledger, trim, write
from tests.host.sharing import MTP, SharedLedger, retained


def store_in_use() -> Ledger:
    """Row 0: 130 tokens and a trimmed page; row 1: a unit in flight; row 2: free.  Two pools, nothing shared."""
    ledger = make_ledger(max_context=256, max_concurrency=3, backend=MTPBackend(5))
    first, second = activate(ledger, 200, 56), activate(ledger, 100)
    write(ledger, first, {"main": 200, "mtp": 130}, accepted={"main": 130, "mtp": 120})
    trim(ledger, first)
    begin(ledger, second, {"main": 70, "mtp": 3})
    return ledger


def store_that_shares() -> Ledger:
    """Everything that may hold a page, in two pools; continuation 1 holds 130 tokens, protected whole.

    Row 0 is its fork, and so is continuation 2, at 128; row 1 was moved and holds an immutable page alone; rows 2
    and 3 share two pages that no continuation holds; row 4 is free.
    """
    store, kept = retained({"main": 130, "mtp": 130}, max_concurrency=5, backend=MTP)
    running = store.go_on(kept, 60)
    store.append(running, {"main": 10, "mtp": 10})
    store.finish(store.go_on(kept, frontier={"main": 128, "mtp": 128}))
    store.go_on(store.retain({"main": 70, "mtp": 70}), keep_source=False)
    gone = store.retain({"main": 128, "mtp": 128})
    store.go_on(gone, 5)
    store.go_on(gone, 5)
    store.release(gone)
    return store.ledger


def store_that_grows() -> Ledger:
    """Row 0 is at 436 of 448 tokens and was not extended: less than a launch of 16; row 1 is full, row 2 idle."""
    ledger = growing(max_concurrency=3, tokens=4096, columns=16)
    sequence = activate(ledger, 64, 4000)
    activate(ledger, 4096 - 7 * 64)
    write(ledger, sequence, 436)
    assert ledger.begin_round(ledger.batch([sequence])) == [sequence]
    return ledger


def store_with_a_host() -> Ledger:
    """One continuation on the Host alone and restoring, another one on its way to the Host."""
    store = SharedLedger(host_arena_bytes=32 * 32_768)
    first, second = store.retain(130), store.retain(64)
    store.demote(first)
    answer = store.ledger.prepare_activation(ActivationTarget(1, 0, first), is_announced=True)
    assert isinstance(answer, Transaction)
    assert isinstance(store.ledger.prepare_demotion(second), Demotion)
    return store.ledger


def split_a_free_range(arena: HostArena) -> None:
    """Let two free ranges touch."""
    start, end = int(arena.starts[0]), int(arena.ends[0])
    arena.starts, arena.ends = np.array([start, start + 1]), np.array([start + 1, end])


def planes_differ(ledger: Ledger, **changed: object) -> None:
    """Let one plane of Main have other pages or another order."""
    pool, *others = ledger.config.pools
    planes = (dataclasses.replace(pool.planes[0], **changed), *pool.planes[1:])  # type: ignore[arg-type]
    shown = SimpleNamespace(name=pool.name, pages=pool.pages, guard_pages=0, order=pool.order, planes=planes)
    ledger.config = SimpleNamespace(pools=(shown, *others), decode_columns=1)  # type: ignore[assignment]


# Of each store: the number of the check, what it says, and the statement that breaks its law.  `main` and `mtp` are
# active spaces; `pages`, `members` and `table` are Main's; `kept` is continuation 1 in Main, `others` in MTP.
BROKEN: dict[Callable[[], Ledger], list[tuple[int, str, str]]] = {
    store_in_use: [
        (1, "one page group carries two", "pages.device[members[0, 1]] = pages.device[members[0, 0]]"),
        (1, "one page group carries two", "pages.device[pages.device < 0] = table[0, 0]"),
        (1, "one Host record carries two", "pages.host[members[0, :2]] = 3"),
        (1, "table and descriptors disagree", "table[0, :2] = table[0, 1::-1].copy()"),
        (2, "planes differ", "planes_differ(ledger, pages=5)"),
        (2, "planes differ", "planes_differ(ledger, order='head-major')"),
        (3, "a plane lacks pages", "planes_differ(ledger, pages=5)"),
        (3, "beyond the planes", "table[0, 0] = 12"),
        (3, "negative id", "mtp.table[2, 3] = -2"),
        (4, "allocated 6, leases 5", "main.pool.allocated += 1"),
        (4, "reserved 0, reservations 1", "main.pool.reserved -= 1"),
        (4, "bound 2, ids bound 1", "main.pool.bound += 1"),
        (4, "serials and held ids", "main.pool.serials[0] = 0"),
        (4, "both free and held", "mtp.pool.free_runs._starts[0] -= 1"),
        (4, "free count drifted", "main.pool.free_runs.id_count += 1"),
        (5, "without references and pins", "pages.pins[11] = 1"),
        (5, "share a serial", "pages.serial[members[0, 0]] = pages.serial[members[1, 0]]"),
        (5, "share a content epoch", "pages.content[members[0, 0]] = pages.content[members[1, 0]]"),
        (5, "without a replica", "pages.device[0] = -1"),
        (5, "without a replica", "pages.host[11] = 0"),
        (5, "free and live", "mtp.pages.free_runs._starts[0] -= 1"),
        (5, "free and live", "pages.free_runs.take(1)"),
        (6, "negative shared_end", "main.shared_end[0] = -64"),
        (6, "exceeds", "main.committed_end[0] = 193"),
        (6, "exceeds", "mtp.mapped_end[0] = 320"),
        (6, "exceeds", "mtp.bound_end[0] = 320"),
        (6, "not whole pages", "main.mapped_end[0] = 191"),
        (6, "not whole pages", "main.bound_end[0] = 255"),
        (6, "not whole pages", "main.entitled_end[2] = 1"),
        (6, "writable ends", "mtp.writable_end[0] = 192"),
        (6, "beyond L", "main.entitled_end[0] = 320"),
        (6, "nearer to their next page", "main._mapped_left = 129"),
        (6, "nearer to their next page", "main._ready_left = 1000"),
        (6, "inside a page", "main.shared_end[0] = 63"),
        (7, "two places", "members[1, 0] = members[0, 0]"),
        (7, "another row", "pages.writer[members[0, 1]] = 1"),
        (7, "writer elsewhere", "pages.writer[11] = 1"),
        (8, "another block", "pages.block[members[0, 1]] = 0"),
        (8, "references drifted", "pages.references[members[0, 0]] = 2"),
        (10, "available 6, not promised 5", "main.entitled_end[2] = 64"),
        (11, "frontier moved", "main.committed_end[1] += 1"),
        (11, "page left", "main.mapped_end[1] -= 64"),
        (11, "rows in flight and units", "ledger.units.rows_in_flight = 0"),
        (11, "in flight twice", "ledger.units.in_flight *= 2"),
        (12, "idle row has an entitlement", "ledger.sequences.serials[1] = 0"),
        (12, "idle row has an entitlement", "mtp.entitled_end[2] = 64"),
        (12, "free rows", "ledger.sequences._free_rows.append(2)"),
        (12, "stale ids", "table[1, 3] = 7"),
        (13, "share a ledger", "mtp.pool = main.pool"),
        (13, "share descriptors", "mtp.pages = pages"),
        (17, "not covered", "ledger.sequences.budget_tokens[1] = 129"),
    ],
    store_that_shares: [
        (1, "one page group carries two", "pages.device[kept.members[2]] = 0"),
        (1, "table and descriptors disagree", "pages.device[kept.members[0]] = 15"),
        (4, "available -1 of", "mtp.pool.capacity = mtp.pool.allocated + mtp.pool.reserved - 1"),
        (4, "allocated", "pages.references[kept.members[2]] = 0"),
        (5, "without references and pins", "pages.references[kept.members[2]] = 0"),
        (5, "without a replica", "pages.device[kept.members[2]] = -1"),
        (6, "exceeds", "main.shared_end[0] = 192"),
        (7, "writer elsewhere", "main.shared_end[0] += 64"),
        (7, "another row", "main.shared_end[0] -= 64"),
        (7, "writer elsewhere", "pages.writer[kept.members[2]] = 0"),
        (7, "writer elsewhere", "pages.writer[members[1, 0]] = 1"),
        (7, "beyond the frontier", "kept.protected_frontier = 131"),
        (7, "beyond the frontier", "kept.protected_frontier = -1"),
        (7, "protected columns drifted", "kept.protected_frontier = 129"),
        (7, "protected columns drifted", "pages.protected[kept.members[2]] = 3"),
        (7, "protectors drifted", "pages.protectors[kept.members[0]] = 1"),
        (7, "protectors drifted", "mtp.pages.protectors[others[1].members[1]] = 3"),
        (7, "no inactive space holds", "pages.references[kept.members[0]] = 1"),
        (8, "a page at another block", "pages.block[members[1, 1]] = 0"),
        (8, "main: another block", "pages.block[kept.members[2]] = 0"),
        (8, "3 pages, 128", "kept.frontier = 128"),
        (8, "3 pages, 193", "kept.frontier = 193"),
        (8, "twice in one space", "kept.members[1] = kept.members[0]"),
        (8, "a page is not full", "pages.committed[kept.members[1]] = 63"),
        (8, "another tail", "pages.committed[kept.members[2]] = 3"),
        (8, "active references drifted", "pages.active[kept.members[0]] = 0"),
        (8, "active references drifted", "pages.active[members[1, 1]] = 0"),
        (8, "main: references drifted", "pages.references[kept.members[0]] = 2"),
        (8, "mtp: references drifted", "del others[2]"),
        (8, "a shared page has a writer", "pages.writer[kept.members[0]] = 0"),
        (8, "a shared page is not full", "pages.committed[members[2, 1]] = 63"),
        (8, "a writer below shared_end", "pages.writer[members[1, 0]] = 1"),
        (8, "below shared_end is not full", "pages.committed[members[1, 0]] = 63"),
        (8, "count of pins drifted", "mtp.pages.pins_total += 1"),
        (8, "an active page without a Device replica", "pages.device[members[0, 0]] = -1"),
        (10, "available 14, not promised 13", "mtp.entitled_end[3] = 256"),
        (12, "idle row has an entitlement", "main.entitled_end[4] = 64"),
        (16, "a state at 131 of 130", "ledger.continuations.states[1].state_frontier['main'] = 131"),
        (16, "its state names", "ledger.continuations.states[1].state = None"),
    ],
    store_with_a_host: [
        (4, "a claimed page group is held already", "claim.restored['main'].page_ids[:] = 0"),
        (9, "is not valid", "pages.host_content[pages.host >= 0] += 1"),
        (9, "is not valid", "pages.host_columns[pages.host >= 0] = 1"),
        (9, "count of Host replicas drifted", "pages.hosted += 1"),
        (9, "held twice, or by nobody", "ledger.arena.starts = ledger.arena.starts + 1"),
        (9, "held twice, or by nobody", "del ledger.demotions.open[0]"),
        (9, "free ranges touch", "split_a_free_range(ledger.arena)"),
        (12, "free rows", "claim.target = None"),
        (12, "announced sequences", "ledger.sequences.announced.clear()"),
    ],
    store_that_grows: [
        (17, "not covered", "ledger.growth.round_frontier['main'][0] = 433"),
        (17, "idle row is short", "ledger.growth.short[2] = True"),
        (17, "rows grow at", "ledger.growth.grow_at['main'][0] += 64"),
        (17, "rows grow at", "ledger.growth.grow_at['main'][1] = 0"),
        (17, "entitlements .* beyond", "ledger.growth.full_pages['main'][1] -= 1"),
    ],
}
CASES = [(build, *case) for build, cases in BROKEN.items() for case in cases]
CHECKS = {int(name.split("_")[1]): function for name, function in vars(check).items() if name.startswith("check_")
          and name != "check_ledger"}


def run(number: int, ledger: Ledger) -> None:
    """Call one check function with what it takes, for every pool."""
    for pool in ledger.config.pools:
        offered = {"ledger": ledger, "spaces": ledger.active[pool.name], "pool": pool, "kept": ledger.kept[pool.name]}
        CHECKS[number](*(offered[name] for name in inspect.signature(CHECKS[number]).parameters))


def broken_store(build: Callable[[], Ledger], statement: str) -> Ledger:
    ledger = leave_broken(build())
    main = ledger.active["main"]
    names = {"ledger": ledger, "main": main, "pages": main.pages, "members": main.members, "table": main.table,
             "mtp": ledger.active.get("mtp"), "kept": ledger.kept["main"].by_number.get(1),
             "others": ledger.kept["mtp"].by_number if "mtp" in ledger.kept else None, "planes_differ": planes_differ,
             "split_a_free_range": split_a_free_range, "claim": next(iter(ledger.transactions.open), None)}
    exec(statement, names)
    return ledger


@pytest.mark.parametrize("build", BROKEN)
def test_a_store_in_use_passes_every_check(build: Callable[[], Ledger]) -> None:
    """So that a failure below is the corruption's and nothing else's."""
    for number in CHECKS:
        run(number, build())
    check_ledger(build())


@pytest.mark.parametrize(("build", "number", "message", "statement"), CASES, ids=[f"{c[1]}-{c[3]}" for c in CASES])
def test_a_broken_law_is_seen(build: Callable[[], Ledger], number: int, message: str, statement: str) -> None:
    """By the function named after it, and by the sum of all checks.  (C16)"""
    ledger = broken_store(build, statement)

    with pytest.raises(AssertionError, match=message):
        run(number, ledger)
    with pytest.raises(AssertionError):
        check_ledger(ledger)


@pytest.mark.parametrize("number", CHECKS)
def test_every_demand_of_a_check_has_a_corruption(number: int) -> None:
    """Each `_demand` fails in a case above, and the sum of all checks calls the function."""
    lines, first = inspect.getsourcelines(CHECKS[number])
    failed = set()
    for build, checked, _, statement in CASES:
        if checked == number:
            with pytest.raises(AssertionError) as caught:
                run(number, broken_store(build, statement))
            failed.add(caught.traceback[-2].lineno + 1 - first)
    demands = {index for index, line in enumerate(lines) if line.strip().startswith("_demand(")}

    assert demands - failed == set()
    assert f"{CHECKS[number].__name__}(" in inspect.getsource(check_ledger)


def test_a_check_fails_under_python_o_too() -> None:
    """`python -O` drops every `assert`, and no check is one."""
    program = (
        "from tests.host.test_check import broken_store, check_ledger, store_in_use\n"
        "check_ledger(broken_store(store_in_use, 'main.pool.allocated += 1'))"
    )
    done = subprocess.run([sys.executable, "-O", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert "AssertionError: pool main: allocated 6, leases 5" in done.stderr
