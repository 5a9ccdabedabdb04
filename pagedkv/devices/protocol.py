"""The device protocol: what the library asks of a device.

Two devices implement it: `cpu` (CUDA sources on fibers, no GPU, no driver) and `cuda` (CuPy).  A ledger decides on the
host; the library submits the work to a device, always on an explicit stream.  The protocol knows no page, row or
sequence.  Clauses: C12 (order of work), C14.4 (one stream, nothing allocated), C15.1 (stable addresses under graphs).

    device.load(spec) -> module -> kernel.launch(grid, block, arguments, stream)
    device.copy, device.call, stream.record, stream.wait: the other work of a stream
    begin_capture ... end_capture -> graph.launch(stream)

Every method refuses a closed device, a device of the parent process after a fork, and a stream, event or array of
another device: MisuseError.  Several stores of one thread may use one device; while one is open, every other thread is
refused (MisuseError), and a DeviceFault latches all of them (C12.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy.typing as npt

from pagedkv.devices.users import Users

# numpy.ndarray on `cpu` (memory owned by the device), cupy.ndarray on `cuda`.  BF16 arrays are uint16 bits.
Array: TypeAlias = Any

Extent: TypeAlias = tuple[int, int, int]
Shape: TypeAlias = int | tuple[int, ...]

THREADS_PER_BLOCK_MAX = 1024
BLOCK_EXTENT_MAX: Extent = (1024, 1024, 64)
GRID_EXTENT_MAX: Extent = (2**31 - 1, 65535, 65535)

CPU_ONLY_ATTRIBUTE = "__pagedkv_cpu_only__"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cpu_only(function: _Function) -> _Function:
    """Mark a function for `call` that uses library matrix products, which CUDA cannot capture.

    cuBLAS refuses to run on a capturing stream, so every device refuses `matmul`, `dot`, `einsum` and `@` under
    capture.  The cpu device allows them in a function with this mark; the cuda device refuses the function.
    """
    setattr(function, CPU_ONLY_ATTRIBUTE, True)
    return function


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One translation unit to compile: files of `cuda_src`, or the text of an embedder.

    Attributes:
        name: for messages and file names; letters, digits, `_` and `-`.
        sources: file names in `cuda_src`, in order.
        defines: preprocessor definitions, in order.
        text: CUDA C++ text compiled after `runtime.cuh`; it may declare `__shared__` arrays.
        kernels: names to export from `text` (`extern "C" __global__ void name(...)`).  Sources export their
            kernels with `PK_EXPORT(name)`.
    """

    name: str
    sources: tuple[str, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One recorded node of a captured graph.

    Attributes:
        kind: "kernel", "copy" or "call".
        name: the kernel's or function's name; "copy" for a copy.
        grid: blocks of a kernel.
        block: threads of a kernel.
        argument_bytes: frozen arguments: 8 bytes per kernel argument; destination, source and byte count of a copy;
            empty for a call.
        dependencies: indices of the nodes that must run before it.
        reads: (address, bytes) of the pinned slices that a launch declared.
    """

    kind: str
    name: str
    dependencies: tuple[int, ...]
    grid: Extent = (0, 0, 0)
    block: Extent = (0, 0, 0)
    argument_bytes: bytes = b""
    reads: tuple[tuple[int, int], ...] = ()


class Event(Protocol):
    """A point in the work of a stream.

    During a capture both methods raise CaptureRefused; so does an event of a capture.  They raise DeviceFault when
    work before the point failed.
    """

    def synchronize(self) -> None:
        """Wait on the host until the recorded point has passed."""

    def query(self) -> bool:
        """Has the recorded point passed?  True for an event that was never recorded, as in CUDA."""


class Stream(Protocol):
    """A queue of operations that run in the order of submission."""

    @property
    def device(self) -> Device:
        """The device that made the stream."""

    @property
    def is_capturing(self) -> bool:
        """Are submissions recorded instead of run?"""

    def synchronize(self) -> None:
        """Wait on the host until everything submitted has run.

        Raises:
            CaptureRefused: a capture is on.
            DeviceFault: submitted work failed.
        """

    def record(self, event: Event) -> None:
        """Move `event` to the end of the work that this stream has now."""

    def wait(self, event: Event) -> None:
        """Run later submissions only after `event`; an event of a capture joins this stream to the capture.

        Raises:
            CaptureRefused: the event lies outside of this stream's capture, or in a capture that has ended.
        """


class Kernel(Protocol):
    """One compiled kernel of a module."""

    @property
    def name(self) -> str:
        """The kernel's name in its source."""

    def launch(
        self,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Any],
        stream: Stream,
        *,
        reads: Sequence[npt.NDArray[Any]] = (),
        through: Sequence[Array] = (),
    ) -> None:
        """Submit one launch.

        Args:
            grid: blocks in x, y, z; each at least 1.
            block: threads in x, y, z; product at most 1024.
            arguments: per parameter a device or pinned array (C-contiguous), None (null), or a NumPy scalar of
                exactly the parameter's type.  A Python number has no type and is refused.
            stream: the launch runs there.
            reads: pinned slices that the kernel reads, for checks of their re-use.
            through: device arrays whose addresses the kernel reads in memory; it may read and write them.

        Raises:
            MisuseError: extents, argument count, kind or size, or an array that is not contiguous.  Nothing runs.
            DeviceFault: the kernel failed, or earlier work did; a deferred device raises it where work is forced.
        """


class Module(Protocol):
    """Compiled kernels of one `ModuleSpec`."""

    @property
    def spec(self) -> ModuleSpec:
        """The compiled translation unit."""

    def kernel(self, name: str) -> Kernel:
        """Give the kernel exported under `name`; MisuseError when there is none."""


class Graph(Protocol):
    """Recorded work with frozen arguments; replay reads memory at the recorded addresses (C15.1)."""

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The recorded nodes, in submission order."""

    def launch(self, stream: Stream) -> None:
        """Submit all nodes; one driver call.

        Raises:
            CaptureRefused: the stream is capturing.
            DeviceFault: a kernel failed, and the later nodes did not run; or earlier work failed.
        """

    def upload(self, stream: Stream) -> None:
        """Move the graph to the device ahead of its first launch."""


class DeviceState(Protocol):
    """Who uses a device, and whether it can be used now; the device alone writes it."""

    @property
    def users(self) -> Users:
        """The open stores: only their thread may use the device, and each learns of every fault."""

    @property
    def unusable(self) -> str:
        """Why the device cannot be used; empty while it is open."""

    @property
    def capturing_on(self) -> str:
        """The label of the stream on which a capture began; empty when none is on."""

    def check_outside_capture(self, what: str) -> None:
        """Refuse a device that cannot be used (MisuseError), or one with a capture on any stream (CaptureRefused)."""


class Device(Protocol):
    """An executor of kernels, copies and calls on streams."""

    @property
    def name(self) -> str:
        """ "cpu", "cuda" or "none"."""

    @property
    def keeps_bytes(self) -> bool:
        """Whether arrays keep what is written; "none" keeps nothing."""

    @property
    def description(self) -> str:
        """One line: which device this is, and why it was chosen."""

    @property
    def state(self) -> DeviceState:
        """Who uses the device, and whether it can be used now."""

    @property
    def driver_calls(self) -> int:
        """Launches, copies, calls, records, waits, queries, synchronizations and graph launches so far."""

    def empty(self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None) -> Array:
        """Allocate device memory; its content is 0xFF on `cpu`, anything on `cuda`.

        Args:
            shape: as in NumPy.
            dtype: as in NumPy; no objects.
            align_bytes: a power of two, 1 to 4096.
            name: for messages.

        Raises:
            MisuseError: alignment, dtype or shape.
            CapacityError: there is not so much memory.
            CaptureRefused: a capture is on.
        """

    def zeros(self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None) -> Array:
        """Allocate device memory of zero bytes, as `empty`; the cuda device waits for the GPU."""

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate host memory at a fixed address, as `empty`; kernels and asynchronous copies may use it."""

    def stream(self) -> Stream:
        """Make a stream."""

    def event(self) -> Event:
        """Make an event."""

    def load(self, spec: ModuleSpec) -> Module:
        """Compile a module, or take it from the cache, and load it.

        Raises:
            MisuseError: the compiler refuses the source.
            MissingRequirement: the cache folder cannot be made.
            CaptureRefused: a capture is on.
        """

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Submit a copy of equal dtype and byte count between C-contiguous arrays, either side host or device.

        The device has read a pageable source before the method returns.  The cuda device also writes a pageable
        destination before that, because CUDA waits for it.

        Raises:
            MisuseError: size, dtype or contiguity differ, or neither side is memory of this device.
            CaptureRefused: a side is pageable host memory and the stream is capturing.
        """

    def require_usable(self, what: str, array: Array, *, is_written: bool) -> None:
        """Refuse what no kernel of this device may use: the check of an array argument of a launch, ahead of it.

        Raises:
            MisuseError: no plain array of this device, not contiguous, beyond its buffer, at an address that its dtype
                does not allow, or read-only though the kernel writes it.
        """

    def readable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give a host array that an operation writes, for reading; the caller has waited for that operation.

        No driver call.  Only the cpu device in deferred mode checks: it raises StreamHazard for a read before the wait.
        """

    def call(self, stream: Stream, fn: Callable[..., Any], *arguments: Any) -> None:
        """Submit array work written in Python; `calls.py` says which functions are legal.

        The cuda device runs the function at once, also under capture, and records what it launches.

        Args:
            stream: the function runs there.
            fn: a plain module-level function.
            arguments: arrays of this device and pinned arrays, passed as views, and scalars, frozen.

        Raises:
            MisuseError: the function or an argument can change between replays, or the function is for the cpu only.
            CaptureRefused: a library matrix product under capture in a function that is not `cpu_only`; on `cuda`
                also an allocation for which no warm-up made room, or a value read back.
        """

    def begin_capture(self, stream: Stream) -> None:
        """Record the later submissions to `stream`, and to streams that join it.

        Raises:
            CaptureRefused: a capture is on.
        """

    def end_capture(self, stream: Stream) -> Graph:
        """Stop recording and give the graph.

        Raises:
            CaptureRefused: the capture did not begin on this stream (it stays open); or another stream took part and
                was not joined back, or something broke the capture (the capture is dropped, as in CUDA).
        """

    def abort_capture(self, stream: Stream) -> None:
        """Stop recording and drop what was recorded."""

    def address(self, array: Array) -> int:
        """Give the device address of the first element."""

    def memory_bytes(self) -> tuple[int, int]:
        """Give free and total memory, in bytes, as the runtime reports them."""

    def empty_caches(self) -> int:
        """Return the memory that this process's allocators keep for later, and say how many bytes that was."""

    def close(self) -> None:
        """Release threads and workspaces; arrays stay readable, and closing twice is legal.

        Raises:
            DeviceFault: the cpu device found writes around a buffer; it is closed nevertheless.
        """
