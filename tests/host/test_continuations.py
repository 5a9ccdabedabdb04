"""Continuations: retained, protected, truncated, released; every handle that outlived one is refused.  (C7.8, C9.8)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.errors import MisuseError, StaleHandle
from pagedkv.ledger.continuations import STATE_FOLLOWS, Continuation
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget
from pagedkv.values.config import Backend
from tests.host.builders import begin, counts, trim
from tests.host.picture import Picture
from tests.host.refusals import differences, observables, refused
from tests.host.sharing import BACKENDS, DRAFT, MTP, SharedLedger, retained, started

# ---- retain ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130, 256])
def test_retaining_keeps_membership_and_frontier_and_gives_up_the_rest(backend: Backend | None, tokens: int) -> None:
    """Row free, reservation 0, available grows by it; no writer; all that is committed is protected.  (C9.8, C7.8)"""
    store = SharedLedger(backend=backend)
    sequence = store.start(256, written=dict.fromkeys(store.ledger.active, tokens))
    read = {pool: store.read(sequence, pool) for pool in store.ledger.active}
    seen = {pool: (store.logical(sequence, pool), store.column("content", sequence, pool),
                   store.column("serial", sequence, pool)) for pool in store.ledger.active}
    free = {pool: store.available(pool) for pool in store.ledger.active}
    reserved = {pool: spaces.pool.reserved for pool, spaces in store.ledger.active.items()}
    kept = store.finish(sequence)

    cover = [64] * (tokens // 64) + [tokens % 64] * (tokens % 64 > 0)
    for pool, spaces in store.ledger.active.items():
        assert seen[pool] == (store.logical(kept, pool), store.column("content", kept, pool),
                              store.column("serial", kept, pool))
        assert store.read(kept, pool) == read[pool]
        assert (spaces.pool.reserved, store.available(pool) - free[pool]) == (0, reserved[pool])
        assert (store.column("committed", kept, pool), store.column("protected", kept, pool)) == (cover, cover)
        assert store.column("protectors", kept, pool) == [int(columns == 64) for columns in cover]
        assert store.column("writer", kept, pool) == [-1] * len(cover)
        assert store.column("active", kept, pool) == [0] * len(cover)
        assert store.space(kept, pool).protected_frontier == tokens
    assert len(store.ledger.sequences.active_rows()) == 0


def test_retaining_trims_what_is_provisional_in_every_pool() -> None:
    """Mapped pages behind the frontiers go back first: a rejected draft leaves no coverage.  (C9.8, C13.3, S85)"""
    store, sequence = started(256, backend=MTP)
    unit, _ = begin(store.ledger, sequence, {"main": 250, "mtp": 200})
    store.ledger.commit_unit(unit, {"main": 66, "mtp": 64})
    kept = store.finish(sequence)

    assert (store.frontier(kept), store.frontier(kept, "mtp")) == (66, 64)
    assert (len(store.logical(kept)), len(store.logical(kept, "mtp"))) == (2, 1)
    assert [counts(store.ledger, pool)[:2] for pool in ("main", "mtp")] == [(2, 0), (1, 0)]


def test_a_backend_without_a_token_is_retained_as_nothing() -> None:
    """Its frontier is 0: no page, and a later activation begins there.  (C9.9)"""
    store, kept = retained({"main": 70, "mtp": 0}, backend=MTP)
    assert (store.logical(kept, "mtp"), store.frontier(kept, "mtp")) == ([], 0)

    store.ledger.protect(kept, 0, "mtp")
    store.ledger.truncate_continuation(kept, 0, "mtp")
    sequence = store.go_on(kept, 5, keep_source=False)
    store.append(sequence, {"main": 5, "mtp": 75})


@pytest.mark.parametrize("keep", [True, False])
def test_a_continuation_goes_on_in_any_row(keep: bool) -> None:
    """The table of the new row equals the membership's order.  (C9.7; vector 43)"""
    store, kept = retained(130)
    blocker = store.start(1)
    sequence = store.go_on(kept, 60, keep_source=keep)
    store.append(sequence, 60)

    assert (blocker.row, sequence.row) == (0, 1)
    mirror = store.ledger.active["main"].table[1]
    assert mirror[:3].tolist() == store.page_ids(sequence)


def test_a_state_is_for_a_continuation() -> None:
    """`finish` without retain has nothing to attach a state or its frontier to.  (C9.8)"""
    store, sequence = started(100, written=70)
    for options in ({"state": "s"}, {"state": STATE_FOLLOWS}, {"state_frontier": 70}):
        with refused(MisuseError, "C9.8", store.ledger, match="pass retain=True"):
            store.ledger.finish(sequence, **options)
    kept = store.finish(sequence, state="s")

    assert store.ledger.continuations.states[kept.number].state == "s"


# ---- the frontier that a state belongs to ------------------------------------------------------------------


def attached(ledger: Ledger, sequence: Sequence, state: object, frontier: Any) -> Continuation:
    """Attach a state to the only continuation, or to a new one of the sequence."""
    handles = ledger.continuations.handles()
    kept = handles[0] if handles else ledger.finish(sequence, True, STATE_FOLLOWS)
    assert kept is not None
    ledger.attach_state(kept, state, frontier)
    return kept


STATE_ENDS: dict[str, Callable[[Ledger, Sequence, object, Any], object]] = {
    "finish": lambda ledger, sequence, state, frontier: ledger.finish(sequence, True, state, frontier),
    "snapshot": lambda ledger, sequence, state, frontier: ledger.try_snapshot(sequence, state, frontier),
    "attach_state": attached,
}


@pytest.mark.parametrize("end", STATE_ENDS)
@pytest.mark.parametrize(("backend", "main", "other", "state", "frontier", "clause", "expected"), [
    (MTP, 120, 0, "s", None, "C9.8", 0),  # the state needs 120 tokens of MTP too
    (MTP, 120, 119, "s", None, "C9.8", 0), (DRAFT, 120, 0, "s", None, "C9.8", 0),
    (MTP, 120, 119, "s", 120, "C9.8", 0), (MTP, 120, 119, "s", {"main": 120, "mtp": 120}, "C9.8", 0),
    (MTP, 120, 120, "s", {"main": 100, "mtp": 101}, "C9.8", 0), (MTP, 120, 119, "s", {"main": 120}, "C9.9", 0),
    (MTP, 120, 119, "s", {"main": 120, "mtp": 119, "draft": 0}, "C9.9", 0), (MTP, 120, 119, "s", "main", "C9.9", 0),
    (None, 120, 0, "s", 121, "C9.8", 0), (None, 120, 0, "s", 0, "C9.8", 0), (None, 120, 0, "s", True, "C9.9", 0),
    (None, 120, 0, "s", {"main": 120.0}, "C9.8", 0), (None, 120, 0, "s", -1, "C9.8", 0),
    (MTP, 120, 120, None, None, "C9.8", 0), (None, 120, 0, None, 120, "C9.8", 0),
    (None, 120, 0, STATE_FOLLOWS, 120, "C9.8", 0),
    (MTP, 120, 120, "s", None, "", {"main": 120, "mtp": 120}), (MTP, 120, 110, "s", 110, "", {"main": 110, "mtp": 110}),
    (MTP, 120, 119, "s", {"main": 120, "mtp": 119}, "", {"main": 120, "mtp": 119}),
    (MTP, 120, 0, 0, {"main": 120, "mtp": 0}, "", {"main": 120, "mtp": 0}),
    (MTP, 120, 0, STATE_FOLLOWS, None, "", {}), (None, 120, 0, False, None, "", {"main": 120}),
    (None, 120, 0, "s", 64, "", {"main": 64}),
])
def test_a_pool_behind_the_frontier_of_the_state_is_refused(
    end: str, backend: Backend | None, main: int, other: int, state: object, frontier: Any, clause: str, expected: Any
) -> None:
    """What is retained is complete, or the caller says that its state follows.  (C2.2, C9.8, C9.9, C13.2)"""
    store = SharedLedger(backend=backend)
    pools = list(store.ledger.active)
    sequence = store.start(200, written={"main": main, **({pools[1]: other} if backend else {})})
    if end == "attach_state":
        attached(store.ledger, sequence, STATE_FOLLOWS, None)
    if clause:
        with refused(MisuseError, clause, store.ledger):
            STATE_ENDS[end](store.ledger, sequence, state, frontier)
        return
    kept = STATE_ENDS[end](store.ledger, sequence, state, frontier)
    assert isinstance(kept, Continuation)

    record = store.ledger.continuations.states[kept.number]
    assert (record.state, record.state_frontier) == (None if state is STATE_FOLLOWS else state, expected)
    if state is STATE_FOLLOWS:
        with refused(MisuseError, "C2.2", store.ledger, match="attach_state"):
            store.ledger.transactions.explain(ActivationTarget(1, 0, kept))
    else:
        store.go_on(kept)


# ---- release and handles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_continuations_are_released_in_any_order(order: tuple[int, ...]) -> None:
    """A page goes back with its last reference; what is left reads as before.  (C9.8; vector 56)"""
    store, first = retained({"main": 200, "mtp": 130}, max_context=256, backend=MTP)
    second = store.finish(store.go_on(first, frontier={"main": 130, "mtp": 64}))
    running = store.go_on(second, 100)
    store.append(running, {"main": 70, "mtp": 70})
    third = store.finish(running)
    held = [first, second, third]
    read = {handle: (store.read(handle), store.read(handle, "mtp")) for handle in held}

    for index in order:
        store.release(held[index])
        read.pop(held[index])
        store.check()
        assert read == {handle: (store.read(handle), store.read(handle, "mtp")) for handle in read}
        assert [handle.number for handle in store.ledger.continuations.handles()] == [h.number for h in read]
    assert all(spaces.pool.available == spaces.pool.capacity for spaces in store.ledger.active.values())


USES: dict[str, Callable[[Ledger, Continuation], object]] = {
    "release": lambda ledger, kept: ledger.release(kept),
    "protect": lambda ledger, kept: ledger.protect(kept, 0, "main"),
    "truncate": lambda ledger, kept: ledger.truncate_continuation(kept, 1, "main"),
    "attach_state": lambda ledger, kept: ledger.attach_state(kept, "s"),
}
SOURCES: dict[str, Callable[[Ledger, Continuation], object]] = {
    "explain fork": lambda ledger, kept: ledger.transactions.explain(ActivationTarget(1, 0, kept)),
    "explain move": lambda ledger, kept: ledger.transactions.explain(ActivationTarget(1, 0, kept, keep_source=False)),
    "prepare fork": lambda ledger, kept: ledger.prepare_activation(ActivationTarget(1, 0, kept)),
    "prepare move": lambda ledger, kept: ledger.prepare_activation(ActivationTarget(1, 0, kept, keep_source=False)),
    "try fork": lambda ledger, kept: ledger.try_activate(ActivationTarget(1, 0, kept)),
    "try move": lambda ledger, kept: ledger.try_activate(ActivationTarget(1, 0, kept, keep_source=False)),
}


@pytest.mark.parametrize("use", [*USES.values(), *SOURCES.values()], ids=[*USES, *SOURCES])
@pytest.mark.parametrize("end", ["release", "move"])
def test_a_handle_that_outlived_its_continuation_is_refused(
    end: str, use: Callable[[Ledger, Continuation], object]
) -> None:
    """Twice, and after its pages serve another: nothing changes.  (C9.8, C10.4, S25, S35, S37)"""
    store, kept = retained(130)
    if end == "release":
        store.release(kept)
    else:
        store.end(store.go_on(kept, keep_source=False))
    other = store.retain(130)
    assert other.number != kept.number

    for _ in range(2):
        with refused(StaleHandle, "C9.8", store.ledger):
            use(store.ledger, kept)
    assert store.frontier(other) == 130


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("bad", [None, 1, "kept", Continuation(2, 1), Continuation(1, 2), Continuation(1, True)])
def test_only_a_handle_of_this_store_names_a_continuation(
    bad: object, use: Callable[[Ledger, Continuation], object]
) -> None:
    """Something else, another store's, a number that was never given out.  (C9.8)"""
    store = SharedLedger()
    store.retain(130)

    with refused(StaleHandle if isinstance(bad, Continuation) else MisuseError, "C9.8", store.ledger):
        use(store.ledger, bad)  # type: ignore[arg-type]


# ---- protect ---------------------------------------------------------------------------------------------


def test_protection_is_rebuilt_when_it_goes_down_and_up() -> None:
    """At 65: {64, 1}; at 32: {32, 0}; back at 65.  (C7.8; vector 37)"""
    store, kept = retained(130)
    seen = []
    for tokens in (65, 32, 65, 0, 64, 130):
        store.ledger.protect(kept, tokens, "main")
        seen.append(store.column("protected", kept))
        assert store.space(kept).protected_frontier == tokens
        store.check()

    assert seen == [[64, 1, 0], [32, 0, 0], [64, 1, 0], [0, 0, 0], [64, 0, 0], [64, 64, 2]]


@pytest.mark.parametrize(("method", "clause", "committed", "bad"), [
    ("protect", "C7.8", 130, (-1, 131, 1.0, True, None)), ("protect", "C7.8", 128, (129, 192, 1000)),
    ("truncate_continuation", "C9.10", 130, (-1, 131, 0, 1.5)),  # 0 is what `release` is for
])
def test_only_what_is_committed_is_protected_or_kept(
    method: str, clause: str, committed: int, bad: tuple[int, ...]
) -> None:
    """Up to the frontier, also where no page behind it could refuse; whole tokens, an enabled pool.  (C7.8, C9.10)"""
    store, kept = retained(committed)
    store.ledger.protect(kept, 0, "main")
    act = getattr(store.ledger, method)

    for tokens in bad:
        with refused(MisuseError, clause, store.ledger):
            act(kept, tokens, "main")
    with refused(MisuseError, "C3.3", store.ledger):
        act(kept, 1, "mtp")


def test_a_page_protects_the_most_of_what_its_inactive_spaces_protect() -> None:
    """Three continuations on the same two pages, lowered and released one after another.  (C7.8)"""
    store, first = retained(200, max_context=320)
    second = store.finish(store.go_on(first, frontier=128))
    third = store.finish(store.go_on(first, frontier=192))
    pages = store.logical(first)
    ledger = store.ledger

    def protected() -> tuple[list[int], list[int]]:
        found = ledger.active["main"].pages
        store.check()
        return found.protected[pages].tolist(), found.protectors[pages].tolist()

    assert protected() == ([64, 64, 64, 8], [3, 3, 2, 0])
    ledger.protect(first, 70, "main")
    assert protected() == ([64, 64, 64, 0], [3, 2, 1, 0])
    ledger.protect(third, 100, "main")
    assert protected() == ([64, 64, 0, 0], [3, 1, 0, 0])
    ledger.protect(second, 0, "main")
    assert protected() == ([64, 36, 0, 0], [2, 0, 0, 0])
    ledger.protect(first, 10, "main")
    assert protected() == ([64, 36, 0, 0], [1, 0, 0, 0])
    ledger.protect(first, 101, "main")
    assert protected() == ([64, 37, 0, 0], [2, 0, 0, 0])
    store.release(third)
    assert protected() == ([64, 37, 0, 0], [1, 0, 0, 0])
    ledger.protect(second, 20, "main")
    assert protected() == ([64, 37, 0, 0], [1, 0, 0, 0])
    ledger.protect(first, 5, "main")
    assert protected() == ([20, 0, 0, 0], [0, 0, 0, 0])
    store.go_on(second, keep_source=False)
    assert protected() == ([5, 0, 0, 0], [0, 0, 0, 0])


# ---- truncate a continuation -----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 32, 63, 64, 65, 127, 128, 129, 130])
def test_truncating_a_continuation_drops_pages_and_cuts_one(tokens: int) -> None:
    """Pages behind go to available; the page cut inside gets a new content epoch, and no other.  (C9.10, C7.6)"""
    store, kept = retained(130)
    read, contents, free = store.read(kept), store.column("content", kept), store.available()
    store.ledger.protect(kept, 0, "main")
    store.ledger.truncate_continuation(kept, tokens, "main")
    store.poison()

    pages = -(-tokens // 64)
    assert (store.frontier(kept), len(store.logical(kept))) == (tokens, pages)
    assert store.available() == free + 3 - pages
    assert store.read(kept) == read[:tokens]
    cut = tokens < 130 and tokens % 64 > 0
    assert store.column("content", kept)[: pages - cut] == contents[: pages - cut]
    assert not cut or store.column("content", kept)[-1] > max(contents)
    store.check()
    store.ledger.attach_state(kept, "state")
    store.append(store.go_on(kept, 5, keep_source=False), 5)


@pytest.mark.parametrize(("pool", "leaves", "deletes"), [("main", 120, 119), ("mtp", 90, 89)])
def test_a_state_goes_with_the_tokens_of_each_pool_that_it_belongs_to(pool: str, leaves: int, deletes: int) -> None:
    """KV presence behind them is no hit; a cut down to them leaves the state.  (C2.2, C9.8, C16.16)"""
    store, kept = retained({"main": 130, "mtp": 100}, backend=MTP)
    store.ledger.attach_state(kept, "state", {"main": 120, "mtp": 90})
    store.ledger.protect(kept, 0, pool)
    store.ledger.truncate_continuation(kept, leaves, pool)
    assert store.ledger.continuations.states[kept.number].state == "state"

    store.ledger.truncate_continuation(kept, deletes, pool)
    assert store.ledger.continuations.states[kept.number].state_frontier == {}
    with refused(MisuseError, "C2.2", store.ledger, match="attach_state"):
        store.ledger.transactions.explain(ActivationTarget(1, 0, kept))
    store.ledger.attach_state(kept, "another", {"main": 100, "mtp": 89})
    store.go_on(kept)


def test_truncating_below_what_is_protected_is_refused_until_it_is_lowered() -> None:
    """Retaining protects all of it.  (C7.8, C9.10; vector 39)"""
    store, kept = retained(130)
    for tokens in (1, 64, 128, 129):  # at 64 and 128 whole pages would go, and none is cut inside
        with refused(MisuseError, "C9.10", store.ledger, match=r"expected 130 \(protected\) to 130 tokens"):
            store.ledger.truncate_continuation(kept, tokens, "main")
    store.ledger.protect(kept, 100, "main")
    with refused(MisuseError, "C9.10", store.ledger):
        store.ledger.truncate_continuation(kept, 99, "main")

    store.ledger.truncate_continuation(kept, 100, "main")
    assert store.column("committed", kept) == store.column("protected", kept) == [64, 36]


def test_a_backend_is_truncated_to_nothing_and_main_is_not_touched() -> None:
    """Every truncate names its pool.  (C9.9)"""
    store, kept = retained({"main": 130, "mtp": 100}, backend=MTP)
    main = store.read(kept)
    store.ledger.protect(kept, 0, "mtp")
    assert store.column("protected", kept) == [64, 64, 2]
    store.ledger.truncate_continuation(kept, 0, "mtp")

    assert (store.frontier(kept, "mtp"), store.read(kept), store.frontier(kept)) == (0, main, 130)
    store.check()
    store.ledger.attach_state(kept, "without MTP", {"main": 130, "mtp": 0})
    store.go_on(kept, 5)


@pytest.mark.parametrize("holder", ["continuation", "sequence"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128])
def test_truncating_a_continuation_inside_a_shared_page_is_refused(holder: str, tokens: int) -> None:
    """Whole pages behind the cut only lose a reference, and the other space reads on.  (C9.10, C16.8)"""
    store, kept = retained(200)
    other = store.go_on(kept, frontier=128)
    read = store.read(other)
    held = store.finish(other) if holder == "continuation" else other
    store.ledger.protect(kept, 0, "main")
    if tokens % 64:
        with refused(MisuseError, "C9.10", store.ledger):
            store.ledger.truncate_continuation(kept, tokens, "main")
        store.ledger.truncate_continuation(kept, 130, "main")
        if isinstance(held, Continuation):
            store.release(held)
        else:
            store.end(held)
    store.ledger.truncate_continuation(kept, tokens, "main")
    store.check()

    assert store.frontier(kept) == tokens
    assert store.read(kept) == read[:tokens]
    if not tokens % 64:
        assert store.read(held) == read
        assert store.column("references", held) == [2, 2][: tokens // 64] + [1] * (2 - tokens // 64)
        assert store.column("committed", held) == [64, 64]


# ---- truncate and trim of an active row that shares -------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 127])
@pytest.mark.parametrize("how", ["fork", "snapshot", "move"])
def test_truncating_a_row_inside_a_shared_page_is_refused(how: str, tokens: int) -> None:
    """However it came to share.  Whole pages only lose a reference, and the budget stays.  (C9.10, C16.17)"""
    store = SharedLedger()
    if how == "snapshot":
        sequence = store.start(200, written=130)
        other = store.snapshot(sequence)
    else:
        kept = store.retain(130)
        other = kept if how == "fork" else store.finish(store.go_on(kept))
        sequence = store.go_on(kept, 70, keep_source=how == "fork")
    read, shared = store.read(sequence), store.read(other)
    if tokens % 64:
        with refused(MisuseError, "C9.10", store.ledger):
            store.ledger.truncate(sequence, tokens, "main")
        store.ledger.truncate(sequence, 129, "main")
        store.ledger.truncate(sequence, 128, "main")
        store.release(other)
    contents, entitled = store.column("content", sequence), store.ledger.active["main"].entitlement_pages(sequence.row)

    store.ledger.truncate(sequence, tokens, "main")

    assert store.read(sequence) == read[:tokens]
    pages = -(-tokens // 64)
    assert store.column("writer", sequence) == [-1] * (tokens // 64) + [sequence.row] * (tokens % 64 > 0)
    assert store.column("content", sequence)[: tokens // 64] == contents[: tokens // 64]
    assert len(store.logical(sequence)) == pages
    assert store.ledger.active["main"].entitlement_pages(sequence.row) == entitled
    store.check()
    store.append(sequence, 200 - tokens)
    assert store.read(sequence)[:tokens] == read[:tokens]
    if not tokens % 64:
        assert store.read(other) == shared


def test_a_row_that_leaves_shared_pages_needs_others_in_their_place() -> None:
    """Its entitlement stays; without room the cut is refused, and nothing changed.  Observers follow it.  (C9.10)"""
    store = SharedLedger(tokens=512)
    picture = Picture()
    store.ledger.events.observe(picture)
    kept = store.retain(130)
    sequence = store.go_on(kept, 62)
    store.append(sequence, 30)
    blocker = store.start(3 * 64)
    assert store.available() == 1
    with refused(MisuseError, "C9.10", store.ledger, match="2 available pages in place of those"):
        store.ledger.truncate(sequence, 0, "main")
    store.ledger.truncate(sequence, 64, "main")
    assert store.available() == 0
    store.ledger.events.deliver()
    picture.compare(store.ledger)
    store.end(blocker)
    store.ledger.truncate(sequence, 0, "main")
    assert store.page_ids(sequence) == []
    store.append(sequence, 130)
    store.check()
    store.ledger.events.deliver()
    picture.compare(store.ledger)


@pytest.mark.parametrize(("pool", "other"), [("main", "mtp"), ("mtp", "main")])
def test_each_pool_of_a_fork_is_cut_by_itself(pool: str, other: str) -> None:
    """Membership, entitlement and the pages it needs are the pool's own; the other is not touched.  (C9.9, C9.10)"""
    store, kept = retained({"main": 200, "mtp": 200}, backend=MTP)
    fork = store.go_on(kept, 50)
    store.append(fork, {"main": 20, "mtp": 20})
    store.ledger.protect(kept, 0, pool)
    store.ledger.truncate_continuation(kept, 128, pool)  # block 2 is the fork's alone now, between shared and own pages
    cut, spared = store.ledger.active[pool], store.ledger.active[other]
    read, free, entitled = store.read(fork, pool), store.available(pool), cut.entitlement_pages(fork.row)
    spared_before = (store.read(fork, other), store.page_ids(fork, other), store.available(other))

    lacking = store.available(other)
    spared.pool.try_reserve(lacking)
    store.ledger.truncate(fork, 64, pool)
    spared.pool.shrink(lacking)
    lacking = store.available(pool)
    cut.pool.try_reserve(lacking)
    with refused(MisuseError, "C9.10", store.ledger, match="1 available pages in place of those"):
        store.ledger.truncate(fork, 0, pool)
    cut.pool.shrink(lacking)

    assert (store.read(fork, pool), store.available(pool)) == (read[:64], free - 1)
    assert cut.entitlement_pages(fork.row) == entitled
    assert spared_before == (store.read(fork, other), store.page_ids(fork, other), store.available(other))
    store.check()
    store.append(fork, {pool: 150})
    assert store.read(fork, pool)[:64] == read[:64]


def test_a_unit_after_a_cut_maps_pages_anew() -> None:
    """What the last unit left to write in its pages is no longer known, for they are gone.  (C9.4, C9.10)"""
    store, kept = retained(128)
    fork = store.go_on(kept, 100)
    batch = store.ledger.batch([fork])
    for frontier in (*range(129, 140), 64, *range(65, 70)):
        if frontier == 64:
            store.ledger.truncate(fork, 64, "main")
            continue
        unit, _ = store.ledger.begin_unit("step", batch, {"main": 1})
        store.ledger.commit_unit(unit)
        assert (store.frontier(fork), len(store.logical(fork))) == (frontier, -(-frontier // 64))
    store.check()


def test_a_trim_never_touches_a_shared_page() -> None:
    """Shared pages are full and committed, so they lie below every frontier that a trim keeps.  (C9.6)"""
    store, kept = retained(128)
    sequence = store.go_on(kept, 100)
    unit, _ = begin(store.ledger, sequence, 100)
    store.ledger.commit_unit(unit, {"main": 0})
    assert len(store.logical(sequence)) == 4

    assert trim(store.ledger, sequence) == 2
    assert store.logical(sequence) == store.logical(kept)


def test_retaining_and_moving_a_hundred_times_leaks_nothing() -> None:
    """S28, S33: pages, descriptors, rows and pins are where they began.  (C10.4)"""
    store = SharedLedger(backend=MTP)
    before = observables(store.ledger)
    kept = store.retain({"main": 130, "mtp": 70})
    for _ in range(100):
        sequence = store.go_on(kept, 10, keep_source=False)
        store.append(sequence, {"main": 10, "mtp": 10})
        store.ledger.truncate(sequence, 130, "main")
        store.ledger.truncate(sequence, 70, "mtp")
        kept = store.finish(sequence)
        store.check()
    store.release(kept)

    grown = ("stamp", "_number_next")
    changed = differences(before, observables(store.ledger))
    assert [line for line in changed if not any(name in line for name in grown)] == []
