"""A CuPy without a GPU: CuPy's names and signatures, CUDA's refusals, and the cpu device to run the kernels.

    CudaDevice(runtime=CudaRuntime(FakeCupy(cpu_device)))

The product runs above the one door (`pagedkv/devices/cuda/runtime.py`), this file below it.  A stream runs work at
once, so tests prove nothing about order here (`tests/gpu` does that).  They prove which calls the cuda device makes to
CuPy, in which order, and what it does after a refusal.  Only the names that the device uses exist, and a test compares
them with CuPy's own docstrings.

    capture   streams that take part record their work; a stream joins by waiting for a captured event
              refused: allocation that the pool cannot serve, synchronization, queries, the default stream,
              streams that were not joined, matrix products, values read back; a refusal breaks the capture
    memory    the GPU hands blocks of a dead pool out again at once, so a graph that lost its pool fails
    kernels   NVRTC is the cpu device's compiler, and gives the signatures as its PTX would
"""

from __future__ import annotations

import ctypes
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.devices.cpu.compiler import build
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cpu.kernels import CpuModule
from pagedkv.devices.kernels import Launch
from pagedkv.devices.protocol import ModuleSpec
from pagedkv.errors import DeviceFault
from tests.cuda.fake_arrays import FakeArray

THREAD_LOCAL = 1  # the capture mode
LAUNCH_FAILED, NOT_PERMITTED, INVALIDATED, UNJOINED, IMPLICIT = 719, 900, 901, 904, 906
_EXPORT = re.compile(r"\bPK_EXPORT\s*\(\s*(\w+)\s*\)")


class CUDARuntimeError(RuntimeError):
    """As CuPy's: a status and a text."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text or f"cudaError {status}")
        self.status = status


class CUDADriverError(RuntimeError): ...


class NVRTCError(RuntimeError): ...


class OutOfMemoryError(MemoryError): ...


class FakeCupy:
    """The module `cupy` of one machine, with one GPU of architecture sm_90 and `memory_bytes`.

    `device` runs the kernels and maps the memory; `log` holds the names of the runtime calls, in order.
    """

    __version__ = "14.2.0"

    def __init__(self, device: CpuDevice, *, memory_bytes: int = 1 << 30) -> None:
        self.device = device
        self.memory_bytes = memory_bytes
        self.mapped_bytes = 0
        self.log: list[str] = []
        self.streams: list[Any] = []  # the stack of `with stream`
        self.allocators: list[Callable[[int], Any]] = []
        self.handles: dict[int, Any] = {}
        self.recording: Recording | None = None
        self.free_blocks: dict[int, list[np.ndarray]] = {}
        self.fail_with = 0  # a status that the next synchronization reports
        self.ndarray: type = type("ndarray", (FakeArray,), {"machine": self})
        self.default_pool = MemoryPool(self)
        self.cuda = _cuda(self)

    def get_default_memory_pool(self) -> MemoryPool:
        return self.default_pool

    # ---- what arrays ask -------------------------------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        return bool(self.streams) and self.streams[-1].recording is not None

    def submit(self, work: Callable[[], object]) -> None:
        if self.recording is not None and not self.streams:
            raise self.capture_error(IMPLICIT)
        self.submit_on(self.streams[-1] if self.streams else None, work)

    def submit_on(self, stream: Any, work: Callable[[], object]) -> None:
        if stream is not None and stream.recording is not None:
            stream.recording.add(stream, work)
        else:
            work()

    def allocate(self, byte_count: int) -> Any:
        return (self.allocators[-1] if self.allocators else self.default_pool.malloc)(byte_count)

    def capture_error(self, status: int) -> CUDARuntimeError:
        if self.recording is not None:
            self.recording.is_broken = True
        return CUDARuntimeError(status)

    def forbid_in_capture(self) -> None:
        if self.recording is not None:
            raise self.capture_error(NOT_PERMITTED)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def map(self, byte_count: int) -> np.ndarray:
        """Give GPU memory as cudaMalloc does: freed blocks first."""
        self.forbid_in_capture()
        if found := self.free_blocks.get(byte_count):
            return found.pop()
        if self.mapped_bytes + byte_count > self.memory_bytes:
            raise OutOfMemoryError(f"Out of memory allocating {byte_count} bytes")
        self.mapped_bytes += byte_count
        block: np.ndarray = self.device.empty((byte_count,), np.uint8, align_bytes=512)
        return block

    def unmap(self, block: np.ndarray) -> None:
        """Take GPU memory back; its bytes stay mapped, so that a late write lands in the next owner's."""
        self.free_blocks.setdefault(block.size, []).append(block)

    def handle(self, thing: Any) -> int:
        """Give a number for a thing, as CUDA does."""
        number = 4096 + 16 * len(self.handles)
        self.handles[number] = thing
        return number


class Recording:
    def __init__(self, origin: Any) -> None:
        self.origin = origin
        self.work: list[Callable[[], object]] = []
        self.after: list[set[int]] = []
        self.streams = [origin]
        self.is_broken = False

    def add(self, stream: Any, work: Callable[[], object]) -> None:
        self.after.append(set(stream.tail))
        self.work.append(work)
        stream.tail = {len(self.work) - 1}

    def is_joined(self) -> bool:
        reached: set[int] = set()
        pending = list(self.origin.tail)
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                pending.extend(self.after[node])
        return len(reached) == len(self.work)


# ---- memory ----------------------------------------------------------------------------------------------------------
class MemoryPointer:
    """A place in a piece of memory: `MemoryPointer(mem, offset)`."""

    device_id = 0

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.content = mem.content[offset:]


class PooledMemory:
    """One block of a pool; the last reference returns it."""

    def __init__(self, pool: MemoryPool, block: np.ndarray) -> None:
        self.pool = pool
        self.content = block
        self.ptr, self.size = int(block.ctypes.data), int(block.size)
        pool.live_bytes += block.size

    def __del__(self) -> None:
        self.pool.live_bytes -= self.content.size
        self.pool.blocks.setdefault(self.content.size, []).append(self.content)


class UnownedMemory:
    """Memory of somebody else."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = ptr, size, owner
        self.content = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(ptr))


class MemoryPool:
    """A pool that serves a request from a free block of the same size, else from the GPU."""

    def __init__(self, machine: FakeCupy) -> None:
        self.machine = machine
        self.blocks: dict[int, list[np.ndarray]] = {}
        self.live_bytes = 0

    def malloc(self, size: int) -> MemoryPointer:
        found = self.blocks.get(size)
        block = found.pop() if found else self.machine.map(size)
        return MemoryPointer(PooledMemory(self, block), 0)

    def used_bytes(self) -> int:
        return self.live_bytes

    def free_bytes(self) -> int:
        return sum(block.size for blocks in self.blocks.values() for block in blocks)

    def total_bytes(self) -> int:
        return self.used_bytes() + self.free_bytes()

    def free_all_blocks(self, stream: Any = None) -> None:
        blocks, self.blocks = self.blocks, {}
        for found in blocks.values():
            for block in found:
                self.machine.unmap(block)

    def __del__(self) -> None:
        self.free_all_blocks()


# ---- streams, events, graphs -----------------------------------------------------------------------------------------
def _stream_classes(machine: FakeCupy) -> tuple[type, type, type]:
    class Stream:
        def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False,
                     priority: int | None = None) -> None:  # fmt: skip
            assert non_blocking, "a blocking stream waits for the legacy default stream"
            self.ptr = machine.handle(self)
            self.recording: Recording | None = None
            self.tail: set[int] = set()

        def __enter__(self) -> Any:
            machine.streams.append(self)
            return self

        def __exit__(self, *error: object) -> None:
            machine.streams.pop()

        def begin_capture(self, mode: int | None = None) -> None:
            machine.log.append("begin_capture")
            assert mode == THREAD_LOCAL, "relaxed capture lets cudaMalloc through"
            machine.forbid_in_capture()
            self.recording = machine.recording = Recording(self)

        def end_capture(self) -> Any:
            machine.log.append("end_capture")
            recording = self.recording
            if recording is None or recording.origin is not self:
                raise CUDARuntimeError(903)
            machine.recording = None
            is_joined = recording.is_joined()
            for stream in recording.streams:
                stream.recording, stream.tail = None, set()
            if recording.is_broken:
                raise CUDARuntimeError(INVALIDATED)
            if not is_joined:
                raise CUDARuntimeError(UNJOINED)
            return Graph(recording.work)

    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
            assert disable_timing, "an event with times costs more and is not needed"
            self.ptr = machine.handle(self)
            self.recording: Recording | None = None
            self.nodes: set[int] = set()

    class Graph:
        def __init__(self, work: list[Callable[[], object]]) -> None:
            self.work = work

        def launch(self, stream: Any = None) -> None:
            assert stream is not None, "every launch names its stream"
            machine.log.append("Graph.launch")
            if stream.recording is not None:
                raise machine.capture_error(NOT_PERMITTED)
            for work in self.work:
                work()

        def upload(self, stream: Any = None) -> None:
            assert stream is not None, "every upload names its stream"
            machine.forbid_in_capture()

        def debug_dot_str(self, flags: int = 0) -> str:
            return f"digraph {{ nodes={len(self.work)} }}"

    return Stream, Event, Graph


# ---- the namespace below cupy.cuda -----------------------------------------------------------------------------------
def _cuda(machine: FakeCupy) -> types.SimpleNamespace:
    Stream, Event, Graph = _stream_classes(machine)

    class PinnedMemory:
        def __init__(self, size: int, flags: int = 0) -> None:
            machine.forbid_in_capture()
            self.array = machine.device.pinned((size,), np.uint8)
            self.ptr = int(self.array.ctypes.data)

        def __del__(self) -> None:
            if machine.recording is not None:
                machine.capture_error(NOT_PERMITTED)  # cudaFreeHost breaks the capture without an error here

    class BoundPool(MemoryPool):
        def __init__(self, allocator: Any = None) -> None:
            super().__init__(machine)

    @contextmanager
    def using_allocator(allocator: Any = None) -> Iterator[None]:
        machine.allocators.append(allocator)
        try:
            yield
        finally:
            machine.allocators.pop()

    return types.SimpleNamespace(
        Stream=Stream, Event=Event, Graph=Graph, MemoryPool=BoundPool, MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory, PinnedMemory=PinnedMemory, using_allocator=using_allocator,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError), runtime=_Runtime(machine),
        driver=_Driver(machine), nvrtc=_Nvrtc(machine), function=types.SimpleNamespace(Module=_module_class(machine)),
    )


class _Part:
    """A module below `cupy.cuda` of one machine."""

    def __init__(self, machine: FakeCupy) -> None:
        self._machine = machine


class _Runtime(_Part):
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = CUDARuntimeError
    streamCaptureModeThreadLocal = THREAD_LOCAL  # noqa: N815 - CuPy's name
    is_hip = False

    def driverGetVersion(self) -> int:
        return 13_000

    def getDeviceCount(self) -> int:
        return 1

    def getDevice(self) -> int:
        return 0

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        return {75: 9, 76: 0}[attrib]

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": b"a GPU that is not there", "major": 9, "minor": 0}

    def memGetInfo(self) -> tuple[int, int]:
        self._machine.forbid_in_capture()
        free = sum(block.size for blocks in self._machine.free_blocks.values() for block in blocks)
        return self._machine.memory_bytes - self._machine.mapped_bytes + free, self._machine.memory_bytes

    def deviceSynchronize(self) -> None:
        self._synchronize("deviceSynchronize")

    def memset(self, ptr: int, value: int, size: int) -> None:
        self._machine.forbid_in_capture()
        ctypes.memset(ptr, value, size)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._machine.log.append("memcpyAsync")
        self._machine.submit_on(self._machine.handles[stream], lambda: ctypes.memmove(dst, src, size))

    def eventRecord(self, event: int, stream: int) -> None:
        self._machine.log.append("eventRecord")
        point, on = self._machine.handles[event], self._machine.handles[stream]
        point.recording, point.nodes = on.recording, set(on.tail)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        self._machine.log.append("streamWaitEvent")
        point, on = self._machine.handles[event], self._machine.handles[stream]
        if self._machine.recording is None or point.recording is not self._machine.recording:
            if on.recording is not None:
                raise self._machine.capture_error(905)
            return
        if on.recording is None:
            on.recording = point.recording
            self._machine.recording.streams.append(on)
        on.tail |= point.nodes

    def eventSynchronize(self, event: int) -> None:
        self._synchronize("eventSynchronize")

    def eventQuery(self, event: int) -> int:
        self._machine.forbid_in_capture()
        status, self._machine.fail_with = self._machine.fail_with, 0
        return status

    def streamSynchronize(self, stream: int) -> None:
        self._synchronize("streamSynchronize")

    def _synchronize(self, name: str) -> None:
        self._machine.log.append(name)
        self._machine.forbid_in_capture()
        if self._machine.fail_with:
            raise CUDARuntimeError(self._machine.fail_with)


class _Driver(_Part):
    """`cupy.cuda.driver`."""

    CUDADriverError = CUDADriverError

    def launchKernel(
        self, f: int, grid_dim_x: int, grid_dim_y: int, grid_dim_z: int, block_dim_x: int, block_dim_y: int,
        block_dim_z: int, shared_mem_bytes: int, stream: int, kernel_params: int, extra: int,
    ) -> None:
        """Run the cpu device's kernel on the slots that the parameters point to."""
        machine = self._machine
        machine.log.append("launchKernel")
        kernel, executor = machine.handles[f], machine.device._context.executor
        pointers = (ctypes.c_uint64 * len(kernel.parameters)).from_address(kernel_params)
        slots = b"".join(ctypes.string_at(pointer, 8) for pointer in pointers)
        grid, block = (grid_dim_x, grid_dim_y, grid_dim_z), (block_dim_x, block_dim_y, block_dim_z)
        operation = kernel.operation(Launch(grid, block, slots))

        def run() -> None:
            try:
                operation.run(executor)
            except DeviceFault as fault:
                raise CUDARuntimeError(LAUNCH_FAILED, str(fault)) from fault

        machine.submit_on(machine.handles[stream], run)


class _Nvrtc(_Part):
    """`cupy.cuda.nvrtc`: the cpu device's compiler behind NVRTC's interface."""

    NVRTCError = NVRTCError

    def getVersion(self) -> tuple[int, int]:
        return (99, 0)  # no NVRTC has this version, so that no real device takes what lies in the cache

    def createProgram(self, src: str, name: str, headers: Any, include_names: Any) -> int:
        assert isinstance(src, str), "CuPy wants the source as text"
        assert name.encode() not in include_names, "NVRTC takes it for the source itself"
        assert all(type(item) is bytes for item in (*headers, *include_names)), "CuPy wants headers as bytes"
        return self._machine.handle(_Program(src, name, dict(zip(include_names, headers, strict=True))))

    def compileProgram(self, prog: int, options: Any) -> None:
        program = self._machine.handles[prog]
        plain = [option for option in options if not option.startswith("-D")]
        assert plain == ["--gpu-architecture=sm_90", "--std=c++17", "--fmad=false"], "what the kernel report uses"
        defines = [tuple(option[2:].partition("=")[::2]) for option in options if option.startswith("-D")]
        if "nonsense" in program.text:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        device = self._machine.device
        name = program.name.removesuffix(".cu")
        path = build(name, program.text, device.compiler, defines=tuple(defines), announce=lambda line: None)
        spec = ModuleSpec(name, text=program.text)
        program.path = path
        program.module = CpuModule(device._context, spec, ctypes.CDLL(str(path)), is_serial=True)

    def getProgramLog(self, prog: int) -> str:
        return "line 1: error: nonsense"

    def getPTX(self, prog: int) -> bytes:
        """Give the tables that PK_EXPORT leaves in PTX, trailing zeros left out as NVRTC does."""
        program = self._machine.handles[prog]
        lines = []
        for name in program.kernels():
            words = (*program.module.kernel(name).signature.words, 0)
            content = b"".join(word.to_bytes(4, "little") for word in words)
            initial = ", ".join(str(byte) for byte in content.rstrip(b"\0"))
            initializer = f" = {{{initial}}}" if initial else ""
            lines.append(f".global .align 4 .b8 pk_signature_{name}[{len(content)}]{initializer};")
        return "\n".join(lines).encode()

    def getCUBIN(self, prog: int) -> bytes:
        """Give the place of the shared library: the driver of this machine knows what it means."""
        return str(self._machine.handles[prog].path).encode()

    def destroyProgram(self, prog: int) -> None:
        return None


@dataclass
class _Program:
    """A source on its way through the compiler."""

    text: str
    name: str
    headers: dict[bytes, bytes]
    module: CpuModule = field(init=False)
    path: Path = field(init=False)

    def kernels(self) -> list[str]:
        """Give the names that the text and its headers export."""
        texts = [self.text, *(header.decode() for header in self.headers.values())]
        found = {name for text in texts for name in _EXPORT.findall(text)} - {"kernel", "name"}
        return sorted(found)


def _module_class(machine: FakeCupy) -> type:
    class Module:
        def load(self, cubin: bytes) -> None:
            machine.forbid_in_capture()
            spec = ModuleSpec("loaded", text="")
            assert Path(cubin.decode()).is_file(), "the cpu device's cache was cleared: clear pagedkv/cuda too"
            library = ctypes.CDLL(cubin.decode())
            self.module = CpuModule(machine.device._context, spec, library, is_serial=True)

        def get_function(self, name: str) -> types.SimpleNamespace:
            return types.SimpleNamespace(ptr=machine.handle(self.module.kernel(name)))

    return Module
