"""Transfers on the ledger: runs, pins, states, and what publication demands.  (C7.4, C8.3)"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import MisuseError, StaleHandle
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.pages import LogicalPages
from pagedkv.transfer.plan import Direction, PageRun, Transfer, Transfers, page_runs
from pagedkv.values.planes import PackedPlanes, plane_inventory
from tests.host.builders import ids, running, trim, write
from tests.host.refusals import broken, refused


def held_pages(count: int = 16) -> LogicalPages:
    """Return descriptors that a row writes."""
    pages = LogicalPages(count)
    pages.describe(np.arange(count, dtype=np.int32), writer=0, first_block=0)
    return pages


def plan(transfers: Transfers, pages: LogicalPages, direction: Direction = "d2h", count: int = 2) -> Transfer:
    """Plan a small transfer of the first pages."""
    here, there = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32) + (direction == "d2d") * count
    return transfers.plan(direction, "main", pages, here, here, there, host_pages=0 if direction == "d2d" else count)


def written() -> tuple[Any, Any, Transfers]:
    """Return the ledger of a sequence with 3 mapped pages, one of them committed, and no transfer."""
    ledger, sequence = running(256)
    write(ledger, sequence, 192, accepted=64)
    return ledger, sequence, Transfers()


# ---- runs and layout -------------------------------------------------------------------------------------------------


def test_adjacent_pages_are_one_run_while_both_sides_advance() -> None:
    """C8.3: the worked example of `page_runs`, and its corner cases."""
    expected = (PageRun(7, 0, 3), PageRun(3, 3, 1), PageRun(12, 4, 2))

    assert expected == page_runs(ids(7, 8, 9, 3, 12, 13), ids(0, 1, 2, 3, 4, 5))
    assert page_runs(ids(), ids()) == ()
    assert page_runs(ids(4), ids(9)) == (PageRun(4, 9, 1),)
    assert page_runs(ids(1, 2, 3), ids(5, 7, 8)) == (PageRun(1, 5, 1), PageRun(2, 7, 2))
    assert page_runs(ids(3, 2, 1), ids(0, 1, 2)) == (PageRun(3, 0, 1), PageRun(2, 1, 1), PageRun(1, 2, 1))
    with broken(match=r"\(2,\) sources, \(1,\) destinations"):
        page_runs(ids(1, 2), ids(1))


def test_runs_say_what_the_ids_said(rng: np.random.Generator) -> None:
    """Expanding the runs gives every pair back, in order, and no two neighbours could be one."""
    for _ in range(50):
        sources = np.flatnonzero(rng.random(64) < 0.7).astype(np.int32)
        destinations = np.flatnonzero(rng.random(200) < 0.7).astype(np.int32)[: sources.size]
        sources = sources[: destinations.size]
        runs = page_runs(sources, destinations)
        pairs = [(run.source + at, run.destination + at) for run in runs for at in range(run.count)]

        assert pairs == list(zip(sources.tolist(), destinations.tolist(), strict=True))
        for run, following in itertools.pairwise(runs):
            joins = (run.source + run.count, run.destination + run.count)
            assert joins != (following.source, following.destination)


@pytest.mark.parametrize("order", ["page-major", "head-major"])
def test_packed_planes_lie_behind_each_other_padded_to_256_bytes(order: str) -> None:
    """C5.7: each plane's payload is rounded up; a page's bytes are all there."""
    planes = plane_inventory("k8v4", layers=2, kv_heads=3, head_dim=64, pages=9, order=order)  # type: ignore[arg-type]
    layout = PackedPlanes(planes, 5)
    ends = [offset + plane.span_bytes for offset, plane in zip(layout.offsets_bytes, layout.planes, strict=True)]

    assert all(offset % 256 == 0 for offset in layout.offsets_bytes)
    assert all(0 <= offset - end < 256 for offset, end in zip(layout.offsets_bytes[1:], ends, strict=False))
    assert sum(plane.span_bytes for plane in layout.planes) == 5 * sum(plane.page_bytes for plane in planes)
    assert {plane.pages for plane in layout.planes} == {5}
    with refused(MisuseError, "C8.1"):
        PackedPlanes(planes, 0)


# ---- pins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 1, 2, 3])
def test_pinned_pages_are_neither_released_nor_trimmed(block: int) -> None:
    """C7.4: each page of a row, bound ones too: what would give it up is refused whole; later it works."""
    ledger, sequence, transfers = written()
    spaces = ledger.active["main"]
    pinned = spaces.members[sequence.row, block : block + 1].copy()
    transfer = transfers.plan("d2h", "main", spaces.pages, pinned, spaces.pages.page_ids(pinned), ids(0), host_pages=1)
    acts: list[Callable[[], object]] = [lambda: ledger.finish(sequence), lambda: ledger.abort(sequence)]
    acts += [lambda: ledger.truncate(sequence, 10, "main")] * (block < 3)
    acts += [lambda: trim(ledger, sequence)] * (block in {1, 2})
    for act in acts:
        with refused(MisuseError, "C7.4", ledger, match=f"of logical page {pinned[0]} "):
            act()
    if block == 0:  # pins are per page: the trailing pages go
        assert trim(ledger, sequence) == 2
    assert transfers.abort(transfer)

    assert trim(ledger, sequence) == (2 if block else 0)
    ledger.finish(sequence)
    assert spaces.pages.pins_total == 0


def test_pins_add_up_and_never_go_below_zero() -> None:
    """C7.4, S35: an unpin too many changes nothing; free pages cannot be pinned, and no transfer of them is open."""
    pages = held_pages(4)
    pages.pin(ids(0, 1))
    pages.pin(ids(1))
    pages.unpin(ids(0, 1))
    with broken(pages, match="unpinning"):
        pages.unpin(ids(0))
    assert pages.pins.tolist() == [0, 1, 0, 0]
    empty = LogicalPages(4)
    with broken(empty, match="pinning pages that nobody holds"):
        empty.pin(ids(0))
    transfers = Transfers()
    with broken(empty, transfers, match="pinning pages that nobody holds"):
        plan(transfers, empty)


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["d2h", "h2d", "d2d"])
def test_pins_begin_with_the_plan_and_go_with_the_end(direction: Direction) -> None:
    """C7.4: the logical pages are pinned, whichever replica is read or written."""
    pages, transfers = held_pages(), Transfers()
    transfer = plan(transfers, pages, direction)
    assert pages.pins.tolist()[:3] == [1, 1, 0]
    transfers.submitted(transfer)
    transfers.completed(transfer)
    assert pages.pins_total == 2
    transfers.publish(transfer)

    assert (pages.pins_total, transfers.open, transfer.state) == (0, [], "published")
    assert (transfers.counters.planned, transfers.counters.published, transfers.counters.pages) == (1, 1, 2)


def test_publication_demands_completion_or_an_order() -> None:
    """C7.4, C16.9: a host replica is published only when it is there; a device one also when its users wait for it."""
    pages, transfers = held_pages(), Transfers()
    for direction in ("d2h", "h2d"):
        transfer = plan(transfers, pages, direction)
        with refused(MisuseError, "C7.4", transfers):
            transfers.publish(transfer)
        transfers.submitted(transfer)
        with refused(MisuseError, "C7.4", transfers):
            transfers.publish(transfer)
        transfers.ordered(transfer)
        if direction == "d2h":
            with refused(MisuseError, "C7.4", transfers):
                transfers.publish(transfer)
            continue
        transfers.publish(transfer)
        assert transfer.state == "published"
        assert pages.pins_total == 4, "its copies still run"
        transfers.completed(transfer)

    assert pages.pins_total == 2


def test_content_that_changed_is_not_published() -> None:
    """C7.6: the epochs of the plan are compared; a stale transfer stays open, to be aborted."""
    pages, transfers = held_pages(), Transfers()
    transfer = plan(transfers, pages, "h2d")
    transfers.submitted(transfer)
    transfers.completed(transfer)
    pages.renew_content(ids(1))
    with refused(StaleHandle, "C7.6", transfers):
        transfers.publish(transfer)
    assert transfers.abort(transfer)

    assert pages.pins_total == 0


def test_an_abort_in_flight_takes_effect_when_the_copies_have_run() -> None:
    """S26 to S28: pages return only after both; a second report of completion is ignored."""
    pages, transfers = held_pages(), Transfers()
    load, save = plan(transfers, pages, "h2d"), plan(transfers, pages, "d2h")
    for transfer in (load, save):
        transfers.submitted(transfer)
        assert not transfers.abort(transfer)
    assert pages.pins.tolist()[:2] == [2, 2]
    transfers.completed(save)
    transfers.completed(save)
    assert pages.pins.tolist()[:2] == [1, 1]
    transfers.completed(load)

    assert (pages.pins_total, load.state, save.state, transfers.counters.aborted) == (0, "aborted", "aborted", 2)


def test_every_step_out_of_order_is_refused_and_changes_nothing() -> None:
    """Each transfer ends once; nothing is submitted or aborted twice."""
    pages, transfers = held_pages(), Transfers()
    transfer = plan(transfers, pages)
    with refused(MisuseError, "C7.4", transfers):
        transfers.completed(transfer)
    transfers.submitted(transfer)
    with refused(MisuseError, "C7.4", transfers):
        transfers.submitted(transfer)
    transfers.completed(transfer)
    transfers.publish(transfer)
    for act in (transfers.publish, transfers.abort, transfers.submitted, transfers.ordered):
        with refused(MisuseError, "C7.4", transfers):
            act(transfer)


@pytest.mark.parametrize(("direction", "sources", "destinations", "host_pages", "clause"),
                         [("d2h", ids(), ids(), 1, "C8.3"), ("d2h", ids(0, 1), ids(0, 0), 2, "C8.3"),
                          ("d2d", ids(0, 1), ids(1, 2), 0, "C8.3"), ("d2h", ids(0, 1), ids(0, 2), 2, "C8.1"),
                          ("h2d", ids(-1), ids(0), 1, "C8.1")])
def test_plans_that_make_no_sense_are_refused_and_pin_nothing(
    direction: Direction, sources: Ids, destinations: Ids, host_pages: int, clause: str
) -> None:
    """No page, doubled destinations, a source that is a destination, pages outside the extent."""
    pages, transfers = held_pages(4), Transfers()

    with refused(MisuseError, clause, pages, transfers):
        transfers.plan(direction, "main", pages, ids(*range(sources.size)), sources, destinations,
                       host_pages=host_pages)
