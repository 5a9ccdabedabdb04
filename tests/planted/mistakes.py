"""Mistakes to plant in the product's own transfer, publication, staging, trim, completion and capture code.

Each is one line removed, changed or moved (a move is two edits), with the scene that it spoils and what the error
must name: the operation and the buffer, as patterns.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.errors import CaptureRefused, DeviceFault, MisuseError, PagedKVError, StreamHazard
from pagedkv.graphs import DecodeLoop, Unit
from pagedkv.graphs.control_buffers import ControlBuffers
from pagedkv.ledger.pool import PagePool
from pagedkv.store.actions import DeviceActions
from pagedkv.store.store import Store
from pagedkv.transfer.mover import PageMover, _Slot
from pagedkv.transfer.plan import Transfers
from tests.planted import scenes


@dataclass(frozen=True)
class Mistake:
    """One mistake: where it is planted, the scene that meets it, and what the error says.

    `operation` and `buffer` are regular expressions; both must be in the message of an `error`.
    """

    what: str
    edits: tuple[tuple[type, str, str, str], ...]
    scene: Callable[[CpuDevice], None]
    operation: str
    buffer: str
    errors: tuple[type[PagedKVError], ...] = (StreamHazard,)

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compile every edited method anew, all of its edits at once, and put it in its place."""
        for owner, method in dict.fromkeys((owner, method) for owner, method, _, _ in self.edits):
            function = getattr(owner, method)
            source = textwrap.dedent(inspect.getsource(function))
            for old, new in ((old, new) for *place, old, new in self.edits if place == [owner, method]):
                assert source.count(old) == 1, f"{old!r} is not once in {function.__qualname__}: plant it anew"
                source = source.replace(old, new)
            scope: dict[str, object] = {}
            code = compile("from __future__ import annotations\n" + source, self.what, "exec")
            exec(code, vars(inspect.getmodule(function)), scope)
            monkeypatch.setattr(owner, method, scope[method])


SAVE = r"copy of \d+ bytes from 'main\.0\.[kv]_code'.* to 'extent'"
RESTORE = r"copy of \d+ bytes from 'saved extent'.* to 'main\.0\.[kv]_code'"
PLANE = r"'main\.0\.[kv]_code'"
EGRESS = r"'egress host B=\d W=\d+'"

IN_FENCES = (
    Mistake(
        "a save does not wait for the writers of its source",
        ((PageMover, "submit", "lane.stream.wait(before)", "pass"),),
        scenes.save_behind_append, SAVE, PLANE,
    ),
    Mistake(
        "a restore does not wait for the readers of its destination",
        ((PageMover, "submit", "lane.stream.wait(before)", "pass"),),
        scenes.restore_behind_reader, RESTORE, PLANE,
    ),
    Mistake(
        "the next reader does not wait for the restore",
        ((PageMover, "order_before", "stream.wait(ticket.done)", "pass"),),
        scenes.read_behind_restore, RESTORE, PLANE,
    ),
    Mistake(
        "the fence is recorded before the users' work instead of behind it",
        ((PageMover, "submit", "self._users.record(before)", "lane.stream.record(before)"),),
        scenes.save_behind_append, SAVE, PLANE,
    ),
    Mistake(
        "completion is recorded before the copies",
        (
            (PageMover, "submit", "finally:\n        lane.stream.record(ticket.done)", "finally:\n        pass"),
            (PageMover, "submit", "slot.last = ticket.done", "slot.last = ticket.done; lane.stream.record(slot.last)"),
        ),
        scenes.save_behind_append, SAVE, r"'extent'",
    ),
    Mistake(
        "the packing kernel runs on the users' stream",
        (
            (PageMover, "_move_packed", "self._ops.pack_pages(planes, chunk_ids, lane.staging, stream=lane.stream)",
             "self._ops.pack_pages(planes, chunk_ids, lane.staging, stream=self._users)"),
        ),
        scenes.move_both_ways, "kernel pack_pages", r"'out (staging|slot \d ids)'",
    ),
)  # fmt: skip

IN_STAGING = (
    Mistake(
        "a slot of page ids is re-used while a copy reads it",
        ((_Slot, "is_free", "self.last is None or self.last.query()", "True"),),
        scenes.move_both_ways, r"copy of \d+ bytes from 'out slot 0 ids host'", "'out slot 0 ids host'",
    ),
    Mistake(
        "both lanes share one staging buffer",
        ((PageMover, "submit", "else self._in", "else self._in; lane.staging = self._out.staging"),),
        scenes.move_both_ways, r"(kernel (un)?pack_pages|copy of \d+ bytes)", "'out staging'",
    ),
    Mistake(
        "the loop rewrites its selectors while the replay may still read them",
        (
            (DecodeLoop, "_run", "self.store.wait(unit)", "self.store._completed.add(unit.number)"),
            (ControlBuffers, "read_next_tokens", "self._device.readable(self.egress_host)", "(self.egress_host & 255)"),
        ),
        scenes.decode_in_a_loop, r"graph of \d+ nodes, operation \d+ of stream 0", r"'ingress host B=\d W=\d+'",
    ),
)  # fmt: skip

IN_PUBLICATION = (
    Mistake(
        "table slices are published behind the launch",
        (
            (Store, "begin_unit", "self._publish(slices)", "self._late = slices"),
            (Store, "launch_graph", "graph.launch(self.stream)",
             "(graph.launch(self.stream), self._publish(self._late))"),
        ),
        scenes.decode_in_a_loop, "kernel append_rows", PLANE, (DeviceFault,),
    ),
    Mistake(
        "table slices are published on a stream that nobody orders",
        ((DeviceActions, "publish", ".copy(), self._stream", ".copy(), self._device.stream()"),),
        scenes.decode_in_a_loop, r"copy of \d+ bytes from pageable host memory to 'main\.block_table'",
        r"'main\.block_table'",
    ),
    Mistake(
        "a save is published before its copies have run",
        ((Transfers, "publish",
          'self._require_state(transfer, "publish", *(("complete", "submitted") if may_be_ordered else ("complete",)))',
          "pass"),),
        scenes.save_and_read, SAVE, "'extent'",
    ),
)  # fmt: skip

IN_PINS = (
    Mistake(
        "a page is trimmed and written anew while a copy reads it",
        ((PagePool, "dematerialize", 'self.require_unpinned(ids, "dematerialize")', "pass"),),
        scenes.trim_while_saving, "kernel append_rows", PLANE,
    ),
    Mistake(
        "a page is released to another sequence while a copy reads it",
        ((PagePool, "require_unpinned", "self.pins_total and self.pins[ids].any()", "False"),),
        scenes.finish_while_saving, "kernel append_rows", PLANE,
    ),
    Mistake(
        "an abort lets the pages go while its copies wait",
        ((Transfers, "abort", "return False", "return self.completed(transfer)"),),
        scenes.abort_while_saving, "kernel append_rows", PLANE,
    ),
)  # fmt: skip

IN_COMPLETION = (
    Mistake(
        "copies count as done as soon as they are queued",
        ((PageMover, "is_done", "return ticket.done.query()", "return True"),),
        scenes.save_behind_append, SAVE, "'extent'",
    ),
    Mistake(
        "waiting for a unit does not wait",
        ((Store, "wait", "self.stream.synchronize()", "pass"),),
        scenes.decode_in_a_loop, r"graph of \d+ nodes", EGRESS,
    ),
    Mistake(
        "the loop commits without waiting",
        ((DecodeLoop, "_run", "self.store.wait(unit)", "pass"),),
        scenes.decode_in_a_loop, r"graph of \d+ nodes", EGRESS,
    ),
    Mistake(
        "poll takes every submitted unit for done",
        ((Store, "poll", "if event.query():", "if True:"),),
        scenes.decode_by_polling, r"graph of \d+ nodes", EGRESS,
    ),
    Mistake(
        "submit records nothing",
        ((Store, "submit", "self.stream.record(event)", "pass"),),
        scenes.decode_by_polling, r"graph of \d+ nodes", EGRESS,
    ),
)  # fmt: skip

IN_CAPTURE = (
    Mistake(
        "a captured copy reads a temporary of the host",
        ((Unit, "enqueue", "self.control.ingress_host,", "self.control.ingress_host.copy(),"),),
        scenes.decode_in_a_loop, "copy under capture", "pageable host memory", (CaptureRefused,),
    ),
    Mistake(
        "a call closes over what a replay would read late",
        ((Unit, "call", "self.stream, function, *arguments", "self.stream, lambda: function(*arguments)"),),
        scenes.decode_in_a_loop, "call of .*lambda", "closing over arguments, function", (MisuseError,),
    ),
)  # fmt: skip

MISTAKES = (*IN_FENCES, *IN_STAGING, *IN_PUBLICATION, *IN_PINS, *IN_COMPLETION, *IN_CAPTURE)
