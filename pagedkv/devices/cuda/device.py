"""The cuda device: one NVIDIA GPU through CuPy.

NVRTC compiles the kernels of the cpu device without fused or approximate arithmetic, so results are the same bits.

Arrays are `cupy.ndarray`.  Frameworks with DLPack share them without a copy, in both directions:
`cupy.from_dlpack(tensor)` is an array of this device, and `torch.from_dlpack(array)` is a tensor over a cache plane.
Their own work runs on our stream with `torch.cuda.ExternalStream(stream.native.ptr)`.

Capture uses CUDA's thread-local mode, which refuses allocation; the array functions of `call` take their temporaries
from a pool that the graph keeps.  So run the same work once before `begin_capture`: that compiles CuPy's kernels and
fills the pool.  CuPy compiles one launch per array operation, flushes subnormals and fuses.  An array that a captured
function makes from a shape needs `like=` (`np.arange(n, like=x)`); never make one from a Python list there, because
the replay would read memory that was freed.

Clauses: C12.4 (faults are answers), C14.4 (streams are explicit), C15.1 (addresses are stable).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.devices.cache_folder import Announce, announce_on_stderr
from pagedkv.devices.cuda.compiler import check_options, compile_module
from pagedkv.devices.cuda.context import CudaContext
from pagedkv.devices.cuda.kernels import CudaModule
from pagedkv.devices.cuda.runtime import CudaRuntime, find_cupy
from pagedkv.devices.cuda.streams import CudaEvent, CudaGraph, CudaStream
from pagedkv.devices.device import BaseDevice
from pagedkv.devices.protocol import CPU_ONLY_ATTRIBUTE, ModuleSpec, Stream
from pagedkv.devices.streams import Capture
from pagedkv.errors import MisuseError

_HOST_TO_HOST, _HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = range(4)  # cudaMemcpyKind


class CudaDevice(BaseDevice):
    """The GPU that is current when it is opened.

    Args:
        reason: why this device was chosen; part of `description`.
        options: further options of NVRTC, for example "--generate-line-info".
        announce: called with one line when something is compiled, which happens once per machine.
        runtime: the door to CuPy; tests pass one without a GPU.

    Raises:
        MissingRequirement: no CuPy, no driver, no GPU, or one that is too old; says which.
        MisuseError: an option that changes bits.
    """

    name = "cuda"
    array_words = "cupy.ndarray or numpy.ndarray"
    _context: CudaContext

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
        super().__init__(CudaContext(api), reason)
        self._options = options
        self._announce = announce
        properties = api.invoke("cuda.runtime.getDeviceProperties", self._context.index)
        self._gpu = properties["name"].decode()
        self.architecture = f"sm_{properties['major']}{properties['minor']}"

    def _summary(self) -> str:
        version = self._context.api.find("__version__")
        return f"cuda device: {self._gpu} ({self.architecture}), CuPy {version}"

    def memory_bytes(self) -> tuple[int, int]:
        """Give free and total memory of the GPU, in bytes, as the driver reports them.  (C5.3)"""
        self._context.check_outside_capture("memory_bytes")
        free, total = self._context.api.invoke("cuda.runtime.memGetInfo")
        return int(free), int(total)

    def empty_caches(self) -> int:
        """Return the freed blocks of this device and of CuPy's default pool; say how many bytes.  (C5.3)

        Pools of graphs keep their bytes for the replays.
        """
        self._context.check_outside_capture("empty_caches")
        return self._context.memory.empty_caches()

    def stream(self) -> CudaStream:
        """Make a stream; it does not wait for the legacy default stream."""
        self._context.check_usable()
        self._streams_count += 1
        return CudaStream(self._context, self, self._streams_count - 1)

    def event(self) -> CudaEvent:
        """Make an event; it carries no time."""
        self._context.check_usable()
        return CudaEvent(self._context)

    def call(self, stream: Stream, fn: Callable[..., Any], *arguments: Any) -> None:
        """Run array work written in Python, now and on CuPy arrays; a capture records what it launches."""
        if getattr(fn, CPU_ONLY_ATTRIBUTE, False):
            raise MisuseError(
                f"call of {getattr(fn, '__qualname__', 'call')}", expected="a function that runs on the cuda device",
                got="one marked cpu_only", clause="C15.1",
                remedy="use a kernel, as cuda_src/kernels/linear.cu for matrix products",
            )
        super().call(stream, fn, *arguments)

    # -- how checked work runs -----------------------------------------------------------------------------

    def _compile(self, spec: ModuleSpec) -> CudaModule:
        context = self._context
        compiled = compile_module(context.api, spec, self.architecture, options=self._options, announce=self._announce)
        return CudaModule(context, spec, compiled)

    def _submit_copy(self, destination: Any, source: Any, stream: CudaStream, *, is_source_pageable: bool) -> None:
        context = self._context
        if not destination.nbytes:
            context.api.count()
            return
        if context.is_native(destination):
            kind = _DEVICE_TO_DEVICE if context.is_native(source) else _HOST_TO_DEVICE
        else:
            kind = _DEVICE_TO_HOST if context.is_native(source) else _HOST_TO_HOST
        to = context.address(destination)
        pieces = [(context.address(source), 0, int(destination.nbytes))]
        for address, offset, byte_count in stream.staging.pieces(source) if is_source_pageable else pieces:
            context.api.invoke("cuda.runtime.memcpyAsync", to + offset, address, byte_count, kind, stream.native.ptr)
        words = np.array((to, *pieces[0][::2]), "<u8")
        stream.note((destination, source), "copy", "copy", argument_bytes=words.tobytes())

    def _submit_call(self, name: str, fn: Callable[..., Any], arguments: tuple[Any, ...], stream: CudaStream) -> None:
        context = self._context
        context.api.count()
        with context.api.current(stream.native, context.call_pool, f"call of {name}"):
            fn(*arguments)
        stream.note(arguments, "call", name)

    def _begin_native(self, stream: CudaStream) -> None:
        mode = self._context.api.find("cuda.runtime.streamCaptureModeThreadLocal")
        self._context.api.invoke("cuda.Stream.begin_capture", stream.native, mode)
        self._context.memory.keeps_freed = True

    def _end_native(self, stream: CudaStream) -> Any:
        return self._context.api.invoke("cuda.Stream.end_capture", stream.native)

    def _drop(self, capture: Capture[Any]) -> None:
        super()._drop(capture)
        self._context.memory.free_waiting()

    def _graph(self, capture: Capture[tuple[Any, ...]], native: Any) -> CudaGraph:
        return CudaGraph(self._context, capture, native)
