"""The bytes that an operation of the cpu device touches, as far as its arguments show.

A copy says exactly what it reads and writes.  A kernel or a call is opaque: it may read every array argument and write
those that are not const; comparing memory before and after it shows what it wrote (`races.py`).  A graph is the union
of its nodes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.devices.cpu.memory import Memory, address_of
from pagedkv.devices.cpu.operations import CallOperation, CopyOperation, KernelOperation, Operation

Span = tuple[int, int]
"""Addresses [start, end)."""

WORD_BYTES = 4


class Footprint(NamedTuple):
    """Spans of one operation.

    Attributes:
        reads: spans that it reads.
        writes: spans that it writes.
        may_read: array arguments of an opaque part.
        may_write: those of them that are not const.
        pinned_reads: host memory whose bytes must not change between submission and execution.
        host_writes: host memory that holds nothing useful until the operation has run.
    """

    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    may_read: tuple[Span, ...] = ()
    may_write: tuple[Span, ...] = ()
    pinned_reads: tuple[Span, ...] = ()
    host_writes: tuple[Span, ...] = ()

    @property
    def reach(self) -> tuple[Span, ...]:
        """Everything it may touch."""
        return self.reads + self.writes + self.may_read


def footprint_of(operation: Operation, memory: Memory) -> Footprint:
    """Give the spans of an operation."""
    if isinstance(operation, CopyOperation):
        return _of_copy(operation, memory)
    if isinstance(operation, KernelOperation):
        return _of_kernel(operation)
    if isinstance(operation, CallOperation):
        arrays = [argument for argument in operation.arguments if isinstance(argument, np.ndarray) and argument.nbytes]
        return Footprint(
            may_read=tuple(_bounds(array) for array in arrays),
            may_write=tuple(_bounds(array) for array in arrays if array.flags.writeable),
        )
    return _of_nodes([footprint_of(node, memory) for node in operation.operations])


def _of_copy(operation: CopyOperation, memory: Memory) -> Footprint:
    destination, source = (memory.owner(array) for array in operation.keep)
    reads: Span = (operation.source_address, operation.source_address + operation.byte_count)
    writes: Span = (operation.destination_address, operation.destination_address + operation.byte_count)
    return Footprint(
        # A pageable source is the operation's own copy, which nobody else can touch.
        reads=(reads,) if source is not None else (),
        writes=(writes,),
        pinned_reads=(reads,) if source is not None and source.is_pinned else (),
        host_writes=(writes,) if destination is None or destination.is_pinned else (),
    )


def _of_kernel(operation: KernelOperation) -> Footprint:
    launch = operation.launch
    slots = struct.unpack(f"<{len(launch.slots) // 8}Q", launch.slots)
    writable = {slot for slot, is_const in zip(slots, operation.is_read_only, strict=True) if not is_const}
    arrays = [array for array in launch.keep if array.nbytes]
    through = tuple(_bounds(array) for array in launch.through if array.nbytes)
    return Footprint(
        may_read=(*(_bounds(array) for array in arrays), *through),
        may_write=(*(_bounds(array) for array in arrays if address_of(array) in writable), *through),
        pinned_reads=tuple((start, start + byte_count) for start, byte_count in launch.reads),
    )


def _of_nodes(nodes: Sequence[Footprint]) -> Footprint:
    written: list[Span] = []
    pinned_reads: list[Span] = []
    for node in nodes:
        # Only the host must leave pinned bytes alone: an earlier node may write them.
        pinned_reads += [span for span in node.pinned_reads if not clip(span, written)]
        written += [*node.writes, *node.may_write]
    unions = (tuple(dict.fromkeys(chain.from_iterable(spans))) for spans in zip(*nodes, strict=True))
    union = Footprint(*unions) if nodes else Footprint()
    return union._replace(pinned_reads=tuple(dict.fromkeys(pinned_reads)))


def clip(span: Span, spans: Iterable[Span]) -> list[Span]:
    """Give the parts of `span` that lie in any of `spans`."""
    start, end = span
    return [(max(start, first), min(end, last)) for first, last in spans if start < last and first < end]


def first_common(spans: Iterable[Span], others: Sequence[Span]) -> Span | None:
    """Give the first piece that both lists cover, or None."""
    for span in spans:
        if pieces := clip(span, others):
            return min(pieces)
    return None


def read_bytes(span: Span) -> bytes:
    """Copy the bytes of a span."""
    return ctypes.string_at(span[0], span[1] - span[0])


def write_bytes(address: int, data: bytes) -> None:
    """Put bytes at an address."""
    ctypes.memmove(address, data, len(data))


def differences(start: int, before: bytes, after: bytes) -> list[Span]:
    """Give the spans in which two images of the memory from `start` on differ.

    Changes at most a word apart are one span, because a written element often keeps some of its bytes.
    """
    if before == after:
        return []
    places = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    gaps = np.flatnonzero(np.diff(places) > WORD_BYTES)
    firsts, lasts = places[np.concatenate(([0], gaps + 1))], places[np.concatenate((gaps, [-1]))]
    return [(start + first, start + last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _bounds(array: npt.NDArray[np.generic]) -> Span:
    if array.flags.c_contiguous:
        start = address_of(array)
        return start, start + array.nbytes
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)
