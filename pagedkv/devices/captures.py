"""What a capture has recorded so far, and which streams take part; the same bookkeeping on both devices.

    origin stream      begin ──k1──record(e)──────────wait(f)──k3── end
                                      │                  │
    another stream                 wait(e)──k2──record(f)┘           joined by e, joined back by f

A node depends on the last node of its stream and on what its stream waited for; the capture is whole only when
everything recorded lies before the end of the origin stream.  Knows no operation: a node is a number and what the
device keeps for it.  Clauses: C12, C15.1.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

Recorded = TypeVar("Recorded")


class TakesPart(Protocol):
    """A stream as its capture sees it.

    `tail` are the nodes that the next one depends on.
    """

    label: str
    tail: set[int]

    def leave_capture(self) -> None:
        """Forget the capture; called by it when it closes."""


StreamKind = TypeVar("StreamKind", bound=TakesPart)


class Capture(Generic[StreamKind, Recorded]):
    """Recorded nodes with their dependencies.

    Attributes:
        origin: the stream it began on.
        operations: what the device keeps for each node, in submission order.
        dependencies: per node, indices of earlier ones.
        streams: streams that take part; a stream leaves at the end.
    """

    def __init__(self, origin: StreamKind) -> None:
        self.origin = origin
        self.operations: list[Recorded] = []
        self.dependencies: list[tuple[int, ...]] = []
        self.streams: list[StreamKind] = [origin]
        self.is_open = True

    def add(self, operation: Recorded, after: set[int]) -> int:
        """Record one node and give its index."""
        self.operations.append(operation)
        self.dependencies.append(tuple(sorted(after)))
        return len(self.operations) - 1

    def unjoined_streams(self) -> list[StreamKind]:
        """Give the streams whose work the origin stream does not wait for."""
        reached: set[int] = set()
        pending = list(self.origin.tail)
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                pending.extend(self.dependencies[node])
        return [stream for stream in self.streams if not stream.tail <= reached]

    def close(self) -> None:
        """Let the streams go; recorded events stay unusable outside."""
        self.is_open = False
        for stream in self.streams:
            stream.leave_capture()
