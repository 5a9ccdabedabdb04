"""One random walk through a store's ledgers, beside the model, with everything compared after every event.

Each round has its own store: pools, sizes and binding window are drawn, and so is how often each kind of event comes
("swarm" weights: some kinds hardly occur in a round, others dominate it), how often calls are illegal, and how far
units reach.  Events are chosen from the model alone, so a bug in the store cannot steer the walk.  A call that the
model refuses must raise one of the errors it names, and leave every column and counter as it was.

Read next: `test_fuzz.py`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

import numpy as np

from pagedkv import address_space
from pagedkv.activation import ActivationPlan, ActivationTarget, Refusal
from pagedkv.address_space import AddressSpaces
from pagedkv.check import check_ledgers
from pagedkv.config import Backend, DraftFullBackend, MTPBackend, StoreConfig
from pagedkv.errors import PagedKVError
from pagedkv.ledgers import Batch, Columns, StoreLedgers
from pagedkv.pool import DevicePageLease
from pagedkv.sequence import Sequence
from pagedkv.unit_guard import SubmittedUnit
from tests.host.builders import DRAFT_GEOMETRY, assert_unchanged, make_config, slices_of, snapshot
from tests.oracle.ledger_model import (
    LedgerModel,
    PoolShape,
    PoolView,
    SequenceModel,
    StoreView,
    UnitModel,
    Wanted,
    pages_of,
)

T = TypeVar("T")

EVENTS_A_ROUND = 250
CHECK_EVERY = 16
HISTORY = 12


class LedgerFuzz:
    """One store, its model, and the events between them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        config = self._draw_config()
        self.ledgers = StoreLedgers(config, store_id=1)
        self.model = LedgerModel(
            {pool.name: PoolShape(pool.pages, pool.lead_tokens) for pool in config.pools},
            max_context=config.max_context, max_concurrency=config.max_concurrency,
        )  # fmt: skip
        self.window_pages = self.rng.choice((1, 2, 3, 64))
        self.handles: dict[int, Sequence] = {}
        self.units: dict[int, SubmittedUnit] = {}
        self.batches: list[tuple[Batch, list[SequenceModel]]] = []
        self.leases: list[tuple[str, DevicePageLease, int]] = []
        self.history: deque[str] = deque(maxlen=HISTORY)
        self.told = 0
        self.counts: Counter[str] = Counter()
        self.boldness = self.rng.choice((0.02, 0.1, 0.2))
        self.reach = self.rng.choice((2, 6, 70, 300))
        self.events: dict[Callable[[], None], float] = {
            self.activate: 7, self.begin: 40, self.commit: 36, self.fail: 4, self.trim: 12, self.truncate: 4,
            self.ensure: 6, self.finish: 4, self.abort: 2, self.select: 4, self.lease: 3, self.use_lease: 5,
            self.misuse: 2, self.overreach: 2,
        }  # fmt: skip
        self.events = {event: weight * self.rng.choice((0.2, 1.0, 1.0, 3.0)) for event, weight in self.events.items()}

    def run(self, events: int) -> Counter[str]:
        """Walk, compare after every event, end everything, and return how often each thing happened."""
        kinds, weights = list(self.events), list(self.events.values())
        with mock.patch.object(address_space, "WINDOW_PAGES", self.window_pages):
            for number in range(events):
                with self._reported(number):
                    told = self.told
                    while self.told == told:  # an event that finds nothing to act on is drawn again
                        self.rng.choices(kinds, weights)[0]()
                    self.model.compare(self.view())
                    if number % CHECK_EVERY == 0:
                        check_ledgers(self.ledgers)
            with self._reported(events):
                self.end_everything()
        return self.counts

    def view(self) -> StoreView:
        """Return everything observable as plain lists."""
        pools = {name: _pool_view(spaces) for name, spaces in self.ledgers.spaces.items()}
        guard = self.ledgers.guard
        return StoreView(pools, self.ledgers.sequences.active_rows(), guard.rows_in_flight, len(guard.units))

    def end_everything(self) -> None:
        """Finish all there is; every page of every pool is available again, under its own id."""
        for unit in self.model.open_units:
            self.ledgers.fail_unit(self.units[unit.key])
            self.model.end(unit)
            self.model.compare(self.view())
        for sequence in self.model.active:
            self.ledgers.finish(self.handles[sequence.key])
            self.model.finish(sequence)
            self.model.compare(self.view())
        check_ledgers(self.ledgers)
        for name, spaces in self.ledgers.spaces.items():
            whole = [(0, spaces.pool.capacity)]
            assert spaces.pool.free_runs.runs() == whole, f"pool {name}: pages leaked"
            assert spaces.pages.free_runs.runs() == whole, f"pool {name}: descriptors leaked"

    # ---- events -----------------------------------------------------------------------------------

    def activate(self) -> None:
        """Explain a target and try it; the answers agree, and refusals carry the model's numbers."""
        ceiling = self.model.max_context
        low = self.rng.randint(1, (ceiling + 1) // 2)
        total = self.rng.choice((low, low, self.rng.randint(1, ceiling), ceiling))
        if self.rng.random() < 0.5:  # at a page boundary, or just below it
            total = min(max(pages_of(total) * 64 - self.rng.randint(0, 4), 1), ceiling)
        if self._is_bold():
            total = ceiling + self.rng.choice((1, 63, 64, 10_000))
        prompt = self.rng.randint(1, total)
        target = ActivationTarget(prompt, total - prompt)
        self._note("activate", total)
        refusals = self.model.refusals(total)
        before = snapshot(self.ledgers)
        explained = self.ledgers.explain(target)
        assert_unchanged(before, self.ledgers)
        answer = self.ledgers.try_activate(target)
        if isinstance(answer, Refusal):
            assert answer == explained, f"explained {explained}, answered {answer}"
            assert (answer.pool, answer.needed, answer.available, answer.forever) in refusals, f"{answer}: {refusals}"
            assert_unchanged(before, self.ledgers)
            self.counts["refusals"] += 1
            return
        assert not refusals, f"granted, model {refusals}"
        assert isinstance(explained, ActivationPlan), f"explained {explained}, granted"
        _require_equal("entitlement", dict(explained.entitlement_pages), self.model.entitlements(total))
        _require_equal("row", answer.row, explained.row)
        self.handles[self.model.activate(total, answer.row).key] = answer

    def select(self) -> None:
        """Make a batch, legal or not, and keep it for later units."""
        sequences = self._some_sequences()
        self._note("batch", [sequence.key for sequence in sequences])
        handles = [self.handles[sequence.key] for sequence in sequences]
        batch = self._expect(self.model.batch_errors(sequences), lambda: self.ledgers.batch(handles))
        if batch is not None:
            self.batches = [*self.batches[-3:], (batch, sequences)]

    def begin(self) -> None:
        """Begin a unit over a fresh or an old batch, in one pool or two, with columns that mostly fit."""
        chosen = self._batch()
        if chosen is None:
            return
        batch, sequences = chosen
        self._begin(batch, sequences, self._columns(sequences))

    def overreach(self) -> None:
        """Begin a unit that fills every pool of one sequence to its limit, and one pool perhaps beyond it."""
        resting = [sequence for sequence in self.model.active if sequence.unit is None]
        if not resting:
            return
        sequence = self.rng.choice(resting)
        limit, context = self.rng.choice(list(self.model.pools)), self.model.max_context
        columns: dict[str, Wanted] = {}
        for pool, space in sequence.spaces.items():
            columns[pool] = min(space.entitlement * 64, context) - space.frontier
            if pool == limit:
                columns[pool] = (
                    self.rng.choice((space.entitlement * 64, context)) - space.frontier + self.rng.randint(0, 1)
                )
        self._begin(self.ledgers.batch([self.handles[sequence.key]]), [sequence], columns)

    def _begin(self, batch: Batch, sequences: list[SequenceModel], columns: dict[str, Wanted]) -> None:
        self._note("begin", [sequence.key for sequence in sequences], columns)
        errors = self.model.begin_errors(sequences, columns)
        answer = self._expect(errors, lambda: self.ledgers.begin_unit("fuzz", batch, self._as_given(columns)))
        if answer is None:
            return
        unit, slices = answer
        model_unit, expected = self.model.begin(sequences, columns)
        _require_equal("slices", {pool: slices_of(gained) for pool, gained in slices.items()}, expected)
        _require_equal("columns", {pool: part.tolist() for pool, part in unit.columns.items()}, model_unit.columns)
        firsts = {pool: part.tolist() for pool, part in unit.first_positions.items()}
        _require_equal("first positions", firsts, model_unit.firsts)
        self.units[model_unit.key] = unit
        self.counts["units"] += 1
        self.counts["crossings"] += bool(expected)

    def commit(self) -> None:
        """Commit a unit in flight, mostly in part; sometimes one that has ended, or too much."""
        unit = self._unit()
        if unit is None:
            return
        accepted = self._accepted(unit)
        self._note("commit", unit.key, accepted)
        store_unit = self.units[unit.key]
        errors = self.model.commit_errors(unit, accepted)
        is_everything = unit.is_open and accepted == unit.columns and self.rng.random() < 0.5
        given = None if is_everything else self._as_given(accepted)
        self._expect(errors, lambda: self.ledgers.commit_unit(store_unit, given))
        if not errors:
            self.model.commit(unit, accepted)

    def fail(self) -> None:
        """End a unit without a commit."""
        unit = self._unit()
        if unit is None:
            return
        self._note("fail", unit.key)
        errors = self.model.end_errors(unit)
        self._expect(errors, lambda: self.ledgers.fail_unit(self.units[unit.key]))
        if not errors:
            self.model.end(unit)

    def trim(self) -> None:
        """Trim a batch in one pool, with or without provisional columns."""
        chosen = self._batch()
        if chosen is None:
            return
        batch, sequences = chosen
        pool = self._pool()
        provisional: Wanted = self.rng.choice((0, 0, self.rng.randint(0, 200)))
        if self.rng.random() < 0.3:
            provisional = [self.rng.randint(0, 130) for _ in sequences]
        if self._is_bold():
            provisional = self.rng.choice((-1, [0] * (len(sequences) + 1), 1 << 31))
        self._note("trim", [sequence.key for sequence in sequences], pool, provisional)
        errors = self.model.trim_errors(sequences, pool, provisional)
        trimmed = self._expect(errors, lambda: self.ledgers.trim(batch, pool, provisional))
        if not errors:
            expected = self.model.trim(sequences, pool, provisional)
            _require_equal("trimmed pages", trimmed, expected)
            self.counts["trimmed pages"] += expected

    def truncate(self) -> None:
        """Lower a frontier, to anything from 0 to itself; sometimes above it or below 0."""
        sequence = self._sequence()
        if sequence is None:
            return
        pool = self._pool()
        committed = sequence.spaces.get(pool, sequence.spaces["main"]).frontier
        tokens = self.rng.choice((0, committed, committed - committed % 64, self.rng.randint(0, committed)))
        if self._is_bold():
            tokens = self.rng.choice((-1, committed + 1, committed + 64))
        self._note("truncate", sequence.key, pool, tokens)
        handle = self.handles[sequence.key]
        errors = self.model.truncate_errors(sequence, pool, tokens)
        self._expect(errors, lambda: self.ledgers.truncate(handle, tokens, pool))
        if not errors:
            self.model.truncate(sequence, pool, tokens)

    def ensure(self) -> None:
        """Map ahead, also in flight; sometimes beyond the entitlement or the context."""
        sequence = self._sequence()
        if sequence is None:
            return
        pool = self._pool()
        space = sequence.spaces.get(pool, sequence.spaces["main"])
        room = min(space.entitlement * 64, self.model.max_context)
        tokens = self.rng.choice((0, room, self.rng.randint(0, room)))
        if self._is_bold():
            tokens = self.rng.choice((-1, space.entitlement * 64 + 1, self.model.max_context + 1))
        self._note("ensure", sequence.key, pool, tokens)
        handle = self.handles[sequence.key]
        errors = self.model.ensure_errors(sequence, pool, tokens)
        slices = self._expect(errors, lambda: self.ledgers.ensure_mapped_to_tokens(handle, tokens, pool))
        if slices is not None:
            got = {name: slices_of(gained) for name, gained in slices.items()}
            _require_equal("slices", got, self.model.ensure(sequence, pool, tokens))

    def finish(self) -> None:
        """End a sequence at a boundary; refused in flight and the second time."""
        sequence = self._sequence()
        if sequence is None:
            return
        self._note("finish", sequence.key)
        errors = self.model.finish_errors(sequence)
        self._expect(errors, lambda: self.ledgers.finish(self.handles[sequence.key]))
        if not errors:
            self.model.finish(sequence)

    def abort(self) -> None:
        """End a sequence now or at its boundary."""
        sequence = self._sequence()
        if sequence is None:
            return
        self._note("abort", sequence.key)
        errors = self.model.abort_errors(sequence)
        ended = self._expect(errors, lambda: self.ledgers.abort(self.handles[sequence.key]))
        if not errors:
            _require_equal("whether it ended", ended, self.model.abort(sequence))
            self.counts["aborts in flight"] += not ended

    def lease(self) -> None:
        """Take the lease of a block, mapped or not, and keep it."""
        sequence = self._sequence(active_only=True)
        if sequence is None:
            return
        pool = self.rng.choice(list(self.model.pools))
        block = self.rng.randint(-1, len(sequence.spaces[pool].pages))
        self._note("lease", sequence.key, pool, block)
        is_mapped = 0 <= block < len(sequence.spaces[pool].pages)
        spaces = self.ledgers.spaces[pool]
        lease = self._expect(set() if is_mapped else {"MisuseError"}, lambda: spaces.lease(sequence.row, block))
        if lease is not None:
            page = sequence.spaces[pool].pages[block]
            _require_equal("lease", (lease.page_id, lease.serial), (page.page_id, page.lease))
            self.leases = [*self.leases[-15:], (pool, lease, lease.serial)]

    def use_lease(self) -> None:
        """Use a lease that was taken earlier: it is current exactly while its page is mapped."""
        if not self.leases:
            return
        pool, lease, serial = self.rng.choice(self.leases)
        self._note("use lease", pool, lease)
        is_current = serial not in self.model.retired[f"{pool}.lease"]
        self.counts["stale leases"] += not is_current
        spaces = self.ledgers.spaces[pool]
        self._expect(set() if is_current else {"StaleHandle"}, lambda: spaces.require_current(lease))

    def misuse(self) -> None:
        """Make one of the calls that are never right."""
        foreign = Sequence(2, self.rng.randrange(self.model.max_concurrency), 1)
        ledgers = self.ledgers
        calls: list[tuple[str, Callable[[], object]]] = [
            ("StaleHandle", lambda: ledgers.finish(foreign)),
            ("StaleHandle", lambda: ledgers.abort(foreign)),
            ("StaleHandle", lambda: ledgers.batch([foreign])),
            ("StaleHandle", lambda: ledgers.truncate(foreign, 0, "main")),
            ("StaleHandle", lambda: ledgers.ensure_mapped_to_tokens(foreign, 0, "main")),
            ("MisuseError", lambda: ledgers.batch([])),
            ("MisuseError", lambda: ledgers.try_activate(ActivationTarget(0, 1))),
            ("MisuseError", lambda: ledgers.try_activate(ActivationTarget(1, -1))),
        ]
        number = self.rng.randrange(len(calls))
        self._note("misuse", number)
        self._expect({calls[number][0]}, calls[number][1])

    # ---- choices ----------------------------------------------------------------------------------

    def _draw_config(self) -> StoreConfig:
        """Draw a small store: any context, one to five rows, no more pages than lanes can use, any backend."""
        rng = self.rng
        max_context, max_concurrency = rng.choice((rng.randint(1, 400), rng.randint(100, 400))), rng.randint(1, 5)
        if rng.random() < 0.1:  # more than one binding window of 64 pages
            max_context, max_concurrency = rng.randint(64 * 66, 64 * 90), rng.randint(1, 2)
        blocks = pages_of(max_context)
        pages = rng.randint(max(blocks, max_concurrency), blocks * max_concurrency)
        backends: tuple[Backend | None, ...] = (
            None, MTPBackend(rng.choice((1, 2, 5))), MTPBackend(15), DraftFullBackend(DRAFT_GEOMETRY),
        )  # fmt: skip
        return make_config(
            max_context=max_context, max_concurrency=max_concurrency, tokens=max(pages * 64, max_context),
            backend=rng.choice(backends),
        )  # fmt: skip

    def _is_bold(self) -> bool:
        """Say whether this event breaks a rule on purpose."""
        return self.rng.random() < self.boldness

    def _pool(self) -> str:
        if self._is_bold() and self.rng.random() < 0.2:
            return self.rng.choice(("rows", "mtp2", ""))
        return self.rng.choice(list(self.model.pools))

    def _sequence(self, *, active_only: bool = False) -> SequenceModel | None:
        """Return a sequence, mostly an active one at a boundary."""
        ended = [sequence for sequence in self.model.sequences[-8:] if not sequence.is_active]
        if ended and not active_only and self._is_bold():
            return self.rng.choice(ended)
        active = self.model.active
        resting = [sequence for sequence in active if sequence.unit is None]
        if resting and self.rng.random() < 0.8:
            return self.rng.choice(resting)
        return self.rng.choice(active) if active else None

    def _some_sequences(self) -> list[SequenceModel]:
        """Return distinct sequences in any order, mostly those at a boundary; sometimes none, stale or twice."""
        active = self.model.active
        resting = [sequence for sequence in active if sequence.unit is None]
        pick = resting if self.rng.random() < 0.95 else active
        sequences = self.rng.sample(pick, self.rng.randint(min(1, len(pick)), len(pick)))
        if self._is_bold():
            spoiled = self.rng.choice((self.model.sequences[-8:], sequences, []))
            sequences = [*sequences, *spoiled[:1]]
        return sequences

    def _batch(self) -> tuple[Batch, list[SequenceModel]] | None:
        """Return a fresh legal batch, or one that was made earlier and may be stale."""
        if self.batches and self.rng.random() < 0.4:
            batch, sequences = self.rng.choice(self.batches)
            is_usable = all(sequence.is_active and sequence.unit is None for sequence in sequences)
            if is_usable or self.rng.random() < 0.1:
                return batch, sequences
        sequences = self._some_sequences()
        if self.model.batch_errors(sequences):
            return None
        batch = self.ledgers.batch([self.handles[sequence.key] for sequence in sequences])
        self.batches = [*self.batches[-3:], (batch, sequences)]
        return batch, sequences

    def _columns(self, sequences: list[SequenceModel]) -> dict[str, Wanted]:
        """Return columns per pool that fit each row's room, or do not."""
        names = list(self.model.pools)
        columns: dict[str, Wanted] = {}
        for pool in self.rng.sample(names, self.rng.choice((1, len(names), len(names)))):
            rooms = [
                min(sequence.spaces[pool].entitlement * 64, self.model.max_context) - sequence.spaces[pool].frontier
                for sequence in sequences
            ]
            limits = [min(room, self.reach) for room in rooms]
            counts = [self.rng.choice((0, min(1, limit), limit, *[self.rng.randint(0, limit)] * 2)) for limit in limits]
            columns[pool] = min(counts) if self.rng.random() < 0.5 else counts
        if self._is_bold():
            self._spoil(columns, sequences)
        return columns

    def _spoil(self, columns: dict[str, Wanted], sequences: list[SequenceModel]) -> None:
        """Break one rule in columns that fit: mostly one entry of one pool that goes beyond its entitlement."""
        pool, entry = self.rng.choice(list(columns)), self.rng.randrange(len(sequences))
        given = columns[pool]
        counts = [given] * len(sequences) if isinstance(given, int) else list(given)
        space = sequences[entry].spaces[pool]
        counts[entry] = space.entitlement * 64 - space.frontier + self.rng.choice((1, 64))
        kind = self.rng.randrange(10)
        if kind == 0:
            counts[entry] = self.rng.choice((-1, 1 << 31))
        elif kind == 1:
            counts[entry] = self.model.max_context - space.frontier + 1
        elif kind == 2:
            counts = self.rng.choice(([*counts, 0], counts[1:]))
        columns[pool] = counts
        if kind == 3:
            columns["rows"] = 1
        elif kind == 4:
            columns.clear()

    def _unit(self) -> UnitModel | None:
        """Return a unit, mostly one in flight."""
        open_units = self.model.open_units
        if self.model.units and self._is_bold():
            return self.rng.choice(self.model.units[-6:])
        return self.rng.choice(open_units) if open_units else None

    def _accepted(self, unit: UnitModel) -> dict[str, Wanted]:
        """Return accepted columns for some of the pools that a unit wrote, or more than it wrote."""
        accepted: dict[str, Wanted] = {}
        for pool, written in unit.columns.items():
            counts = list(written) if self.rng.random() < 0.35 else [self.rng.randint(0, count) for count in written]
            if self._is_bold():
                entry = self.rng.randrange(len(counts))
                counts[entry] = self.rng.choice((-1, written[entry] + 1, 1 << 31))
            if self.rng.random() < 0.9:
                accepted[pool] = min(counts) if self.rng.random() < 0.2 else counts
        if self._is_bold() and self.rng.random() < 0.3:
            accepted[self.rng.choice(("main", "mtp", "draft", "rows"))] = self.rng.choice((0, 1))
        return accepted

    def _as_given(self, columns: dict[str, Wanted]) -> dict[str, Columns]:
        """Return columns in one of the forms that callers use: numbers, lists, arrays of some integer type."""
        given: dict[str, Columns] = {}
        for pool, wanted in columns.items():
            form = self.rng.randrange(3)
            given[pool] = (
                wanted if form == 0 else np.array(wanted, np.int64 if form == 1 or _is_wide(wanted) else np.int32)
            )
        return given

    # ---- calls ------------------------------------------------------------------------------------

    def _expect(self, errors: set[str], call: Callable[[], T]) -> T | None:
        """Call the store: it succeeds when the model names no error, else raises one of them and changes nothing."""
        if not errors:
            try:
                return call()
            except PagedKVError as error:
                raise AssertionError(f"the model accepts what was refused: {type(error).__name__}: {error}") from error
        before = snapshot(self.ledgers)
        raised: PagedKVError | None = None
        try:
            call()
        except PagedKVError as error:
            raised = error
        name = type(raised).__name__
        assert name in errors, f"got {name} ({raised}), model {sorted(errors)}"
        assert_unchanged(before, self.ledgers)
        self.counts[name] += 1
        return None

    def _note(self, *event: object) -> None:
        self.told += 1
        self.counts[str(event[0])] += 1
        self.history.append(" ".join(str(part) for part in event))

    @contextmanager
    def _reported(self, number: int) -> Iterator[None]:
        """Add the seed and the last events to a failure."""
        try:
            yield
        except AssertionError as failure:
            told = "\n  ".join(self.history)
            raise AssertionError(f"seed {self.seed}, event {number}: {failure}\nlast events:\n  {told}") from failure


def fuzz(seed: int, events: int) -> Counter[str]:
    """Walk `events` events in rounds, each with its own store and a seed that derives from `seed`."""
    counts: Counter[str] = Counter()
    for number in range(0, events, EVENTS_A_ROUND):
        counts += LedgerFuzz(seed * 1_000_003 + number).run(min(EVENTS_A_ROUND, events - number))
    return counts


def _require_equal(what: str, got: object, expected: object) -> None:
    assert got == expected, f"{what}: {got}, model {expected}"


def _is_wide(wanted: Wanted) -> bool:
    values = [wanted] if isinstance(wanted, int) else wanted
    return any(value > np.iinfo(np.int32).max for value in values)


def _pool_view(spaces: AddressSpaces) -> PoolView:
    mirror, members, pages, pool = spaces.table.mirror, spaces.members, spaces.pages, spaces.pool
    return PoolView(
        pool.allocated, pool.reserved, pool.available,
        spaces.frontier.tolist(), spaces.mapped_end.tolist(), spaces.limit.tolist(),
        mirror.tolist(), pool.serials[mirror].tolist(), pages.serial[members].tolist(), pages.content[members].tolist(),
        spaces.committed_columns(members).tolist(),
    )  # fmt: skip
