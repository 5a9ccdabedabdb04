"""Free ids as sorted, coalesced runs, so that what is handed out together lies together.

    ids      0 1 2 3 4 5 6 7 8 9
    free     . # # . . # # # . .        runs [1, 3) and [5, 8)

Neighbouring ids make one copy instead of two in a transfer; nothing else depends on them (C3.6).
Taking prefers the run that continues the caller's last id, then the smallest run that is large
enough, then whole runs from the lowest upward.  Cost: O(runs) vector work, no loop over ids.

Read next: `pool.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

_FEW_RUNS = 8


class FreeRuns:
    """A set of ids in [0, capacity) kept as half-open runs.

    `run_count` runs stand at the front of `_starts` and `_ends`, ascending and never adjacent, and hold `id_count` ids;
    `take` and `give` alone write them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts = np.zeros(capacity // 2 + 2, np.int64)
        self._ends = np.zeros(capacity // 2 + 2, np.int64)
        self._ends[0] = capacity
        self.run_count = 1 if capacity else 0
        self.id_count = capacity

    def runs(self) -> list[tuple[int, int]]:
        """Return the runs as (start, end) pairs in ascending order."""
        n = self.run_count
        return list(zip(self._starts[:n].tolist(), self._ends[:n].tolist(), strict=True))

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return a (capacity,) array that is True at every free id."""
        edges = np.zeros(self.capacity + 1, np.int32)
        edges[self._starts[: self.run_count]] += 1
        edges[self._ends[: self.run_count]] -= 1
        return np.cumsum(edges[:-1]).astype(np.bool_)

    def take(self, count: int, after: int = -1) -> Ids:
        """Remove and return `count` ids, ascending within a run; `after` is the caller's last id or -1.

        The caller has checked that `count` ids are free: reservations are promised before they are bound.
        """
        assert 0 <= count <= self.id_count, f"{count} ids asked of {self.id_count} free ones"
        if count == 0:
            return np.empty(0, np.int32)
        self.id_count -= count
        starts, ends = self._starts[: self.run_count], self._ends[: self.run_count]
        hint = after + 1
        if 0 < hint < self.capacity:
            index = int(np.searchsorted(starts, hint, side="right")) - 1
            if index >= 0 and ends[index] - hint >= count:
                return self._take_from(index, hint, count)
        lengths = ends - starts
        fitting = np.flatnonzero(lengths >= count)
        if fitting.size:
            index = int(fitting[np.argmin(lengths[fitting])])
            return self._take_from(index, int(starts[index]), count)
        return self._drain(count, lengths)

    def give(self, ids: Ids) -> None:
        """Return ids to the set and merge them with their neighbours; they must not be free already."""
        if ids.size == 0:
            return
        ordered = np.sort(ids).astype(np.int64)
        breaks = np.flatnonzero(np.diff(ordered) != 1)
        starts = ordered[np.concatenate(([0], breaks + 1))]
        ends = ordered[np.concatenate((breaks, [ordered.size - 1]))] + 1
        if starts.size <= _FEW_RUNS:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                self._insert(start, end)
        else:
            self._merge(starts, ends)
        self.id_count += ids.size

    def _take_from(self, index: int, first: int, count: int) -> Ids:
        """Cut [first, first + count) out of one run."""
        start, end = int(self._starts[index]), int(self._ends[index])
        last = first + count
        if first == start and last == end:
            self._delete(index, index + 1)
        elif first == start:
            self._starts[index] = last
        elif last == end:
            self._ends[index] = first
        else:
            self._open_slot(index + 1)
            self._starts[index + 1], self._ends[index + 1] = last, end
            self._ends[index] = first
        return np.arange(first, last, dtype=np.int32)

    def _drain(self, count: int, lengths: npt.NDArray[np.int64]) -> Ids:
        """Take whole runs from the lowest upward and the front of the last one."""
        totals = np.cumsum(lengths)
        whole = int(np.searchsorted(totals, count, side="right"))
        taken_starts = self._starts[:whole].copy()
        taken_lengths = lengths[:whole]
        rest = count - (int(totals[whole - 1]) if whole else 0)
        offsets = np.concatenate(([0], np.cumsum(taken_lengths)[:-1])) if whole else np.empty(0, np.int64)
        ids = np.repeat(taken_starts - offsets, taken_lengths) + np.arange(count - rest)
        self._delete(0, whole)
        if rest:
            first = int(self._starts[0])
            ids = np.concatenate((ids, np.arange(first, first + rest)))
            self._starts[0] = first + rest
        return ids.astype(np.int32)

    def _insert(self, start: int, end: int) -> None:
        count = self.run_count
        index = int(np.searchsorted(self._starts[:count], start))
        joins_left = index > 0 and self._ends[index - 1] == start
        joins_right = index < count and self._starts[index] == end
        assert index == 0 or self._ends[index - 1] <= start, f"ids from {start} are free already"
        assert index == count or end <= self._starts[index], f"ids up to {end} are free already"
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends[index]
            self._delete(index, index + 1)
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = start
        else:
            self._open_slot(index)
            self._starts[index], self._ends[index] = start, end

    def _merge(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        all_starts = np.concatenate((self._starts[: self.run_count], starts))
        order = np.argsort(all_starts, kind="stable")
        all_starts = all_starts[order]
        all_ends = np.concatenate((self._ends[: self.run_count], ends))[order]
        gaps = all_starts[1:] - all_ends[:-1]
        assert not (gaps < 0).any(), "some of these ids are free already"
        opens = np.concatenate(([True], gaps > 0))
        closes = np.concatenate((gaps > 0, [True]))
        self.run_count = int(np.count_nonzero(opens))
        self._starts[: self.run_count] = all_starts[opens]
        self._ends[: self.run_count] = all_ends[closes]

    def _delete(self, first: int, last: int) -> None:
        count = self.run_count
        self._starts[first : count - (last - first)] = self._starts[last:count].copy()
        self._ends[first : count - (last - first)] = self._ends[last:count].copy()
        self.run_count = count - (last - first)

    def _open_slot(self, index: int) -> None:
        count = self.run_count
        self._starts[index + 1 : count + 1] = self._starts[index:count].copy()
        self._ends[index + 1 : count + 1] = self._ends[index:count].copy()
        self.run_count = count + 1
