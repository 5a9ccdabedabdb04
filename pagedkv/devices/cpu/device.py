"""The cpu device: CUDA kernel sources on this machine's cores, for tests and for machines without a GPU.

Every CUDA thread is a fiber; blocks run on a few OS threads; streams and events keep the protocol.  In eager
mode an operation runs when it is submitted, so events always have passed; in deferred mode streams are real queues
and a seed picks among the legal orders (`cpu_deferred.py`).  What CUDA forbids under capture is refused here too,
so that code that works here works there.

The device keeps four kinds of evidence a GPU does not: guard pages and canaries around every buffer, poison in
fresh memory, exact errors for divergent barriers and warp collectives, and thread orders to choose from (a
data race gives different bits in another order).

Clauses: C12.4 (faults are answers), C14.4 (streams are explicit), C15.1 (addresses are stable).
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices import refusals
from pagedkv.devices.calls import check_call, freeze_call
from pagedkv.devices.captures import Capture
from pagedkv.devices.cpu.compiler import (
    Announce,
    Compiler,
    announce_on_stderr,
    build,
    find_compiler,
)
from pagedkv.devices.cpu.context import CpuContext
from pagedkv.devices.cpu.deferred import SCHEDULES
from pagedkv.devices.cpu.graph import CpuGraph
from pagedkv.devices.cpu.kernels import CpuModule
from pagedkv.devices.cpu.memory import POISON, address_of, host_memory_bytes
from pagedkv.devices.cpu.operations import CallOperation, CopyOperation
from pagedkv.devices.cpu.runtime import ORDERS, load_library
from pagedkv.devices.cpu.streams import CpuCapture, CpuEvent, CpuStream, own_stream
from pagedkv.devices.protocol import ModuleSpec, Shape, Stream
from pagedkv.devices.sources import has_static_shared, module_text

THREADS_DEFAULT_MAX = 16  # every OS thread reserves 128 MiB of address space for stacks
THREADS_MAX = 256
PINNED_ALIGN_BYTES = 64
CHECKS = ("", "bounds")
MODES = ("eager", "deferred")

_SCALARS = (int, float, bool, np.generic)


class CpuDevice:
    """An executor of CUDA sources on fibers.

    Args:
        order: "ascending", "descending" or "random": order of lanes, warps and blocks.
        seed: of the random order, and of the schedule; every launch draws another one from it.
        mode: "eager" runs an operation at its submission, "deferred" when something forces it.
        schedule: "late", "early" or "random": what a deferred device runs, and in which order, when forced.
        threads: OS threads that run blocks, the caller's included; by default the cores this process may use.
        checks: "bounds" builds modules that trap on misaligned accesses and on indices outside fixed arrays.
        compiler: by default what `find_compiler` finds.
        announce: told in one line when something is compiled, which happens once per machine.
        spin_seconds: a block in which only spinning threads run for so long is a fault.
        reason: why this device was chosen; part of `description`.

    Raises:
        MissingRequirement: no C++ compiler.
    """

    name = "cpu"

    def __init__(
        self,
        *,
        order: str = "ascending",
        seed: int = 0,
        mode: str = "eager",
        schedule: str = "late",
        threads: int | None = None,
        checks: str = "",
        compiler: Compiler | None = None,
        announce: Announce = announce_on_stderr,
        spin_seconds: float = 10.0,
        reason: str = "",
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        self.threads = min(cores, THREADS_DEFAULT_MAX) if threads is None else threads
        _require(1 <= self.threads <= THREADS_MAX, "threads", f"1 to {THREADS_MAX}", threads)
        _require(order in ORDERS, "order", f"one of {tuple(ORDERS)}", order)
        _require(checks in CHECKS, "checks", f"one of {CHECKS}", checks)
        _require(mode in MODES, "mode", f"one of {MODES}", mode)
        _require(schedule in SCHEDULES, "schedule", f"one of {SCHEDULES}", schedule)
        self.checks = checks
        self.mode = mode
        self.compiler = compiler or find_compiler()
        self._announce = announce
        self._context = CpuContext(
            load_library(self.compiler, announce),
            threads=self.threads,
            order=order,
            seed=seed,
            spin_seconds=spin_seconds,
            schedule=schedule if mode == "deferred" else None,
        )
        self._deferred = f", deferred ({schedule}, seed {seed})" if mode == "deferred" else ""
        self._reason = reason
        self._stream_numbers = itertools.count()
        self._modules: dict[ModuleSpec, CpuModule] = {}
        self._capture: CpuCapture | None = None

    def __repr__(self) -> str:
        return f"<{self.description}>"

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """One line: which device, and why."""
        plural = "thread" if self.threads == 1 else "threads"
        line = f"cpu device: kernels as fibers on {self.threads} OS {plural}, compiled by {self.compiler.kind}"
        line += self._deferred
        return f"{line}; {self._reason}" if self._reason else line

    @property
    def order_choices(self) -> int:
        """How often the seed decided the order of work or the time of an event, in deferred mode; else 0."""
        return 0 if self._context.queues is None else self._context.queues.choices

    @property
    def driver_calls(self) -> int:
        """Launches, copies, calls, records, waits, queries, synchronizations and graph launches so far."""
        return self._context.driver_calls

    def set_order(self, order: str, seed: int = 0) -> None:
        """Choose the order of lanes, warps and blocks for later launches."""
        self._context.check_usable()
        _require(order in ORDERS, "order", f"one of {tuple(ORDERS)}", order)
        self._context.set_order(order, seed)

    def memory_bytes(self) -> tuple[int, int]:
        """Give free and total memory of the host, in bytes, within its control group."""
        return host_memory_bytes()

    def empty_caches(self) -> int:
        """Say 0: freed buffers go back to the system at once."""
        return 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live arrays that `empty` and `zeros` handed out: exact spans, without guards and slack."""
        return self._context.memory.allocated_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the live arrays that `pinned` handed out."""
        return self._context.memory.pinned_bytes

    def address(self, array: npt.NDArray[Any]) -> int:
        """Give the address of the first element of an array of this device."""
        self._own_array(array, "address")
        return address_of(array)

    # -- memory --------------------------------------------------------------------------------------------

    def empty(
        self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None
    ) -> npt.NDArray[Any]:
        """Allocate device memory filled with 0xFF; `name` is for messages."""
        return self._array(shape, dtype, align_bytes, POISON, False, name)

    def zeros(
        self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None
    ) -> npt.NDArray[Any]:
        """Allocate device memory of zero bytes; `name` is for messages."""
        return self._array(shape, dtype, align_bytes, 0, False, name)

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate host memory at a fixed address, filled with 0xFF; kernels may use it too."""
        return self._array(shape, dtype, PINNED_ALIGN_BYTES, POISON, True, name)

    def _array(
        self, shape: Shape, dtype: npt.DTypeLike, align_bytes: int, fill: int, is_pinned: bool, name: str | None
    ) -> npt.NDArray[Any]:
        self._context.check_usable()
        self._context.refuse_in_capture("allocation")
        return self._context.memory.array(
            shape, dtype, align_bytes=align_bytes, fill=fill, is_pinned=is_pinned, name=name
        )

    def check_canaries(self) -> None:
        """Look at the slack around every buffer.

        Raises:
            DeviceFault: something was written there; also for buffers freed since the last look.
        """
        self._context.raise_overwritten(self._context.memory.check())

    # -- work ----------------------------------------------------------------------------------------------

    def stream(self) -> CpuStream:
        """Make a stream."""
        self._context.check_usable()
        return CpuStream(self._context, self, next(self._stream_numbers))

    def event(self) -> CpuEvent:
        """Make an event."""
        self._context.check_usable()
        return CpuEvent(self._context)

    def load(self, spec: ModuleSpec) -> CpuModule:
        """Compile, or take from the cache, and load.

        Raises:
            MisuseError: the compiler refuses the source.
            CaptureRefused: a capture is on.
        """
        self._context.check_usable()
        if spec in self._modules:
            return self._modules[spec]
        if self._capture is not None:
            raise refusals.load_in_capture(spec.name)
        path = build(
            spec.name,
            module_text(spec),
            self.compiler,
            defines=spec.defines,
            checks=self.checks,
            announce=self._announce,
        )
        module = CpuModule(self._context, spec, ctypes.CDLL(str(path)), is_serial=has_static_shared(spec))
        self._modules[spec] = module
        return module

    def copy(self, destination: npt.NDArray[Any], source: npt.NDArray[Any], stream: Stream) -> None:
        """Submit a copy; see `protocol.Device.copy`.

        Raises:
            MisuseError: size, dtype or contiguity differ, or neither side is this device's.
            CaptureRefused: a side is pageable host memory and the stream is capturing.
        """
        self._context.check_usable()
        own = own_stream(self._context, stream, "copy")
        for side, array in (("destination", destination), ("source", source)):
            if type(array) is not np.ndarray or not array.flags.c_contiguous:
                raise refusals.copy_sides(f"a C-contiguous numpy.ndarray as {side}", refusals.array_text(array))
        if destination.dtype != source.dtype or destination.nbytes != source.nbytes:
            expected = f"{refusals.array_text(source)} in {source.nbytes} bytes"
            raise refusals.copy_sides(expected, refusals.array_text(destination))
        if not destination.flags.writeable:
            raise refusals.copy_sides("a writable destination", "a read-only one")
        owners = [self._context.memory.owner(array) for array in (destination, source)]
        if owners == [None, None]:
            raise refusals.copy_sides("at least one side of this device", "pageable host memory on both sides")
        if own.is_capturing and None in owners:
            raise refusals.pageable_in_capture()
        if self._context.queues is not None and owners[1] is None:
            source = source.copy()  # at submission, as CUDA stages it
        self._context.driver_calls += 1
        if destination.nbytes:
            own.submit(
                CopyOperation(
                    address_of(destination), address_of(source), destination.nbytes, (destination.view(), source.view())
                )
            )

    def readable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give host memory for reading; see `protocol.Device.readable`.

        Raises:
            StreamHazard: in deferred mode: an operation writes there, and the host has not waited for it.
        """
        if self._context.queues is not None and array.nbytes:
            start = address_of(array)
            self._context.queues.require_readable((start, start + array.nbytes))
        return array

    def call(self, stream: Stream, fn: Callable[..., Any], *arguments: Any) -> None:
        """Submit array work written in Python; see `calls.py`.

        Args:
            stream: where it goes.
            fn: a plain module-level function.
            arguments: arrays of this device, passed as views, and scalars, frozen.

        Raises:
            MisuseError: the function or an argument can change behind the device's back.
            CaptureRefused: a library matrix product under capture in a function that is not `cpu_only`.
        """
        self._context.check_usable()
        own = own_stream(self._context, stream, "call")
        frozen = tuple(self._call_argument(fn, argument) for argument in arguments)
        if own.is_capturing:
            fn = freeze_call(fn)
        else:
            check_call(fn)
        self._context.driver_calls += 1
        own.submit(CallOperation(getattr(fn, "__qualname__", "call"), fn, frozen))

    def _call_argument(self, fn: Callable[..., Any], argument: Any) -> Any:
        if isinstance(argument, np.ndarray):
            if type(argument) is np.ndarray and self._context.memory.owner(argument) is not None:
                return argument.view()
        elif isinstance(argument, _SCALARS):
            return argument
        raise refusals.call_argument(fn, argument)

    # -- capture -------------------------------------------------------------------------------------------

    def begin_capture(self, stream: Stream) -> None:
        """Record submissions to `stream`, and to streams that join it, from here on.

        Raises:
            CaptureRefused: a capture is on already.
        """
        self._context.check_usable()
        own = own_stream(self._context, stream, "begin_capture")
        self._context.refuse_in_capture("begin_capture")
        self._capture = Capture(own)
        self._context.capturing_on = own.label
        own.capture = self._capture

    def end_capture(self, stream: Stream) -> CpuGraph:
        """Stop recording and give the graph.

        Raises:
            CaptureRefused: the capture did not begin on this stream (it goes on), or another stream took part
                and was not joined back (it is dropped, as in CUDA).
        """
        capture = self._capture_of(stream, "end_capture")
        unjoined = capture.unjoined_streams()
        if unjoined:
            self._drop(capture)
            raise refusals.unjoined([other.label for other in unjoined], capture.origin.label)
        graph = CpuGraph(self._context, capture)
        self._drop(capture)
        return graph

    def abort_capture(self, stream: Stream) -> None:
        """Stop recording and drop what was recorded."""
        self._drop(self._capture_of(stream, "abort_capture"))

    def _capture_of(self, stream: Stream, what: str) -> CpuCapture:
        self._context.check_usable()
        own = own_stream(self._context, stream, what)
        if self._capture is None or self._capture.origin is not own:
            raise refusals.not_the_origin(what, "no capture" if self._capture is None else own.label)
        return self._capture

    def _drop(self, capture: CpuCapture) -> None:
        self._capture = None
        self._context.capturing_on = ""
        capture.close()

    # -- end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the OS threads; arrays stay readable.  Closing twice is legal.

        Raises:
            DeviceFault: a canary was overwritten; the device is closed nevertheless.
        """
        if self._context.close():
            self._capture = None
            self._context.raise_overwritten(self._context.memory.check())

    def _own_array(self, array: object, what: str) -> None:
        if not isinstance(array, np.ndarray) or self._context.memory.owner(array) is None:
            raise refusals.foreign_array(what, array)


def _require(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise refusals.setting("cpu", what, expected, got)
