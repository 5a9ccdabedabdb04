"""Bugs to plant in the ledgers: one changed line each, compiled from the method's own source.

A line that is rewritten makes its bug fail to plant, and the message says so: plant it anew in the new line.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pagedkv.ledger.activation import Activations
from pagedkv.ledger.active_spaces import AddressSpaces
from pagedkv.ledger.continuations import Continuations
from pagedkv.ledger.free_runs import FreeRuns
from pagedkv.ledger.growth import LeaseGrowth
from pagedkv.ledger.kept_spaces import RetainedSpaces
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.sequences import Sequences
from pagedkv.ledger.snapshot import Snapshots
from pagedkv.ledger.units import UnitGuard
from pagedkv.store.actions import DeviceActions
from pagedkv.store.store import Store


@dataclass(frozen=True)
class Planted:
    """In `method` of `owner`, the text `old` becomes `new`."""

    what: str
    owner: type
    method: str
    old: str
    new: str

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compile the method with the change and put it in its place."""
        function: Callable[..., object] = getattr(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.old!r} is not once in {function.__qualname__}: plant it anew"
        scope: dict[str, object] = {}
        code = compile("from __future__ import annotations\n" + source.replace(self.old, self.new), self.what, "exec")
        exec(code, vars(inspect.getmodule(function)), scope)
        monkeypatch.setattr(self.owner, self.method, scope[self.method])


IN_MAPPING = (
    Planted(
        "a crossing is mapped a step early", AddressSpaces, "ensure_mapped_to_tokens", "np.less(", "np.less_equal(",
    ),
    Planted(
        "mapping loses the last page of a slice", AddressSpaces, "ensure_mapped_to_tokens",
        "(ends[rows] + PAGE_MASK) & ~PAGE_MASK", "np.maximum(ends[rows] & ~PAGE_MASK, old_ends)",
    ),
    Planted(
        "the second window starts over", AddressSpaces, "_bind_window",
        "first = int(self.bound_end[row]) >> PAGE_SHIFT", "first = 0",
    ),
    Planted(
        "a window ignores the entitlement", AddressSpaces, "_bind_window",
        "min(wanted, self.entitlement_pages(row) - first)", "wanted",
    ),
    Planted(
        "a unit maps one pool before it asks the next", StoreLedgers, "begin_unit",
        "spaces.require_entitled(pool_ends)", "pass",
    ),
    Planted(
        "positions beyond the context are written", StoreLedgers, "begin_unit",
        "self._require_positions(batch, pool, entry)", "pass",
    ),
    Planted(
        "no unit is ever beyond its ceiling", AddressSpaces, "has_row_beyond_ceiling",
        "self._crossing.tobytes() != self._none_crossing", "False",
    ),
    Planted(
        "a batch keeps counts under a wrong number", StoreLedgers, "_entry_columns",
        "batch.uniform.get(wanted)", "next(iter(batch.uniform.values()), None)",
    ),
)  # fmt: skip

IN_COMMIT = (
    Planted(
        "commit adds twice when W > 1", AddressSpaces, "commit",
        "+= columns", "+= np.where(columns > 1, 2 * columns, columns)",
    ),
    Planted("more is accepted than was written", StoreLedgers, "_accepted_span", "(counts > limits).any()", "False"),
    Planted(
        "a commit of everything skips the last pool", StoreLedgers, "commit_unit",
        "in unit.written.items()", "in list(unit.written.items())[:1]",
    ),
    Planted("a failed unit is committed", StoreLedgers, "fail_unit", "self._end_unit(unit)", "self.commit_unit(unit)"),
)  # fmt: skip

IN_TRIM_AND_TRUNCATE = (
    Planted("trim forgets to dematerialize one page", AddressSpaces, "trim", "mirror[flat])", "mirror[flat][1:])"),
    Planted("trim drops a partly committed page", AddressSpaces, "trim", "keep_tokens) + PAGE_MASK)", "keep_tokens))"),
    Planted(
        "trim ignores provisional columns", AddressSpaces, "trim",
        "np.maximum(self.frontier, keep_tokens)", "np.where(keep_tokens == HOLD, HOLD, self.frontier)",
    ),
    Planted("trim keeps the identity of a page", AddressSpaces, "trim", "self.pages.renew(logical)", "pass"),
    Planted(
        "trim asks nobody whether the row is frozen", StoreLedgers, "trim",
        'self.guard.require_thawed(batch.rows_mask, "trim", pool)', "pass",
    ),
    Planted("truncate keeps the content epoch", AddressSpaces, "truncate", "if tokens < committed and", "if False and"),
    Planted(
        "truncate renews the epoch at an equal frontier", AddressSpaces, "truncate",
        "tokens < committed and tokens & PAGE_MASK", "tokens & PAGE_MASK and self.mapped_end[row]",
    ),
    Planted(
        "truncate trims the other rows", AddressSpaces, "trim_row",
        "np.full_like(self.frontier, HOLD)", "np.zeros_like(self.frontier)",
    ),
)  # fmt: skip

IN_POOLS = (
    Planted(
        "release frees a page twice", PagePool, "release",
        "self.free_runs.give(at)", "self.free_runs.give(at); self.free_runs.give(ids[:1])",
    ),
    Planted("release forgets the bound pages", PagePool, "release", "self.reserved -= bound", "pass"),
    Planted("a trimmed lease stays current", PagePool, "dematerialize", "self.renew(ids)", "pass"),
    Planted(
        "shrink gives back one page less", PagePool, "shrink",
        "self.reserved -= pages", "self.reserved -= max(pages - 1, 0)",
    ),
    Planted(
        "a run that is cut stays whole", FreeRuns, "_take_from",
        "self._start_of[index] = last", "self._start_of[index] = first",
    ),
    Planted("neighbouring runs are not merged", FreeRuns, "_insert", "if joins_left and joins_right", "if False"),
    Planted("finish leaks descriptors", LogicalPages, "recycle", "self.free_runs.give(at)", "pass"),
)  # fmt: skip

IN_SEQUENCES = (
    Planted(
        "finish leaks the bound window", AddressSpaces, "close",
        "members[row, shared:bound])", "members[row, shared:mapped])",
    ),
    Planted(
        "finish leaves ids in the table", AddressSpaces, "_vacate",
        "self.table.mirror[row, :bound] = UNMAPPED", "pass",
    ),
    Planted("finish does not return the row", Sequences, "return_row", "self._free_rows.append(row)", "pass"),
    Planted("finish does not move the stamp", Sequences, "end", "self.stamp += 1", "pass"),
    Planted(
        "the backend's lead is forgotten", Activations, "_full_entitlement",
        " + self._lead_tokens[pool]", "",
    ),
    Planted(
        "a refused activation keeps a row", Activations, "prepare",
        "return plan", "return (self.sequences.next_row is not None and self.sequences.lease_row(), plan)[1]",
    ),
    Planted(
        "any serial is current", Sequences, "require_current",
        "self.serials[sequence.row] != sequence.serial", "not self.serials[sequence.row]",
    ),
    Planted(
        "an old batch is never revalidated", StoreLedgers, "_require_batch",
        "batch.stamp != self.sequences.stamp", "False",
    ),
)  # fmt: skip

IN_UNITS = (
    Planted("begin does not freeze", UnitGuard, "begin", "self.rows_in_flight |= rows_mask", "pass"),
    Planted("end thaws every row", UnitGuard, "end", "&= ~unit.rows_mask", "= 0"),
    Planted(
        "an ended unit can be ended again", UnitGuard, "require_open",
        "not unit.is_open or unit not in self.units", "False",
    ),
    Planted(
        "an abort in flight takes effect at once", StoreLedgers, "abort",
        "self.guard.rows_in_flight >> sequence.row & 1", "False",
    ),
    Planted(
        "an abort in flight is forgotten", StoreLedgers, "_end_unit", "if self._aborting else ()", "if False else ()",
    ),
)  # fmt: skip

IN_ACTIVATIONS = (
    Planted(
        "a fork reserves no page for its tail", Activations, "_plan_pool",
        "entitlement - full)", "entitlement - full - (tail > 0))",
    ),
    Planted(
        "a tail that others hold is moved", Activations, "_plan_pool",
        "int(retained.pages.references[members[full]]) == 1", "True",
    ),
    Planted("a moved tail is left behind", Activations, "_plan_pool", "kept = full + is_moved", "kept = full"),
    Planted(
        "a moved source stays", Activations, "commit",
        "del self.continuations.states[target.source.number]", "pass",
    ),
    Planted(
        "a budget forgets what came from the source", Activations, "commit",
        "prepared.plan.pools[0].frontier + target.total_tokens", "target.total_tokens",
    ),
    Planted(
        "an aborted activation keeps its row", Activations, "prepare",
        "undo.append((self.sequences.return_row, leased))", "pass",
    ),
    Planted(
        "an aborted activation keeps its source pinned", Activations, "_claim_pages",
        "prepared.undo.append((pages.unpin, tail_source))", "pass",
    ),
    Planted(
        "an aborted activation keeps its claim", Activations, "prepare",
        "undo.append((pool.shrink, claim))", "pass",
    ),
    Planted(
        "an aborted activation claims its source for good", Activations, "prepare",
        "undo.append((self.continuations.unclaim, target.source))", "pass",
    ),
    Planted("a fork adds no reference", Activations, "_take_members", "pages.share_active(", "(lambda pages: None)("),
    Planted(
        "a moved tail is cut in the same epoch", Activations, "_take_members",
        "pages.withdraw(kept[-1:], part.frontier & PAGE_MASK)", "pass",
    ),
    Planted(
        "nobody may write a moved tail", Activations, "_take_members",
        "pages.thaw(kept[-1:], prepared.plan.row)", "pass",
    ),
    Planted(
        "pages beyond a move leak", Activations, "_take_members",
        "retained.drop(members[part.kept_pages :], first_block=part.kept_pages, pages=members.size - part.kept_pages)",
        "pass",
    ),
    Planted("a backend begins beyond Main", Activations, "_frontiers", 'min(own, wanted["main"])', "own"),
    Planted(
        "KV without state is a hit", Activations, "_frontiers",
        "self.continuations.states[number].state is None", "False",
    ),
    Planted(
        "the last column of a tail is not copied", Activations, "_claim_pages",
        "part.copied_columns),)", "part.copied_columns - 1),)",
    ),
    Planted(
        "a tail is copied over itself", Activations, "_claim_pages",
        "int(pages.device[tail_source[0]])", "int(destination[0])",
    ),
)  # fmt: skip

IN_SNAPSHOTS = (
    Planted("a snapshot adds no reference", Snapshots, "commit", "spaces.pages.share(members)", "pass"),
    Planted(
        "a snapshot copies one column less", Snapshots, "prepare",
        "int(destination[0]), columns),)", "int(destination[0]), columns - 1),)",
    ),
    Planted("a snapshot takes provisional pages", Snapshots, "explain", "if provisional:", "if False:"),
    Planted("a snapshot needs no free page", Snapshots, "explain", "needed > spaces.pool.available", "False"),
    Planted(
        "an aborted snapshot keeps its page", Snapshots, "prepare",
        "undo.append((spaces.pool.unbind, destination))", "pass",
    ),
    Planted(
        "a backend's lead is retained", StoreLedgers, "_require_resumable",
        "int(spaces.frontier[sequence.row]) > main:", "False:",
    ),
    Planted("retaining forgets to trim", AddressSpaces, "trim_row", "self.trim(keep_tokens)", "pass"),
)  # fmt: skip

IN_RETAINED = (
    Planted(
        "a cut continuation keeps its epoch", RetainedSpaces, "truncate",
        "if tokens < space.frontier and tokens & PAGE_MASK", "if False",
    ),
    Planted(
        "a shared page of a continuation is cut", RetainedSpaces, "truncate",
        "self.pages.require_private(cut, what)", "pass",
    ),
    Planted(
        "a continuation is cut below what it protects", RetainedSpaces, "truncate",
        "not space.protected_frontier <= tokens", "not 0 <= tokens",
    ),
    Planted("a cut continuation keeps its frontier", RetainedSpaces, "truncate", "space.frontier = tokens", "pass"),
    Planted(
        "lowering protection forgets the other spaces", RetainedSpaces, "_lower_protection",
        "after if others is None else np.maximum(after, others)", "after",
    ),
    Planted(
        "a continuation that ends protects for good", RetainedSpaces, "take",
        "self._lower_protection(number, space, 0)", "pass",
    ),
    Planted(
        "retaining protects nothing", RetainedSpaces, "keep",
        "self._raise_protection(self.spaces[number], frontier)", "pass",
    ),
    Planted(
        "dropping pages gives no page group back", RetainedSpaces, "drop",
        "self.pool.release(page_ids, leased=page_ids.size)", "pass",
    ),
    Planted("a released continuation is still there", Continuations, "release", "del self.states[number]", "pass"),
)  # fmt: skip

IN_SHARED_PAGES = (
    Planted(
        "the first of many to let go frees a page", LogicalPages, "_drop_reference", "self._where_zero(at, left)", "at",
    ),
    Planted("withdrawn columns keep their epoch", LogicalPages, "withdraw", "self.renew_content(changed)", "pass"),
    Planted("a frozen page has nothing committed", LogicalPages, "freeze", "self.committed[at] = committed", "pass"),
    Planted(
        "protectors are never counted down", LogicalPages, "lower_protection",
        "self.protectors[at] = left", "pass",
    ),
    Planted("an inactive page stays active", LogicalPages, "deactivate", "self.active[at] = active - _ONE", "pass"),
    Planted(
        "freezing moves no boundary", AddressSpaces, "freeze",
        "self.shared_end[row] = full << PAGE_SHIFT", "pass",
    ),
    Planted(
        "adopted pages are in no table", AddressSpaces, "adopt",
        "self.table.mirror[row, :count] = page_ids", "pass",
    ),
    Planted(
        "nobody may write what a truncate cut", AddressSpaces, "truncate",
        "self.pages.thaw(immutable, row)", "pass",
    ),
    Planted(
        "a truncate leaves shared_end", AddressSpaces, "truncate",
        "min(int(self.shared_end[row]), first_cut << PAGE_SHIFT)", "int(self.shared_end[row])",
    ),
    Planted("finish releases shared pages for all", AddressSpaces, "close", "if shared:", "if False:"),
    Planted(
        "finish keeps the promise", AddressSpaces, "_vacate",
        "self.pool.shrink(self.entitlement_pages(row) - bound)", "pass",
    ),
)  # fmt: skip

IN_GROWTH = (
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
    Planted("an extension gives a page too many", LeaseGrowth, "_extend", "pages=pages)", "pages=pages + 1)"),
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

ON_THE_DEVICE = (
    Planted(
        "the last entry of a membership is not published", DeviceActions, "publish_memberships",
        "[row, : page_ids.size], page_ids,", "[row, : page_ids.size - 1], page_ids[:-1],",
    ),
    Planted(
        "only the first tail is copied", DeviceActions, "copy_tails",
        "for copy in copies:", "for copy in copies[:1]:",
    ),
    Planted(
        "a failed activation is not aborted", Store, "_activate",
        "self._ledgers.abort_activation(prepared)", "pass",
    ),
    Planted(
        "a failed snapshot is not aborted", Store, "try_snapshot",
        "self._ledgers.abort_snapshot(prepared)", "pass",
    ),
    Planted(
        "a broken publication does not latch", Store, "_publish",
        'self._latch_broken("publication of table slices", error)', "pass",
    ),
    Planted(
        "a broken withdrawal does not latch", Store, "_withdraw",
        'self._latch_broken("withdrawal of table entries", error)', "pass",
    ),
    Planted(
        "a latched store still says what is covered", Store, "covered_columns",
        'self._enter("covered_columns")', "pass",
    ),
)  # fmt: skip

PLANTED = (
    *IN_MAPPING, *IN_COMMIT, *IN_TRIM_AND_TRUNCATE, *IN_POOLS, *IN_SEQUENCES, *IN_UNITS, *IN_ACTIVATIONS, *IN_SNAPSHOTS,
    *IN_RETAINED, *IN_SHARED_PAGES, *IN_GROWTH, *ON_THE_DEVICE,
)  # fmt: skip
