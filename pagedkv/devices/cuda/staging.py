"""Staging: a copy from pageable memory returns before it has run.

The submission copies a pageable source into pinned memory, as CUDA does with its own staging, but without waiting for
the stream.  Each stream uses two halves of staging in turn:

    half 0  [ piece | piece | piece ... ] event      a half is written again only after the event behind its copies
    half 1  [ piece | ...                            a source larger than a half becomes several pieces

While a stream captures, CUDA allows neither pinning nor waiting, so a copy that needs one of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.cuda.context import CudaContext
from pagedkv.values.quantities import align_up

STAGING_HALF_BYTES = 1 << 20
STAGING_ALIGN_BYTES = 64


class Staging:
    """Pinned copies of one stream's pageable sources, until the copies to the device have run."""

    def __init__(self, context: CudaContext, stream: Any) -> None:
        self._context = context
        self._stream = stream  # CuPy's
        self._halves: list[npt.NDArray[np.uint8]] = []
        self._events: list[Any] = [None, None]  # CuPy's; behind the copies of a full half
        self._current = 0
        self._used_bytes = 0

    def pieces(self, source: npt.NDArray[Any]) -> Iterator[tuple[int, int, int]]:
        """Stage a contiguous source; yield each piece's address, offset in the source and size in bytes.

        The caller submits each piece before it takes the next one.
        """
        content = source.reshape(-1).view(np.uint8)
        if not self._halves:
            self._context.check_outside_capture("the first copy of pageable memory on a stream")
            half = ((STAGING_HALF_BYTES,), np.dtype(np.uint8))
            self._halves = [self._context.memory.pinned(*half) for _ in range(2)]
        at = 0
        while at < content.size:
            if self._used_bytes >= STAGING_HALF_BYTES:
                self._turn()
            count = min(STAGING_HALF_BYTES - self._used_bytes, content.size - at)
            piece = self._halves[self._current][self._used_bytes : self._used_bytes + count]
            piece[...] = content[at : at + count]
            yield int(piece.ctypes.data), at, count
            at += count
            self._used_bytes += align_up(count, STAGING_ALIGN_BYTES)

    def release(self) -> None:
        """Reuse all staging: the host has waited for the stream."""
        self._used_bytes = 0
        self._events = [None, None]

    def _turn(self) -> None:
        self._context.check_outside_capture("a copy of more pageable memory than is staged")
        api = self._context.api
        event = api.invoke("cuda.Event", disable_timing=True)
        api.invoke("cuda.runtime.eventRecord", event.ptr, self._stream.ptr)
        self._events[self._current] = event
        self._current ^= 1
        self._used_bytes = 0
        if (passed := self._events[self._current]) is not None:
            api.invoke("cuda.runtime.eventSynchronize", passed.ptr)
