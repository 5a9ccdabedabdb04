"""Activation, handles and the end of a sequence, over one and two pools.  (C9.2, C9.8, C10, C11.3)"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle
from pagedkv.ledger.batch import batch_of, numbers_of
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationPlan, ActivationTarget, Refusal
from pagedkv.values.config import Backend, MTPBackend
from tests.host.builders import activate, begin, counts, frontier, make_ledger, mapped, refuse, running, trim, write
from tests.host.refusals import assert_unchanged, refused, snapshot
from tests.host.sharing import BACKENDS, DRAFT, MTP

# ---- budgets and refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_tokens", "output_tokens", "pages"),
                         [(1, 0, 1), (64, 0, 1), (64, 1, 2), (100, 60, 3), (200, 56, 4)])
def test_an_activation_reserves_prompt_and_whole_output(prompt_tokens: int, output_tokens: int, pages: int) -> None:
    """ceil((prompt + output) / P) pages are in no one's available capacity, and nothing is mapped.  (C9.2, C16.10)"""
    ledger, sequence = running(prompt_tokens, output_tokens)

    assert counts(ledger) == (0, pages, 8 - pages)
    assert (mapped(ledger, sequence), frontier(ledger, sequence)) == ([], 0)
    assert int(ledger.sequences.budget_tokens[sequence.row]) == prompt_tokens + output_tokens


@pytest.mark.parametrize(("backend", "total_tokens", "backend_pages"), [
    (MTPBackend(1), 64, 1), (MTPBackend(2), 63, 1), (MTPBackend(2), 64, 2), (MTP, 60, 1),
    (MTP, 61, 2), (MTP, 256, 4), (DRAFT, 64, 1), (DRAFT, 65, 2),
])
def test_the_backend_reserves_its_lead_as_well_but_never_beyond_the_table(
    backend: Backend, total_tokens: int, backend_pages: int
) -> None:
    """MTP: ceil(min(budget + K - 1, 64 L) / P); Draft Full: as Main.  (C9.2, C5.6)"""
    ledger = make_ledger(backend=backend)
    activate(ledger, total_tokens)

    assert [counts(ledger, name)[1] for name in ledger.active] == [-(-total_tokens // 64), backend_pages]


@pytest.mark.parametrize(("max_context", "prompt_tokens", "output_tokens", "pages"), [
    (256, 257, 0, 5), (256, 256, 1, 5), (256, 1, 256, 5), (256, 10**9, 0, 15_625_000), (100, 101, 0, 2),
])
def test_a_budget_beyond_the_context_is_refused_for_ever_not_clamped(
    max_context: int, prompt_tokens: int, output_tokens: int, pages: int
) -> None:
    """prompt + output > S, token by token: 101 of 100, although two pages hold 128.  (C5.5, C9.2, C10.9, S80)"""
    ledger = make_ledger(max_context=max_context)
    blocks = -(-max_context // 64)

    answer = refuse(ledger, prompt_tokens, output_tokens)
    assert answer == Refusal("main", pages, blocks, forever=True, reason="context")
    activate(ledger, max_context)


def test_scarcity_is_a_refusal_with_the_numbers() -> None:
    """5 pages: one of 4 leaves 1; 2 more do not fit now, but would alone.  C = 2: the third waits.  (C10.9, S80)"""
    ledger, first = running(256, max_concurrency=2, tokens=320)

    assert refuse(ledger, 65) == Refusal("main", 2, 1, forever=False)
    second = activate(ledger, 1)
    assert refuse(ledger, 1) == Refusal("rows", 1, 0, forever=False, reason="rows")
    ledger.finish(second)
    ledger.finish(first)
    activate(ledger, 65)
    activate(ledger, 1)


@pytest.mark.parametrize("backend", [MTP, DRAFT])
def test_a_backend_that_lacks_pages_leaves_main_unchanged(backend: Backend) -> None:
    """Only the backend pool is short: no counter, row or column of any pool moves.  (C10.2, C6.3; vector 58)"""
    ledger = make_ledger(backend=backend)
    name = list(ledger.active)[1]
    scarce = ledger.active[name].pool
    taken = scarce.available - 2
    assert scarce.try_reserve(taken)

    assert refuse(ledger, 129) == Refusal(name, 3, 2, forever=False)
    scarce.shrink(taken)
    activate(ledger, 129)


@pytest.mark.parametrize("backend", BACKENDS)
def test_explaining_has_no_side_effect_and_activation_does_what_it_said(backend: Backend | None) -> None:
    """The plan's pages and row are those that the activation takes; a refusal is the activation's.  (C10.9)"""
    ledger = make_ledger(max_concurrency=3, tokens=320, backend=backend)
    activate(ledger, 64)
    before = snapshot(ledger)
    plan = ledger.transactions.explain(ActivationTarget(100, 29))
    assert_unchanged(before, ledger)
    assert isinstance(plan, ActivationPlan)
    reserved = {name: spaces.pool.reserved for name, spaces in ledger.active.items()}

    sequence = activate(ledger, 100, 29)

    assert sequence.row == plan.row
    assert dict(plan.entitlement_pages) == {name: spaces.pool.reserved - reserved[name]
                                            for name, spaces in ledger.active.items()}
    for target in (ActivationTarget(129, 0), ActivationTarget(257, 0)):
        assert isinstance(ledger.transactions.explain(target), Refusal)
        assert ledger.transactions.explain(target) == ledger.try_activate(target)


# ---- rows and handles ----------------------------------------------------------------------------------------


def test_active_sequences_have_distinct_rows_and_a_row_serves_again() -> None:
    """A row is leased while its sequence is active, by one sequence at a time.  (C9.7)"""
    ledger = make_ledger(max_concurrency=3)
    sequences = [activate(ledger, 64) for _ in range(3)]
    assert sorted(sequence.row for sequence in sequences) == ledger.sequences.active_rows() == [0, 1, 2]

    ledger.finish(sequences[1])
    again = activate(ledger, 64)

    assert again.row == sequences[1].row
    assert again != sequences[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_finish_gives_up_everything_in_every_pool(backend: Backend | None) -> None:
    """One row selects a space in each; mapped, bound and promised pages go, the next starts empty.  (C9.8, C10.1)"""
    ledger, sequence = running(200, backend=backend)
    assert all(spaces.entitlement_pages(sequence.row) for spaces in ledger.active.values())
    write(ledger, sequence, dict.fromkeys(ledger.active, 130))

    ledger.finish(sequence)

    assert all(spaces.pool.available == spaces.pool.capacity for spaces in ledger.active.values())
    assert ledger.sequences.active_rows() == []
    again = activate(ledger, 200)
    assert {(frontier(ledger, again, name), *mapped(ledger, again, name)) for name in ledger.active} == {(0,)}


USES: dict[str, Callable[[Ledger, Sequence], object]] = {
    "finish": lambda ledger, sequence: ledger.finish(sequence),
    "abort": lambda ledger, sequence: ledger.abort(sequence),
    "batch": lambda ledger, sequence: ledger.batch([sequence]),
    "truncate": lambda ledger, sequence: ledger.truncate(sequence, 0, "main"),
    "ensure": lambda ledger, sequence: ledger.ensure_mapped_to_tokens(sequence, 1, "main"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_handle_of_a_finished_sequence_or_another_store_is_refused(use: Callable[[Ledger, Sequence], object]) -> None:
    """Also after its row serves another sequence; a handle made by hand names nothing.  (C6.1, C10.1, S35)"""
    ours, theirs = make_ledger(store_id=1), make_ledger(store_id=2)
    ended, foreign = activate(ours, 100), activate(theirs, 100)
    ours.finish(ended)
    forged = (Sequence(1, 1, 0), Sequence(1, 1, 1), Sequence(1, 0, 0), Sequence(1, 2, 1), Sequence(1, -1, 0))

    for _ in range(2):
        for handle in (ended, foreign, *forged):
            with refused(StaleHandle, "C10.1", ours, theirs):
                use(ours, handle)
        if not ours.sequences.active_rows():
            assert activate(ours, 100).row == ended.row


def test_a_batch_outlives_other_sequences_but_not_its_own() -> None:
    """Handles are revalidated when a row was leased or returned since; a batch of another store is refused.  (C10.1)"""
    ledger = make_ledger(max_concurrency=3)
    sequences = [activate(ledger, 100) for _ in range(3)]
    batch = ledger.batch(sequences[:2])
    ledger.finish(sequences[2])
    ledger.commit_unit(ledger.begin_unit("step", batch, {"main": 1})[0])

    ledger.finish(sequences[1])
    for _ in range(2):
        with refused(StaleHandle, "C10.1", ledger):
            ledger.begin_unit("step", batch, {"main": 1})
        with refused(StaleHandle, "C10.1", ledger):
            ledger.trim(batch, "main")
        activate(ledger, 1)
    assert frontier(ledger, sequences[0]) == 1
    theirs, ours = make_ledger(store_id=2), make_ledger(store_id=3)
    foreign = theirs.batch([activate(theirs, 100)])
    activate(ours, 100)  # both stores have leased and returned rows equally often
    for call in (lambda: ours.begin_unit("step", foreign, {"main": 1}), lambda: ours.trim(foreign, "main")):
        with refused(StaleHandle, "C10.1", ours, theirs):
            call()


def test_a_batch_names_each_sequence_once() -> None:
    """An empty batch and a repeated sequence are misuse.  (C14.4)"""
    ledger, sequence = running(100)

    for named in ([], [sequence, sequence]):
        with refused(MisuseError, "C14.4", ledger):
            ledger.batch(named)
    assert len(ledger.batch([sequence])) == 1


def test_a_batch_after_another_is_what_it_would_be_alone() -> None:
    """Whatever both have in front and at their end, the same handles or equal ones, while others go.  (C10.1, C11.3)"""
    ledger, draw = make_ledger(max_concurrency=30), random.Random(1)
    sequences = [activate(ledger, 60) for _ in range(30)]
    for _ in range(300):
        ended = sequences[draw.randrange(30)]
        if draw.random() < 0.3:
            named = [*ledger._last_batch.sequences]
            ledger.finish(ended)
            sequences[sequences.index(ended)] = activate(ledger, 60)
            if ended in named:
                with refused(StaleHandle, "C10.1", ledger):
                    ledger.batch(named)
        chosen = draw.choice((
            draw.sample(sequences, draw.randint(1, 30)), sequences[draw.randrange(15) : draw.randint(15, 30)],
            sequences[draw.randrange(4) : draw.randint(10, 30)],
            [one for one in ledger._last_batch.sequences if one in sequences] or sequences[:1],
        ))
        handles = tuple(copy.copy(one) if draw.random() < 0.1 else one for one in chosen)
        batch, alone = ledger.batch(handles), batch_of(handles, *numbers_of(handles), 0)

        assert all(ours is theirs for ours, theirs in zip(batch.sequences, handles, strict=True))
        for ours, theirs in ((batch.rows, alone.rows), (batch.serials, alone.serials)):
            assert (ours.tolist(), ours.flags.writeable) == (theirs.tolist(), False)
        assert (batch.rows_mask, repr(batch.index)) == (alone.rows_mask, repr(alone.index))
        assert (batch.rows_mask, len(batch)) == (sum(1 << one.row for one in chosen), len(chosen))
        if draw.random() < 0.5:
            ledger.fail_unit(ledger.begin_unit("step", batch, {"main": 1})[0])


class Equal:
    """Is equal to everything."""

    row = serial = 0
    store_id = 1
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Thrower:
    """Has no row that can be read, and compares with nothing."""

    @property
    def row(self) -> int:
        raise ValueError("no row")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")

    def __hash__(self) -> int:
        raise ValueError("no hash")


@pytest.mark.parametrize("foreign", [Equal(), Thrower(), None, 0, "ab", (), [0]], ids=lambda one: type(one).__name__)
def test_what_is_no_handle_is_no_entry_of_a_batch(foreign: object) -> None:
    """Alone, first, last, and in the place of a handle of the previous batch.  (C10.1)"""
    ledger, first = running(100)
    second = activate(ledger, 100)
    for named in ([foreign], [foreign, second], [first, foreign], [first, foreign, second]):
        ledger.batch([first, second])
        with refused(MisuseError, "C10.1", ledger):
            ledger.batch(named)  # type: ignore[arg-type]


# ---- pools apart ---------------------------------------------------------------------------------------------


def test_pools_map_commit_and_trim_apart() -> None:
    """Main maps 3 pages, MTP 4 (its lead); after rejection each trims its own tail.  (C9.9, C13.1)"""
    ledger, sequence = running(130, 60, written={"main": 128, "mtp": 128}, max_context=320, backend=MTP)
    unit, _ = begin(ledger, sequence, {"main": 6, "mtp": 65})
    assert (len(mapped(ledger, sequence)), len(mapped(ledger, sequence, "mtp"))) == (3, 4)

    ledger.commit_unit(unit, {"main": 0, "mtp": 1})
    assert trim(ledger, sequence, "mtp") == 1
    assert (len(mapped(ledger, sequence)), len(mapped(ledger, sequence, "mtp"))) == (3, 3)
    assert trim(ledger, sequence) == 1
    assert (len(mapped(ledger, sequence)), len(mapped(ledger, sequence, "mtp"))) == (2, 3)
    assert (frontier(ledger, sequence), frontier(ledger, sequence, "mtp")) == (128, 129)


def test_no_pool_follows_another() -> None:
    """A unit, a commit and a truncate that name one pool leave the other as it was.  (C9.4, C9.9, C16.13)"""
    ledger, sequence = running(200, backend=DRAFT)
    assert list(write(ledger, sequence, {"draft": 70})) == ["draft"]
    assert (mapped(ledger, sequence), len(mapped(ledger, sequence, "draft"))) == ([], 2)
    assert list(write(ledger, sequence, {"main": 130, "draft": 1})) == ["main"]
    before = snapshot(ledger.active["draft"])

    write(ledger, sequence, {"main": 10}, accepted={"main": 3})
    ledger.truncate(sequence, 5, "main")
    trim(ledger, sequence)
    ledger.ensure_mapped_to_tokens(sequence, 200, "main")

    assert_unchanged(before, ledger.active["draft"])


def test_a_pool_that_is_not_enabled_is_refused() -> None:
    """Every operation names a pool of this store, and the refusal names the enabled ones.  (C3.3, C9.9)"""
    ledger, sequence = running(200)
    batch = ledger.batch([sequence])
    calls: list[Callable[[], object]] = [
        lambda: ledger.begin_unit("step", batch, {"main": 1, "mtp": 1}), lambda: ledger.trim(batch, "draft"),
        lambda: ledger.truncate(sequence, 0, "rows"), lambda: ledger.active_in("side"), lambda: ledger.kept_in("side"),
        lambda: ledger.ensure_mapped_to_tokens(sequence, 1, "Main"), lambda: ledger.covered_columns(batch, "mtp"),
    ]
    for call in calls:
        with refused(MisuseError, "C3.3", ledger, match=r"one of \['main'\]"):
            call()


@pytest.mark.parametrize("scarce", ["main", "mtp"])
def test_a_unit_maps_in_all_its_pools_or_in_none(scarce: str) -> None:
    """Beyond one pool's entitlement nothing is mapped in the other.  (C9.3, C9.4)"""
    ledger, sequence = running(100, backend=MTPBackend(1))

    with refused(EntitlementExceeded, "C9.3", ledger, match=f"pool {scarce}"):
        begin(ledger, sequence, {"main": 10, "mtp": 10} | {scarce: 129})
