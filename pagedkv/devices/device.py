"""What both devices do alike: they check a caller's request, keep the open capture, and cache modules.

An embedder develops on `cpu` and deploys on `cuda`, so both devices refuse the same mistakes in the same words.  Each
device adds how the checked work runs.  Clauses: C12.4 (faults are answers), C14.4 (streams are explicit), C15.1
(addresses are stable).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.calls import check_call, freeze_call, name_of
from pagedkv.devices.context import BaseContext, value_text
from pagedkv.devices.kernels import BaseModule
from pagedkv.devices.memory import check_allocation
from pagedkv.devices.protocol import Event, ModuleSpec, Shape, Stream
from pagedkv.devices.streams import Capture, own_stream
from pagedkv.errors import CaptureRefused, DeviceFault, MisuseError, PagedKVError, shown

_SCALARS = (int, float, bool, np.generic)


class BaseDevice(ABC):
    """The part of a device that `cpu` and `cuda` share; the methods are those of `protocol.Device`."""

    name: str
    keeps_bytes = True
    array_words: str
    """The array types that the device takes, for messages."""

    def __init__(self, context: BaseContext, reason: str) -> None:
        self._context = context
        self._reason = reason
        self._streams_count = 0
        self._modules: dict[ModuleSpec, BaseModule] = {}
        self._capture: Capture[Any] | None = None

    def __repr__(self) -> str:
        return f"<{self.description}>"

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def state(self) -> BaseContext:
        """Who uses the device, and whether it can be used now."""
        return self._context

    @property
    def description(self) -> str:
        """One line: which device, and why."""
        return f"{self._summary()}; {self._reason}" if self._reason else self._summary()

    @property
    def driver_calls(self) -> int:
        """Launches, copies, calls, records, waits, queries, synchronizations and graph launches so far."""
        return self._context.driver_calls

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live arrays of `empty` and `zeros`, without alignment and guards."""
        return self._context.memory.allocated_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the live arrays of `pinned`, and of staging."""
        return self._context.memory.pinned_bytes

    @abstractmethod
    def _summary(self) -> str:
        """Say which device this is."""

    # -- memory --------------------------------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None) -> Any:
        """Allocate device memory."""
        return self._array(shape, dtype, align_bytes, name, is_zero=False)

    def zeros(self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None) -> Any:
        """Allocate device memory of zero bytes."""
        return self._array(shape, dtype, align_bytes, name, is_zero=True)

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate host memory at a fixed address."""
        self._context.check_outside_capture("allocation")
        return self._context.memory.pinned(*check_allocation(shape, dtype, name=name), name=name)

    def address(self, array: Any) -> int:
        """Give the address of the first element of an array of this device."""
        if not self._context.is_array(array) or not self._context.is_own(array):
            raise MisuseError(
                "address", expected="an array of this device", got=value_text(array),
                remedy="allocate it with device.empty, zeros or pinned", clause="C15.1",
            )
        return self._context.address(array)

    def _array(self, shape: Shape, dtype: npt.DTypeLike, align_bytes: int, name: str | None, *, is_zero: bool) -> Any:
        self._context.check_outside_capture("allocation")
        extents, resolved = check_allocation(shape, dtype, align_bytes, name)
        return self._context.memory.array(extents, resolved, align_bytes=align_bytes, is_zero=is_zero, name=name)

    # -- work ----------------------------------------------------------------------------------------------

    @abstractmethod
    def stream(self) -> Stream:
        """Make a stream."""

    @abstractmethod
    def event(self) -> Event:
        """Make an event."""

    def load(self, spec: ModuleSpec) -> BaseModule:
        """Compile a module, or take it from the cache, and load it."""
        self._context.check_usable()
        if not isinstance(spec, ModuleSpec):
            raise MisuseError("load of a module", expected="a ModuleSpec", got=shown(spec),
                              remedy="name sources or text in a ModuleSpec", clause="C14.4")
        if spec not in self._modules:
            if self._capture is not None:
                raise CaptureRefused(
                    f"load of module {spec.name}", expected="every module loaded before the capture",
                    got="a load during it", remedy="load it before begin_capture", clause="C15.1",
                )
            self._modules[spec] = self._compile(spec)
        return self._modules[spec]

    def copy(self, destination: Any, source: Any, stream: Stream) -> None:
        """Submit a copy between C-contiguous arrays of equal dtype and byte count."""
        context = self._context
        own = own_stream(context, stream, "copy")
        for side, array in (("destination", destination), ("source", source)):
            if not context.is_array(array) or not array.flags.c_contiguous or not context.lies_within(array):
                expected = f"a C-contiguous {self.array_words} as {side}, within its buffer"
                raise _copy_refusal(expected, value_text(array))
        if destination.dtype != source.dtype or destination.nbytes != source.nbytes:
            raise _copy_refusal(f"{value_text(source)} in {source.nbytes} bytes", value_text(destination))
        if not getattr(destination.flags, "writeable", True):  # CuPy's arrays always are
            raise _copy_refusal("a writable destination", "a read-only one")
        if abs(context.address(destination) - context.address(source)) < int(source.nbytes):
            raise _copy_refusal("two sides that share no byte", "overlapping address ranges")
        is_pageable, is_source_pageable = (not context.is_own(array) for array in (destination, source))
        if is_pageable and is_source_pageable:
            raise _copy_refusal("at least one side of this device", "pageable host memory on both sides")
        if own.is_capturing and (is_pageable or is_source_pageable):
            raise CaptureRefused(
                "copy under capture", expected="device or pinned memory on both sides", got="pageable host memory",
                remedy="stage it through device.pinned", clause="C15.1",
            )
        self._submit_copy(destination, source, own, is_source_pageable=is_source_pageable)

    def require_usable(self, what: str, array: Any, *, is_written: bool) -> None:
        """Refuse what no kernel of this device may use."""
        if self._context.address_of(array, is_read_only=not is_written) is None:
            got, remedy = self._context.explain(array)
            raise MisuseError(what, expected="a C-contiguous device or pinned array", got=got, remedy=remedy,
                              clause="C14.2")

    def readable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give a host array that an operation writes, for reading."""
        return array

    def call(self, stream: Stream, fn: Callable[..., Any], *arguments: Any) -> None:
        """Submit array work written in Python; `calls.py` says which functions are legal."""
        own = own_stream(self._context, stream, "call")
        frozen = tuple(self._call_argument(fn, argument) for argument in arguments)
        name = name_of(fn)
        if own.is_capturing:
            fn = freeze_call(fn)
        else:
            check_call(fn)
        self._submit_call(name, fn, frozen, own)

    @abstractmethod
    def _compile(self, spec: ModuleSpec) -> BaseModule:
        """Compile and load a module."""

    @abstractmethod
    def _submit_copy(self, destination: Any, source: Any, stream: Any, *, is_source_pageable: bool) -> None:
        """Give a checked copy to an own stream."""

    @abstractmethod
    def _submit_call(self, name: str, fn: Callable[..., Any], arguments: tuple[Any, ...], stream: Any) -> None:
        """Give a checked call to an own stream."""

    def _call_argument(self, fn: Callable[..., Any], argument: Any) -> Any:
        context = self._context
        if isinstance(argument, _SCALARS):
            return argument
        is_own = context.is_array(argument) and context.is_own(argument)
        if is_own and context.address(argument) % argument.dtype.itemsize == 0:
            return context.view(argument)
        raise MisuseError(
            f"call of {name_of(fn)}", got=value_text(argument), clause="C15.1",
            expected="aligned arrays of this device, pinned arrays and scalars as arguments",
            remedy="allocate it with device.empty or device.pinned",
        )

    # -- capture -------------------------------------------------------------------------------------------

    def begin_capture(self, stream: Stream) -> None:
        """Record the later submissions to `stream`, and to streams that join it."""
        own = own_stream(self._context, stream, "begin_capture")
        self._context.check_outside_capture("begin_capture")
        # First ours, then the driver's: after an interrupt in between, `abort_capture` ends both.
        capture: Capture[Any]
        self._capture = own.capture = capture = Capture(own)
        self._context.capturing_on = own.label
        try:
            self._begin_native(own)
        except PagedKVError:  # the driver refused
            self._drop(capture)
            raise

    def end_capture(self, stream: Stream) -> Any:
        """Stop recording and give the graph."""
        capture = self._capture_of(stream, "end_capture")
        if unjoined := capture.unjoined_streams():
            self.abort_capture(stream)
            labels = ", ".join(other.label for other in unjoined)
            raise CaptureRefused(
                "end_capture", expected="every stream of the capture joined back to the first",
                got=f"work of {labels} that {capture.origin.label} does not wait for", clause="C15.1",
                remedy="record an event there and wait for it on the first stream; capture again",
            )
        try:
            native = self._end_native(capture.origin)
        finally:
            self._drop(capture)
        return self._graph(capture, native)

    def abort_capture(self, stream: Stream) -> None:
        """Stop recording and drop what was recorded."""
        capture = self._capture_of(stream, "abort_capture")
        try:
            # CUDA says what broke the capture; the caller aborts and needs no error.  A fault has latched the stores.
            with contextlib.suppress(CaptureRefused, DeviceFault):
                self._end_native(capture.origin)
        finally:
            self._drop(capture)

    def close(self) -> None:
        """Release threads, modules and workspaces; arrays stay readable.  Closing twice is legal.

        Close the stores of the device first: afterwards their calls that reach it are refused, `close` too.
        """
        self._context.users.check_thread(f"close of the {self.name} device")
        if self._capture is not None:
            self._drop(self._capture)
        self._modules.clear()
        self._context.close()

    @abstractmethod
    def _begin_native(self, stream: Any) -> None:
        """Begin the driver's capture on an own stream, where there is a driver."""

    @abstractmethod
    def _end_native(self, stream: Any) -> Any:
        """End the driver's capture and give its graph, where there is a driver."""

    @abstractmethod
    def _graph(self, capture: Capture[Any], native: Any) -> Any:
        """Make the graph of a capture, from the driver's graph where there is one."""

    def _capture_of(self, stream: Stream, what: str) -> Capture[Any]:
        own = own_stream(self._context, stream, what)
        if self._capture is None or self._capture.origin is not own:
            raise CaptureRefused(
                what, expected="the stream on which the capture began",
                got="no capture" if self._capture is None else own.label,
                remedy="call it once per begin_capture, on the same stream", clause="C15.1",
            )
        return self._capture

    def _drop(self, capture: Capture[Any]) -> None:
        capture.close()
        self._context.capturing_on = ""
        self._capture = None  # last: after an interrupt in between, `abort_capture` does the rest


def _copy_refusal(expected: str, got: str) -> MisuseError:
    return MisuseError(
        "copy", expected=expected, got=got, clause="C14.4",
        remedy="pass equal, contiguous arrays of which one is the device's",
    )
