"""PageRun: adjacent page ids that one copy moves.  (C8.3)

    sources       [ 7 8 9 | 3 | 12 13 ]
    destinations  [ 0 1 2 | 3 |  4  5 ]        ->  (7, 0, 3)  (3, 3, 1)  (12, 4, 2)

A run goes on while both sides advance by one, so that a plane stores it in one piece on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages [source, source + count) go to [destination, destination + count)."""

    source: int
    destination: int
    count: int


def page_runs(sources: npt.NDArray[np.int32], destinations: npt.NDArray[np.int32]) -> tuple[PageRun, ...]:
    """Coalesce (source, destination) pairs, in the order given, into runs.  Python work per run, not per page.

    Raises:
        MisuseError: arrays of different length.
    """
    if sources.shape != destinations.shape or sources.ndim != 1:
        raise MisuseError("page runs", expected="as many destinations as sources",
                          got=f"{sources.shape} and {destinations.shape}", remedy="pair them", clause="C8.3")
    if not sources.size:
        return ()
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [sources.size])))
    return tuple(
        PageRun(source, destination, count)
        for source, destination, count in zip(
            sources[starts].tolist(), destinations[starts].tolist(), counts.tolist(), strict=True
        )
    )
