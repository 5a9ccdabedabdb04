"""Staging: how a copy from pageable memory can return before it has run.

A pageable source is copied into pinned memory at submission, as CUDA promises for its own staging, but without waiting
for the stream.  Each stream has two halves of staging in turn:

    half 0  [ piece | piece | piece ... ] event      a half is written again only after the event behind its copies
    half 1  [ piece | ...                            a source larger than a half goes in several pieces

While another stream captures, CUDA allows neither pinning nor waiting: what needs one of them is refused.
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
    """Pinned copies of pageable sources, of one stream, until their copies have run."""

    def __init__(self, context: CudaContext, stream: Any) -> None:
        self._context = context
        self._stream = stream  # CuPy's
        self._halves: list[npt.NDArray[np.uint8]] = []
        self._events: list[Any] = [None, None]  # CuPy's; behind the copies of a half that was left
        self._current = 0
        self._used_bytes = 0

    def pieces(self, source: npt.NDArray[Any]) -> Iterator[tuple[int, int, int]]:
        """Copy a contiguous pageable source piece by piece; each is to be submitted before the next is asked for.

        Yields:
            address of the pinned piece, its offset in the source, and its size; bytes.
        """
        content = source.reshape(-1).view(np.uint8)
        if not self._halves:
            self._context.refuse_in_capture("the first copy of pageable memory on a stream")
            self._halves = [self._context.memory.pinned(STAGING_HALF_BYTES, np.uint8) for _ in range(2)]
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
        """Begin anew: the stream has been waited for."""
        self._used_bytes = 0
        self._events = [None, None]

    def _turn(self) -> None:
        self._context.refuse_in_capture("a copy of more pageable memory than is staged")
        api = self._context.api
        event = api.invoke("cuda.Event", disable_timing=True)
        api.invoke("cuda.runtime.eventRecord", event.ptr, self._stream.ptr)
        self._events[self._current] = event
        self._current ^= 1
        self._used_bytes = 0
        if (passed := self._events[self._current]) is not None:
            api.invoke("cuda.runtime.eventSynchronize", passed.ptr)
