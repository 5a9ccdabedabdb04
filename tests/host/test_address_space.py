"""Address spaces: four token columns per row, and what may move each of them.  (C9, C6.5, C7.6)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle
from pagedkv.ledger import active_spaces as address_space
from pagedkv.ledger.active_spaces import HOLD, AddressSpaces
from pagedkv.ledger.block_tables import UNMAPPED
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.pool import DevicePageLease
from tests.host.builders import (
    activate,
    assert_unchanged,
    begin,
    counts,
    frontier,
    make_ledgers,
    make_spaces,
    mapped,
    refused,
    runs_of,
    slices_of,
    snapshot,
    span,
    trim,
    write,
)


def open_space(spaces: AddressSpaces, row: int, pages: int) -> None:
    assert spaces.pool.try_reserve(pages)
    spaces.open(row, entitlement_pages=pages)


def state(spaces: AddressSpaces) -> tuple[int, int, int]:
    return spaces.pool.allocated, spaces.pool.reserved, spaces.pool.available


def columns(spaces: AddressSpaces, row: int) -> tuple[int, int, int, int]:
    return tuple(  # type: ignore[return-value]
        int(column[row]) for column in (spaces.frontier, spaces.mapped_end, spaces.bound_end, spaces.limit)
    )


def content(spaces: AddressSpaces, row: int) -> list[int]:
    """Return the content epochs of the pages that a row maps."""
    logical = spaces.members[row, : spaces.membership_pages(row)]
    epochs: list[int] = spaces.pages.content[logical].tolist()
    return epochs


def test_an_open_space_is_entitled_and_empty() -> None:
    """Entitlement = membership + reservation; nothing belongs yet.  (C9.1)"""
    spaces = make_spaces(blocks=4)
    open_space(spaces, 1, 3)

    assert (spaces.entitlement_pages(1), spaces.membership_pages(1)) == (3, 0)
    assert spaces.mapped_ids(1).tolist() == []
    assert columns(spaces, 1) == (0, 0, 0, 192)
    assert state(spaces) == (0, 3, 5)


def test_a_row_holds_one_space() -> None:
    """A row that is in use is never opened again; only a broken row ledger could try.  (C9.7)"""
    spaces = make_spaces()
    open_space(spaces, 0, 1)

    with pytest.raises(AssertionError, match="holds a space already"):
        spaces.open(0, entitlement_pages=1)


def test_65_tokens_are_two_pages_with_64_and_1_committed_columns() -> None:
    """Coverage follows the frontier token by token, without a write per step.  (C9.1, C7 preamble)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)

    slices = spaces.ensure_mapped_to_tokens(span(spaces, {0: 65}))
    spaces.commit(span(spaces, {0: 65}))

    assert slices_of(slices) == [(0, 0, 2)]
    assert spaces.committed_columns(spaces.members[0, :2]).tolist() == [64, 1]
    assert columns(spaces, 0) == (65, 128, 256, 256)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, [0, 0]), (1, [1, 0]), (63, [63, 0]), (64, [64, 0]), (128, [64, 64])]
)
def test_a_frontier_lies_at_any_offset(tokens: int, expected: list[int]) -> None:
    """Never rounded down to a page.  (C2.1, C16.6)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 128}))
    spaces.commit(span(spaces, {0: tokens}))

    assert spaces.committed_columns(spaces.members[0, :2]).tolist() == expected
    assert int(spaces.frontier[0]) == tokens


def test_uncommitted_pages_have_no_committed_columns() -> None:
    """A speculative window extends membership, never coverage.  (C7.1, C13.2)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 200}))
    spaces.commit(span(spaces, {0: 70}))

    assert spaces.committed_columns(spaces.members[0, :4]).tolist() == [64, 6, 0, 0]


def test_ensure_is_a_lower_bound() -> None:
    """63, then 71, then 64 tokens: 1, 2 and 2 pages; it never shrinks.  (C9.3)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)
    pages = []
    for tokens in (63, 71, 64):
        spaces.ensure_mapped_to_tokens(span(spaces, {0: tokens}))
        pages.append(spaces.membership_pages(0))

    assert pages == [1, 2, 2]
    assert int(spaces.frontier[0]) == 0
    assert spaces.entitlement_pages(0) == 4


def test_enough_membership_returns_at_once() -> None:
    """No slice to publish, and no column moves.  (C9.3)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 129}))
    before = snapshot(spaces)

    for tokens in (0, 1, 128, 129, 192):
        assert spaces.ensure_mapped_to_tokens(span(spaces, {0: tokens})) is None
    assert_unchanged(before, spaces)


def test_zero_tokens_of_an_empty_space_map_nothing() -> None:
    """The neutral value asks for nothing in any row.  (C9.3)"""
    spaces = make_spaces()
    open_space(spaces, 0, 1)
    before = snapshot(spaces)

    assert spaces.ensure_mapped_to_tokens(span(spaces, {})) is None
    assert_unchanged(before, spaces)


def test_need_beyond_the_entitlement_fails_and_changes_no_row() -> None:
    """193 tokens of a 3-page entitlement, beside a row that could be mapped.  (C9.3)"""
    spaces = make_spaces(pages=8, rows=3)
    open_space(spaces, 0, 4)
    open_space(spaces, 1, 3)

    with refused(EntitlementExceeded, "C9.3", spaces, match="row 1 .* 193 tokens.* at most 192 tokens") as caught:
        spaces.ensure_mapped_to_tokens(span(spaces, {0: 100, 1: 193}))
    assert caught.value.fields == {"rows": [1]}
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 100, 1: 192}))
    assert (spaces.membership_pages(0), spaces.membership_pages(1)) == (2, 3)


def test_a_refusal_names_every_row_that_is_over() -> None:
    """The first in the text, all in `rows`.  (C9.3)"""
    spaces = make_spaces(pages=8, rows=3)
    open_space(spaces, 0, 1)
    open_space(spaces, 2, 1)

    with refused(EntitlementExceeded, "C9.3", spaces, match="mapping row 0") as caught:
        spaces.ensure_mapped_to_tokens(span(spaces, {0: 65, 2: 70}))
    assert caught.value.fields == {"rows": [0, 2]}


def test_mapping_moves_reservation_to_allocation_of_its_own_space() -> None:
    """Available is constant, whoever maps.  (C9.3, C6.2)"""
    spaces = make_spaces(pages=8, rows=2)
    open_space(spaces, 0, 4)
    open_space(spaces, 1, 2)
    seen = []
    for ends in ({0: 64}, {1: 65}, {0: 256, 1: 128}):
        spaces.ensure_mapped_to_tokens(span(spaces, ends))
        seen.append(state(spaces))

    assert seen == [(1, 5, 2), (3, 3, 2), (6, 0, 2)]
    assert (spaces.entitlement_pages(0), spaces.entitlement_pages(1)) == (4, 2)


def test_pages_of_a_space_follow_one_another() -> None:
    """Interleaved growth of two rows keeps neighbouring ids together: ids are bound ahead.  (C3.6, C6.5)"""
    spaces = make_spaces(pages=8, rows=2)
    open_space(spaces, 0, 4)
    open_space(spaces, 1, 4)
    for tokens in (64, 128, 192, 256):
        spaces.ensure_mapped_to_tokens(span(spaces, {0: tokens, 1: tokens}))

    assert spaces.mapped_ids(0).tolist() == [0, 1, 2, 3]
    assert spaces.mapped_ids(1).tolist() == [4, 5, 6, 7]


def test_ids_are_bound_in_windows_and_never_beyond_the_entitlement() -> None:
    """64 pages at a time, then the rest of an entitlement of 70; bound ids count as reserved.  (C6.5)"""
    spaces = make_spaces(pages=100, rows=1, blocks=80)
    open_space(spaces, 0, 70)

    spaces.ensure_mapped_to_tokens(span(spaces, {0: 1}))
    first = (columns(spaces, 0), state(spaces))
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 64 * 64 + 1}))

    assert first == ((0, 64, 64 * 64, 70 * 64), (1, 69, 30))
    assert columns(spaces, 0) == (0, 65 * 64, 70 * 64, 70 * 64)
    assert state(spaces) == (65, 5, 30)
    assert spaces.mapped_ids(0).tolist() == list(range(65))
    spaces.commit(span(spaces, {0: 64 * 64 + 1}))
    assert spaces.committed_columns(spaces.members[0, 62:66]).tolist() == [64, 64, 1, 0]


def test_a_large_need_binds_more_than_a_window() -> None:
    """A prefill chunk beyond the window binds what it needs.  (C6.5)"""
    spaces = make_spaces(pages=200, rows=1, blocks=200)
    open_space(spaces, 0, 200)

    slices = spaces.ensure_mapped_to_tokens(span(spaces, {0: 150 * 64}))

    assert slices_of(slices) == [(0, 0, 150)]
    assert columns(spaces, 0)[2] == 150 * 64


def test_a_later_window_continues_the_ids_of_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two pages: the next one takes the id after the last, not a lower run that fits too.  (C3.6, C6.5)"""
    monkeypatch.setattr(address_space, "WINDOW_PAGES", 2)
    spaces = make_spaces(pages=9, rows=2)
    open_space(spaces, 1, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {1: 64}))
    open_space(spaces, 0, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 64}))
    spaces.close(1)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 192}))

    assert runs_of(spaces.pool.free_runs) == [(0, 2), (6, 9)]
    assert spaces.mapped_ids(0).tolist() == [2, 3, 4]
    assert spaces.table.mirror[0].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("tokens", [1, 59, 123])
def test_commit_advances_by_what_was_accepted(tokens: int) -> None:
    """Row by row, and no other column moves.  (C9.5)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)
    open_space(spaces, 1, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 128, 1: 128}))
    spaces.commit(span(spaces, {0: 5, 1: 1}))
    spaces.commit(span(spaces, {0: tokens}))

    assert spaces.frontier.tolist() == [5 + tokens, 1]
    assert spaces.mapped_end.tolist() == [128, 128]


@pytest.mark.parametrize("accepted", [-1, 29, 64, 2**30])
def test_a_commit_outside_the_mapping_is_refused_for_all_rows(accepted: int) -> None:
    """Below the frontier or beyond the membership: 100 of 128 mapped tokens are committed.  (C9.5)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)
    open_space(spaces, 1, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 128, 1: 128}))
    spaces.commit(span(spaces, {0: 100}))

    with refused(MisuseError, "C9.5", spaces, match="row 0 .* 0 to 28 tokens"):
        spaces.commit(span(spaces, {0: accepted, 1: 3}))
    spaces.commit(span(spaces, {0: 28}))


def test_trim_returns_pages_to_the_same_reservation() -> None:
    """Map 129, commit 65, trim: 2 pages stay, the third is reserved again, available is constant.  (C9.6)"""
    spaces = make_spaces(pages=8)
    open_space(spaces, 0, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 129}))
    spaces.commit(span(spaces, {0: 65}))
    before = state(spaces)

    assert spaces.trim(span(spaces, {})) == 1
    assert (before, state(spaces)) == ((3, 1, 4), (2, 2, 4))
    assert columns(spaces, 0) == (65, 128, 256, 256)


@pytest.mark.parametrize(
    ("committed", "provisional", "kept"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 1),
        (63, 0, 1),
        (64, 0, 1),
        (65, 0, 2),
        (64, 65, 2),
        (65, 64, 2),
        (10, 129, 3),
        (128, 5, 2),
    ],
)
def test_trim_keeps_what_frontier_or_provisional_needs(committed: int, provisional: int, kept: int) -> None:
    """ceil(max(committed, provisional) / P) pages.  (C9.6)"""
    spaces = make_spaces(pages=8)
    open_space(spaces, 0, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 256}))
    spaces.commit(span(spaces, {0: committed}))

    assert spaces.trim(span(spaces, {0: provisional})) == 4 - kept
    assert spaces.membership_pages(0) == kept
    assert spaces.trim(span(spaces, {0: provisional})) == 0


def test_trim_leaves_rows_on_hold_alone() -> None:
    """The neutral value keeps every page of a row that is not meant.  (C9.6)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)
    open_space(spaces, 1, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 256, 1: 256}))

    assert spaces.trim(span(spaces, {0: 0}, neutral=int(HOLD))) == 4
    assert spaces.mapped_end.tolist() == [0, 256]


def test_a_trimmed_page_comes_back_as_another_page() -> None:
    """The id may be the same; lease, identity and content epoch are new.  (C6.1, C7.3, C7.6)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 65}))
    spaces.commit(span(spaces, {0: 10}))
    kept, trimmed = spaces.lease(0, 0), spaces.lease(0, 1)
    identity = spaces.pages.serial[spaces.members[0, :2]].tolist()
    epochs = content(spaces, 0)

    spaces.trim(span(spaces, {}))
    with refused(StaleHandle, "C6.1", spaces):
        spaces.require_current(trimmed)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 65}))

    with refused(StaleHandle, "C6.1", spaces):
        spaces.require_current(trimmed)
    spaces.require_current(kept)
    again = spaces.pages.serial[spaces.members[0, :2]].tolist()
    assert spaces.lease(0, 1).page_id == trimmed.page_id
    assert [new == old for new, old in zip(again, identity, strict=True)] == [True, False]
    assert [new == old for new, old in zip(content(spaces, 0), epochs, strict=True)] == [True, False]


def test_appending_keeps_the_content_epoch() -> None:
    """Committed columns rise; nothing is withdrawn.  (C7.6)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 128}))
    before = content(spaces, 0)
    for tokens in (1, 62, 1, 64):
        spaces.commit(span(spaces, {0: tokens}))

    assert content(spaces, 0) == before


def test_truncate_lowers_the_frontier_and_trims() -> None:
    """130 to 65: the third page goes back to the reservation, available is constant.  (C9.10)"""
    spaces = make_spaces(pages=8)
    open_space(spaces, 0, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 130}))
    spaces.commit(span(spaces, {0: 130}))

    spaces.truncate(0, 65)

    assert columns(spaces, 0) == (65, 128, 256, 256)
    assert state(spaces) == (2, 2, 4)
    assert spaces.committed_columns(spaces.members[0, :2]).tolist() == [64, 1]


def test_truncate_inside_a_page_advances_its_content_epoch_only() -> None:
    """To 32 of 65 tokens: page 0 was cut inside, so an older copy of it is not valid.  (C9.10, C7.6)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 65}))
    spaces.commit(span(spaces, {0: 65}))
    epochs, identity, lease = content(spaces, 0), int(spaces.pages.serial[spaces.members[0, 0]]), spaces.lease(0, 0)

    spaces.truncate(0, 32)

    assert content(spaces, 0)[0] not in epochs
    assert int(spaces.pages.serial[spaces.members[0, 0]]) == identity, "the same page, with other content"
    spaces.require_current(lease)


@pytest.mark.parametrize("tokens", [64, 65])
def test_truncate_that_withdraws_nothing_inside_a_page_keeps_its_epoch(tokens: int) -> None:
    """At a page boundary, and at the same frontier.  (C7.6, C9.10)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 65}))
    spaces.commit(span(spaces, {0: 65}))
    epochs = content(spaces, 0)

    spaces.truncate(0, tokens)

    assert int(spaces.frontier[0]) == tokens
    assert content(spaces, 0) == epochs[: spaces.membership_pages(0)]


def test_truncate_at_the_frontier_drops_provisional_pages_only() -> None:
    """An equal frontier only trims.  (C9.10)"""
    spaces = make_spaces()
    open_space(spaces, 0, 4)
    open_space(spaces, 1, 4)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 256, 1: 256}))
    spaces.commit(span(spaces, {0: 64, 1: 1}))
    spaces.truncate(0, 64)

    assert columns(spaces, 0) == (64, 64, 256, 256)
    assert columns(spaces, 1) == (1, 256, 256, 256), "another row is not trimmed"


@pytest.mark.parametrize("tokens", [-1, 66, 128])
def test_truncate_never_raises_a_frontier(tokens: int) -> None:
    """Above the committed frontier, also where pages are mapped, and below zero.  (C9.10)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 128}))
    spaces.commit(span(spaces, {0: 65}))

    with refused(MisuseError, "C9.10", spaces, match="0 to 65 tokens"):
        spaces.truncate(0, tokens)


def test_close_gives_everything_to_available() -> None:
    """Mapped, bound and promised pages alike.  (C9.8)"""
    spaces = make_spaces(pages=100, rows=2, blocks=80)
    open_space(spaces, 0, 70)
    open_space(spaces, 1, 3)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 100, 1: 1}))

    spaces.close(0)

    assert state(spaces) == (1, 2, 97)
    assert columns(spaces, 0) == (0, 0, 0, 0)
    assert (spaces.table.mirror[0] == UNMAPPED).all()
    assert (spaces.members[0] == -1).all()
    assert spaces.mapped_ids(1).tolist() == [64]
    spaces.close(1)
    assert state(spaces) == (0, 0, 100)
    assert runs_of(spaces.pages.free_runs) == runs_of(spaces.pool.free_runs) == [(0, 100)]


def test_a_lease_of_a_released_page_stays_stale_when_the_index_is_used_again() -> None:
    """The same id, leased by the next space, is another lease.  (C6.1, S37)"""
    spaces = make_spaces()
    open_space(spaces, 0, 1)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 1}))
    old = spaces.lease(0, 0)
    spaces.close(0)
    with refused(StaleHandle, "C6.1", spaces, match="released or trimmed"):
        spaces.require_current(old)
    open_space(spaces, 1, 1)
    spaces.ensure_mapped_to_tokens(span(spaces, {1: 1}))
    new = spaces.lease(1, 0)

    assert new.page_id == old.page_id
    spaces.require_current(new)
    with refused(StaleHandle, "C6.1", spaces):
        spaces.require_current(old)


@pytest.mark.parametrize("block", [-1, 1, 2, 4, 400])
def test_a_block_that_is_not_mapped_has_no_lease(block: int) -> None:
    """Block 1 is bound: an id is known, and every accessor treats it as unmapped.  (C6.5)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 1}))

    with refused(MisuseError, "C6.5", spaces, match="a mapped block, 0 to 0"):
        spaces.lease(0, block)


def test_a_bound_id_is_nobodys_lease() -> None:
    """A lease made by hand with its right serial is refused.  (C6.1, C6.5)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 1}))
    bound_id = int(spaces.table.mirror[0, 1])

    assert spaces.mapped_mask().tolist() == [True] + [False] * 7
    assert spaces.held_mask().tolist() == [True, True] + [False] * 6
    with refused(StaleHandle, "C6.1", spaces):
        spaces.require_current(DevicePageLease("main", bound_id, int(spaces.pool.serials[bound_id])))


@pytest.mark.parametrize(("pool", "page_id"), [("mtp", 0), ("main", -1), ("main", 8), ("main", 5)])
def test_a_lease_of_another_pool_or_page_is_refused(pool: str, page_id: int) -> None:
    """Pools have their own id spaces; out of range and free ids name nothing.  (C3.1, C6.1)"""
    spaces = make_spaces()
    open_space(spaces, 0, 1)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 1}))
    serial = spaces.lease(0, 0).serial if page_id == 0 else 0

    with refused(StaleHandle, "C6.1", spaces):
        spaces.require_current(DevicePageLease(pool, page_id, serial))


def test_mapped_ids_are_a_copy() -> None:
    """Later changes of the row do not reach an answer given earlier.  (C12.1)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 65}))
    answer = spaces.mapped_ids(0)
    spaces.close(0)

    assert answer.tolist() == [0, 1]


def test_every_writable_page_has_one_writer_and_one_reference() -> None:
    """Its row, at its block; pages of another row have that row.  (C7.5, C16.7)"""
    spaces = make_spaces()
    open_space(spaces, 0, 2)
    open_space(spaces, 1, 2)
    spaces.ensure_mapped_to_tokens(span(spaces, {0: 65, 1: 65}))

    for row in (0, 1):
        logical = spaces.members[row, :2]
        assert spaces.pages.writer[logical].tolist() == [row, row]
        assert spaces.pages.references[logical].tolist() == [1, 1]
        assert spaces.pages.block[logical].tolist() == [0, 1]
        assert spaces.pages.device[logical].tolist() == spaces.mapped_ids(row).tolist()


# ---- the same rules through the store's ledgers ----------------------------------------------------


def test_a_frozen_prefix_does_not_stop_mapping_for_the_next_unit() -> None:
    """Blocks beyond the range in flight may be mapped.  (C12.1, C9.3)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    unit, _ = begin(ledgers, sequence, 10)

    slices = ledgers.ensure_mapped_to_tokens(sequence, 150, "main")

    assert slices_of(slices["main"]) == [(sequence.row, 1, 2)]
    check_ledgers(ledgers)
    ledgers.commit_unit(unit, {"main": 10})
    assert (frontier(ledgers, sequence), len(mapped(ledgers, sequence))) == (10, 3)


def test_ensure_beyond_the_entitlement_is_refused_through_the_store() -> None:
    """193 of 192 entitled tokens.  (C9.3)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 150)

    with refused(EntitlementExceeded, "C9.3", ledgers):
        ledgers.ensure_mapped_to_tokens(sequence, 193, "main")
    assert slices_of(ledgers.ensure_mapped_to_tokens(sequence, 192, "main")["main"]) == [(sequence.row, 0, 3)]
    check_ledgers(ledgers)


@pytest.mark.parametrize(
    ("provisional", "trimmed"), [(0, 2), (5, 2), (59, 1), (60, 1), (122, 1), (123, 0), (2**30 - 1, 0)]
)
def test_provisional_columns_are_counted_from_the_frontier(provisional: int, trimmed: int) -> None:
    """Frontier 70 of 4 mapped pages: 58 more columns fill the second page, 122 the third.  (C9.6)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 256)
    write(ledgers, sequence, 256, accepted=70)

    assert trim(ledgers, sequence, provisional=provisional) == trimmed
    check_ledgers(ledgers)


def test_trim_takes_one_provisional_count_per_entry() -> None:
    """In batch order; sequences outside the batch are left alone.  (C9.6, C14.4)"""
    ledgers = make_ledgers(max_concurrency=3)
    sequences = [activate(ledgers, 192) for _ in range(3)]
    write(ledgers, sequences, 192, accepted=0)

    assert ledgers.trim(ledgers.batch([sequences[2], sequences[0]]), "main", [65, 1]) == 1 + 2
    assert [len(mapped(ledgers, sequence)) for sequence in sequences] == [1, 3, 2]
    check_ledgers(ledgers)


@pytest.mark.parametrize("bad", [-1, [1, 2], [[1]], 1.0, True, "1", None, 2**30, 2**70])
def test_counts_are_one_or_one_per_entry(bad: object) -> None:
    """Other shapes, types, signs and sizes are refused in every batch call.  (C14.4)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    batch = ledgers.batch([sequence])
    write(ledgers, sequence, 10)

    with refused(MisuseError, "C14.4", ledgers):
        ledgers.trim(batch, "main", bad)  # type: ignore[arg-type]
    with refused(MisuseError, "C14.4", ledgers):
        ledgers.begin_unit("step", batch, {"main": bad})  # type: ignore[dict-item]
    unit, _ = ledgers.begin_unit("step", batch, {"main": 10})
    with refused(MisuseError, "C14.4", ledgers):
        ledgers.commit_unit(unit, {"main": bad})  # type: ignore[dict-item]
    check_ledgers(ledgers)


@pytest.mark.parametrize("tokens", [1.0, True, "1", None, np.int32(1)])
def test_token_limits_are_integers(tokens: int) -> None:
    """Another type is refused, not converted.  (C9.3, C9.10)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 10)

    with refused(MisuseError, "C11.2", ledgers):
        ledgers.ensure_mapped_to_tokens(sequence, tokens, "main")
    with refused(MisuseError, "C9.10", ledgers):
        ledgers.truncate(sequence, tokens, "main")


def test_truncate_in_the_store_is_per_pool_and_checked() -> None:
    """-1 and above the frontier are refused; 0 empties the space and keeps the entitlement.  (C9.10)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 130)
    before = counts(ledgers)

    for tokens in (-1, 131):
        with refused(MisuseError, "C9.10", ledgers):
            ledgers.truncate(sequence, tokens, "main")
    ledgers.truncate(sequence, 0, "main")
    assert (before, counts(ledgers)) == ((3, 1, 4), (0, 4, 4))
    check_ledgers(ledgers)


def test_provisional_columns_near_the_integer_limit_trim_nothing() -> None:
    """Frontier 2^30 - 1 plus 2^30 - 1 columns, rounded up to a page, would wrap an int32.  (C3.10, C9.6)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 64)
    spaces = ledgers.spaces["main"]
    spaces.frontier[sequence.row], spaces.mapped_end[sequence.row] = 2**30 - 1, 2**30
    before = snapshot(ledgers)

    assert ledgers.trim(ledgers.batch([sequence]), "main", 2**30 - 1) == 0
    assert_unchanged(before, ledgers)
