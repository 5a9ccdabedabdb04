"""Mutants of captured units and of the decode loop."""

from __future__ import annotations

from tests.mutants.mutant import GONE, Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant("C9.2", "the loop never begins a round", "graphs/decode_loop.py",
           "if running and self.store.config.kv_lease_growth:", "if False:", "graphs/test_growth_loop.py"),
    Mutant("C9.2", "a row ends as soon as it is not extended", "graphs/decode_loop.py",
           "strict=True) if not covered}", "strict=True)}", "graphs/test_growth_loop.py"),
    Mutant("C9.2", "a row that nothing covers is launched", "graphs/decode_loop.py",
           '_replace(reason="length")', GONE, "graphs/test_growth_loop.py"),
    Mutant("C9.5", "the frontiers of an interrupted step stay", "graphs/decode_loop.py",
           "self.store.truncate(sequence, frontier)", "pass", "hostile/test_loop_interrupts.py -k step"),
    Mutant("C9.5", "a generator loses the tokens of an interrupted step", "graphs/decode_loop.py",
           "yield self._hand_over(delivered)", "delivered = self._hand_over(delivered)\n            yield delivered",
           "hostile/test_loop_interrupts.py -k 'decode and KeyboardInterrupt-3'"),
    Mutant("C9.5", "an interrupted step is forgotten", "graphs/decode_loop.py",
           "pending is None or self.store.evidence is not None", "True", "hostile/test_loop_interrupts.py -k step"),
    Mutant("C9.2", "a prompt beyond the lease is begun", "graphs/decode_loop.py",
           "if ids.size > covered:", "if False:", "graphs/test_growth_loop.py"),
    Mutant("C11.3", "batch order is taken for row order", "graphs/control_buffers.py",
           "self.ingress_host[:count] = rows", "self.ingress_host[:count] = np.arange(count)",
           "graphs/test_shapes.py"),
    Mutant("C15.1", "capture allocates anew", "graphs/unit.py:Unit.enqueue",
           "self._buffer_next = 0", "self._buffers, self._buffer_next = [], 0", "graphs/test_shapes.py"),
    Mutant("C15.2", "a unit attends in another pool", "graphs/unit.py",
           "if pool != self.key.pool:", "if False:", "graphs/test_draft_units.py -k 'other_pool or equal_geometry'"),
    Mutant("C15.2", "the pool is not in the key", "graphs/key.py:key_for",
           "scale=geometry.head_dim**-0.5, pool=pool,", "scale=geometry.head_dim**-0.5,",
           "graphs/test_draft_units.py -k equal_geometry"),
    Mutant("C15.2", "the width is not in the key", "graphs/key.py",
           "width=width, is_masked=True", "width=1, is_masked=True", "graphs/test_shapes.py"),
    Mutant("C15.3", "lengths are frozen at capture", "graphs/capture.py",
           "self._store.launch_graph(self.graph)",
           "if not self.replays:\n                self._store.launch_graph(self.graph)", "graphs/test_decode_loop.py"),
)  # fmt: skip
