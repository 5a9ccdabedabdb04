"""Retention: which ended outputs a scheduler keeps for later prompts, and what it gives up for room.  (C1.2, C2.2)

    an output ends      retained with its committed tokens; continuations that it covers are released
    a prompt comes      the longest common prefix of a retained text is forked, at any token
    pages are missing   the least recently used continuations go to the Host, or without a Host arena are released
    the arena is full   the least recently used of those on the Host are released

`LeastRecent` is that policy; it uses public names only, and so may yours: any object with the methods of `Retention`.
The state of a retained continuation is its text (`RetainedText`), so the policy finds its continuations again in the
store after an interrupt.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import pagedkv as pk
from pagedkv.graphs.outputs import Int32
from pagedkv.graphs.prefix_index import PrefixIndex


class RetainedText(NamedTuple):
    """The state of a continuation of a model without a state of its own: (n,) int32 committed tokens, and a salt."""

    tokens: Int32
    salt: Hashable


class RetainedPrefix(NamedTuple):
    """A continuation to start from, and how many of its tokens to take."""

    source: pk.Continuation
    tokens: int


class Retention(Protocol):
    """What a scheduler asks of a retention policy; every continuation that `keep` gets is the policy's to release."""

    def find(self, store: pk.Store, prompt_ids: Int32, salt: Hashable) -> RetainedPrefix | None:
        """Return where a prompt may start; not beyond its last token but one."""

    def make_room(self, store: pk.Store, refusal: pk.Refusal, source: pk.Continuation | None) -> bool:
        """Give something up so that a refused activation fits, but not its source; False if all that is not enough."""

    def keep(self, store: pk.Store, continuation: pk.Continuation) -> None:
        """Keep a continuation whose state is a `RetainedText`."""

    def started(self, store: pk.Store, prefix: RetainedPrefix, *, has_moved: bool) -> None:
        """Note that an output started from a prefix; after a Move the source is gone."""

    def recover(self, store: pk.Store) -> None:
        """Make the policy's records agree with the store, after an interrupt of any of these calls."""


@dataclass
class RetentionCounters:
    """What a policy did; counters only grow.

    Attributes:
        hits: outputs that started from a retained prefix.
        reused_tokens: of these prefixes.
        forks, moves: how they started.
        kept, covered: continuations that were kept, and released because a longer one covers them.
        demotions, demoted_pages: continuations that went to the Host, and page groups that this freed.
        evictions, evicted_pages: continuations that were released for room, and page groups that this freed.
    """

    hits: int = 0
    reused_tokens: int = 0
    forks: int = 0
    moves: int = 0
    kept: int = 0
    covered: int = 0
    demotions: int = 0
    demoted_pages: int = 0
    evictions: int = 0
    evicted_pages: int = 0


class LeastRecent:
    """Keeps every ended output, and gives up the least recently used.

    Args:
        entries_max: most continuations.
        tokens_min: a shorter common prefix is no hit.
    """

    def __init__(self, *, entries_max: int = 1 << 20, tokens_min: int = 1) -> None:
        self.index = PrefixIndex(entries_max=entries_max)
        self.counters = RetentionCounters()
        self.tokens_min = pk.checks.checked_integer("tokens_min", tokens_min, 1, 1 << 30, clause="C1.2",
                                                    remedy="pass the fewest tokens worth a Fork")
        # Least recently used first: continuations with pages on the Device, perhaps, and those that went to the Host.
        # Pages that the latter shared with an active sequence stayed on the Device.
        self._near: OrderedDict[pk.Continuation, None] = OrderedDict()
        self._far: OrderedDict[pk.Continuation, None] = OrderedDict()
        self._futile: tuple[pk.Refusal, pk.Continuation | None] | None = None  # nothing changed since this one

    def find(self, store: pk.Store, prompt_ids: Int32, salt: Hashable) -> RetainedPrefix | None:  # noqa: ARG002
        """Return the longest retained prefix of all but the last token of a prompt."""
        found = self.index.match(prompt_ids[:-1], salt=salt)
        if found is None or found.tokens < self.tokens_min:
            return None
        source = cast("pk.Continuation", found.handle)
        (self._far if source in self._far else self._near).move_to_end(source)
        return RetainedPrefix(source, found.tokens)

    def make_room(self, store: pk.Store, refusal: pk.Refusal, source: pk.Continuation | None) -> bool:
        """Demote or release the least recently used until the missing pages are there, and no more than that.  (S60)

        If all of them together do not have the pages, nobody goes.  Work grows with the victims, or with all pages that
        are held, where those that have pages of their own, which no other continuation shares, are not enough.
        """
        if refusal.reason == "copying":
            while store.poll_copies():
                pass
            return True
        if refusal.reason != "pages" or refusal.forever:
            return False
        if (refusal, source) == self._futile:
            return False
        missing, freed = refusal.needed - refusal.available, 0
        victims = self._victims(store, missing, refusal.pool, source)
        if not victims:
            self._futile = refusal, source
        for victim in victims:
            if freed >= missing:
                break
            if victim in self.index:  # it may have left the Host for another victim
                freed += self._give_up(store, victim, refusal.pool, source)
        return freed > 0

    def keep(self, store: pk.Store, continuation: pk.Continuation) -> None:
        """Keep a continuation, and release those that offer nothing that it does not."""
        self._futile = None
        text = store.state_of(continuation)
        assert isinstance(text, RetainedText), f"{continuation} is not of a scheduler"
        if not self.index.insert(text.tokens, continuation, salt=text.salt):
            self._release(store, next(iter(self._far or self._near)))
            self.counters.evictions += 1
            self.index.insert(text.tokens, continuation, salt=text.salt)
        self._near[continuation] = None
        self.counters.kept += 1
        for covered in self.index.covered(continuation):
            self._release(store, cast("pk.Continuation", covered))
            self.counters.covered += 1

    def started(self, store: pk.Store, prefix: RetainedPrefix, *, has_moved: bool) -> None:  # noqa: ARG002
        """Count a hit; the source has pages on the Device now, or is gone."""
        self._futile = None
        self.counters.hits += 1
        self.counters.reused_tokens += prefix.tokens
        if has_moved:
            self.counters.moves += 1
            self._forget(prefix.source)
            return
        self.counters.forks += 1
        self._far.pop(prefix.source, None)
        self._near.pop(prefix.source, None)
        self._near[prefix.source] = None

    def recover(self, store: pk.Store) -> None:
        """Forget continuations that the store does not have, and keep those with a text that nobody knows."""
        held = dict.fromkeys(store.continuations())
        for gone in [one for one in self.index if one not in held]:
            self._forget(cast("pk.Continuation", gone))
        for one in held:
            if one not in self.index and isinstance(store.state_of(one), RetainedText):
                self.keep(store, one)
        self._near |= {one: None for one in held if one in self.index and one not in self._far}

    def release_all(self, store: pk.Store) -> None:
        """Release every continuation."""
        for one in list(self.index):
            self._release(store, cast("pk.Continuation", one))

    # ---- helpers ----------------------------------------------------------------------------------

    def _victims(
        self, store: pk.Store, missing: int, pool: str, source: pk.Continuation | None
    ) -> list[pk.Continuation]:
        """Return who goes for so many page groups, in this order; nobody if all together do not have them."""
        own: list[pk.Continuation] = []
        shared: list[pk.Continuation] = []
        pages = 0
        for one in itertools.chain(self._near, self._far):
            if one == source:
                continue
            plan = store.explain_release(one)[pool]
            if plan.released_pages:
                own.append(one)
                pages += plan.released_pages
                if pages >= missing:
                    return own
            elif plan.demoted_pages:
                shared.append(one)
        return [*own, *shared] if _idle_pages(store, [*own, *shared], pool) >= missing else []

    def _give_up(self, store: pk.Store, victim: pk.Continuation, pool: str, source: pk.Continuation | None) -> int:
        """Let a continuation leave the Device, or end; return how many page groups of a pool that freed."""
        plans = store.explain_release(victim)
        if store.config.host_arena_bytes and self._demote(store, victim, source):
            self._far[victim] = None
            self._near.pop(victim, None)
            self.counters.demotions += 1
            freed = {name: plan.demoted_pages for name, plan in plans.items()}
            self.counters.demoted_pages += sum(freed.values())
            return freed[pool]
        self._release(store, victim)
        self.counters.evictions += 1
        freed = {name: plan.released_pages for name, plan in plans.items()}
        self.counters.evicted_pages += sum(freed.values())
        return freed[pool]

    def _demote(self, store: pk.Store, victim: pk.Continuation, source: pk.Continuation | None) -> bool:
        """Demote a continuation; where the arena is full, release the least recently used that are on the Host.

        If all of them leave too little room, nobody goes.
        """
        needed = sum(plan.needed_host_bytes for plan in store.explain_release(victim).values())
        free, leaving = store.host_summary()["free_bytes"], []
        for one in self._far:
            if free >= needed:
                break
            freed = sum(plan.released_host_bytes for plan in store.explain_release(one).values())
            if freed and one not in (source, victim):
                leaving.append(one)
                free += freed
        if free < needed:
            return False
        for one in leaving:
            self._release(store, one)
            self.counters.evictions += 1
        return not isinstance(store.demote(victim), pk.Refusal)

    def _release(self, store: pk.Store, continuation: pk.Continuation) -> None:
        store.release(continuation)
        self._forget(continuation)

    def _forget(self, continuation: pk.Continuation) -> None:
        self._futile = None
        self._near.pop(continuation, None)
        self._far.pop(continuation, None)
        if continuation in self.index:
            self.index.remove(continuation)


def _idle_pages(store: pk.Store, continuations: list[pk.Continuation], pool: str) -> int:
    """Return how many page groups of a pool would be available without some continuations."""
    held = {page for one in continuations for page in store.page_ids(one, pool)}
    others = {*continuations}
    users: list[pk.Sequence | pk.Continuation] = [*store.sequences()]
    for user in users + [one for one in store.continuations() if one not in others]:
        held.difference_update(store.page_ids(user, pool))
    held.discard(-1)
    return len(held)
