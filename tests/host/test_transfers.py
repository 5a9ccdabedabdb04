"""Transfers on the ledger: runs, pins, states, and what publication demands.  (C7.4, C8.3)"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pagedkv.errors import MisuseError, PagedKVError, StaleHandle
from pagedkv.ledger.pool import PagePool
from pagedkv.transfer.page_runs import PageRun, page_runs
from pagedkv.transfer.plan import Direction, Transfer, Transfers
from pagedkv.values.planes import PackedPlanes, plane_inventory
from tests.host.builders import activate, make_ledgers, refused, snapshot, trim, write


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def held_pool(pages: int = 16) -> PagePool:
    """Return a pool whose pages are all bound."""
    pool = PagePool("main", pages)
    assert pool.try_reserve(pages)
    pool.bind(pages)
    return pool


def plan(transfers: Transfers, pool: PagePool, direction: Direction = "d2h", pages: int = 2) -> Transfer:
    """Plan a small transfer of the first pages of a pool."""
    here, there = np.arange(pages, dtype=np.int32), np.arange(pages, dtype=np.int32) + (direction == "d2d") * pages
    return transfers.plan(direction, pool, here, there, host_pages=0 if direction == "d2d" else pages)


# ---- runs and layout -------------------------------------------------------------------------------------------------


def test_adjacent_pages_are_one_run_while_both_sides_advance() -> None:
    """C8.3: the worked example of page_runs.py, and its corner cases."""
    expected = (PageRun(7, 0, 3), PageRun(3, 3, 1), PageRun(12, 4, 2))

    assert expected == page_runs(ids(7, 8, 9, 3, 12, 13), ids(0, 1, 2, 3, 4, 5))
    assert page_runs(ids(), ids()) == ()
    assert page_runs(ids(4), ids(9)) == (PageRun(4, 9, 1),)
    assert page_runs(ids(1, 2, 3), ids(5, 7, 8)) == (PageRun(1, 5, 1), PageRun(2, 7, 2))
    assert page_runs(ids(3, 2, 1), ids(0, 1, 2)) == (PageRun(3, 0, 1), PageRun(2, 1, 1), PageRun(1, 2, 1))
    with refused(MisuseError, "C8.3"):
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


def test_pinned_pages_are_neither_released_nor_trimmed() -> None:
    """C7.4: finish, trim, truncate and abort are refused, naming the page, and change nothing; later they work."""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 256)
    write(ledgers, sequence, 192, accepted=64)
    pool, transfers = ledgers.spaces["main"].pool, Transfers()
    mapped = ledgers.spaces["main"].mapped_ids(sequence.row)
    transfer = transfers.plan("d2h", pool, mapped[2:], ids(0), host_pages=1)
    for act in (
        lambda: trim(ledgers, sequence), lambda: ledgers.finish(sequence), lambda: ledgers.abort(sequence),
        lambda: ledgers.truncate(sequence, 10, "main"),
    ):  # fmt: skip
        with refused(MisuseError, "C7.4", ledgers, match=f"of page {mapped[2]} of pool main"):
            act()
    assert transfers.abort(transfer)

    assert trim(ledgers, sequence) == 2
    ledgers.finish(sequence)
    assert pool.pins_total == 0


def test_a_trim_of_other_pages_is_not_refused() -> None:
    """Pins are per page: the kept page is pinned, the trailing ones go."""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 256)
    write(ledgers, sequence, 192, accepted=64)
    spaces, transfers = ledgers.spaces["main"], Transfers()
    transfers.plan("d2h", spaces.pool, spaces.mapped_ids(sequence.row)[:1], ids(0), host_pages=1)

    assert trim(ledgers, sequence) == 2


def test_pins_add_up_and_never_go_below_zero() -> None:
    """S35: an unpin too many is refused and changes nothing; free pages cannot be pinned."""
    pool = held_pool(4)
    pool.pin(ids(0, 1))
    pool.pin(ids(1))
    pool.unpin(ids(0, 1))
    for bad in (ids(0), ids(1, 1)):
        with refused(MisuseError, "C7.4", pool):
            pool.unpin(bad)
    with refused(MisuseError, "C7.4", pool):
        PagePool.pin(pool, ids(4))

    assert pool.pins.tolist() == [0, 1, 0, 0]
    empty = PagePool("main", 4)
    with refused(MisuseError, "C7.4", empty):
        empty.pin(ids(0))


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["d2h", "h2d", "d2d"])
def test_pins_cover_the_device_sides_and_go_with_the_end(direction: Direction) -> None:
    """C7.4: source and destination on the device are pinned from the plan to the publication."""
    pool, transfers = held_pool(), Transfers()
    transfer = plan(transfers, pool, direction)
    assert pool.pins_total == (4 if direction == "d2d" else 2)
    transfers.submitted(transfer)
    transfers.completed(transfer)
    assert pool.pins_total > 0
    transfers.publish(transfer)

    assert (pool.pins_total, transfers.open, transfer.state) == (0, [], "published")
    assert (transfers.counters.planned, transfers.counters.published, transfers.counters.pages) == (1, 1, 2)


def test_publication_demands_completion_or_an_order() -> None:
    """C7.4, C16.9: a host replica is published only when it is there; a device one also when its users wait for it."""
    pool, transfers = held_pool(), Transfers()
    for direction in ("d2h", "h2d"):
        transfer = plan(transfers, pool, direction)
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
        assert pool.pins_total == 4, "its copies still run"
        transfers.completed(transfer)

    assert pool.pins_total == 2


def test_content_that_changed_is_not_published() -> None:
    """C7.6: the epochs of the plan are compared; a stale transfer stays open, to be aborted."""
    pool, transfers = held_pool(), Transfers()
    epochs = np.array([5, 6])
    transfer = transfers.plan("h2d", pool, ids(0, 1), ids(3, 4), host_pages=2, contents=epochs)
    transfers.submitted(transfer)
    transfers.completed(transfer)
    with refused(StaleHandle, "C7.6", transfers):
        transfers.publish(transfer, np.array([5, 7]))
    assert transfers.abort(transfer)

    assert pool.pins_total == 0


def test_an_abort_in_flight_takes_effect_when_the_copies_have_run() -> None:
    """S26 to S28: pages return only after both; a second report of completion is ignored."""
    pool, transfers = held_pool(), Transfers()
    load, save = plan(transfers, pool, "h2d"), plan(transfers, pool, "d2h")
    for transfer in (load, save):
        transfers.submitted(transfer)
        assert not transfers.abort(transfer)
    assert pool.pins.tolist()[:2] == [2, 2]
    transfers.completed(save)
    transfers.completed(save)
    assert pool.pins.tolist()[:2] == [1, 1]
    transfers.completed(load)

    assert (pool.pins_total, load.state, save.state, transfers.counters.aborted) == (0, "aborted", "aborted", 2)


def test_every_step_out_of_order_is_refused_and_changes_nothing() -> None:
    """Each transfer ends once; nothing is submitted or aborted twice."""
    pool, transfers = held_pool(), Transfers()
    transfer = plan(transfers, pool)
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


def test_plans_that_make_no_sense_are_refused_and_pin_nothing() -> None:
    """No page, doubled destinations, a source that is a destination, pages outside the extent, pages held by nobody."""
    pool, transfers = held_pool(4), Transfers()
    wrong: list[tuple[Direction, object, object, int]] = [
        ("d2h", ids(), ids(), 1), ("d2h", ids(0, 1), ids(0, 0), 2), ("d2d", ids(0, 1), ids(1, 2), 0),
        ("d2h", ids(0, 1), ids(0, 2), 2), ("h2d", ids(-1), ids(0), 1), ("d2h", ids(4), ids(0), 1),
    ]  # fmt: skip
    before = snapshot((pool, transfers))
    for direction, sources, destinations, host_pages in wrong:
        with pytest.raises(PagedKVError):
            transfers.plan(direction, pool, sources, destinations, host_pages=host_pages)  # type: ignore[arg-type]

    assert before == snapshot((pool, transfers))
