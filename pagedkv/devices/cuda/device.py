"""The cuda device: one NVIDIA GPU through CuPy.

The same kernels as on `cpu`, compiled by NVRTC without fused or approximate arithmetic, so that results are the same
bits.  What it refuses it refuses in the words of the cpu device.

Arrays are `cupy.ndarray`.  Frameworks that speak DLPack share them without a copy, in both directions:
`cupy.from_dlpack(tensor)` is an array of this device, and `torch.from_dlpack(array)` a tensor over a cache plane.
Their own work goes on our stream with `torch.cuda.ExternalStream(stream.native.ptr)`.

Capture runs in the thread-local mode, in which CUDA refuses allocation, and array functions of `call` take their
temporaries from a pool that the graph keeps.  So run the same work once before `begin_capture`: it compiles CuPy's
kernels and fills the pool.  A `call` reaches CUDA as one launch per array operation, compiled by CuPy, which
flushes subnormals and fuses; arrays that it makes from a shape take `like=` (`np.arange(n, like=x)`), and an array
made from a Python list inside a captured call would be read again at replay from memory that is gone.

Clauses: C12.4 (faults are answers), C14.4 (streams are explicit), C15.1 (addresses are stable).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices import refusals
from pagedkv.devices.calls import check_call, freeze_call
from pagedkv.devices.captures import Capture
from pagedkv.devices.cpu.compiler import Announce, announce_on_stderr
from pagedkv.devices.cuda.compiler import compile_module
from pagedkv.devices.cuda.context import CudaContext
from pagedkv.devices.cuda.graph import CudaGraph
from pagedkv.devices.cuda.kernels import CudaModule
from pagedkv.devices.cuda.runtime import CudaRuntime, check_options, find_cupy
from pagedkv.devices.cuda.streams import CapturedNode, CudaCapture, CudaEvent, CudaStream, own_stream
from pagedkv.devices.protocol import CPU_ONLY_ATTRIBUTE, ModuleSpec, Shape, Stream
from pagedkv.errors import CaptureRefused, DeviceFault, MisuseError

_SCALARS = (int, float, bool, np.generic)

_HOST_TO_HOST, _HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = range(4)  # cudaMemcpyKind


class CudaDevice:
    """The GPU that is current when it is opened.

    Args:
        reason: why this device was chosen; part of `description`.
        options: further options of NVRTC, for example "--generate-line-info".
        announce: told in one line when something is compiled, which happens once per machine.
        runtime: the door to CuPy; tests hand in one without a GPU.

    Raises:
        MissingRequirement: no CuPy, no driver, no GPU, or one that is too old; says which.
        MisuseError: an option that changes bits.
    """

    name = "cuda"

    def __init__(
        self,
        *,
        reason: str = "",
        options: tuple[str, ...] = (),
        announce: Announce = announce_on_stderr,
        runtime: CudaRuntime | None = None,
    ) -> None:
        check_options(options)
        api = CudaRuntime(find_cupy()) if runtime is None else runtime
        self._context = CudaContext(api)
        self._options = options
        self._announce = announce
        self._reason = reason
        properties = api.invoke("cuda.runtime.getDeviceProperties", self._context.index)
        self._gpu = properties["name"].decode()
        self.architecture = f"sm_{properties['major']}{properties['minor']}"
        self._stream_numbers = itertools.count()
        self._modules: dict[ModuleSpec, CudaModule] = {}
        self._capture: CudaCapture | None = None

    def __repr__(self) -> str:
        return f"<{self.description}>"

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """One line: which device, and why."""
        version = self._context.api.find("__version__")
        line = f"cuda device: {self._gpu} ({self.architecture}), CuPy {version}"
        return f"{line}; {self._reason}" if self._reason else line

    @property
    def driver_calls(self) -> int:
        """Launches, copies, calls, records, waits, queries, synchronizations and graph launches so far."""
        return self._context.api.calls

    def memory_bytes(self) -> tuple[int, int]:
        """Give free and total memory of the GPU, in bytes, as the driver reports them.  (C5.3)"""
        self._context.check_usable()
        self._context.refuse_in_capture("memory_bytes")
        free, total = self._context.api.invoke("cuda.runtime.memGetInfo")
        return int(free), int(total)

    def empty_caches(self) -> int:
        """Give the freed blocks of this device and of CuPy's default pool back; say how many bytes they held.  (C5.3)

        Pools that graphs hold stay: their bytes are the replays'.
        """
        self._context.check_usable()
        self._context.refuse_in_capture("empty_caches")
        return self._context.memory.empty_caches()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live arrays that `empty` and `zeros` handed out: exact spans, without the pool's rounding."""
        return self._context.memory.allocated_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the live arrays that `pinned` handed out, and of staging."""
        return self._context.memory.pinned_bytes

    def address(self, array: Any) -> int:
        """Give the address of the first element of an array of this device."""
        api = self._context.api
        if isinstance(array, api.array_type) and array.data.device_id == self._context.index:  # type: ignore[attr-defined]
            return int(array.data.ptr)  # type: ignore[attr-defined]
        if isinstance(array, np.ndarray) and self._context.memory.owner(array) is not None:
            return int(array.ctypes.data)
        raise refusals.foreign_array("address", array)

    # -- memory --------------------------------------------------------------------------------------------

    def empty(
        self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None
    ) -> Any:
        """Allocate device memory; its content is whatever lay there.  `name` is for messages."""
        self._context.check_usable()
        self._context.refuse_in_capture("allocation")
        return self._context.memory.array(shape, dtype, align_bytes=align_bytes, name=name)

    def zeros(
        self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None
    ) -> Any:
        """Allocate device memory of zero bytes; waits for the GPU.  `name` is for messages."""
        array = self.empty(shape, dtype, align_bytes=align_bytes, name=name)
        self._context.memory.clear(array)
        return array

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate host memory at a fixed address; kernels may use it too.  `name` is for messages."""
        self._context.check_usable()
        self._context.refuse_in_capture("allocation")
        return self._context.memory.pinned(shape, dtype, name=name)

    # -- work ----------------------------------------------------------------------------------------------

    def stream(self) -> CudaStream:
        """Make a stream; it does not wait for the legacy default stream."""
        self._context.check_usable()
        return CudaStream(self._context, self, f"stream {next(self._stream_numbers)}")

    def event(self) -> CudaEvent:
        """Make an event; it carries no time."""
        self._context.check_usable()
        return CudaEvent(self._context)

    def load(self, spec: ModuleSpec) -> CudaModule:
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
        compiled = compile_module(
            self._context.api, spec, self.architecture, options=self._options, announce=self._announce
        )
        module = CudaModule(self._context, spec, compiled)
        self._modules[spec] = module
        return module

    def copy(self, destination: Any, source: Any, stream: Stream) -> None:
        """Submit a copy; see `protocol.Device.copy`.

        A pageable source is read before this returns.  A pageable destination is written before this returns, because
        CUDA waits for it.

        Raises:
            MisuseError: size, dtype or contiguity differ, or neither side is this device's.
            CaptureRefused: a side is pageable host memory and the stream is capturing.
        """
        context = self._context
        context.check_usable()
        own = own_stream(context, stream, "copy")
        for side, array in (("destination", destination), ("source", source)):
            is_plain = type(array) is np.ndarray or self._is_native(array)
            if not is_plain or not array.flags.c_contiguous:
                expected = f"a C-contiguous cupy.ndarray or numpy.ndarray as {side}"
                raise refusals.copy_sides(expected, refusals.array_text(array))
        if destination.dtype != source.dtype or destination.nbytes != source.nbytes:
            expected = f"{refusals.array_text(source)} in {source.nbytes} bytes"
            raise refusals.copy_sides(expected, refusals.array_text(destination))
        if not self._is_native(destination) and not destination.flags.writeable:
            raise refusals.copy_sides("a writable destination", "a read-only one")
        pageable = [not self._is_own(array) for array in (destination, source)]
        if all(pageable):
            raise refusals.copy_sides("at least one side of this device", "pageable host memory on both sides")
        if own.is_capturing and any(pageable):
            raise refusals.pageable_in_capture()
        if not destination.nbytes:
            context.api.count()
            return
        to, kind = self._address(destination), self._copy_kind(destination, source)
        if pageable[1]:
            for address, offset, byte_count in own.staging.pieces(source):
                context.api.invoke("cuda.runtime.memcpyAsync", to + offset, address, byte_count, kind, own.native.ptr)
            return
        words = (to, self._address(source), destination.nbytes)
        context.api.invoke("cuda.runtime.memcpyAsync", *words, kind, own.native.ptr)
        own.note(CapturedNode("copy", "copy", argument_bytes=np.array(words, "<u8").tobytes(),
                              keep=(destination, source)))

    def readable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give host memory for reading: the array itself, because only the cpu device knows what is still to come."""
        return array

    def call(self, stream: Stream, fn: Callable[..., Any], *arguments: Any) -> None:
        """Submit array work written in Python, on CuPy arrays; see `calls.py`.

        Under capture the function runs once, now, and what it launches is recorded.

        Args:
            stream: where it goes.
            fn: a plain module-level function; not `cpu_only`.
            arguments: arrays of this device and pinned arrays, passed as CuPy views, and scalars, frozen.

        Raises:
            MisuseError: the function or an argument can change behind the device's back, or is for the cpu only.
            CaptureRefused: a library matrix product under capture, an allocation that no warm-up made room for, or a
                value read back.
        """
        context = self._context
        context.check_usable()
        own = own_stream(context, stream, "call")
        frozen = tuple(self._call_argument(fn, argument) for argument in arguments)
        name = getattr(fn, "__qualname__", "call")
        if getattr(fn, CPU_ONLY_ATTRIBUTE, False):
            raise MisuseError(
                f"call of {name}",
                expected="a function that runs on the cuda device",
                got="one marked cpu_only",
                remedy="use a kernel, as cuda_src/kernels/linear.cu for matrix products",
                clause="C15.1",
            )
        if own.is_capturing:
            fn = freeze_call(fn)
        else:
            check_call(fn)
        context.api.count()
        with context.api.current(own.native, context.call_pool, f"call of {name}"):
            fn(*frozen)
        own.note(CapturedNode("call", name, keep=frozen))

    # -- capture -------------------------------------------------------------------------------------------

    def begin_capture(self, stream: Stream) -> None:
        """Record submissions to `stream`, and to streams that join it, from here on.

        Raises:
            CaptureRefused: a capture is on already.
        """
        context = self._context
        context.check_usable()
        own = own_stream(context, stream, "begin_capture")
        context.refuse_in_capture("begin_capture")
        mode = context.api.find("cuda.runtime.streamCaptureModeThreadLocal")
        context.api.invoke("cuda.Stream.begin_capture", own.native, mode)
        context.memory.keeps_freed = True
        self._capture = Capture(own)
        context.capturing_on = own.label
        own.capture = self._capture

    def end_capture(self, stream: Stream) -> CudaGraph:
        """Stop recording and give the graph.

        Raises:
            CaptureRefused: the capture did not begin on this stream (it goes on), or another stream took part
                and was not joined back, or something broke the capture (it is dropped, as in CUDA).
        """
        capture = self._capture_of(stream, "end_capture")
        unjoined = capture.unjoined_streams()
        if unjoined:
            self.abort_capture(stream)
            raise refusals.unjoined([other.label for other in unjoined], capture.origin.label)
        try:
            native = self._context.api.invoke("cuda.Stream.end_capture", capture.origin.native)
        finally:
            self._drop(capture)
        return CudaGraph(self._context, capture, native, self._context.take_call_pool())

    def abort_capture(self, stream: Stream) -> None:
        """Stop recording and drop what was recorded."""
        capture = self._capture_of(stream, "abort_capture")
        self._drop(capture)
        try:
            self._context.api.invoke("cuda.Stream.end_capture", capture.origin.native)
        except (CaptureRefused, DeviceFault):
            # CUDA ends the capture and says what broke it; whoever aborts knows that already.  A fault of the device
            # comes back with the next call.
            return

    def _capture_of(self, stream: Stream, what: str) -> CudaCapture:
        self._context.check_usable()
        own = own_stream(self._context, stream, what)
        if self._capture is None or self._capture.origin is not own:
            raise refusals.not_the_origin(what, "no capture" if self._capture is None else own.label)
        return self._capture

    def _drop(self, capture: CudaCapture) -> None:
        self._capture = None
        self._context.capturing_on = ""
        capture.close()
        self._context.memory.free_kept()

    # -- end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unload modules and become unusable; arrays stay readable.  Closing twice is legal."""
        if self._context.close():
            self._capture = None
            self._modules.clear()

    # -- arrays --------------------------------------------------------------------------------------------

    def _is_native(self, array: object) -> bool:
        return isinstance(array, self._context.api.array_type)

    def _is_own(self, array: Any) -> bool:
        if self._is_native(array):
            return bool(array.data.device_id == self._context.index)
        return self._context.memory.owner(array) is not None

    def _address(self, array: Any) -> int:
        return int(array.data.ptr) if self._is_native(array) else int(array.ctypes.data)

    def _copy_kind(self, destination: Any, source: Any) -> int:
        if self._is_native(destination):
            return _DEVICE_TO_DEVICE if self._is_native(source) else _HOST_TO_DEVICE
        return _DEVICE_TO_HOST if self._is_native(source) else _HOST_TO_HOST

    def _call_argument(self, fn: Callable[..., Any], argument: Any) -> Any:
        if self._is_native(argument):
            if self._is_own(argument):
                return argument.view()
        elif type(argument) is np.ndarray:
            if self._context.memory.owner(argument) is not None:
                return self._context.device_view(argument)
        elif isinstance(argument, _SCALARS):
            return argument
        raise refusals.call_argument(fn, argument)
