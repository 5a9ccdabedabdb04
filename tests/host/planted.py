"""Bugs to plant in the ledgers: one changed line each, compiled from the method's own source.

A line that is rewritten makes its bug fail to plant, and the message says so: plant it anew in the new line.

Read next: `test_fuzz.py`, which demands that a random walk finds each of them.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pagedkv.activation import Activations
from pagedkv.address_space import AddressSpaces
from pagedkv.free_runs import FreeRuns
from pagedkv.ledgers import StoreLedgers
from pagedkv.logical_pages import LogicalPages
from pagedkv.pool import PagePool
from pagedkv.sequence import Sequences
from pagedkv.unit_guard import UnitGuard


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
    Planted("a failed unit is committed", StoreLedgers, "fail_unit", "self._end(unit)", "self.commit_unit(unit)"),
)  # fmt: skip

IN_TRIM_AND_TRUNCATE = (
    Planted("trim forgets to dematerialize one page", AddressSpaces, "trim", "mirror[flat])", "mirror[flat][1:])"),
    Planted("trim drops a partly committed page", AddressSpaces, "trim", "provisional) + PAGE_MASK)", "provisional))"),
    Planted(
        "trim ignores provisional columns", AddressSpaces, "trim",
        "np.maximum(self.frontier, provisional)", "np.where(provisional == HOLD, HOLD, self.frontier)",
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
        "truncate trims the other rows", AddressSpaces, "truncate",
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
    Planted("an abort in flight is forgotten", StoreLedgers, "_end", "if self._aborting else ()", "if False else ()"),
)  # fmt: skip

PLANTED = (*IN_MAPPING, *IN_COMMIT, *IN_TRIM_AND_TRUNCATE, *IN_POOLS, *IN_SEQUENCES, *IN_UNITS)
