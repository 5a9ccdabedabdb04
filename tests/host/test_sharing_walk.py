"""Random walks over everything that shares pages: what every space reads, and the accounting, after every step.

The model is one list of numbers for each space and pool: what was written into it, cut where it was cut.  Pages do
not occur in it, so whatever is done to them has to come out as if every space had bytes of its own.  (C10, C16)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from pagedkv.errors import MisuseError
from pagedkv.ledger.activation import ActivationTarget, PreparedActivation, Refusal
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.snapshot import PreparedSnapshot
from pagedkv.values.config import Backend
from tests.host.builders import assert_unchanged, differences, observables, runs_of, snapshot
from tests.host.sharing import BACKENDS, Held, SharedLedgers

WALKS = 3
STEPS = 200
STEPS_LONG = 10_000
READ_EVERY = 4

Read = dict[str, list[int]]
H = TypeVar("H", Sequence, Continuation)
Prepared = PreparedActivation | PreparedSnapshot


class SharingWalk:
    """One store, and what each of its spaces must read."""

    def __init__(self, seed: int, backend: Backend | None) -> None:
        self.rng = random.Random(seed)
        self.store = SharedLedgers(
            max_context=320, max_concurrency=self.rng.choice((3, 5)), tokens=self.rng.choice((448, 640, 960)),
            backend=backend,
        )  # fmt: skip
        self.ledgers = self.store.ledgers
        self.pools = list(self.ledgers.spaces)
        self.active: dict[Sequence, Read] = {}
        self.kept: dict[Continuation, Read] = {}
        self.protected: dict[Continuation, dict[str, int]] = {}
        self.budget: dict[Sequence, int] = {}
        self.counts: Counter[str] = Counter()
        self.events = (
            self.start, self.append, self.append, self.append, self.reject, self.snapshot, self.finish, self.go_on,
            self.go_on, self.go_on, self.abort, self.release, self.truncate, self.truncate_kept, self.protect,
            self.trim,
        )  # fmt: skip

    def run(self, steps: int) -> Counter[str]:
        """Walk, compare after every step, end everything, and return how often each thing happened."""
        for number in range(steps):
            self.rng.choice(self.events)()
            self.store.poison()
            self.store.check()
            if number % READ_EVERY == 0:
                self.compare()
        self.compare()
        for sequence in self.active:
            self.ledgers.finish(sequence)
        for continuation in self.rng.sample(list(self.kept), len(self.kept)):
            self.ledgers.release(continuation)
        self.store.check()
        for name, spaces in self.ledgers.spaces.items():
            assert runs_of(spaces.pool.free_runs) == [(0, spaces.pool.capacity)], f"pool {name}: pages leaked"
            assert runs_of(spaces.pages.free_runs) == [(0, spaces.pool.capacity)], f"pool {name}: descriptors leaked"
        return self.counts

    def compare(self) -> None:
        """Assert that every space reads what was written into it."""
        held: list[tuple[Held, Read]] = [*self.active.items(), *self.kept.items()]
        for holder, expected in held:
            assert {pool: self.store.read(holder, pool) for pool in self.pools} == expected, f"{holder}"
        assert list(self.kept) == self.ledgers.continuations.handles()
        for kept in self.kept:
            frontiers = {pool: self.store.space(kept, pool).protected_frontier for pool in self.pools}
            assert frontiers == self.protected[kept], f"{kept}"

    # ---- events -----------------------------------------------------------------------------------

    def start(self) -> None:
        total = self.rng.randint(1, self.rng.choice((100, 200, 320)))
        self._activate(ActivationTarget(total, 0), {pool: [] for pool in self.pools}, "start")

    def go_on(self) -> None:
        source = self._any(self.kept)
        if source is None:
            return
        read, keep = self.kept[source], self.rng.random() < 0.6
        main = self._draw(1, len(read["main"]))
        frontier = {pool: main if pool == "main" else self._draw(0, min(main, len(read[pool]))) for pool in read}
        if self.rng.random() < 0.2:
            frontier = {pool: len(numbers) for pool, numbers in read.items()}
        most = min(320 - frontier["main"] + 1, self.rng.choice((10, 100, 321)))
        target = ActivationTarget(self.rng.randint(0, most), 0, source, frontier, keep)
        if not self._activate(target, {pool: read[pool][:tokens] for pool, tokens in frontier.items()},
                              "fork" if keep else "move"):
            return
        if not keep:
            del self.kept[source]

    def append(self) -> None:
        sequence = self._any(self.active)
        if sequence is None:
            return
        room = self.budget[sequence] - self.store.frontier(sequence)
        columns = {"main": min(self.rng.choice((1, 3, 64, 100)), room)}
        for pool in self.pools[1:]:
            lead = self.store.frontier(sequence) + columns["main"] - self.store.frontier(sequence, pool)
            columns[pool] = min(self.rng.choice((0, 1, 70)), max(lead, 0))
        if any(columns.values()):
            self.store.append(sequence, columns)
            self.active[sequence] = {pool: self.store.read(sequence, pool) for pool in self.pools}
            self.counts["append"] += 1

    def reject(self) -> None:
        """Write up to 100 columns in one pool and accept none: pages behind the frontier stay mapped."""
        sequence = self._any(self.active)
        if sequence is None:
            return
        pool = self.rng.choice(self.pools)
        room = self.budget[sequence] - self.store.frontier(sequence, pool)
        unit, _ = self.ledgers.begin_unit("verify", self.ledgers.batch([sequence]), {pool: min(room, 100)})
        self.ledgers.commit_unit(unit, {pool: 0})
        self.counts["reject"] += 1

    def snapshot(self) -> None:
        sequence = self._any(self.active)
        if sequence is None or not self.active[sequence]["main"] or self._leads(sequence):
            return
        prepared = self._end_or_abort(lambda: self.ledgers.prepare_snapshot(sequence, "state"))
        is_provisional = any(
            len(self.store.logical(sequence, pool)) > -(-len(read) // 64)
            for pool, read in self.active[sequence].items()
        )
        assert prepared is None or not is_provisional, "a snapshot beside provisional pages"
        if prepared is None:
            return
        assert isinstance(prepared, PreparedSnapshot)
        self.store.copy(prepared.copies)
        kept = self.ledgers.commit_snapshot(prepared)
        self._keep(kept, self.active[sequence])
        self.counts["snapshot"] += 1

    def finish(self) -> None:
        sequence = self._any(self.active)
        if sequence is None or not self.active[sequence]["main"] or self._leads(sequence):
            return
        kept = self.ledgers.finish(sequence, retain=True, state="state")
        assert kept is not None
        self._keep(kept, self.active.pop(sequence))
        self.counts["retain"] += 1

    def abort(self) -> None:
        sequence = self._any(self.active)
        if sequence is not None and self.rng.random() < 0.3:
            self.ledgers.abort(sequence)
            del self.active[sequence]
            self.counts["abort"] += 1

    def release(self) -> None:
        kept = self._any(self.kept)
        if kept is not None and self.rng.random() < 0.7:
            self.ledgers.release(kept)
            del self.kept[kept]
            self.counts["release"] += 1

    def truncate(self) -> None:
        sequence = self._any(self.active)
        if sequence is None:
            return
        pool = self.rng.choice(self.pools)
        numbers = self.active[sequence][pool]
        tokens = self._draw(0, len(numbers))
        must = self._is_shared(sequence, pool, tokens)
        if self._refused(lambda: self.ledgers.truncate(sequence, tokens, pool), must):
            return
        self.active[sequence][pool] = numbers[:tokens]
        self.counts["truncate"] += 1

    def truncate_kept(self) -> None:
        kept = self._any(self.kept)
        if kept is None:
            return
        pool = self.rng.choice(self.pools)
        numbers = self.kept[kept][pool]
        tokens = self._draw(int(pool == "main"), len(numbers))
        if self.rng.random() < 0.6:
            lower = min(tokens, self.protected[kept][pool])
            self.ledgers.protect(kept, lower, pool)
            self.protected[kept][pool] = lower
        must = self._is_shared(kept, pool, tokens) or tokens < self.protected[kept][pool]
        if self._refused(lambda: self.ledgers.truncate_continuation(kept, tokens, pool), must):
            return
        self.kept[kept][pool] = numbers[:tokens]
        for other in self.pools[1:] if pool == "main" else ():  # a backend beyond Main is nobody's continuation
            if len(self.kept[kept][other]) > tokens:
                self.ledgers.release(kept)
                del self.kept[kept]
                break
        self.counts["truncate kept"] += 1
        if kept in self.kept:
            self.ledgers.attach_state(kept, "state")

    def protect(self) -> None:
        kept = self._any(self.kept)
        if kept is not None:
            pool = self.rng.choice(self.pools)
            tokens = self._draw(0, len(self.kept[kept][pool]))
            self.ledgers.protect(kept, tokens, pool)
            self.protected[kept][pool] = tokens
            self.counts["protect"] += 1

    def trim(self) -> None:
        sequence = self._any(self.active)
        if sequence is not None:
            self.ledgers.trim(self.ledgers.batch([sequence]), self.rng.choice(self.pools))
            self.counts["trim"] += 1

    # ---- helpers ----------------------------------------------------------------------------------

    def _keep(self, kept: Continuation, read: Read) -> None:
        """Note what a continuation holds; all of it is protected."""
        self.kept[kept] = {pool: list(numbers) for pool, numbers in read.items()}
        self.protected[kept] = {pool: len(numbers) for pool, numbers in read.items()}

    def _activate(self, target: ActivationTarget, read: Read, kind: str) -> bool:
        prepared = self._end_or_abort(lambda: self.ledgers.prepare_activation(target))
        if prepared is None:
            return False
        assert isinstance(prepared, PreparedActivation)
        self.store.copy(prepared.copies)
        sequence = self.ledgers.commit_activation(prepared)
        self.active[sequence] = read
        self.budget[sequence] = len(read["main"]) + target.total_tokens
        self.counts[kind] += 1
        self.counts["copied tails"] += len(prepared.copies)
        return True

    def _end_or_abort(self, prepare: Callable[[], Prepared | Refusal]) -> Prepared | None:
        """Prepare; now and then abort and prepare again.  Returns None for a refusal, which must change nothing."""
        is_compared = self.rng.random() < 0.3  # a copy of the whole state takes longer than anything else here
        before, exact = (observables(self.ledgers), snapshot(self.ledgers)) if is_compared else (None, None)
        prepared = prepare()
        if isinstance(prepared, Refusal):
            if is_compared:
                assert_unchanged(exact, self.ledgers)
            self.counts["refusal"] += 1
            self.release()
            return None
        if is_compared:
            if isinstance(prepared, PreparedSnapshot):
                self.ledgers.abort_snapshot(prepared)
            else:
                self.ledgers.abort_activation(prepared)
            assert differences(before, observables(self.ledgers)) == []
            self.counts["aborted"] += 1
            prepared = prepare()
            assert not isinstance(prepared, Refusal)
        return prepared

    def _refused(self, operation: Callable[[], object], must: bool) -> bool:
        if not must:
            operation()
            return False
        before = snapshot(self.ledgers)
        with pytest.raises(MisuseError):
            operation()
        assert_unchanged(before, self.ledgers)
        self.counts["misuse"] += 1
        return True

    def _is_shared(self, held: Held, pool: str, tokens: int) -> bool:
        """Whether a cut to `tokens` reaches a page that another space holds, by counting who holds what."""
        everyone: list[Held] = [*self.active, *self.kept]
        holders = Counter(page for other in everyone for page in set(self.store.logical(other, pool)))
        return any(holders[page] > 1 for page in self.store.logical(held, pool)[tokens // 64 :])

    def _leads(self, sequence: Sequence) -> bool:
        read = self.active[sequence]
        return any(len(read[pool]) > len(read["main"]) for pool in self.pools)

    def _any(self, held: dict[H, Read]) -> H | None:
        return self.rng.choice(list(held)) if held else None

    def _draw(self, low: int, high: int) -> int:
        """Draw a frontier: any, at the end, or at a page boundary."""
        drawn = self.rng.choice((self.rng.randint(low, high), high, self.rng.randint(low, high) // 64 * 64))
        return min(max(drawn, low), high)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_space_reads_what_was_written_into_it(seed: int, backend: Backend | None) -> None:
    """S30, S31, S39: forks, moves, snapshots, cuts and releases at random.  (C10.5, C16.4, C16.7; vectors 54, 55)"""
    counts: Counter[str] = Counter()
    for number in range(WALKS):
        counts += SharingWalk(seed + number, backend).run(STEPS)
    print(f"seed {seed}: {dict(counts.most_common())}")

    wanted = {"fork", "move", "snapshot", "retain", "append", "release", "truncate", "protect", "aborted", "refusal"}
    assert {name for name in wanted if not counts[name]} == set(), "a kind of event never happened"


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_walk_reads_what_was_written(seed: int, backend: Backend | None) -> None:
    """The same, for long.  (S30, S31)"""
    counts = SharingWalk(seed, backend).run(STEPS_LONG)

    assert min(counts[name] for name in ("fork", "move", "snapshot", "misuse", "refusal", "copied tails")) > 100


def test_the_poison_is_seen() -> None:
    """A space that names a free page group reads -1, so the walk above would notice.  (S7)"""
    store = SharedLedgers()
    kept = store.retain(130)
    page = store.page_ids(kept)[1]
    store.ledgers.spaces["main"].pool.free_runs.give(np.array([page], np.int32))
    store.poison()

    assert store.read(kept)[64:128] == [-1] * 64
