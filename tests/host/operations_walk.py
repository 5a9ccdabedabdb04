"""A random walk over every operation of the ledgers, legal and illegal, with forks, moves and snapshots.

It compares nothing itself: who walks it watches events, or keeps a journal.  Calls are drawn from what the ledgers
answered so far, handles that have ended among them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.ledger.activation import ActivationTarget, Refusal
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.units import Submission


class OperationsWalk:
    """One walk; `counts` says how often each operation answered, and "refused NAME" how often it did not."""

    def __init__(self, ledgers: StoreLedgers, seed: int) -> None:
        self.ledgers = ledgers
        self.rng = random.Random(seed)
        self.sequences: list[Sequence] = []
        self.continuations: list[Continuation] = []
        self.units: list[Submission] = []
        self.prepared: list[tuple[str, Any]] = []
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """Draw one operation and run it; what it refuses is counted."""
        steps: dict[Callable[[], object], int] = {
            self._activate: 5, self._begin: 9, self._commit: 9, self._fail: 1, self._finish: 4, self._abort: 1,
            self._snapshot: 3, self._release: 2, self._protect: 3, self._truncate: 3, self._cut: 3, self._ensure: 2,
            self._trim: 5, self._attach: 1, self._prepare: 2, self._end_prepared: 3, self._nonsense: 1,
            self._round: 4,
        }  # fmt: skip
        step = self.rng.choices(list(steps), list(steps.values()))[0]
        name = step.__name__.strip("_")
        try:
            step()
        except PagedKVError:
            name = f"refused {name}"
        self.counts[name] += 1

    def end(self) -> None:
        """End everything that is left."""
        for kind, prepared in self.prepared:
            if prepared.is_open:
                getattr(self.ledgers, f"abort_{kind}")(prepared)
        for unit in list(self.ledgers.guard.units):
            self.ledgers.fail_unit(unit)
        for sequence in self.sequences:
            if self.ledgers.sequences.serials[sequence.row] == sequence.serial:
                self.ledgers.finish(sequence)
        for continuation in self.ledgers.continuations.handles():
            self.ledgers.release(continuation)

    # ---- operations -------------------------------------------------------------------------------

    def _target(self) -> ActivationTarget:
        longest = (40, 250) if self.ledgers.config.kv_lease_growth else (150, 60)
        tokens = (self.rng.randint(1, longest[0]), self.rng.randint(0, longest[1]))
        if not self.continuations or self.rng.random() < 0.4:
            return ActivationTarget(*tokens)
        source = self._pick(self.continuations)
        frontier: Any = None
        if self.rng.random() < 0.6 and source.number in self.ledgers.continuations.states:
            retained = self.ledgers.continuations.retained
            frontier = {name: self.rng.randint(0, max(kept.spaces[source.number].frontier, 1))
                        for name, kept in retained.items()}  # fmt: skip
        elif self.rng.random() < 0.3:
            frontier = self.rng.choice((64, 10, "all", {"main": np.int64(5)}))
        return ActivationTarget(*tokens, source, frontier, keep_source=self.rng.random() < 0.6)

    def _activate(self) -> None:
        answer = self.ledgers.try_activate(self._target())
        if isinstance(answer, Refusal):
            self.counts["no room"] += 1
        else:
            self.sequences.append(answer)

    def _prepare(self) -> None:
        if self.rng.random() < 0.6 or not self.sequences:
            self.prepared.append(("activation", self.ledgers.prepare_activation(self._target())))
        else:  # a snapshot ends before its sequence goes on
            self.prepared.append(("snapshot", self.ledgers.prepare_snapshot(self._settled(), "state")))
        if isinstance(self.prepared[-1][1], Refusal):
            self.prepared.pop()
        elif self.prepared[-1][0] == "snapshot":
            self._end(*self.prepared[-1])

    def _end_prepared(self) -> None:
        if not self.prepared:
            return
        self._end(*self._pick(self.prepared))

    def _end(self, kind: str, prepared: Any) -> None:
        if self.rng.random() < 0.5:
            getattr(self.ledgers, f"abort_{kind}")(prepared)
        elif kind == "activation":
            self.sequences.append(self.ledgers.commit_activation(prepared))
        else:
            self.continuations.append(self.ledgers.commit_snapshot(prepared))

    def _begin(self) -> None:
        if not self.sequences:
            return
        chosen = [self._pick(self.sequences) for _ in range(self.rng.randint(1, 2))]
        chosen = chosen[:1] if chosen[0] == chosen[-1] else chosen
        batch = self.ledgers.batch(chosen)
        columns: dict[str, Any] = {name: self.rng.choice((1, 5, self.rng.randint(0, 90))) for name in self._pools()}
        if self.rng.random() < 0.3:
            columns["main"] = np.array([self.rng.randint(0, 9) for _ in chosen], np.int64)
        unit, _ = self.ledgers.begin_unit("walk", batch, columns)
        self.units.append(unit)

    def _commit(self) -> None:
        if not self.units:
            return
        unit = self._pick(self.units)
        if self.rng.random() < 0.3:
            self.ledgers.commit_unit(unit)
        else:
            self.ledgers.commit_unit(unit, {name: [self.rng.randint(0, count) for count in counts.tolist()]
                                            for name, counts in unit.columns.items()})  # fmt: skip

    def _fail(self) -> None:
        if self.units:
            self.ledgers.fail_unit(self._pick(self.units))

    def _finish(self) -> None:
        if self.sequences:
            is_kept = self.rng.random() < 0.6
            state = self.rng.choice(("state", "state", None)) if is_kept else None
            kept = self.ledgers.finish(self._pick(self.sequences), retain=is_kept, state=state)
            if kept is not None:
                self.continuations.append(kept)

    def _abort(self) -> None:
        if self.sequences:
            self.ledgers.abort(self._pick(self.sequences))

    def _snapshot(self) -> None:
        if self.sequences:
            answer = self.ledgers.try_snapshot(self._settled(), "state")
            if isinstance(answer, Refusal):
                self.counts["no snapshot"] += 1
            else:
                self.continuations.append(answer)

    def _release(self) -> None:
        if self.continuations:
            self.ledgers.release(self._pick(self.continuations))

    def _protect(self) -> None:
        if self.continuations:
            self.ledgers.protect(self._pick(self.continuations), self.rng.choice((0, 0, 0, 64, 200)), self._pool())

    def _round(self) -> None:
        live = [sequence for sequence in self.sequences if self._is_live(sequence)]
        if live:
            chosen = live if self.rng.random() < 0.8 else [self._pick(self.sequences)]
            self.ledgers.begin_round(self.ledgers.batch(chosen))
        elif self.ledgers.guard.units:
            in_flight = self.ledgers.guard.units[0].rows.tolist()
            self.ledgers.begin_round(
                self.ledgers.batch([each for each in self.sequences if each.row == in_flight[0]][-1:])
            )

    def _attach(self) -> None:
        if self.continuations:
            self.ledgers.attach_state(self._pick(self.continuations), self.rng.choice((None, "state", "state")))

    def _cut(self) -> None:
        if self.continuations:
            tokens = self.rng.choice((1, 64, 70, 150))
            self.ledgers.truncate_continuation(self._pick(self.continuations), tokens, self._pool())

    def _truncate(self) -> None:
        if self.sequences:
            sequence, pool = self._pick(self.sequences), self._pool()
            committed = int(self.ledgers.spaces["main"].frontier[sequence.row])
            self.ledgers.truncate(sequence, self.rng.choice((committed, committed // 2, committed + 1)), pool)

    def _ensure(self) -> None:
        if self.sequences:
            self.ledgers.ensure_mapped_to_tokens(self._pick(self.sequences), self.rng.randint(0, 260), self._pool())

    def _trim(self) -> None:
        if self.sequences:
            batch = self.ledgers.batch([self._pick(self.sequences)])
            self.ledgers.trim(batch, self._pool(), self.rng.choice((0, 0, [70], np.array([3]), -1)))

    def _nonsense(self) -> None:
        """Arguments of forms that no operation accepts."""
        ledgers: Any = self.ledgers
        calls: list[Callable[[], object]] = [
            lambda: ledgers.finish("a name"), lambda: ledgers.release(None), lambda: ledgers.trim(7, "main"),
            lambda: ledgers.truncate(self._pick(self.sequences), np.int64(3), "main"),
            lambda: ledgers.begin_unit("walk", ledgers.batch(self.sequences[-1:]), {"main": [1.5]}),
            lambda: ledgers.begin_unit("walk", ledgers.batch(self.sequences[-1:]), {"main": [[1], [2, 3]]}),
            lambda: ledgers.begin_unit("walk", ledgers.batch(self.sequences[-1:]), {"side": 1}),
            lambda: ledgers.prepare_activation({"prompt_tokens": 3}), lambda: ledgers.commit_unit("unit"),
            lambda: ledgers.finish(Sequence(99, 0, 1)), lambda: ledgers.abort_activation(None),
        ]  # fmt: skip
        if self.sequences:
            self.rng.choice(calls)()

    # ---- helpers ----------------------------------------------------------------------------------

    def _pick(self, handles: list[Any]) -> Any:
        """Return a handle that has not ended, or now and then any that there ever was."""
        live = [handle for handle in handles if self._is_live(handle)]
        return self.rng.choice(handles if not live or self.rng.random() < 0.1 else live)

    def _is_live(self, handle: Any) -> bool:
        if isinstance(handle, Sequence):
            row = handle.row
            is_current = bool(self.ledgers.sequences.serials[row] == handle.serial)
            return is_current and not self.ledgers.guard.rows_in_flight >> row & 1
        if isinstance(handle, Continuation):
            return handle.number in self.ledgers.continuations.states
        return bool((handle[1] if isinstance(handle, tuple) else handle).is_open)

    def _pools(self) -> list[str]:
        names = list(self.ledgers.spaces)
        return self.rng.choice((names, names, names[:1], names[-1:]))

    def _settled(self) -> Sequence:
        """Return a sequence, mostly one without provisional pages."""
        sequence: Sequence = self._pick(self.sequences)
        if self.rng.random() < 0.7:
            for name in self.ledgers.spaces:
                self.ledgers.trim(self.ledgers.batch([sequence]), name)
        return sequence

    def _pool(self) -> str:
        return self.rng.choice([*self.ledgers.spaces, "side"] if self.rng.random() < 0.1 else list(self.ledgers.spaces))
