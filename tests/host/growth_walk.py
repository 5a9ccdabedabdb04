"""A random walk through rounds with lease growth, beside a model that knows the rules of C9.2 as arithmetic.

Every round: perhaps an activation or a fork, `begin_round` over some rows, a launch of what is covered, perhaps a
forced span, acceptance at random, trims, and perhaps an end.  The model predicts each entitlement and each answer
from the pages that are available; nothing in a round may raise.

Read next: `test_lease_growth.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass

from pagedkv.activation import ActivationTarget, Refusal
from pagedkv.check import check_ledgers
from pagedkv.config import MTPBackend, StoreConfig
from pagedkv.continuation import Continuation
from pagedkv.lease_growth import LeaseGrowth
from pagedkv.ledgers import StoreLedgers
from pagedkv.sequence import Sequence
from tests.host.builders import make_config, write
from tests.host.planted import Planted

ROUNDS_A_STORE = 300


@dataclass
class Row:
    """What the model knows of one active sequence: frontier, entitlement and full entitlement of each pool."""

    sequence: Sequence
    budget: int
    frontier: dict[str, int]
    held: dict[str, int]
    full: dict[str, int]
    lags: bool  # its draft seldom runs, and then catches up in one launch


class GrowthWalk:
    """Stores one after the other, each with its own geometry; `run` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._open()

    def run(self, rounds: int) -> Counter[str]:
        """Walk, and check the ledgers after every round."""
        for number in range(rounds):
            if number % ROUNDS_A_STORE == ROUNDS_A_STORE - 1:
                self._open()
            if self.rng.random() < 0.4:
                self.activate()
            if self.rows:
                self.round(self.rng.sample(self.rows, self.rng.randint(1, len(self.rows))))
            if self.rows and self.rng.random() < 0.01:
                self.end(self.rng.choice(self.rows))
            if self.kept and self.rng.random() < 0.02:
                self.ledgers.release(self.kept.pop(self.rng.randrange(len(self.kept))))
            check_ledgers(self.ledgers)
        return self.counts

    def activate(self) -> None:
        """Activate or fork; the entitlement is prompt, window and cushion, or the refusal says what lacks."""
        context = self.config.max_context
        source = self.rng.choice(self.kept) if self.kept and self.rng.random() < 0.5 else None
        base = dict.fromkeys(self.pools, 0)
        if source is not None:
            states = self.ledgers.continuations.retained
            base = {pool: states[pool].spaces[source.number].frontier for pool in self.pools}
        room = context - base["main"]
        if room < 2:
            return
        prompt = self.rng.randint(1, max(room // 8, 1))
        output = self.rng.choice((room - prompt, self.rng.randint(0, room - prompt)))
        full = {pool: min(_pages(base["main"] + prompt + output + lead), _pages(context))
                for pool, lead in self.pools.items()}
        near = _pages(base["main"] + prompt + min(output, self.config.lease_window_tokens)) + self.cushion
        held = {pool: min(full[pool], near) for pool in self.pools}
        available = {pool: self._available(pool) for pool in self.pools}
        has_room = len(self.rows) < self.config.max_concurrency and all(
            held[pool] - base[pool] // 64 <= available[pool] for pool in self.pools
        )
        answer = self.ledgers.try_activate(ActivationTarget(prompt, output, source))
        assert isinstance(answer, Sequence) == has_room, f"{answer}: {held} of {available}"
        if isinstance(answer, Refusal):
            self.counts["refused"] += 1
            return
        self.counts["forked"] += source is not None
        row = Row(answer, base["main"] + prompt + output, base, held, full, self.rng.random() < 0.4)
        self.rows.append(row)
        self._launch([row], [prompt], accepts_all=True)

    def round(self, rows: list[Row]) -> None:
        """Begin a round, launch what is covered, and end the rows that nothing covers."""
        batch = self.ledgers.batch([row.sequence for row in rows])
        unextended = [row.sequence for row in rows if not self._grow(row)]
        # The model granted in batch order from what was available; the store must have done the same.
        assert self.ledgers.begin_round(batch) == unextended, f"not extended: model {unextended}"
        self._compare()
        for row in rows:
            thin = any(self._is_thin(row, pool) for pool in self.pools)
            if not thin:
                for pool in self.pools:
                    columns = min(row.held[pool] * 64, self.config.max_context) - row.frontier[pool]
                    is_whole = row.held[pool] == row.full[pool]
                    assert is_whole or columns >= self.cushion * 64, f"{columns} columns behind {row}"
        columns = self.ledgers.covered_columns(batch, "main").tolist()
        wanted = [min(self.rng.choice((1, self.width, self.width)), row.budget - row.frontier["main"]) for row in rows]
        for row, column, want in zip(rows, columns, wanted, strict=True):
            if not want:
                self.counts["budget used"] += 1
                self.end(row)
            elif not column:
                self.counts["ended at its cover"] += 1
                self.end(row)
        running = [(row, min(column, want)) for row, column, want in zip(rows, columns, wanted, strict=True)
                   if row in self.rows]
        if not running:
            return
        self._launch([row for row, _ in running], [count for _, count in running])
        for row, _ in running:
            left = row.budget - row.frontier["main"]
            is_short = any(self._is_thin(row, pool, row.frontier[pool] - self.width) for pool in self.pools)
            if self.forced and not is_short and left >= self.forced and self.rng.random() < 0.2:
                self._launch([row], [self.forced], accepts_all=True)
                self.counts["forced"] += 1

    def end(self, row: Row) -> None:
        """Finish, or retain where no backend leads Main."""
        self.rows.remove(row)
        leads = any(tokens > row.frontier["main"] for tokens in row.frontier.values())
        if leads or not row.frontier["main"] or self.rng.random() < 0.5:
            self.ledgers.finish(row.sequence)
            return
        kept = self.ledgers.finish(row.sequence, retain=True, state="state")
        assert isinstance(kept, Continuation)
        self.kept.append(kept)
        self.counts["retained"] += 1

    # ---- helpers ----------------------------------------------------------------------------------

    def _open(self) -> None:
        rng = self.rng
        context, concurrency = rng.randint(600, 1600), rng.randint(2, 4)
        pages = rng.randint(_pages(context), _pages(context) * 3 // 2)
        self.width, self.forced = rng.choice((1, 4, 16, 16)), rng.choice((0, 30, 100))
        window = rng.choice((64, 100, 128, 300))
        backend = rng.choice((None, MTPBackend(self.width)) if self.width < 16 else (None,))
        if backend is not None:
            self.width = backend.draft_window + 1
        self.config: StoreConfig = dataclasses.replace(
            make_config(max_context=context, max_concurrency=concurrency, tokens=max(pages * 64, context),
                        backend=backend),
            kv_lease_growth=True, lease_window_tokens=window, forced_span_tokens=self.forced,
            decode_columns_max=self.width,
        )  # fmt: skip
        self.ledgers = StoreLedgers(self.config, 1)
        self.pools = {pool.name: pool.lead_tokens for pool in self.config.pools}
        self.cushion = _pages(self.width + self.forced) + 1
        self.rungs = [_pages(min(tokens, window)) for tokens in (window, 128, 64)]
        self.rungs.sort(reverse=True)
        self.rows: list[Row] = []
        self.kept: list[Continuation] = []

    def _grow(self, row: Row) -> bool:
        """Extend the model's row as C9.2 says, from what the rows before it left available."""
        if not any(self._is_thin(row, pool) for pool in self.pools):
            return True
        for rung in self.rungs:
            gained = {pool: min(rung, row.full[pool] - row.held[pool]) for pool in self.pools}
            if all(pages <= self._available(pool) - self._granted(pool) for pool, pages in gained.items()):
                for pool, pages in gained.items():
                    row.held[pool] += pages
                self.counts["extended"] += 1
                return True
        self.counts["unextended"] += 1
        return False

    def _is_thin(self, row: Row, pool: str, frontier: int | None = None) -> bool:
        tokens = row.frontier[pool] if frontier is None else max(frontier, 0)
        return _pages(tokens) + self.cushion > row.held[pool] and row.held[pool] < row.full[pool]

    def _granted(self, pool: str) -> int:
        """Return pages that the model has granted and the store has not reserved yet."""
        spaces = self.ledgers.spaces[pool]
        return sum(row.held[pool] - spaces.entitlement_pages(row.sequence.row) for row in self.rows)

    def _available(self, pool: str) -> int:
        return self.ledgers.spaces[pool].pool.available

    def _launch(self, rows: list[Row], columns: list[int], *, accepts_all: bool = False) -> None:
        """Write columns in Main, and in the backend up to its lead; commit what is accepted, and trim."""
        written, accepted = {"main": columns}, {"main": columns}
        if not accepts_all:
            accepted["main"] = [self.rng.randint(count // 2, count) for count in columns]
        for pool, lead in self.pools.items():
            if pool != "main":
                ends = [min(row.frontier["main"] + count + lead, row.held[pool] * 64, self.config.max_context)
                        for row, count in zip(rows, columns, strict=True)]
                written[pool] = [
                    0 if row.lags and self.rng.random() < 0.9 else max(end - row.frontier[pool], 0)
                    for row, end in zip(rows, ends, strict=True)
                ]
                accepted[pool] = [
                    min(max(row.frontier["main"] + took + self.rng.choice((0, lead)) - row.frontier[pool], 0), count)
                    for row, took, count in zip(rows, accepted["main"], written[pool], strict=True)
                ]
        sequences = [row.sequence for row in rows]
        write(self.ledgers, sequences, written, accepted)
        for pool, counts in accepted.items():
            for row, count in zip(rows, counts, strict=True):
                row.frontier[pool] += count
            self.ledgers.trim(self.ledgers.batch(sequences), pool)
        self._compare()

    def _compare(self) -> None:
        for row in self.rows:
            for pool, spaces in self.ledgers.spaces.items():
                got = (int(spaces.frontier[row.sequence.row]), spaces.entitlement_pages(row.sequence.row))
                assert got == (row.frontier[pool], row.held[pool]), f"pool {pool}: {got}, model {row}"


def _pages(tokens: int) -> int:
    return -(-tokens // 64)


PLANTED_IN_GROWTH = (
    Planted(
        "an activation reserves no window", LeaseGrowth, "first_pages",
        "filled_tokens + self.window_tokens", "filled_tokens",
    ),
    Planted("an activation reserves no cushion", LeaseGrowth, "first_pages", " + self.cushion_pages", ""),
    Planted("the entitlement passes the budget", LeaseGrowth, "first_pages", "min(full_pages, ", "max(0, "),
    Planted("the cushion holds no forced span", LeaseGrowth, "__init__", " + config.forced_span_tokens", ""),
    Planted(
        "the cushion lacks its spare page", LeaseGrowth, "__init__", "forced_span_tokens) + 1", "forced_span_tokens)",
    ),
    Planted("the ladder has one rung", LeaseGrowth, "_extend", "in self.ladder_pages", "in self.ladder_pages[:1]"),
    Planted(
        "an extension passes the budget", LeaseGrowth, "_extend",
        "min(rung, int(self.full_pages[name][row]) - spaces.entitlement_pages(row))", "rung",
    ),
    Planted(
        "only the first pool is asked", LeaseGrowth, "_extend",
        "for name, pages in wanted.items()]) is None", "for name, pages in list(wanted.items())[:1]]) is None",
    ),
    Planted(
        "an extension is not reserved", LeaseGrowth, "_extend",
        "try_reserve_bundle([(self.spaces[name].pool, pages) for name, pages in wanted.items()]) is None", "True",
    ),
    Planted("the threshold stays after an extension", LeaseGrowth, "_extend", "self._set_grow_at(name, row)", "pass"),
    Planted(
        "a row is thin a page late", LeaseGrowth, "_set_grow_at",
        "(held - self.cushion_pages)", "(held - self.cushion_pages + 1)",
    ),
    Planted("a full row is thin for ever", LeaseGrowth, "_set_grow_at", "NEVER if is_full else ", ""),
    Planted(
        "a scarce round is answered with silence", LeaseGrowth, "begin_round",
        "if not self._extend(", "if self._extend(",
    ),
    Planted("short rows are not marked", LeaseGrowth, "begin_round", "False if thin is None else thin[rows]", "False"),
    Planted("an ended row keeps its threshold", LeaseGrowth, "close", "self.grow_at[name][row] = NEVER", "pass"),
    Planted("an ended row stays short", LeaseGrowth, "close", "self.short[row] = False", "pass"),
)  # fmt: skip
