"""Mutants of the order of work on the device: fences, staging, publication, pins, completion and capture.

Scenes catch them: the error of a deferred device must name the operation and the buffer."""

from __future__ import annotations

from tests.mutants.mutant import BODY, GONE, Mutant, scene

PACK = "kernel pack_pages"
UNPACK = "kernel unpack_pages"
ARENA_READ = "a host read of buffer"
PLANE = r"'main\.0\.[kv]_code'"
EGRESS = r"'egress host B=\d W=\d+'"
MOVER = "transfer/mover.py"
DEFERRED = "devices/test_cpu_deferred.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("C7.4", "a demotion does not wait for the writers of its source", MOVER,
           "lane.stream.wait(lane.before)", GONE, scene("demote_behind_a_copied_tail", PACK, PLANE)),
    Mutant("C7.4", "a restore does not wait for the readers of its destination", MOVER,
           "lane.stream.wait(lane.before)", GONE, scene("restore_behind_reader", UNPACK, PLANE)),
    Mutant("C7.4", "the fence is recorded before the users' work instead of behind it", MOVER,
           "self._users.record(lane.before)", "lane.stream.record(lane.before)",
           scene("demote_behind_a_copied_tail", PACK, PLANE)),
    Mutant("C7.4", "completion is recorded before the copies", MOVER, "lane.stream.record(ticket.done)", GONE,
           scene("write_behind_demotion", ARENA_READ, "host arena"),
           ((MOVER, "slot.last = ticket.done", "slot.last = ticket.done; lane.stream.record(slot.last)"),)),
    Mutant("C7.4", "the packing kernel runs on the users' stream", MOVER,
           "self._ops.pack_pages(table, ids, lane.staging, stream=lane.stream)",
           "self._ops.pack_pages(table, ids, lane.staging, stream=self._users)",
           scene("move_both_ways", PACK, r"'copies\.out\.(staging|ids)'")),
    Mutant("C7.4", "a slot of page ids is re-used while a copy reads it", MOVER,
           "self.last is None or self.last.query()", "True",
           scene("move_both_ways", r"copy of \d+ bytes from 'out slot 0 ids host'", r"'out slot 0 ids host'")),
    Mutant("C7.4", "both lanes share one staging buffer", MOVER,
           "else self._in", "else self._in; lane.staging = self._out.staging",
           scene("move_both_ways", r"(kernel (un)?pack_pages|copy of \d+ bytes)", r"'copies\.out\.staging'")),
    Mutant("C12.1", "the loop rewrites its selectors while the replay may still read them", "graphs/decode_loop.py",
           "self.store.wait(unit)", "unit.is_completed = True",
           scene("decode_in_a_loop", r"graph of \d+ nodes, operation \d+ of stream 0", r"'ingress host B=\d W=\d+'"),
           (("graphs/control_buffers.py", "self._device.readable(self.egress_host)", "(self.egress_host & 255)"),)),
    Mutant("C11.2", "table slices are published behind the launch", "store/store.py:begin_unit",
           "if slices:\n            self._actions.publish(slices)",
           "self._late = slices",
           scene("decode_in_a_loop", "kernel append_rows", PLANE, "DeviceFault"),
           (("store/store.py", "graph.launch(self.stream)",
             "graph.launch(self.stream); self._actions.publish(self._late)"),)),
    Mutant("C11.2", "table slices are published on a stream that nobody orders", "store/actions.py",
           ".copy(), self._stream", ".copy(), self._device.stream()",
           scene("decode_in_a_loop", r"copy of \d+ bytes from pageable host memory to 'main\.block_table'", "")),
    Mutant("C7.4", "copies count as done as soon as they are queued", MOVER,
           "return ticket.done.query()", "return True",
           scene("write_behind_demotion", ARENA_READ, "host arena")),
    Mutant("C7.4", "a demotion is published before its copies have run", "store/store.py:_end_copy",
           "if not self._copies.advance(job)", GONE,
           scene("write_behind_demotion", ARENA_READ, "host arena")),
    Mutant("C10.10", "an aborted restore gives its pages back before its copies have run", "store/store.py:_end_copy",
           "if not self._copies.advance(job)", GONE,
           scene("write_behind_aborted_restore", r"kernel (append_rows|unpack_pages)", PLANE)),
    Mutant("C12.3", "waiting for a unit does not wait", "store/store.py:wait",
           "self.stream.synchronize()", GONE, scene("decode_in_a_loop", r"graph of \d+ nodes", EGRESS)),
    Mutant("C12.3", "the loop commits without waiting", "graphs/decode_loop.py",
           "self.store.wait(unit)", GONE, scene("decode_in_a_loop", r"graph of \d+ nodes", EGRESS)),
    Mutant("C12.3", "poll takes every submitted unit for done", "store/store.py",
           "if event.query():", "if True:", scene("decode_by_polling", r"graph of \d+ nodes", EGRESS)),
    Mutant("C12.3", "submit records nothing", "store/store.py",
           "self.stream.record(event)", GONE, scene("decode_by_polling", r"graph of \d+ nodes", EGRESS)),
    Mutant("C15.1", "a captured copy reads a temporary of the host", "graphs/unit.py",
           "self.control.ingress_host,", "self.control.ingress_host.copy(),",
           scene("decode_in_a_loop", r"copy under capture", r"pageable host memory", "CaptureRefused")),
    Mutant("C15.1", "a call closes over what a replay would read late", "graphs/unit.py",
           "self.stream, function, *arguments", "self.stream, lambda: function(*arguments)",
           scene("decode_in_a_loop", r"call of .*lambda", r"closing over arguments, function", "MisuseError")),
    # ---- the checks of the deferred device itself
    Mutant("C12.1", "fingerprints are not compared", "devices/cpu/deferred.py:_compare_fingerprints",
           BODY, "return None", DEFERRED),
    Mutant("C12.3", "host reads are not asked about", "devices/cpu/deferred.py:require_readable",
           BODY, "return None", DEFERRED),
    Mutant("C7.4", "known bytes are not compared", "devices/cpu/races.py:_refuse_common",
           BODY, "return None", DEFERRED),
    Mutant("C7.4", "no operation is tried in the other order", "devices/cpu/races.py:_differ",
           BODY, "return False", DEFERRED),
)  # fmt: skip
