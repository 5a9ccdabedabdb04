"""Events of a random walk over a store, drawn from the model alone.

An event is a plain record: its kind, its subjects and its numbers.  A subject is named by the number of the event that
made it, so a list of events can run again, also with some events left out: an event without its subject does nothing,
and the model says at run time which answer is right for each other event.

    12  activate   prompt=130 output=70
    13  begin      sequences=[12] columns={'main': [130]} form=1

The frequency of each kind is drawn for each walk ("swarm" weights: some kinds hardly occur, others dominate), and so is
the frequency of illegal calls and the reach of units.  Only the model is asked, so a bug in the store cannot steer the
walk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pagedkv as pk
from pagedkv.tools.fuzz.ledger_model import (
    ContinuationModel,
    Counts,
    LedgerModel,
    Page,
    SequenceModel,
    UnitModel,
    pages_of,
)

Arguments = dict[str, Any]
Item = TypeVar("Item")

RETAINED_MANY = 5
"""From so many continuations on, releases and moves are preferred, so that continuations do not fill the pools."""

KIND_OF = {"overreach": "begin", "use_up": "begin", "resume": "activate", "cut": "truncate"}
"""The kind of an event whose drawer has another name."""

FOLLOWS = "follows"
"""In an event, the word for `pk.STATE_FOLLOWS`."""

HOST_PAGE_BYTES = 2 * pk.PAGE_TOKENS * 16 * 2
"""Bytes of a Host page of Main: K and V of one head of 16 dims in BF16."""

MISUSES = 12
"""Number of calls in `Walk` that are never right."""


class NoSubject(Exception):
    """The model has nothing that an event of this kind could act on."""


@dataclass(frozen=True)
class Event:
    """One event; its number names the object that it makes."""

    number: int
    kind: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        arguments = " ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.number:>4}  {self.kind:<10} {arguments}"


@dataclass(frozen=True)
class WalkShape:
    """The store of a walk: one layer, one head, the fewest elements, so that a page is 2 KiB in each plane of Main.

    Attributes:
        pages: of the Main pool.
        backend: "", "mtp" or "draft".
        draft_window: K of MTP, 0 otherwise.
        role: the plane whose bytes are written and compared.
        lease_window: tokens of the window of lease growth; 0 without lease growth.
        forced_span: the most tokens that are appended at once without sampling.
        decode_columns: W of the widest unit; 0 means the need of the backend.
        sanitizer: whether tables and pages are watched for corruption.
        host_pages: of Main, that the Host arena takes.
    """

    max_context: int
    max_concurrency: int
    pages: int
    backend: str
    draft_window: int
    role: str
    lease_window: int = 0
    forced_span: int = 0
    decode_columns: int = 0
    sanitizer: bool = False
    host_pages: int = 0

    @property
    def widest_columns(self) -> int:
        """W of the widest unit: without a backend 1, K + 1 of MTP, 16 of Draft Full, unless it is drawn."""
        return self.decode_columns or {"": 1, "mtp": self.draft_window + 1, "draft": 16}[self.backend]

    def config(self) -> pk.StoreConfig:
        """Return the configuration of the store."""
        geometry = pk.KVGeometry(layers=1, query_heads=1, kv_heads=1, head_dim=16)
        backend: pk.MTPBackend | pk.DraftFullBackend | None = None
        if self.backend == "mtp":
            backend = pk.MTPBackend(self.draft_window)
        elif self.backend == "draft":
            backend = pk.DraftFullBackend(pk.KVGeometry(layers=1, query_heads=1, kv_heads=1, head_dim=64))
        return pk.StoreConfig(
            geometry, profile="bf16", max_context=self.max_context, max_concurrency=self.max_concurrency,
            kv_capacity=pk.ExplicitCapacity(max(self.pages * pk.PAGE_TOKENS, self.max_context)),
            backend=backend, prefill_columns_max=16, decode_columns_max=self.decode_columns or None,
            kv_lease_growth=self.lease_window > 0, lease_window_tokens=self.lease_window or pk.PAGE_TOKENS,
            forced_span_tokens=self.forced_span, sanitizer=self.sanitizer,
            host_arena_bytes=self.host_pages * HOST_PAGE_BYTES,
        )  # fmt: skip


def draw_shape(rng: random.Random) -> WalkShape:
    """Draw a small store: any context, often of whole pages, one to five rows, at most the pages that all lanes can
    use, any backend.

    One store of three has lease growth, more context than a first window, and fewer pages.
    """
    grows, is_watched = rng.random() < 1 / 3, rng.random() < 0.15
    max_context = rng.choice((rng.randint(1, 400), rng.randint(128, 448), rng.randint(128, 448)))
    max_concurrency = rng.randint(1, 5)
    if grows:
        max_context = rng.randint(400, 900)
    elif rng.random() < 0.05:  # more than one binding window of 64 pages
        max_context, max_concurrency = rng.randint(64 * 66, 64 * 80), rng.randint(1, 2)
    if rng.random() < 1 / 2:  # units ask about S by pages only
        max_context = pages_of(max_context) * pk.PAGE_TOKENS
    blocks = pages_of(max_context)
    least, most = max(blocks, max_concurrency), blocks * max_concurrency
    pages = max(rng.randint(least, most), rng.randint(least, most))
    backend, window = rng.choice((("", 0), ("mtp", 1), ("mtp", 2), ("mtp", 5), ("mtp", 15), ("draft", 0), ("draft", 0)))
    role = rng.choice(("k_code", "v_code"))
    host_pages = rng.choice((0, rng.randint(1, 2 * pages), rng.randint(1, 2 * pages)))
    if not grows:
        return WalkShape(max_context, max_concurrency, pages, backend, window, role, sanitizer=is_watched,
                         host_pages=host_pages)  # fmt: skip
    return WalkShape(
        max_context, max_concurrency, min(pages, least + rng.randint(0, blocks)), backend, window, role,
        lease_window=rng.choice((1, 100, 130, 200)), forced_span=rng.choice((0, 63, 64, 100)),
        decode_columns=rng.choice((0, rng.randint(window + 1, 16))), sanitizer=is_watched, host_pages=host_pages,
    )  # fmt: skip


@dataclass
class EventDrawer:
    """Draws the next event of one walk.

    Attributes:
        is_watched: whether the store has the sanitizer: it withdraws table entries too, which may break off.
        batches: those of the last batch events, for later units.
        drawn: the sequences that were drawn last for a batch.
    """

    rng: random.Random
    model: LedgerModel
    is_watched: bool
    batches: list[tuple[int, list[SequenceModel]]] = field(default_factory=list)
    drawn: list[SequenceModel] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        is_long = self.model.max_context > 64 * 64
        self.boldness = rng.choice((0.03, 0.1, 0.25))
        self.is_bold = False
        self.leads = rng.random() < 0.3  # whether backends run ahead of Main
        self.reach = rng.choice((300, 6000) if is_long else (3, 70, 300, 300))
        self.is_fragile = rng.random() < (0.6 if self.is_watched else 0.2)  # some change of tables breaks off
        weights: dict[Callable[[], Arguments], float] = {
            self.activate: 7, self.begin: 26, self.commit: 26, self.fail: 3, self.trim: 8, self.truncate: 8,
            self.ensure: 3, self.finish: 9, self.abort: 1, self.batch: 4, self.misuse: 1, self.overreach: 3,
            self.resume: 24, self.snapshot: 8, self.release: 4, self.protect: 6, self.cut: 8, self.attach: 4,
            self.round: 1, self.demote: 10 if self.model.host_bytes else 0.3, self.drop: 5,
            self.poll: 4 if self.model.host_bytes else 0.3, self.give_up: 3,
        }  # fmt: skip
        if self.model.growth is not None:  # rows that live long enough to use their leases up
            weights |= {self.round: 26, self.use_up: 26, self.truncate: 2, self.finish: 4, self.release: 8}
        elif self.model.host_bytes and rng.random() < 0.5:  # short lives, and pages that come and go
            weights |= {self.resume: 50, self.demote: 30, self.finish: 30, self.give_up: 12, self.drop: 8}
        self.kinds = list(weights)
        self.weights = [weight * rng.choice((0.2, 1.0, 1.0, 3.0)) for weight in weights.values()]

    def draw(self, number: int) -> Event:
        """Draw an event; draw another kind where a kind has no subject.

        Whether the event may break rules is drawn before its kind: otherwise a kind that has a subject only when it
        breaks a rule would hardly do anything else.
        """
        self.is_bold = self.rng.random() < self.boldness
        while True:
            kind = self.rng.choices(self.kinds, self.weights)[0]
            try:
                arguments = kind()
            except NoSubject:
                continue
            return Event(number, KIND_OF.get(kind.__name__, kind.__name__), arguments)

    # ---- activations ------------------------------------------------------------------------------

    def activate(self) -> Arguments:
        """A fresh target, which mostly fits."""
        if len(self.model.active) == self.model.max_concurrency and self.rng.random() < 0.7:
            raise NoSubject
        ceiling = self.model.max_context
        low = self.rng.randint(1, (ceiling + 1) // 2)
        total = self.rng.choice((low, low, self.rng.randint(1, ceiling), ceiling))
        if self.rng.random() < 0.5:  # at a page boundary, or just below it
            total = min(max(pages_of(total) * pk.PAGE_TOKENS - self.rng.randint(0, 4), 1), ceiling)
        if self._breaks_rule():
            total = ceiling + self.rng.choice((1, 63, 64, 10_000))
        prompt = self.rng.randint(1, total)
        if self.model.growth is not None and total < ceiling and self.rng.random() < 0.9:  # one that grows
            prompt, total = min(prompt, self.rng.randint(1, 64)), ceiling - self.rng.randint(0, ceiling // 4)
        return {"prompt": prompt, "output": total - prompt}

    def resume(self) -> Arguments:
        """A target from a continuation, by Fork or Move, at any frontier; sometimes at one it does not have."""
        complete = [one for one in self.model.retained if one.state is not None]
        on_host = [one for one in complete if self._has_page(one, lambda page: not page.is_on_device)]
        busy = [one for one in complete if any(self.model.pins(page, pool) for pool, space in one.spaces.items()
                                               for page in space.pages)]  # fmt: skip
        if on_host and self.rng.random() < 0.5:
            complete = on_host
        if busy and self.rng.random() < 0.5:
            complete = busy
        continuation = self._continuation() if self._breaks_rule() or not complete else self.rng.choice(complete)
        is_full = len(self.model.rows) == self.model.max_concurrency
        if is_full and self.rng.random() < 0.8:
            raise NoSubject
        rng, spaces = self.rng, continuation.spaces
        main = max(self._position(spaces["main"].frontier), 1)
        frontier: Any = {"main": main}
        for pool, space in spaces.items():
            if pool != "main":
                frontier[pool] = min(self._position(space.frontier), main)
        if rng.random() < 0.3:
            frontier = None
        elif len(spaces) == 1 and rng.random() < 0.5:
            frontier = main
        if len(spaces) > 1 and rng.random() < 0.06:  # a little of Main, and all of the backend, which may be more
            frontier = {pool: space.frontier for pool, space in spaces.items()}
            frontier["main"] = min(main, rng.randint(1, 64))
        if self._breaks_rule():
            frontier = rng.choice((
                0, -1, spaces["main"].frontier + 1, main, {"main": main, "rows": 0}, {},
                {pool: space.frontier + 1 for pool, space in spaces.items()}, dict.fromkeys(spaces, main),
            ))  # fmt: skip
        room = max(self.model.max_context - main, 0)
        total = rng.choice((0, min(1, room), rng.randint(0, min(room, 70)), rng.randint(0, room), room))
        if self.model.growth is not None and rng.random() < 0.5:
            total = room
        if self._breaks_rule():
            total = room + rng.choice((1, 64))
        prompt = rng.randint(0, total)
        if self.model.growth is not None:
            prompt = min(prompt, rng.randint(0, 64))
        keeps = rng.random() < (0.4 if len(self.model.retained) > RETAINED_MANY else 0.6)
        host: Arguments = {}
        if self.model.host_bytes and rng.random() < 0.5:
            host = {"demotes": (keeps and rng.random() < 0.7) or self._breaks_rule(), **self._pace()}
            if host["demotes"] and rng.random() < 0.7:  # one page of Main is missing, where the tail can be taken
                pages = main // pk.PAGE_TOKENS + self.model.available("main") + 1
                exact = pages * pk.PAGE_TOKENS - self.model.pools["main"].lead_tokens - main
                prompt, total = 0, exact if 0 <= exact <= room else total
        return self._with_copy_fault(
            prompt=prompt, output=total - prompt, source=continuation.name, frontier=frontier, keeps=keeps, **host
        )

    # ---- the Host tier ----------------------------------------------------------------------------

    def demote(self) -> Arguments:
        """Pages of a continuation that go to the Host; sometimes of one that ended."""
        warm = [one for one in self.model.retained if any(self.model.idle_pages(one, pool) for pool in one.spaces)]
        continuation = self.rng.choice(warm) if warm and self.rng.random() < 0.7 else self._continuation()
        return self._with_copy_fault(continuation=continuation.name, **self._pace())

    def drop(self) -> Arguments:
        """One replica of pages that have two."""
        both = [one for one in self.model.retained
                if self._has_page(one, lambda page: page.is_on_device and page.host is not None)]  # fmt: skip
        continuation = self.rng.choice(both) if both and self.rng.random() < 0.8 else self._continuation()
        return {"continuation": continuation.name, "replica": self.rng.choice(("device", "host"))}

    def poll(self) -> Arguments:
        """Once, or until no copy is in flight."""
        return {"is_last": self.rng.random() < 0.1}

    def give_up(self) -> Arguments:
        """The end of a sequence that is restoring."""
        return {"restoring": self._choice(self.model.restoring).name}

    @staticmethod
    def _has_page(continuation: ContinuationModel, is_such: Callable[[Page], bool]) -> bool:
        return any(is_such(page) for space in continuation.spaces.values() for page in space.pages)

    def _pace(self) -> Arguments:
        """Whether the call waits for its copies, and how often later questions find that they have not run."""
        return {"wait": self.rng.random() < 0.3, "asks": self.rng.choice((0, 2, 10, 30))}

    # ---- continuations ----------------------------------------------------------------------------

    def snapshot(self) -> Arguments:
        """A checkpoint of a sequence, mostly at a boundary."""
        sequence = self._resumable()
        if len(self.model.retained) > RETAINED_MANY and self.rng.random() < 0.7:
            raise NoSubject
        return self._with_copy_fault(sequence=sequence.name, **self._state(sequence))

    def release(self) -> Arguments:
        """The release of a continuation; sometimes a second time."""
        if len(self.model.retained) < self.rng.randint(0, RETAINED_MANY):
            raise NoSubject
        return {"continuation": self._continuation().name}

    def protect(self) -> Arguments:
        """A protected frontier, set higher or lower."""
        continuation = self._continuation()
        pool = self._pool()
        space = continuation.spaces.get(pool, continuation.spaces["main"])
        tokens = self.rng.choice((0, self._position(space.frontier), self._position(space.frontier)))
        others = [other.spaces.get(pool, space) for other in self.model.retained if other is not continuation]
        blocks = [block for block, page in enumerate(space.pages) if any(page in other.pages for other in others)]
        if blocks and self.rng.random() < 0.5:  # inside a page that another space may protect in part too
            tokens = min(self.rng.choice(blocks) * pk.PAGE_TOKENS + self.rng.randint(1, 63), space.frontier)
        if self._breaks_rule():
            tokens = self.rng.choice((-1, space.frontier + 1))
        return {"continuation": continuation.name, "pool": pool, "tokens": tokens}

    def cut(self) -> Arguments:
        """A truncate of a continuation, mostly down to its protected frontier."""
        pool = self._pool()
        loose = [one for one in self.model.retained
                 if pool in one.spaces and one.spaces[pool].protected < one.spaces[pool].frontier]  # fmt: skip
        continuation = self.rng.choice(loose) if loose and self.rng.random() < 0.8 else self._continuation()
        space = continuation.spaces.get(pool, continuation.spaces["main"])
        last = space.frontier // pk.PAGE_TOKENS
        aligned = self.rng.randint(min(max(pages_of(space.protected), 1), last), last) * pk.PAGE_TOKENS
        position = space.protected + self._position(space.frontier - space.protected)
        tokens = self.rng.choice((aligned, position, space.protected, self._position(space.frontier)))
        if self._breaks_rule():
            tokens = self.rng.choice((space.protected - 1, space.frontier + 1, -1))
        return {"continuation": continuation.name, "pool": pool, "tokens": tokens}

    def attach(self) -> Arguments:
        """A state for a continuation, mostly for one without a state."""
        bare = [one for one in self.model.retained if one.state is None]
        continuation = self.rng.choice(bare) if bare and self.rng.random() < 0.7 else self._continuation()
        return {"continuation": continuation.name, **self._state(continuation)}

    # ---- units ------------------------------------------------------------------------------------

    def batch(self) -> Arguments:
        """A batch, legal or not, for later units."""
        sequences = self._some_sequences()
        if not sequences and not self.is_bold:
            raise NoSubject
        return {"sequences": [sequence.name for sequence in sequences]}

    def begin(self) -> Arguments:
        """A unit over a fresh or an old batch, in one pool or two, with columns that mostly fit."""
        batch, sequences = self._batch()
        return self._with_fault(withdraws=False, **batch, columns=self._columns(sequences), form=self.rng.randrange(3))

    def overreach(self) -> Arguments:
        """A unit that fills every pool of one sequence to its limit, and one pool perhaps beyond it."""
        sequence = self._choice([sequence for sequence in self.model.active if sequence.unit is None])
        limit, context = self.rng.choice(list(self.model.pools)), self.model.max_context
        columns: dict[str, Counts] = {}
        for pool, space in sequence.spaces.items():
            end = min(space.entitlement * pk.PAGE_TOKENS, context)
            if pool == limit:
                end = self.rng.choice((space.entitlement * pk.PAGE_TOKENS, context)) + self.rng.randint(0, 1)
            columns[pool] = end - space.frontier
        return {"sequences": [sequence.name], "columns": columns, "form": 1}

    def use_up(self) -> Arguments:
        """A unit into the cushion of a row that may still grow, in one pool or two."""
        assert self.model.growth is not None, "this kind is drawn with lease growth only"
        growing = [one for one in self.model.active
                   if one.unit is None and any(space.entitlement < space.full for space in one.spaces.values())]
        sequence = self._choice(growing)
        columns: dict[str, Counts] = {}
        for pool in self.rng.sample(list(self.model.pools), self.rng.randint(1, len(self.model.pools))):
            space = sequence.spaces[pool]
            ceiling = min(space.entitlement * pk.PAGE_TOKENS, self.model.max_context)
            low = ceiling - self.model.growth.cushion_pages * pk.PAGE_TOKENS
            end = self.rng.choice((low, low + 1, ceiling, ceiling, self.rng.randint(low, ceiling)))
            columns[pool] = max(end - space.frontier, 0)
        return {"sequences": [sequence.name], "columns": columns, "form": 0}

    def commit(self) -> Arguments:
        """A commit of a unit in flight, mostly in part; sometimes of one that has ended, or of too much."""
        unit = self._unit()
        accepted = self._accepted(unit)
        is_all = unit.is_live and accepted == unit.columns and self.rng.random() < 0.5
        return self._with_fault(unit=unit.name, accepted=None if is_all else accepted, form=self.rng.randrange(3))

    def fail(self) -> Arguments:
        """The end of a unit without a commit."""
        return self._with_fault(unit=self._unit().name)

    # ---- between units ----------------------------------------------------------------------------

    def round(self) -> Arguments:
        """The beginning of a round of a batch, mostly with a row that has nearly used up its lease."""
        thin = [one for one in self.model.active if one.unit is None and self.model.is_thin(one)]
        if thin and self.rng.random() < 0.85:
            return {"sequences": [one.name for one in self.rng.sample(thin, self.rng.randint(1, len(thin)))]}
        return self._batch()[0]

    def trim(self) -> Arguments:
        """A trim of a batch in one pool, with or without provisional columns."""
        batch, sequences = self._batch()
        provisional: Counts = self.rng.choice((0, 0, self.rng.randint(0, 200)))
        if self.rng.random() < 0.3:
            provisional = [self.rng.randint(0, 130) for _ in sequences]
        if self._breaks_rule():
            provisional = self.rng.choice((-1, [0] * (len(sequences) + 1), 1 << 31))
        return self._with_fault(**batch, pool=self._pool(), provisional=provisional)

    def truncate(self) -> Arguments:
        """A frontier of a sequence, set to any position in it; sometimes above it or below 0."""
        sequence, pool, other = self._sequence(), self._pool(), self._sequence()
        if self._frontier(other, pool) > self._frontier(sequence, pool):
            sequence = other
        committed = self._frontier(sequence, pool)
        tokens = self._position(committed)
        if self._breaks_rule():
            tokens = self.rng.choice((-1, committed + 1, committed + 64))
        return self._with_fault(sequence=sequence.name, pool=pool, tokens=tokens)

    def ensure(self) -> Arguments:
        """A mapping ahead, also in flight; sometimes beyond the entitlement or the context."""
        sequence, pool = self._sequence(may_fly=True), self._pool()
        space = sequence.spaces.get(pool, sequence.spaces["main"])
        room = min(space.entitlement * pk.PAGE_TOKENS, self.model.max_context)
        tokens = self.rng.choice((0, room, self.rng.randint(0, room)))
        if self._breaks_rule():
            tokens = self.rng.choice((-1, space.entitlement * pk.PAGE_TOKENS + 1, self.model.max_context + 1))
        return self._with_fault(withdraws=False, sequence=sequence.name, pool=pool, tokens=tokens)

    def finish(self) -> Arguments:
        """The end of a sequence, with or without a continuation; sometimes in flight, or the second time."""
        retain = self.rng.random() < (0.2 if len(self.model.retained) > RETAINED_MANY else 0.8)
        sequence = self._resumable() if retain else self._sequence()
        return self._with_fault(sequence=sequence.name, retain=retain, **(self._state(sequence) if retain else {}))

    def abort(self) -> Arguments:
        """The end of a sequence now or at its boundary."""
        return self._with_fault(sequence=self._sequence(may_fly=True).name)

    def misuse(self) -> Arguments:
        """One of the calls that are never right."""
        return {"which": self.rng.randrange(MISUSES), "row": self.rng.randrange(self.model.max_concurrency)}

    # ---- choices ----------------------------------------------------------------------------------

    def _breaks_rule(self) -> bool:
        """Return whether this event breaks a rule on purpose."""
        return self.is_bold and self.rng.random() < 0.6

    def _choice(self, items: Sequence[Item]) -> Item:
        """Return one of the items; an event without items has no subject."""
        if not items:
            raise NoSubject
        return self.rng.choice(items)

    def _with_copy_fault(self, **arguments: Any) -> Arguments:
        """Let a copy of page contents fail in some events."""
        if self.rng.random() < 0.12:
            arguments["fail_at"] = self.rng.randint(1, 4)
        return arguments

    def _with_fault(self, *, withdraws: bool = True, **arguments: Any) -> Arguments:
        """Let a copy or launch that changes a table fail, seldom and in few walks, because the fault ends the walk.

        Most events publish, so in a store that withdraws too a publication fails more seldom.
        """
        chance = 0.15 if not self.is_watched else 0.5 if withdraws else 0.02
        if self.is_fragile and self.rng.random() < chance:
            arguments["fail_at"] = self.rng.choice((1, 1, 2, 3))
        return arguments

    def _position(self, tokens: int) -> int:
        """Return a position in [0, tokens]: an end, a page boundary, one beside it, or any."""
        aligned = self.rng.randint(0, tokens // pk.PAGE_TOKENS) * pk.PAGE_TOKENS
        beside = min(max(aligned + self.rng.choice((-1, 1)), 0), tokens)
        return self.rng.choice((0, tokens, aligned, beside, self.rng.randint(0, tokens), self.rng.randint(0, tokens)))

    def _state(self, holder: SequenceModel | ContinuationModel) -> Arguments:
        """Return a state and its frontier, mostly within what the holder has; or that the state follows."""
        rng, spaces = self.rng, holder.spaces
        if rng.random() < 0.1:
            return {"state": FOLLOWS}
        main = spaces["main"].frontier
        if rng.random() < 0.3:
            main = max(self._position(main), 1)
        frontier: Any = {pool: min(space.frontier, main) for pool, space in spaces.items()}
        if all(space.frontier == spaces["main"].frontier for space in spaces.values()) and rng.random() < 0.5:
            frontier = rng.choice((None, main))
        elif isinstance(frontier, dict) and rng.random() < 0.3:
            frontier |= {pool: self._position(frontier[pool]) for pool in spaces if pool != "main"}
        if self._breaks_rule():
            pool = rng.choice(list(spaces))
            frontier = rng.choice((
                None, 0, -1, main + 1, {}, {"main": main, "rows": 0}, {**dict.fromkeys(spaces, main), pool: main + 1},
                {name: space.frontier + (name == pool) for name, space in spaces.items()},
            ))  # fmt: skip
            return {"state": rng.choice((None, FOLLOWS, "state", "state")), "frontier": frontier}
        return {"state": f"state {rng.randrange(1000)}", "frontier": frontier}

    def _pool(self) -> str:
        if self._breaks_rule() and self.rng.random() < 0.2:
            return self.rng.choice(("rows", "mtp2", ""))
        return self.rng.choice(list(self.model.pools))

    @staticmethod
    def _frontier(holder: SequenceModel | ContinuationModel, pool: str) -> int:
        return holder.spaces.get(pool, holder.spaces["main"]).frontier

    def _sequence(self, *, may_fly: bool = False) -> SequenceModel:
        """Return an active sequence at a boundary, or also one in flight; a bold event takes any."""
        ended = [sequence for sequence in self.model.sequences[-8:] if not sequence.is_live]
        if ended and self._breaks_rule():
            return self.rng.choice(ended)
        active = self.model.active
        if not may_fly and not self._breaks_rule():
            active = [sequence for sequence in active if sequence.unit is None]
        return self._choice(active)

    def _resumable(self) -> SequenceModel:
        """Return a sequence, mostly one that can be retained, and then the longer one of two."""
        resumable = [one for one in self.model.active if not self.model.retain_errors(one)]
        if self._breaks_rule():
            return self._sequence()
        others = [one for one in self.model.active if one.unit is None and one not in resumable]
        if others and self.rng.random() < 0.08:
            return self.rng.choice(others)
        two = self._choice(resumable), self._choice(resumable)
        return max(two, key=lambda one: one.spaces["main"].frontier)

    def _continuation(self) -> ContinuationModel:
        """Return a continuation, mostly a current one."""
        ended = [one for one in self.model.continuations[-8:] if not one.is_live]
        if ended and self._breaks_rule():
            return self.rng.choice(ended)
        return self._choice(self.model.retained)

    def _some_sequences(self) -> list[SequenceModel]:
        """Return distinct sequences in any order, mostly those at a boundary; sometimes none, stale or twice.

        Often they are those of the last batch, of which one may have come, gone or ended.
        """
        active = self.model.active
        resting = [sequence for sequence in active if sequence.unit is None]
        pick = active if self._breaks_rule() else resting
        sequences = self.rng.sample(pick, self.rng.randint(min(1, len(pick)), len(pick)))
        may_end = self._breaks_rule()
        if self.drawn and (may_end or self.rng.random() < 1 / 3):
            kept = [sequence for sequence in self.drawn if may_end or sequence in pick]
            fresh = [sequence for sequence in sequences if sequence not in kept][: self.rng.randrange(2)]
            at = self.rng.randint(0, len(kept))
            sequences = [*kept[:at], *fresh, *kept[at + self.rng.randrange(2) :]] or sequences
        self.drawn = sequences
        if self._breaks_rule():
            spoiled = self.rng.choice((self.model.sequences[-8:], sequences, []))
            sequences = [*sequences, *spoiled[:1]]
        return sequences

    def _batch(self) -> tuple[Arguments, list[SequenceModel]]:
        """Return a fresh legal batch, or an older one that may be stale."""
        if self.batches and self.rng.random() < 0.4:
            name, sequences = self.rng.choice(self.batches)
            is_usable = all(sequence.is_live and sequence.unit is None for sequence in sequences)
            if is_usable or self._breaks_rule():
                return {"batch": name}, sequences
        sequences = self._some_sequences()
        if self.model.batch_errors(sequences):
            raise NoSubject
        return {"sequences": [sequence.name for sequence in sequences]}, sequences

    def add_batch(self, name: int, sequences: list[SequenceModel]) -> None:
        """Remember a batch for later units."""
        self.batches = [*self.batches[-3:], (name, sequences)]

    def _columns(self, sequences: list[SequenceModel]) -> dict[str, Counts]:
        """Return columns per pool that fit each row's room, or do not."""
        names = list(self.model.pools)
        columns: dict[str, Counts] = {}
        for pool in self.rng.sample(names, self.rng.choice((1, len(names), len(names)))):
            rooms = [
                min(sequence.spaces[pool].entitlement * 64, self.model.max_context) - sequence.spaces[pool].frontier
                for sequence in sequences
            ]
            if pool != "main" and not self.leads:  # no further than Main, so that the sequence can be retained
                ends = [sequence.spaces["main"].frontier - sequence.spaces[pool].frontier for sequence in sequences]
                rooms = [min(room, max(end, 0)) for room, end in zip(rooms, ends, strict=True)]
            limits = [min(room, self.reach) for room in rooms]
            counts = [self.rng.choice((0, min(1, limit), limit, *[self.rng.randint(0, limit)] * 2)) for limit in limits]
            columns[pool] = min(counts) if self.rng.random() < 0.5 else counts
        if self._breaks_rule():
            self._spoil(columns, sequences)
        return columns

    def _spoil(self, columns: dict[str, Counts], sequences: list[SequenceModel]) -> None:
        """Break one rule in columns that fit: mostly let one entry of one pool exceed its entitlement."""
        pool, entry = self.rng.choice(list(columns)), self.rng.randrange(len(sequences))
        fitting = columns[pool]
        counts = [fitting] * len(sequences) if isinstance(fitting, int) else list(fitting)
        space = sequences[entry].spaces[pool]
        counts[entry] = space.entitlement * pk.PAGE_TOKENS - space.frontier + self.rng.choice((1, 64))
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

    def _unit(self) -> UnitModel:
        """Return a unit, mostly one in flight."""
        if self.model.units and self._breaks_rule():
            return self.rng.choice(self.model.units[-6:])
        return self._choice(self.model.open_units)

    def _accepted(self, unit: UnitModel) -> dict[str, Counts]:
        """Return accepted columns for some of the pools of a unit; sometimes more than the unit has."""
        accepted: dict[str, Counts] = {}
        for pool, written in unit.columns.items():
            counts = list(written) if self.rng.random() < 0.5 else [self.rng.randint(0, count) for count in written]
            if self._breaks_rule():
                entry = self.rng.randrange(len(counts))
                counts[entry] = self.rng.choice((-1, written[entry] + 1, 1 << 31))
            if self.rng.random() < 0.9:
                accepted[pool] = min(counts) if self.rng.random() < 0.2 else counts
        if self._breaks_rule() and self.rng.random() < 0.3:
            accepted[self.rng.choice(("main", "mtp", "draft", "rows"))] = self.rng.choice((0, 1))
        return accepted
