"""Access: which thread may call a store, and in which of its states.  (C12.4)

    open --> latched (after a device error or an operation that broke off)
      |         |
      +---------+--> closed

A latched store allows only `close`, `memory_summary`, `event_counts` and `evidence`.  One thread of one process uses a
store; calls from another thread or process are refused.  The device refuses such calls of its own methods, and it tells
the access of each fault, whoever launched the work (`devices/users.py`).  So no work gets around these checks.
"""

from __future__ import annotations

import os
import weakref
from threading import get_ident

from pagedkv.devices.protocol import DeviceState
from pagedkv.errors import BrokenOff, DeviceFault, MisuseError, PagedKVError, StoreLatched
from pagedkv.ledger.ledger import Ledger
from pagedkv.record.journal import Journal


class Access:
    """Checks every call of one store, and latches it when its device reports a fault.

    Attributes:
        is_closed: written by the store alone.
        fault: the first device error, which latched the store.
    """

    def __init__(self, ledger: Ledger, device: DeviceState, journal: Journal | None) -> None:
        self.is_closed = False
        self.fault: DeviceFault | None = None
        self._ledger = ledger
        self._device = device
        self._journal = journal
        self._unwritten: list[bytes] = [] if journal is None else journal.waiting
        self._broken_off: BrokenOff | None = None
        self._thread = get_ident()
        _accesses.add(self)

    def enter(self, operation: str, *, reaches_device: bool = False) -> None:
        """Refuse a call of another thread or process, of a closed or latched store, or one that a capture forbids.

        `reaches_device`: the call submits work or waits for it.  A replay must not repeat it (C11.2), and CUDA refuses
        most of it while any stream of the device captures, so nothing of it begins.  The call also writes the journal's
        lines of earlier calls.
        """
        if get_ident() != self._thread:
            self.require_owner(operation)
        if self._unwritten and operation != "begin_unit":  # which writes what waits together with its own line
            self.write_journal()
        if self.is_closed:
            raise MisuseError(operation, expected="an open store", got="a closed one",
                              remedy="open a new store", clause="C12.4")
        if self._ledger.unsettled or self.fault is not None:
            cause = f"a device error: {self.fault}" if self.fault else f"{self._ledger.unsettled}, which broke off"
            raise StoreLatched(operation, expected="a usable store", got=f"one that is latched after {cause}",
                               remedy="close it and open a new one; store.evidence holds the cause", clause="C12.4")
        if reaches_device and (self._device.capturing_on or self._device.unusable):
            self._device.check_outside_capture(operation)

    def require_owner(self, operation: str) -> None:
        """Refuse a call of another thread or process."""
        if get_ident() != self._thread:
            raise MisuseError(operation, expected="the thread and process that opened the store", got="another",
                              remedy="use one store per thread, and none across fork", clause="C12.4")

    def note_fork(self) -> None:
        """Refuse every thread of a child process.  `os.getpid` in each call would take half of the call's time."""
        self._thread = 0

    def write_journal(self) -> None:
        """Write the decisions of earlier calls; a call of another thread or process writes nothing."""
        if self._journal is not None and self._unwritten and get_ident() == self._thread:
            self._journal.flush()

    def latch(self, fault: DeviceFault) -> None:
        """Stop the store after a device error; the first one becomes the evidence."""
        if self.fault is None:
            self.fault = fault

    @property
    def evidence(self) -> PagedKVError | None:
        """The device error, or the operation that broke off, that latched the store."""
        self.write_journal()
        if self.fault is not None:
            return self.fault
        operation = self._ledger.unsettled
        if not operation:  # asked earlier in the middle of an operation, by a signal handler or another thread
            self._broken_off = None
        elif self._broken_off is None or self._broken_off.fields["operation"] != operation:
            self._broken_off = BrokenOff(
                f"every call after {operation}", expected=f"{operation} to finish what it had begun to write",
                got="an interrupt or another exception in between", clause="C12.4", operation=operation,
                remedy="close the store, whose ledgers and device tables may differ, and open a new one",
            )
        return self._broken_off


_accesses: weakref.WeakSet[Access] = weakref.WeakSet()


def _note_fork_everywhere() -> None:
    for access in list(_accesses):
        access.note_fork()


os.register_at_fork(after_in_child=_note_fork_everywhere)
