"""Access: who may call a store, and until when.  (C12.4)

    open --> latched (a device error or an operation that broke off: only close, memory_summary, evidence remain)
      |         |
      +---------+--> closed

One thread and one process use a store; a call from elsewhere is refused.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from pagedkv.devices.protocol import Stream
from pagedkv.errors import BrokenOff, CaptureRefused, DeviceFault, MisuseError, PagedKVError, StoreLatched
from pagedkv.ledger.ledger import Ledger


class Access:
    """Asked at the beginning of every call of one store.  As a context: latches when a device error leaves the block.

    Attributes:
        is_closed: written by the store alone.
        fault: the device error that latched the store; the first one stays.
    """

    def __init__(self, ledger: Ledger, stream: Stream) -> None:
        self.is_closed = False
        self.fault: DeviceFault | None = None
        self._ledger = ledger
        self._stream = stream
        self._broken: BrokenOff | None = None
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DeviceFault):
            self.latch(error)

    def enter(self, operation: str, *, is_publishing: bool = False) -> None:
        """Refuse a call of another thread or process, of a closed or latched store, or one that a capture forbids.

        Args:
            operation: as the caller knows it.
            is_publishing: it changes a device table, which must happen now and not at a replay (C11.2).
        """
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            self.require_owner(operation)
        if self.is_closed:
            raise MisuseError(operation, expected="an open store", got="a closed one",
                              remedy="open a new store", clause="C12.4")
        if self._ledger.unsettled or self.fault is not None:
            raise StoreLatched(operation, expected="a store that is not latched", got=str(self.evidence),
                               remedy="close it; memory_summary and evidence still answer", clause="C12.4")
        if is_publishing and self._stream.is_capturing:
            raise CaptureRefused(operation, expected="a stream that is not capturing", got="one that is",
                                 remedy="call it outside the capture", clause="C11.2")

    def require_owner(self, operation: str) -> None:
        """Refuse a call of another thread or process."""
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            raise MisuseError(operation, expected="the thread and process that opened the store", got="another",
                              remedy="use one store per thread, and none across fork", clause="C12.4")

    def latch(self, fault: DeviceFault) -> None:
        """Stop the store after a device error; the first one is kept as evidence."""
        if self.fault is None:
            self.fault = fault

    @property
    def evidence(self) -> PagedKVError | None:
        """The device error, or the operation that broke off, that latched the store."""
        if self.fault is not None:
            return self.fault
        if self._broken is None and self._ledger.unsettled:
            operation = self._ledger.unsettled
            self._broken = BrokenOff(
                f"every call after {operation}", expected=f"{operation} to run from its first write to its last",
                got="an exception in between", clause="C12.4", operation=operation,
                remedy="close the store: its ledgers and device tables may contradict each other",
            )
        return self._broken
