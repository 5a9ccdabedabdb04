"""LogicalPages: the effect of every operation column by column, and every precondition.  (C7)

A precondition is always broken beside a page for which the operation is legal: that page must not change either.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv.errors import MisuseError
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import NOTED_MAX
from tests.host.builders import ids
from tests.host.refusals import assert_unchanged, broken, refused, runs_of, snapshot

COLUMNS = ("committed", "protected", "protectors", "references", "active", "writer", "device", "host", "block", "pins")

CAPACITY = 20
KINDS = ("own", "running", "kept", "shared", "half active", "tail", "guarded", "partly", "pinned", "filling", "held")
"""Page i of `pages_in_use` is KINDS[i]: its row writes it; full and active; full and inactive; full in two inactive
spaces; full, one of two references active; a tail of 10 columns; full and protected whole; a tail of 30 columns of
which 20 are protected; full, inactive and pinned; a descriptor that a copy of 10 columns fills; full, of two spaces
and pinned."""


columns = ids


def page(kind: str) -> Ids:
    return ids(KINDS.index(kind))


def pages_in_use() -> LogicalPages:
    """Return descriptors in each of the states of `KINDS`; page i lies in page group 100 + i, at block i."""
    pages = LogicalPages(CAPACITY)
    fill = page("filling")
    before, after = int(fill[0]), len(KINDS) - int(fill[0]) - 1
    pages.describe(np.arange(100, 100 + before, dtype=np.int32), writer=3, first_block=0)
    assert pages.describe_copy(ids(100 + before), block=before, columns=10).tolist() == fill.tolist()
    pages.describe(np.arange(101 + before, 101 + before + after, dtype=np.int32), writer=3, first_block=before + 1)
    for kind in ("running", "kept", "shared", "half active", "guarded", "pinned", "held"):
        pages.freeze(page(kind), 64)
    pages.freeze(page("tail"), 10)
    pages.freeze(page("partly"), 30)
    for kind in KINDS:
        if kind not in ("own", "running", "filling"):
            pages.deactivate(page(kind))
    for kind in ("shared", "half active", "held"):
        pages.share(page(kind))
    pages.activate(page("half active"))
    pages.raise_protection(page("guarded"), columns(0), columns(64))
    pages.raise_protection(page("partly"), columns(0), columns(20))
    for kind in ("pinned", "held"):
        pages.pin(page(kind))
    return pages


def changes(before: LogicalPages, after: LogicalPages) -> dict[str, dict[int, int]]:
    """Return the new values that differ, by column and page; a page's new life or content reads as 1."""
    found: dict[str, dict[int, int]] = {}
    for name in COLUMNS:
        old, new = getattr(before, name), getattr(after, name)
        if (old != new).any():
            found[name] = {int(index): int(new[index]) for index in np.flatnonzero(old != new)}
    for name in ("serial", "content"):
        old, new = getattr(before, name), getattr(after, name)
        moved = np.flatnonzero(old != new)
        if moved.size:
            found[name] = {int(index): int(new[index] > 0) for index in moved}
            fresh = new[moved][new[moved] > 0]
            assert np.unique(new[new > 0]).size == np.count_nonzero(new > 0), f"two pages share a {name}"
            assert not fresh.size or fresh.min() > old.max(), f"a {name} went back"
    if before.pins_total != after.pins_total:
        found["pins_total"] = {0: after.pins_total}
    return found


def act(operation: Callable[[LogicalPages], object]) -> tuple[LogicalPages, dict[str, dict[int, int]]]:
    """Run an operation on pages in use; return them and what changed."""
    before, after = pages_in_use(), pages_in_use()
    operation(after)
    assert (after.free_runs.mask() == (after.serial == 0)).all(), "the free descriptors drifted"
    assert after.pins_total == int(after.pins.sum())
    return after, changes(before, after)


OWN, RUNNING, KEPT, SHARED, HALF, TAIL, GUARDED, PARTLY, PINNED, FILLING, HELD = range(len(KINDS))
FREE = CAPACITY - 1


def test_the_pages_in_use_are_what_their_names_say() -> None:
    """So that a case below is about its subject: (references, active, writer, committed, protected, pins)."""
    pages = pages_in_use()

    found = [tuple(int(getattr(pages, name)[index])
                   for name in ("references", "active", "writer", "committed", "protected", "protectors", "pins",
                                "device", "block")) for index in range(len(KINDS))]
    states = {"own": (1, 1, 3, 0, 0, 0, 0), "running": (1, 1, -1, 64, 0, 0, 0), "kept": (1, 0, -1, 64, 0, 0, 0),
              "shared": (2, 0, -1, 64, 0, 0, 0), "half active": (2, 1, -1, 64, 0, 0, 0),
              "tail": (1, 0, -1, 10, 0, 0, 0), "guarded": (1, 0, -1, 64, 64, 1, 0), "partly": (1, 0, -1, 30, 20, 0, 0),
              "pinned": (1, 0, -1, 64, 0, 0, 1), "filling": (0, 0, -1, 10, 0, 0, 1), "held": (2, 0, -1, 64, 0, 0, 1)}
    assert found == [(*states[kind], 100 + index, index) for index, kind in enumerate(KINDS)]
    assert runs_of(pages.free_runs) == [(len(KINDS), CAPACITY)]


EFFECTS: list[tuple[str, Callable[[LogicalPages], object], dict[str, dict[int, int]]]] = [
    ("describe", lambda p: p.describe(ids(7, 9), writer=2, first_block=5, after=HELD),
     {"references": {11: 1, 12: 1}, "active": {11: 1, 12: 1}, "writer": {11: 2, 12: 2}, "device": {11: 7, 12: 9},
      "block": {11: 5, 12: 6}, "serial": {11: 1, 12: 1}, "content": {11: 1, 12: 1}}),
    ("renew", lambda p: p.renew(ids(OWN)), {"serial": {OWN: 1}, "content": {OWN: 1}}),
    ("renew_content", lambda p: p.renew_content(ids(OWN, TAIL)), {"content": {OWN: 1, TAIL: 1}}),
    ("recycle", lambda p: p.recycle(ids(OWN)),
     {"references": {OWN: 0}, "active": {OWN: 0}, "writer": {OWN: -1}, "device": {OWN: -1}, "block": {OWN: -1},
      "serial": {OWN: 0}}),
    ("freeze", lambda p: p.freeze(ids(OWN), 64), {"writer": {OWN: -1}, "committed": {OWN: 64}}),
    ("freeze a tail", lambda p: p.freeze(ids(OWN), 9), {"writer": {OWN: -1}, "committed": {OWN: 9}}),
    ("freeze nothing committed", lambda p: p.freeze(ids(OWN), 0), {"writer": {OWN: -1}}),
    ("thaw", lambda p: p.thaw(ids(RUNNING, KEPT), 2), {"writer": {RUNNING: 2, KEPT: 2}}),
    ("share", lambda p: p.share(ids(KEPT, SHARED, HALF, RUNNING)),
     {"references": {KEPT: 2, SHARED: 3, HALF: 3, RUNNING: 2}}),
    ("share what is pinned or protected", lambda p: p.share(ids(PINNED, GUARDED)),
     {"references": {PINNED: 2, GUARDED: 2}}),
    ("share actively", lambda p: p.share_active(ids(KEPT, SHARED, HALF, RUNNING, HELD)),
     {"references": {KEPT: 2, SHARED: 3, HALF: 3, RUNNING: 2, HELD: 3},
      "active": {KEPT: 1, SHARED: 1, HALF: 2, RUNNING: 2, HELD: 1}}),
    ("activate", lambda p: p.activate(ids(KEPT, SHARED, HALF)), {"active": {KEPT: 1, SHARED: 1, HALF: 2}}),
    ("deactivate", lambda p: p.deactivate(ids(RUNNING, HALF)), {"active": {RUNNING: 0, HALF: 0}}),
    ("release the last reference", lambda p: p.release(ids(KEPT)),
     {"references": {KEPT: 0}, "committed": {KEPT: 0}, "device": {KEPT: -1}, "block": {KEPT: -1}, "serial": {KEPT: 0}}),
    ("release the last active reference", lambda p: p.release_active(ids(RUNNING)),
     {"references": {RUNNING: 0}, "active": {RUNNING: 0}, "committed": {RUNNING: 0}, "device": {RUNNING: -1},
      "block": {RUNNING: -1}, "serial": {RUNNING: 0}}),
    ("release the active one of two references", lambda p: p.release_active(ids(HALF)),
     {"references": {HALF: 1}, "active": {HALF: 0}}),
    ("release one of two", lambda p: p.release(ids(SHARED, HALF)), {"references": {SHARED: 1, HALF: 1}}),
    ("release the last reference of one among others", lambda p: p.release(ids(SHARED, KEPT, HELD)),
     {"references": {SHARED: 1, KEPT: 0, HELD: 1}, "committed": {KEPT: 0}, "device": {KEPT: -1}, "block": {KEPT: -1},
      "serial": {KEPT: 0}}),
    ("release what is protected", lambda p: p.release(ids(GUARDED)),
     {"references": {GUARDED: 0}, "committed": {GUARDED: 0}, "protected": {GUARDED: 0}, "protectors": {GUARDED: 0},
      "device": {GUARDED: -1}, "block": {GUARDED: -1}, "serial": {GUARDED: 0}}),
    ("release one of two of a pinned page", lambda p: p.release(ids(HELD)), {"references": {HELD: 1}}),
    ("protect in part", lambda p: p.raise_protection(ids(KEPT), columns(0), columns(33)), {"protected": {KEPT: 33}}),
    ("protect whole", lambda p: p.raise_protection(ids(KEPT), columns(33), columns(64)),
     {"protected": {KEPT: 64}, "protectors": {KEPT: 1}}),
    ("protect whole twice", lambda p: p.raise_protection(ids(GUARDED), columns(0), columns(64)),
     {"protectors": {GUARDED: 2}}),
    ("protect no more than is", lambda p: p.raise_protection(ids(GUARDED, PARTLY), columns(64, 10), columns(64, 15)),
     {}),
    ("protect all that is committed", lambda p: p.raise_protection(ids(PARTLY), columns(20), columns(30)),
     {"protected": {PARTLY: 30}}),
    ("give up protection", lambda p: p.lower_protection(ids(GUARDED, PARTLY), columns(64, 20), columns(0, 5)),
     {"protected": {GUARDED: 0, PARTLY: 5}, "protectors": {GUARDED: 0}}),
    ("give up protection while another protects part",
     lambda p: p.lower_protection(ids(GUARDED), columns(64), columns(17)),
     {"protected": {GUARDED: 17}, "protectors": {GUARDED: 0}}),
    ("give up part while another protects all", lambda p: p.lower_protection(ids(GUARDED), columns(9), columns(0)), {}),
    ("cut", lambda p: p.withdraw(ids(TAIL, KEPT), 9), {"committed": {TAIL: 9, KEPT: 9}, "content": {TAIL: 1, KEPT: 1}}),
    ("cut to what is committed", lambda p: p.withdraw(ids(TAIL, KEPT), 10),
     {"committed": {KEPT: 10}, "content": {KEPT: 1}}),
    ("cut to what is protected", lambda p: p.withdraw(ids(PARTLY), 20),
     {"committed": {PARTLY: 20}, "content": {PARTLY: 1}}),
    ("cut to nothing", lambda p: p.withdraw(ids(TAIL), 0), {"committed": {TAIL: 0}, "content": {TAIL: 1}}),
    ("describe a copy", lambda p: p.describe_copy(ids(8), block=4, columns=64, after=HELD),
     {"committed": {11: 64}, "pins": {11: 1}, "pins_total": {0: 4}, "device": {11: 8}, "block": {11: 4},
      "serial": {11: 1}, "content": {11: 1}}),
    ("publish a copy to a row", lambda p: p.publish_copy(ids(FILLING), writer=2, active=1),
     {"references": {FILLING: 1}, "active": {FILLING: 1}, "writer": {FILLING: 2}, "pins": {FILLING: 0},
      "pins_total": {0: 2}}),
    ("publish a copy to a checkpoint", lambda p: p.publish_copy(ids(FILLING), writer=-1, active=0),
     {"references": {FILLING: 1}, "pins": {FILLING: 0}, "pins_total": {0: 2}}),
    ("abort a copy", lambda p: p.abort_copy(ids(FILLING)),
     {"committed": {FILLING: 0}, "pins": {FILLING: 0}, "pins_total": {0: 2}, "device": {FILLING: -1},
      "block": {FILLING: -1}, "serial": {FILLING: 0}}),
    ("pin", lambda p: p.pin(ids(OWN, TAIL, SHARED, PINNED)),
     {"pins": {OWN: 1, TAIL: 1, SHARED: 1, PINNED: 2}, "pins_total": {0: 7}}),
    ("unpin", lambda p: p.unpin(ids(PINNED, HELD)), {"pins": {PINNED: 0, HELD: 0}, "pins_total": {0: 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "expected"), [case[1:] for case in EFFECTS], ids=[case[0] for case in EFFECTS])
def test_an_operation_changes_these_columns_of_these_pages_only(
    operation: Callable[[LogicalPages], object], expected: dict[str, dict[int, int]]
) -> None:
    """Everything else, of these and of all other pages, is as it was.  (C7)"""
    assert act(operation)[1] == expected


# What breaks: the operation on a legal page and this one, and what the message says.
BROKEN: list[tuple[str, Callable[[LogicalPages], object], str]] = [
    ("freezing what has no writer", lambda p: p.freeze(ids(OWN, KEPT), 64), "freezing"),
    ("freezing what a copy fills", lambda p: p.freeze(ids(OWN, FILLING), 64), "freezing"),
    ("freezing at 65 columns", lambda p: p.freeze(ids(OWN), 65), "65 columns in a page"),
    ("freezing at -1 columns", lambda p: p.freeze(ids(OWN), -1), "-1 columns in a page"),
    ("a second writer", lambda p: p.thaw(ids(KEPT, OWN), 2), "a second writer"),
    ("a writer of a shared page", lambda p: p.thaw(ids(KEPT, SHARED), 2), "a writer of shared"),
    ("a writer of a page that nobody holds", lambda p: p.thaw(ids(KEPT, FILLING), 2), "a writer of shared"),
    ("a writer of a protected page", lambda p: p.thaw(ids(KEPT, GUARDED), 2), "a writer of protected"),
    ("a writer of a partly protected page", lambda p: p.thaw(ids(KEPT, PARTLY), 2), "a writer of protected"),
    ("a writer of a pinned page", lambda p: p.thaw(ids(KEPT, PINNED), 2), "a writer of pinned"),
    ("sharing a page with a writer", lambda p: p.share(ids(KEPT, OWN)), "sharing pages with a writer"),
    ("sharing a page that is not full", lambda p: p.share(ids(KEPT, TAIL)), "not full"),
    ("sharing a page that nobody holds", lambda p: p.share(ids(KEPT, FILLING)), "sharing pages that nobody holds"),
    ("sharing a free page", lambda p: p.share(ids(KEPT, FREE)), "sharing pages that nobody holds"),
    ("sharing a page with a writer actively", lambda p: p.share_active(ids(KEPT, OWN)), "sharing pages with a writer"),
    ("sharing a page that is not full actively", lambda p: p.share_active(ids(KEPT, TAIL)), "not full"),
    ("sharing a free page actively", lambda p: p.share_active(ids(KEPT, FREE)), "sharing pages that nobody holds"),
    ("one active reference too many", lambda p: p.activate(ids(KEPT, RUNNING)), "activating: "),
    ("an active reference of a free page", lambda p: p.activate(ids(KEPT, FREE)), "activating: "),
    ("deactivating what is inactive", lambda p: p.deactivate(ids(RUNNING, KEPT)), "deactivating: "),
    ("deactivating what has a writer", lambda p: p.deactivate(ids(RUNNING, OWN)), "deactivating pages with a writer"),
    ("releasing the active reference", lambda p: p.release(ids(KEPT, RUNNING)), "releasing: "),
    ("releasing an active reference of what is inactive", lambda p: p.release_active(ids(RUNNING, KEPT)),
     "releasing actively"),
    ("releasing an active reference of what has a writer", lambda p: p.release_active(ids(RUNNING, OWN)),
     "releasing pages with a writer"),
    ("releasing a free page", lambda p: p.release(ids(KEPT, FREE)), "releasing: "),
    ("releasing what a copy fills", lambda p: p.release(ids(KEPT, FILLING)), "releasing: "),
    ("releasing the last reference of a pinned page", lambda p: p.release(ids(KEPT, PINNED)), "freeing pinned"),
    ("protecting what has a writer",
     lambda p: p.raise_protection(ids(KEPT, OWN), columns(0, 0), columns(64, 0)), "protecting pages with a writer"),
    ("protecting beyond what is committed",
     lambda p: p.raise_protection(ids(KEPT, TAIL), columns(0, 0), columns(64, 11)), "protecting what is not committed"),
    ("raising protection downward",
     lambda p: p.raise_protection(ids(KEPT, PARTLY), columns(0, 20), columns(64, 19)), "raising protection"),
    ("giving up more than is protected in part",
     lambda p: p.lower_protection(ids(GUARDED, PARTLY), columns(64, 21), columns(0, 0)), "lowering protection"),
    ("giving up whole protection that nobody has",
     lambda p: p.lower_protection(ids(GUARDED, KEPT), columns(64, 64), columns(0, 0)), "lowering protection"),
    ("a cut of what has a writer", lambda p: p.withdraw(ids(TAIL, OWN), 0), "a cut of pages with a writer"),
    ("a cut of a shared page", lambda p: p.withdraw(ids(KEPT, SHARED), 9), "a cut of shared"),
    ("a cut of what nobody holds", lambda p: p.withdraw(ids(KEPT, FILLING), 9), "a cut of shared"),
    ("a cut below what is protected", lambda p: p.withdraw(ids(KEPT, PARTLY), 19), "a cut to 19 protected"),
    ("a cut upward", lambda p: p.withdraw(ids(KEPT, TAIL), 11), "a cut to 11 columns"),
    ("a copy of nothing", lambda p: p.describe_copy(ids(8), block=0, columns=0), "a copy of 0"),
    ("a copy of 65 columns", lambda p: p.describe_copy(ids(8), block=0, columns=65), "a copy of 65"),
    ("publishing what no copy fills", lambda p: p.publish_copy(ids(FILLING, PINNED), writer=-1, active=0),
     "publishing a copy"),
    ("publishing a free page", lambda p: p.publish_copy(ids(FILLING, FREE), writer=-1, active=0), "publishing a copy"),
    ("aborting what no copy fills", lambda p: p.abort_copy(ids(FILLING, PINNED)), "aborting a copy"),
    ("pinning what a copy fills", lambda p: p.pin(ids(KEPT, FILLING)), "pinning pages that nobody holds"),
    ("pinning a free page", lambda p: p.pin(ids(KEPT, FREE)), "pinning pages that nobody holds"),
    ("unpinning what is not pinned", lambda p: p.unpin(ids(PINNED, KEPT)), "unpinning"),
    ("unpinning what a copy fills", lambda p: p.unpin(ids(PINNED, FILLING)), "unpinning"),
]


@pytest.mark.parametrize(("operation", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_precondition_changes_no_page(operation: Callable[[LogicalPages], object], message: str) -> None:
    """Also not the page named first, for which the operation is legal.  (C7, S35)"""
    pages = pages_in_use()

    with broken(pages, match=f"{message}.*"):
        operation(pages)


@pytest.mark.parametrize(("ask", "named", "clause", "state"), [
    (lambda p: p.require_private("a trim", ids(KEPT, SHARED, HELD)), SHARED, "C9.10", "references 2"),
    (lambda p: p.require_unpinned("a trim", ids(HELD, PINNED)), PINNED, "C7.4", "pins 1"),
    (lambda p: p.require_unpinned("a trim", ids(HELD, FILLING)), FILLING, "C7.4", "committed 10"),
])
def test_a_refusal_names_the_first_page_that_is_in_the_way(
    ask: Callable[[LogicalPages], object], named: int, clause: str, state: str
) -> None:
    """The message has its columns; a page that another space holds may lose a reference while it is pinned."""
    pages = pages_in_use()

    with refused(MisuseError, clause, pages, match=f"a trim of logical page {named} was refused.*{state}") as caught:
        ask(pages)
    assert caught.value.logical == named


def test_the_last_reference_of_a_pinned_page_stays_though_it_is_active() -> None:
    """Of a page that another space holds, the active reference may go.  (C7.4)"""
    pages = pages_in_use()
    pages.pin(ids(HALF, RUNNING))

    with broken(pages, match="freeing pinned"):
        pages.release_active(ids(HALF, RUNNING))

    assert pages.release_active(ids(HALF)).size == 0


def test_release_returns_the_page_groups_that_went_in_the_order_given() -> None:
    """A page that another space holds keeps its page group.  (C9.8)"""
    pages = pages_in_use()

    assert pages.release(ids(TAIL, SHARED, KEPT)).tolist() == [100 + TAIL, 100 + KEPT]
    assert pages.release(ids(SHARED)).tolist() == [100 + SHARED]
    assert pages.release(ids()).tolist() == []


def test_a_pin_is_undone_as_often_as_it_was_made() -> None:
    """S33: claimed 50 times and given back 50 times, a page has no pin.  (C7.4)"""
    pages = pages_in_use()
    before = snapshot(pages)
    for _ in range(50):
        pages.pin(ids(KEPT))
    with broken(pages, match="freeing pinned"):
        pages.release(ids(KEPT))
    for _ in range(50):
        pages.unpin(ids(KEPT))

    assert_unchanged(before, pages)


def test_a_recycled_descriptor_begins_a_new_generation() -> None:
    """Serial and content epoch of the next life were never used before.  (C7.3, C7.6, S37)"""
    pages = pages_in_use()
    used = {int(pages.serial[KEPT]), int(pages.content[KEPT])}
    pages.release(ids(KEPT))
    assert int(pages.serial[KEPT]) == 0

    again = pages.describe(ids(100 + KEPT), writer=1, first_block=0, after=KEPT - 1)

    assert again.tolist() == [KEPT]
    assert not used & {int(pages.serial[KEPT]), int(pages.content[KEPT])}


@pytest.mark.parametrize("trims", [1, 255, 256, 257, 513])
@pytest.mark.parametrize("column", ["serial", "content"])
def test_every_trim_makes_another_page_and_touches_no_other(column: str, trims: int) -> None:
    """Read once after all of them.  (C7.3, C7.6)"""
    pages = pages_in_use()
    before = getattr(pages, column).tolist()
    for number in range(trims):
        pages.trim(ids(0, 1) if number % 2 else ids(1))
        assert len(pages._trimmed) < NOTED_MAX
    after = getattr(pages, column).tolist()

    changed = [place for place in range(CAPACITY) if before[place] != after[place]]
    assert changed == ([0, 1] if trims > 1 else [1])
    assert not {after[place] for place in changed} & {*before}
    assert getattr(pages, column).tolist() == after, "a second read renews nothing"


def test_operations_on_no_page_change_nothing() -> None:
    """An aligned frontier, an empty space and a backend that wrote nothing all name no page."""
    pages = pages_in_use()
    before = snapshot(pages)
    none = ids()
    for act in (pages.share, pages.activate, pages.deactivate, pages.pin, pages.unpin, pages.renew_content):
        act(none)
    for act_with in (pages.freeze, pages.thaw, pages.withdraw):
        act_with(none, 5)
    for protect in (pages.raise_protection, pages.lower_protection):
        protect(none, none, none)

    assert_unchanged(before, pages)
