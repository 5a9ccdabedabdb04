"""StoreLife: who may call a store, and until when.  (C12.4)

    open --> latched (a device error: only close, memory_summary and the evidence remain)
      |         |
      +---------+--> closed

One thread and one process use a store; a call from elsewhere is refused.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import NoReturn, Self

from pagedkv.devices.protocol import Device, Stream
from pagedkv.errors import CaptureRefused, DeviceFault, MisuseError, PagedKVError, StoreLatched


class StoreLife:
    """Open, latched or closed; owned by one thread of one process.

    Attributes:
        device, stream: where everything runs; one ordered stream.
    """

    _withdraws = False
    """Whether what leaves a membership is written to a table at once (sanitizer mode); set by the store."""

    owns_device = False
    """Whether the device closes with the store, because `open_store` opened it by name; set there."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: Stream = device.stream()
        self._latch: DeviceFault | None = None
        self._is_closed = False
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PagedKVError as second:
            if error is None:
                raise
            error.add_note(f"and the store could not be closed well: {second}")

    def __reduce__(self) -> NoReturn:
        raise MisuseError("a copy of a store", expected="one object for one set of device arrays", got="copy or pickle",
                          remedy="open another store from the same StoreConfig", clause="C1.1")

    def close(self) -> None:
        """Wait for the stream, give the slabs back, and close a device that `open_store` opened by name.

        Closing twice is harmless.

        Raises:
            DeviceFault: a kernel failed meanwhile, or had written beyond a buffer; the fault is the evidence.  The
                store is closed nevertheless, as after everything else that draining the stream raises.
            CaptureRefused: the stream is capturing; the store stays open.
        """
        if self._is_closed:
            return
        self._require_owner("close")
        if self.stream.is_capturing:
            raise CaptureRefused("close", expected="a stream that is not capturing", got="one that is",
                                 remedy="end or abort the capture first", clause="C12.4")
        try:
            if self._latch is None:
                with self._latching():
                    self.stream.synchronize()
        finally:
            self._is_closed = True
            self._release()
            if self.owns_device:
                self.device.close()

    def _release(self) -> None:
        """Let go of the device's arrays; the store is closed already."""
        raise NotImplementedError

    def latch(self, fault: DeviceFault) -> None:
        """Stop the store after a device error; the first one is kept as evidence.  (C12.4)"""
        if self._latch is None:
            self._latch = fault

    @property
    def evidence(self) -> DeviceFault | None:
        """The device error that latched the store, if one did.  (C12.4)"""
        return self._latch

    def _enter(self, operation: str, *, can_withdraw: bool = False) -> None:
        self._require_owner(operation)
        if self._is_closed:
            raise MisuseError(operation, expected="an open store", got="a closed one",
                              remedy="open a new store", clause="C12.4")
        if self._latch is not None:
            raise StoreLatched(operation, expected="a store without a device error", got=str(self._latch),
                               remedy="close it; memory_summary and evidence still answer", clause="C12.4")
        if can_withdraw and self._withdraws:
            self._require_publishing(operation)

    def _require_publishing(self, operation: str) -> None:
        """Refuse to change a table while the stream is capturing: it must happen now, not at a replay.  (C11.2)"""
        if self.stream.is_capturing:
            raise CaptureRefused(operation, expected="a stream that is not capturing", got="one that is",
                                 remedy="call it outside the capture", clause="C11.2")

    def _require_owner(self, operation: str) -> None:
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            raise MisuseError(operation, expected="the thread and process that opened the store", got="another",
                              remedy="use one store per thread, and none across fork", clause="C12.4")

    def _latching(self) -> _Latching:
        return _Latching(self)


class _Latching:
    """Latches the store when a device error leaves the block."""

    def __init__(self, store: StoreLife) -> None:
        self._store = store

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DeviceFault):
            self._store.latch(error)
