"""Bugs to plant in what shares pages: one changed text each, or a method that does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagedkv.ledger.activation import Activations
from pagedkv.ledger.active_spaces import AddressSpaces
from pagedkv.ledger.continuations import Continuations
from pagedkv.ledger.kept_spaces import RetainedSpaces
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.snapshot import Snapshots
from tests.host.planted import Planted


@dataclass(frozen=True)
class Hollow:
    """`method` of `owner` does nothing and returns None."""

    what: str
    owner: type
    method: str

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the empty method in its place."""
        assert callable(getattr(self.owner, self.method))
        monkeypatch.setattr(self.owner, self.method, lambda *arguments, **named: None)


IN_PREPARATION = (
    Planted(
        "a fork reserves its shared pages too", Activations, "_plan_pool",
        "frontier, full, tail, entitlement - full)", "frontier, full, tail, entitlement)",
    ),
    Planted(
        "a fork forgets the tail", Activations, "_plan_pool",
        "frontier, full, tail, entitlement - full)", "frontier, full, 0, entitlement - full)",
    ),
    Planted(
        "a copied tail is one column short", Activations, "_claim_pages",
        "part.copied_columns),)", "part.copied_columns - 1),)",
    ),
    Planted(
        "a tail is copied from the first page", Activations, "_source_tail",
        "block = part.frontier >> PAGE_SHIFT", "block = 0",
    ),
    Planted(
        "a move cuts what others read", Activations, "_plan_pool",
        "is_moved = bool(tail) and int(retained.pages.references[members[full]]) == 1", "is_moved = bool(tail)",
    ),
    Planted(
        "a move counts pages that others hold as its own", Activations, "_plan_pool",
        "retained.sole_pages(members[kept:])", "int(members[kept:].size)",
    ),
    Planted(
        "a source is claimed by nobody", Activations, "prepare",
        "self.continuations.claim(target.source, is_move=not target.keep_source)", "pass",
    ),
    Planted(
        "the source's tail is not pinned", Activations, "_claim_pages",
        "prepared.undo.append((pages.unpin, tail_source))", "pages.unpin(tail_source)",
    ),
    Planted(
        "an abort keeps the row", Activations, "prepare", "undo.append((self.sequences.return_row, leased))", "pass",
    ),
    Planted("an abort keeps what was reserved", Activations, "prepare", "undo.append((pool.shrink, claim))", "pass"),
    Planted("an abort gives nothing back", Activations, "abort", "undo_all(prepared.undo)", "prepared.undo.clear()"),
    Planted("an activation may end twice", Activations, "_require_open", "or not prepared.is_open", ""),
    Planted(
        "a backend may lead Main where a sequence goes on", Activations, "_frontiers",
        'min(own, wanted["main"])', "own",
    ),
    Planted("any source is a hit", Activations, "_frontiers", "state is None", "state is Ellipsis"),
)  # fmt: skip

IN_COMMIT = (
    Planted(
        "a moved continuation stays listed", Activations, "commit",
        "del self.continuations.states[target.source.number]", "pass",
    ),
    Planted(
        "what a move releases is not reserved again", Activations, "commit",
        "missing = part.claimed_pages - prepared.claimed[part.pool]", "missing = 0",
    ),
    Planted(
        "a copied tail has no writer", Activations, "commit",
        "publish_copy(tail, writer=row, active=1)", "publish_copy(tail, writer=-1, active=1)",
    ),
    Planted("a copied tail is not leased", Activations, "commit", "spaces.pool.materialize(1)", "pass"),
    Planted(
        "a moved tail keeps what was cut", Activations, "_take_members",
        "pages.withdraw(kept[-1:], part.frontier & PAGE_MASK)", "pass",
    ),
    Planted(
        "a move keeps the pages beyond its frontier", Activations, "_take_members",
        "retained.drop(members[part.kept_pages :], first_block=part.kept_pages, pages=members.size - part.kept_pages)",
        "pass",
    ),
    Planted(
        "a commit leaves the source pinned", Activations, "_take_members",
        "pages.unpin(self._source_tail(source.number, part))", "pass",
    ),
    Planted(
        "the budget forgets what came from the source", Activations, "commit",
        "prepared.plan.pools[0].frontier + target.total_tokens", "target.total_tokens",
    ),
)  # fmt: skip

IN_SPACES = (
    Planted(
        "an adopted row owns its shared pages", AddressSpaces, "adopt",
        "self.shared_end[row] = frontier & ~PAGE_MASK", "pass",
    ),
    Planted(
        "an adopted row begins at its last page boundary", AddressSpaces, "adopt",
        "self.frontier[row] = frontier", "self.frontier[row] = frontier & ~PAGE_MASK",
    ),
    Planted(
        "freezing forgets where it ended", AddressSpaces, "freeze",
        "self.shared_end[row] = full << PAGE_SHIFT", "pass",
    ),
    Planted(
        "a retained tail is full", AddressSpaces, "detach", ":], frontier & PAGE_MASK)", ":], 64)",
    ),
    Planted("a retained page stays active", AddressSpaces, "detach", "self.pages.deactivate(members)", "pass"),
    Planted(
        "a row that ends keeps its promise", AddressSpaces, "_vacate",
        "self.pool.shrink(self.entitlement_pages(row) - bound)", "pass",
    ),
    Planted(
        "a cut row leaves its pages without a writer", AddressSpaces, "truncate",
        "self.pages.thaw(immutable, row)", "pass",
    ),
    Planted(
        "a row is cut below what others share", AddressSpaces, "truncate",
        'self.pages.require_private(immutable, f"truncate of row {row} of pool {self.pool.name}")', "pass",
    ),
    Hollow("two rows may write one page", LogicalPages, "freeze"),
    Hollow("sharing counts nothing", LogicalPages, "share"),
    Hollow("a shared page is not active", LogicalPages, "activate"),
    Hollow("a reference is never inactive again", LogicalPages, "deactivate"),
    Hollow("pages with a pin are released", LogicalPages, "require_unpinned"),
    Hollow("an id that is unbound is lost", PagePool, "unbind"),
)  # fmt: skip

IN_CONTINUATIONS = (
    Hollow("retaining protects nothing", RetainedSpaces, "_raise_protection"),
    Planted(
        "lowering forgets the other spaces", RetainedSpaces, "_lower_protection",
        "after if others is None else np.maximum(after, others)", "after",
    ),
    Planted(
        "a cut continuation keeps its pages", RetainedSpaces, "truncate",
        "space.members = space.members[:keep].copy()", "pass",
    ),
    Planted(
        "a cut continuation keeps its frontier", RetainedSpaces, "truncate", "space.frontier = tokens", "pass",
    ),
    Planted(
        "a continuation is cut below what it protects", RetainedSpaces, "truncate",
        "space.protected_frontier <= tokens", "0 <= tokens",
    ),
    Planted(
        "a cut continuation's tail keeps its columns", RetainedSpaces, "truncate",
        "self.pages.withdraw(space.members[keep - 1 : keep], tokens & PAGE_MASK)", "pass",
    ),
    Planted(
        "a released continuation stays listed", Continuations, "release", "del self.states[number]", "pass",
    ),
    Planted(
        "a released continuation leaves the second pool's pages", Continuations, "release",
        "in self.retained.items()}", "in list(self.retained.items())[:1]}",
    ),
    Planted("a source may be taken away", Continuations, "require_idle", "if self.states[number].claims:", "if False:"),
    Planted(
        "a moving source may be forked", Continuations, "require_claimable", "if self.states[number].is_moving",
        "if False",
    ),
    Planted("a number is given out again", Continuations, "keep", "self._number_next += 1", "pass"),
)  # fmt: skip

IN_SNAPSHOTS = (
    Planted(
        "a snapshot shares the tail with its checkpoint", Snapshots, "prepare", "if not columns:", "if True:",
    ),
    Planted("a snapshot ignores provisional pages", Snapshots, "explain", "if provisional:", "if False:"),
    Planted(
        "a snapshot takes a page that is not there", Snapshots, "explain", "needed > spaces.pool.available", "False",
    ),
    Planted(
        "a snapshot's tail goes to the sequence's row", Snapshots, "commit",
        "writer=-1, active=0", "writer=row, active=0",
    ),
    Planted("a snapshot's tail is not leased", Snapshots, "commit", "spaces.pool.materialize(1)", "pass"),
    Planted("a snapshot counts no reference", Snapshots, "commit", "spaces.pages.share(members)", "pass"),
    Planted("a snapshot leaves its source pinned", Snapshots, "commit", "spaces.pages.unpin(", "len("),
    Planted("an abort of a snapshot gives nothing back", Snapshots, "abort", "undo_all(prepared.undo)", "pass"),
    Planted(
        "a snapshot's claim in the second pool stays", Snapshots, "prepare", "undo.append((spaces.pool.shrink, 1))",
        "pass",
    ),
    Planted("a lead is checkpointed", StoreLedgers, "_require_resumable", "> main", "> 1 << 40"),
    Planted("nothing is retained", StoreLedgers, "_require_resumable", "if not main", "if False"),
    Planted("retaining does not trim", StoreLedgers, "finish", "spaces.trim_row(sequence.row)", "pass"),
)  # fmt: skip

PLANTED_SHARING: tuple[Planted | Hollow, ...] = (
    *IN_PREPARATION, *IN_COMMIT, *IN_SPACES, *IN_CONTINUATIONS, *IN_SNAPSHOTS,
)  # fmt: skip
