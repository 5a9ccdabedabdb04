"""Active spaces: the token columns of each row, what may move them, and the table that units publish.  (C9, C11)"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle
from pagedkv.ledger import active_spaces
from pagedkv.ledger.active_spaces import UNMAPPED, ActiveSpaces, TableSlices, Tokens
from pagedkv.ledger.batch import Batch, Columns, EntryColumns
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import DevicePageLease, PagePool
from pagedkv.ledger.sequences import Sequence
from tests.host.builders import (
    activate,
    begin,
    counts,
    frontier,
    leave_broken,
    make_ledger,
    mapped,
    running,
    slices_of,
    trim,
    write,
)
from tests.host.refusals import assert_unchanged, broken, refused, runs_of, snapshot


def make_spaces(*entitlements: int, pages: int = 8, rows: int = 2, blocks: int = 4) -> ActiveSpaces:
    """Return the spaces of a pool that belongs to no store; row i is open with entitlements[i] pages, 0 leaves it."""
    spaces = ActiveSpaces(PagePool("main", pages), LogicalPages(pages), rows=rows, blocks=blocks)
    for row, count in enumerate(entitlements):
        if count:
            open_space(spaces, row, count)
    return spaces


def open_space(spaces: ActiveSpaces, row: int, pages: int) -> None:
    assert spaces.pool.try_reserve(pages)
    spaces.open(row, entitlement_pages=pages)


def per_row(*values: int) -> Tokens:
    return np.array(values, np.int32)


def written(mapped_tokens: int, committed: int, **options: int) -> ActiveSpaces:
    """Return spaces of two rows with 4 pages each, of which row 0 has mapped and committed tokens."""
    spaces = make_spaces(4, 4, **options)
    map_to(spaces, mapped_tokens, 0)
    spaces.commit(per_row(committed, 0))
    return spaces


def every_row(columns: Tokens) -> EntryColumns:
    """Return the columns of a unit that selects every row."""
    return EntryColumns(columns, columns, int(columns.max()), slice(0, columns.size), False)


def map_to(spaces: ActiveSpaces, *tokens: int) -> TableSlices | None:
    """Map positions [0, tokens) of each row, as a unit does that ends there."""
    spaces.reaches_new_pages(every_row(np.maximum(per_row(*tokens) - spaces.committed_end, 0)))
    return spaces.map_reached(is_one_page=False)


def trim_to(spaces: ActiveSpaces, provisional: int) -> int:
    """Trim row 0 behind its committed and some provisional tokens; return how many pages went back."""
    return spaces.trim(slice(0, 1), per_row(provisional))


def truncate(spaces: ActiveSpaces, tokens: int) -> None:
    spaces.require_truncate(0, tokens)
    spaces.truncate(0, tokens)


def state(spaces: ActiveSpaces) -> tuple[int, int, int]:
    return spaces.pool.allocated, spaces.pool.reserved, spaces.pool.available


def ends(spaces: ActiveSpaces, row: int = 0) -> list[int]:
    """Return committed, mapped, bound and entitled end of a row."""
    return [int(end[row]) for end in (spaces.committed_end, spaces.mapped_end, spaces.bound_end, spaces.entitled_end)]


def of_pages(spaces: ActiveSpaces, column: str, row: int = 0) -> list[int]:
    """Return a column of the pages that a row maps."""
    values: list[int] = getattr(spaces.pages, column)[spaces.members[row, : spaces.membership_pages(row)]].tolist()
    return values


# ---- opening and mapping -------------------------------------------------------------------------------------


def test_an_open_space_is_entitled_and_empty() -> None:
    """Entitlement = membership + reservation; nothing belongs yet, and the row is not opened again.  (C9.1, C9.7)"""
    spaces = make_spaces(0, 3)

    assert (spaces.entitlement_pages(1), spaces.membership_pages(1)) == (3, 0)
    assert (spaces.mapped_ids(1).tolist(), ends(spaces, 1), state(spaces)) == ([], [0, 0, 0, 192], (0, 3, 5))
    with broken(spaces, match="holds a space already"):
        spaces.open(1, entitlement_pages=1)


@pytest.mark.parametrize(("tokens", "columns"), [
    (0, [0, 0, 0, 0]), (1, [1, 0, 0, 0]), (63, [63, 0, 0, 0]), (64, [64, 0, 0, 0]), (65, [64, 1, 0, 0]),
    (70, [64, 6, 0, 0]), (128, [64, 64, 0, 0]),
])
def test_a_frontier_lies_at_any_offset_and_alone_says_what_is_covered(tokens: int, columns: list[int]) -> None:
    """Never rounded down to a page; a speculative window extends membership, never coverage.  (C2.1, C7.1, C16.6)"""
    spaces = written(200, tokens)

    assert spaces.committed_columns(spaces.members[0, :4]).tolist() == columns
    assert ends(spaces) == [tokens, 256, 256, 256]


def test_ensure_is_a_lower_bound() -> None:
    """63, then 71, then 64 tokens: 1, 2 and 2 pages; it never shrinks, and what is enough publishes nothing.  (C9.3)"""
    spaces = make_spaces(4)
    slices = [slices_of(map_to(spaces, tokens, 0)) for tokens in (0, 63, 71, 64)]
    assert slices == [[], [(0, 0, 1)], [(0, 1, 1)], []]
    before = snapshot(spaces)

    for tokens in (0, 1, 64, 127, 128):
        assert map_to(spaces, tokens, 0) is None
    assert_unchanged(before, spaces)
    assert ends(spaces) == [0, 128, 256, 256]


def test_need_beyond_the_entitlement_is_refused_for_all_rows() -> None:
    """Each row that is over is in `rows`, the first in the text; a row beside them could be mapped.  (C9.3)"""
    spaces = make_spaces(4, 3, 1, rows=3)

    rows = np.arange(3)
    for tokens, over in (((100, 193, 0), [1]), ((100, 193, 65), [1, 2])):
        with refused(EntitlementExceeded, "C9.3", spaces, match="row 1 .* 193 tokens.* at most 192 tokens") as caught:
            spaces.require_entitled(rows, per_row(*tokens))
        assert caught.value.fields == {"rows": over}
        assert spaces.reaches_new_pages(every_row(per_row(*tokens)))
        assert not spaces.is_writable()
    spaces.require_entitled(rows, per_row(100, 192, 64))
    map_to(spaces, 100, 192, 64)
    assert [spaces.membership_pages(row) for row in range(3)] == [2, 3, 1]


def test_mapping_moves_reservation_to_allocation_of_its_own_space() -> None:
    """Available is constant, whoever maps.  (C9.3, C6.2)"""
    spaces = make_spaces(4, 2)
    seen = []
    for tokens in ((64, 0), (0, 65), (256, 128)):
        map_to(spaces, *tokens)
        seen.append(state(spaces))

    assert seen == [(1, 5, 2), (3, 3, 2), (6, 0, 2)]
    assert (spaces.entitlement_pages(0), spaces.entitlement_pages(1)) == (4, 2)


def test_every_writable_page_has_one_writer_and_one_reference() -> None:
    """Interleaved growth keeps neighbouring ids together; each page names its row and block.  (C3.6, C7.5, C16.7)"""
    spaces = make_spaces(4, 4)
    for tokens in (64, 128, 192, 256):
        map_to(spaces, tokens, tokens)

    for row, page_ids in ((0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])):
        assert spaces.mapped_ids(row).tolist() == of_pages(spaces, "device", row) == page_ids
        assert of_pages(spaces, "writer", row) == [row] * 4
        assert of_pages(spaces, "references", row) == [1] * 4
        assert of_pages(spaces, "block", row) == [0, 1, 2, 3]
    answer = spaces.mapped_ids(0)
    spaces.close(0)
    assert answer.tolist() == [0, 1, 2, 3], "an answer is a copy"


def test_ids_are_bound_in_windows_and_never_beyond_the_entitlement() -> None:
    """64 pages at a time, then the rest; a prefill chunk binds what it needs; bound ids count as reserved.  (C6.5)"""
    spaces = make_spaces(70, pages=100, blocks=80)

    map_to(spaces, 1, 0)
    assert (ends(spaces), state(spaces)) == ([0, 64, 64 * 64, 70 * 64], (1, 69, 30))
    map_to(spaces, 64 * 64 + 1, 0)
    assert (ends(spaces), state(spaces)) == ([0, 65 * 64, 70 * 64, 70 * 64], (65, 5, 30))
    assert spaces.mapped_ids(0).tolist() == list(range(65))
    spaces.commit(per_row(64 * 64 + 1, 0))
    assert spaces.committed_columns(spaces.members[0, 62:66]).tolist() == [64, 64, 1, 0]
    prefill = make_spaces(200, pages=200, blocks=200)
    assert slices_of(map_to(prefill, 150 * 64, 0)) == [(0, 0, 150)]
    assert ends(prefill)[2] == 150 * 64


def test_a_later_window_continues_the_ids_of_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two pages: the next one takes the id after the last, not a lower run that fits too.  (C3.6, C6.5)"""
    monkeypatch.setattr(active_spaces, "WINDOW_PAGES", 2)
    spaces = make_spaces(0, 2, pages=9)
    map_to(spaces, 0, 64)
    open_space(spaces, 0, 4)
    map_to(spaces, 64, 0)
    spaces.close(1)
    map_to(spaces, 192, 0)

    assert runs_of(spaces.pool.free_runs) == [(0, 2), (6, 9)]
    assert (spaces.mapped_ids(0).tolist(), spaces.table[0].tolist()) == ([2, 3, 4], [2, 3, 4, 5])


# ---- commit, trim, truncate, close ---------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 59, 123])
def test_commit_advances_by_what_was_accepted(tokens: int) -> None:
    """Row by row; no other column moves, and nothing is withdrawn.  (C9.5, C7.6)"""
    spaces = make_spaces(4, 4)
    map_to(spaces, 128, 128)
    contents = of_pages(spaces, "content")
    spaces.commit(per_row(5, 1))
    spaces.commit(per_row(tokens, 0))

    assert (spaces.committed_end.tolist(), spaces.mapped_end.tolist()) == ([5 + tokens, 1], [128, 128])
    assert of_pages(spaces, "content") == contents


@pytest.mark.parametrize(("committed", "provisional", "kept"), [
    (0, 0, 0), (0, 1, 1), (1, 0, 1), (63, 0, 1), (63, 1, 1), (63, 2, 2), (64, 0, 1), (65, 0, 2), (64, 65, 3),
    (10, 119, 3), (128, 0, 2), (128, 2**30 - 1, 4),
])
def test_trim_returns_what_neither_frontier_nor_provisional_needs(committed: int, provisional: int, kept: int) -> None:
    """ceil((committed + provisional) / P) pages stay, the others are reserved; another row stays.  (C9.6)"""
    spaces = written(256, committed)
    map_to(spaces, 0, 256)
    assert state(spaces) == (8, 0, 0)

    assert trim_to(spaces, provisional) == 4 - kept
    assert (ends(spaces), state(spaces)) == ([committed, kept * 64, 256, 256], (4 + kept, 4 - kept, 0))
    assert ends(spaces, 1) == [0, 256, 256, 256]
    assert trim_to(spaces, provisional) == 0
    assert spaces.trim(slice(0, 2)) == 4 + kept - -(-committed // 64)


@pytest.mark.parametrize("provisional", [1, 70, 200])
def test_what_provisional_columns_kept_is_trimmed_later(provisional: int) -> None:
    """Nothing trails behind them: this does not end what a later trim looks for.  (C9.6)"""
    spaces = written(256, 60)
    first, again = (trim_to(spaces, provisional) for _ in range(2))

    assert (again, spaces.trim(slice(0, 1))) == (0, 3 - first)
    assert spaces.trim(slice(0, 2)) == 0
    map_to(spaces, 65, 1)
    assert spaces.trim(slice(0, 2)) == 2


def test_a_trimmed_page_comes_back_as_another_page() -> None:
    """The id may be the same; lease, identity and content epoch are new.  (C6.1, C7.3, C7.6)"""
    spaces = written(65, 10)
    kept, trimmed = spaces.lease(0, 0), spaces.lease(0, 1)
    before = {name: of_pages(spaces, name) for name in ("serial", "content")}

    trim_to(spaces, 0)
    assert spaces.pool.serials[trimmed.page_id] != trimmed.serial
    for _ in range(2):
        with refused(StaleHandle, "C6.1", spaces):
            spaces.require_current(trimmed)
        map_to(spaces, 65, 0)
    spaces.require_current(kept)
    assert spaces.lease(0, 1).page_id == trimmed.page_id
    for name, (first, second) in before.items():
        assert of_pages(spaces, name)[0] == first
        assert of_pages(spaces, name)[1] != second


@pytest.mark.parametrize(("committed", "tokens", "is_cut"), [
    (65, 32, True), (130, 65, True), (65, 64, False), (65, 65, False), (64, 64, False), (130, 0, False),
])
def test_truncate_lowers_the_frontier_and_trims(committed: int, tokens: int, is_cut: bool) -> None:
    """A page that is cut inside has other content, the same identity and lease; no other row moves.  (C9.10, C7.6)"""
    spaces = written(256, committed)
    map_to(spaces, 0, 256)
    contents, serials, leases = (of_pages(spaces, "content"), of_pages(spaces, "serial"),
                                 [spaces.lease(0, block) for block in range(4)])
    pages = -(-tokens // 64)

    truncate(spaces, tokens)

    assert (ends(spaces), ends(spaces, 1)) == ([tokens, pages * 64, 256, 256], [0, 256, 256, 256])
    assert state(spaces) == (4 + pages, 4 - pages, 0)
    assert spaces.committed_columns(spaces.members[0, :4]).sum() == tokens
    whole = pages - is_cut
    assert of_pages(spaces, "content")[:whole] == contents[:whole]
    assert not is_cut or of_pages(spaces, "content")[-1] not in contents
    assert of_pages(spaces, "serial") == serials[:pages]
    for lease in leases[:pages]:
        spaces.require_current(lease)


def test_close_gives_everything_to_available() -> None:
    """Mapped, bound and promised pages alike.  (C9.8)"""
    spaces = make_spaces(70, 3, pages=100, blocks=80)
    map_to(spaces, 100, 1)

    spaces.close(0)

    assert (state(spaces), ends(spaces)) == ((1, 2, 97), [0, 0, 0, 0])
    assert (spaces.table[0] == UNMAPPED).all()
    assert (spaces.members[0] == -1).all()
    assert spaces.mapped_ids(1).tolist() == [64]
    spaces.close(1)
    assert state(spaces) == (0, 0, 100)
    assert runs_of(spaces.pages.free_runs) == runs_of(spaces.pool.free_runs) == [(0, 100)]


# ---- leases --------------------------------------------------------------------------------------------------


def test_a_lease_of_a_released_page_stays_stale_when_the_index_is_used_again() -> None:
    """The same id, leased by the next space, is another lease.  (C6.1, S37)"""
    spaces = make_spaces(1)
    map_to(spaces, 1, 0)
    old = spaces.lease(0, 0)
    spaces.close(0)
    with refused(StaleHandle, "C6.1", spaces, match="released or trimmed"):
        spaces.require_current(old)
    open_space(spaces, 1, 1)
    map_to(spaces, 0, 1)
    new = spaces.lease(1, 0)

    assert new.page_id == old.page_id
    spaces.require_current(new)
    with refused(StaleHandle, "C6.1", spaces):
        spaces.require_current(old)


def test_a_block_that_is_not_mapped_has_no_lease_and_none_is_made_by_hand() -> None:
    """Block 1 is bound: an id is known, and every accessor treats it as unmapped.  (C3.1, C6.1, C6.5)"""
    spaces = make_spaces(2)
    map_to(spaces, 1, 0)
    assert spaces.mapped_mask().tolist() == [True] + [False] * 7
    assert spaces.held_mask().tolist() == [True, True] + [False] * 6

    for block in (-1, 1, 2, 4, 400):
        with refused(MisuseError, "C6.5", spaces, match="a mapped block, 0 to 0"):
            spaces.lease(0, block)
    # A bound id with its right serial, another pool's, ids out of range, a free one.
    for pool, page_id in (("main", 1), ("mtp", 0), ("main", -1), ("main", 8), ("main", 5)):
        serial = int(spaces.pool.serials[page_id]) if page_id in {0, 1} else 0
        with refused(StaleHandle, "C6.1", spaces):
            spaces.require_current(DevicePageLease(pool, page_id, serial))


# ---- the same rules through the ledger -----------------------------------------------------------------------


def test_a_frozen_prefix_does_not_stop_mapping_for_the_next_unit() -> None:
    """Blocks beyond the range in flight may be mapped, up to the entitlement of 192 tokens.  (C12.1, C9.3)"""
    ledger, sequence = running(150)
    unit, _ = begin(ledger, sequence, 10)

    with refused(EntitlementExceeded, "C9.3", ledger):
        ledger.ensure_mapped_to_tokens(sequence, 193, "main")
    slices = ledger.ensure_mapped_to_tokens(sequence, 192, "main")
    assert slices_of(slices["main"]) == [(sequence.row, 1, 2)]
    ledger.commit_unit(unit, {"main": 10})
    assert (frontier(ledger, sequence), len(mapped(ledger, sequence))) == (10, 3)


@pytest.mark.parametrize("committed", [1, 63, 64, 65, 100])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 66, 128, 129])
@pytest.mark.parametrize("way", ["reject", "fail", "ensure"])
def test_a_trim_finds_what_was_mapped_after_the_last_trim(way: str, columns: int, committed: int) -> None:
    """One page, or several, in a window that is bound already; then nothing more.  (C6.5, C9.3, C9.6)"""
    ledger, sequence = running(320, max_context=320, written=committed)
    kept = -(-committed // 64)
    for _ in range(2):
        assert trim(ledger, sequence) == 0
        if way == "ensure":
            ledger.ensure_mapped_to_tokens(sequence, committed + columns, "main")
        else:
            unit, _ = begin(ledger, sequence, columns)
            ledger.commit_unit(unit, {"main": 0}) if way == "reject" else ledger.fail_unit(unit)
        pages = -(-(committed + columns) // 64)
        assert (len(mapped(ledger, sequence)), counts(ledger)) == (pages, (pages, 5 - pages, 5))
        assert (trim(ledger, sequence), len(mapped(ledger, sequence))) == (pages - kept, kept)


@pytest.mark.parametrize(("provisional", "trimmed"),
                         [(0, 2), (5, 2), (59, 1), (60, 1), (122, 1), (123, 0), (2**30 - 1, 0)])
def test_provisional_columns_are_counted_from_the_frontier(provisional: int, trimmed: int) -> None:
    """Frontier 70 of 4 mapped pages: 58 more columns fill the second page, 122 the third.  (C9.6)"""
    ledger, sequence = running(256)
    write(ledger, sequence, 256, accepted=70)

    assert trim(ledger, sequence, provisional=provisional) == trimmed


def test_provisional_columns_near_the_integer_limit_trim_nothing() -> None:
    """Frontier 2^30 - 1 plus 2^30 - 1 columns, rounded up to a page, would wrap an int32.  (C3.10, C9.6)"""
    ledger = leave_broken(make_ledger())
    sequence = activate(ledger, 64)
    spaces = ledger.active["main"]
    spaces.committed_end[sequence.row], spaces.mapped_end[sequence.row] = 2**30 - 1, 2**30
    spaces._may_trail = True
    ledger.unsettled = "trim"
    before = snapshot(ledger)

    assert ledger.trim(ledger.batch([sequence]), "main", 2**30 - 1) == 0
    assert_unchanged(before, ledger)


def test_trim_takes_one_provisional_count_per_entry() -> None:
    """In batch order; sequences outside the batch are left alone.  (C9.6, C14.4)"""
    ledger = make_ledger(max_concurrency=3)
    sequences = [activate(ledger, 192) for _ in range(3)]
    write(ledger, sequences, 192, accepted=0)

    assert ledger.trim(ledger.batch([sequences[2], sequences[0]]), "main", [65, 1]) == 1 + 2
    assert [len(mapped(ledger, sequence)) for sequence in sequences] == [1, 3, 2]


@pytest.mark.parametrize("bad", [-1, [1, 2], [[1]], [[1, 2], 3], 1.0, True, "1", None, 2**30, 2**70])
def test_counts_are_one_or_one_per_entry(bad: object) -> None:
    """Other shapes, types, signs and sizes are refused in every batch call, with no NumPy error.  (C14.4, S30)"""
    ledger, sequence = running(200)
    batch = ledger.batch([sequence])
    write(ledger, sequence, 10)

    with refused(MisuseError, "C14.4", ledger):
        ledger.trim(batch, "main", bad)  # type: ignore[arg-type]
    with refused(MisuseError, "C14.4", ledger, match="columns of a unit"):
        ledger.begin_unit("step", batch, {"main": bad})  # type: ignore[dict-item]
    unit, _ = ledger.begin_unit("step", batch, {"main": 10})
    with refused(MisuseError, "C14.4", ledger):
        ledger.commit_unit(unit, {"main": bad})  # type: ignore[dict-item]


TOKEN_CALLS: list[tuple[str, Callable[[Ledger, Sequence, int], object]]] = [
    ("C9.3", lambda ledger, sequence, tokens: ledger.ensure_mapped_to_tokens(sequence, tokens, "main")),
    ("C9.10", lambda ledger, sequence, tokens: ledger.truncate(sequence, tokens, "main")),
]


@pytest.mark.parametrize("tokens", [1.0, True, "1", None, np.int32(1), -1, 129, 2**40])
def test_token_limits_are_integers_within_the_entitlement(tokens: int) -> None:
    """Another type is not converted; not beyond L, which holds 128.  (C9.3, C9.10)"""
    ledger, sequence = running(100, written=10, max_context=100)

    for clause, call in TOKEN_CALLS:
        is_entitlement = clause == "C9.3" and tokens == 129
        with refused(EntitlementExceeded if is_entitlement else MisuseError, clause, ledger):
            call(ledger, sequence, tokens)


def test_only_the_entitlement_limits_what_is_mapped() -> None:
    """C9.3: S = 100 does not, whose last page ends at 128; a unit still writes below S only (C11.2)."""
    ledger, sequence = running(100, written=10, max_context=100)

    ledger.ensure_mapped_to_tokens(sequence, 128, "main")

    assert counts(ledger)[1] == 0, "no page is reserved any more"
    with refused(MisuseError, "C11.2", ledger, match="position 100"):
        ledger.begin_unit("unit", ledger.batch((sequence,)), {"main": 91})


def test_truncate_to_nothing_empties_the_space_and_keeps_the_entitlement() -> None:
    """Above the frontier, also where pages are mapped, and below zero it is refused.  (C9.10)"""
    ledger, sequence = running(200, written=130)
    before = counts(ledger)

    for tokens in (-1, 131, 192):
        with refused(MisuseError, "C9.10", ledger, match="0 to 130 tokens"):
            ledger.truncate(sequence, tokens, "main")
    ledger.truncate(sequence, 0, "main")
    assert (before, counts(ledger)) == ((3, 1, 4), (0, 4, 4))


# ---- the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slices", "entries"), [
    (([4, 7], [2, 0], [3, 1]), ([4, 4, 4, 7], [2, 3, 4, 0])), (([1, 2], [5, 6], [1, 1]), ([1, 2], [5, 6])),
    (([], [], []), ([], [])),
])
def test_slices_expand_to_single_entries_slice_after_slice(
    slices: tuple[list[int], ...], entries: tuple[list[int], ...]
) -> None:
    """Rows, first blocks and counts.  (C11.2)"""
    rows, first_blocks, counts = (np.array(part, np.int64) for part in slices)
    flat = TableSlices(rows, first_blocks.astype(np.int32), counts.astype(np.int32), int(counts.sum())).flat()

    assert tuple(part.tolist() for part in flat) == entries


def test_only_what_a_row_gained_is_published() -> None:
    """One contiguous slice per row; a step inside a page publishes nothing.  (C9.4, C11.1, C11.2, C6.5)"""
    ledger = make_ledger(max_context=320)
    table = ledger.active["main"].table
    assert (table.shape, table.dtype.name, table[1].flags.c_contiguous) == ((2, 5), "int32", True)
    assert (table == UNMAPPED).all()
    sequence = activate(ledger, 256)

    first = write(ledger, sequence, 63)["main"]
    assert (slices_of(first), table[first.flat()].tolist()) == ([(sequence.row, 0, 1)], [0])
    assert table[sequence.row].tolist() == [0, 1, 2, 3, UNMAPPED], "bound ids lie behind the membership"
    for columns, published in ((1, []), (1, [(sequence.row, 1, 1)]), (128, [(sequence.row, 2, 2)]), (0, [])):
        assert slices_of(write(ledger, sequence, columns).get("main")) == published
    ledger.finish(sequence)
    assert (table == UNMAPPED).all(), "no entry outlives its sequence (S7)"


def test_one_unit_publishes_the_slices_of_all_its_rows_at_once() -> None:
    """One answer per pool; batch order is the caller's, `rows` names the table row of each entry.  (C11.2, C11.3)"""
    ledger = make_ledger(max_concurrency=3)
    sequences = [activate(ledger, 200) for _ in range(3)]
    write(ledger, sequences[1], 60)
    batch = ledger.batch([sequences[2], sequences[1], sequences[0]])
    unit, slices = ledger.begin_unit("step", batch, {"main": [129, 4, 1]})

    assert slices_of(slices["main"]) == [(sequences[0].row, 0, 1), (sequences[2].row, 0, 3)]
    assert batch.rows.tolist() == [sequences[2].row, sequences[1].row, sequences[0].row]
    assert unit.columns["main"].tolist() == [129, 4, 1]
    ledger.commit_unit(unit, {"main": [128, 3, 1]})
    assert [frontier(ledger, sequence) for sequence in sequences] == [1, 63, 128]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("max_context", [1, 65, 192, 200])
@pytest.mark.parametrize("width", [1, 16, 17, 64, 65, 130])
def test_units_of_any_width_reach_the_last_position_and_no_further(width: int, max_context: int, rows: int) -> None:
    """S at and inside a page, one row and several, at the same places and at different ones.  (C9.3, C11.1, C11.2)"""
    ledger = make_ledger(max_concurrency=rows, max_context=max_context)
    sequences = [activate(ledger, max_context) for _ in range(rows)]
    spaces = ledger.active["main"]
    published = np.full_like(spaces.table, UNMAPPED)

    def run(batch: Batch, columns: Columns) -> None:
        unit, slices = ledger.begin_unit("step", batch, {"main": columns})
        if slices:
            entries = slices["main"].flat()
            published[entries] = spaces.table[entries]
        for sequence in batch.sequences:
            first, count = frontier(ledger, sequence), unit.columns["main"][list(batch.sequences).index(sequence)]
            assert published[sequence.row].tolist()[: -(-(first + count) // 64)] == mapped(ledger, sequence)
        ledger.commit_unit(unit)

    for row, sequence in enumerate(sequences[1:], 1):
        run(ledger.batch([sequence]), min(7 * row, max_context))
    batch = ledger.batch(sequences)
    while max(frontier(ledger, sequence) for sequence in sequences) + width <= max_context:
        run(batch, width)
    with refused(MisuseError, "C11.2", ledger):
        ledger.begin_unit("step", batch, {"main": width})
    run(batch, [max_context - frontier(ledger, sequence) for sequence in sequences])
    for columns in (1, [0] * (rows - 1) + [1]):
        with refused(MisuseError, "C11.2", ledger, match=f"from position {max_context} on"):
            ledger.begin_unit("step", batch, {"main": columns})


def test_columns_at_or_beyond_the_context_are_refused_before_launch() -> None:
    """S = 100: position 99 is the last one, although its page has room for 128.  (C11.2)"""
    ledger, sequence = running(100, written=98, max_context=100)

    with refused(MisuseError, "C11.2", ledger, match="position 100 of row"):
        begin(ledger, sequence, 3)
    write(ledger, sequence, 2)
    assert frontier(ledger, sequence) == 100
