"""The device protocol: what the library asks of a device, whatever executes it.

Two devices implement it: `cpu` (CUDA sources on fibers, no GPU, no driver) and `cuda` (CuPy).  A ledger
decides on the host; what it decided is submitted here, always on an explicit stream.  The protocol knows
no page, no row and no sequence.  Clauses: C12 (order of work), C14.4 (one stream, nothing allocated),
C15.1 (stable addresses under graphs).

    device.load(spec) -> module -> kernel.launch(grid, block, arguments, stream)
    device.copy / device.call / event.record and wait: the other things a stream carries
    begin_capture ... end_capture -> graph.launch(stream)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

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

    cuBLAS refuses to run on a capturing stream, so `matmul`, `dot`, `einsum` and `@` are refused under capture on
    every device.  A function with this mark is allowed on `cpu`, and only there.
    """
    setattr(function, CPU_ONLY_ATTRIBUTE, True)
    return function


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """What to compile: files of `cuda_src`, or the text of an embedder, as one translation unit.

    Attributes:
        name: for messages and file names; letters, digits, `_` and `-`.
        sources: file names in `cuda_src`, in order.
        defines: preprocessor definitions, in order.
        text: CUDA C++ text compiled after `runtime.cuh`; a `__shared__` array is allowed in it.
        kernels: names to export from `text` (`extern "C" __global__ void name(...)`).  Sources export theirs
            with `PK_EXPORT(name)`.
    """

    name: str
    sources: tuple[str, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of a captured graph, as it was recorded.

    Attributes:
        kind: "kernel", "copy" or "call".
        name: the kernel's or function's name; "copy" for a copy.
        grid: blocks; (0, 0, 0) unless a kernel.
        block: threads; (0, 0, 0) unless a kernel.
        argument_bytes: frozen arguments: 8 bytes per kernel argument; address, address and byte count of a copy;
            empty for a call.
        dependencies: indices of the nodes that must have run.
        reads: (address, bytes) of the pinned slices that a launch declared.
    """

    kind: str
    name: str
    grid: Extent
    block: Extent
    argument_bytes: bytes
    dependencies: tuple[int, ...]
    reads: tuple[tuple[int, int], ...] = ()


class Event(Protocol):
    """A point in the work of a stream."""

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
        """Wait on the host until everything submitted has run."""

    def record(self, event: Event) -> None:
        """Let `event` stand for everything submitted to this stream so far."""

    def wait(self, event: Event) -> None:
        """Let later submissions run only after what `event` stands for."""


class Kernel(Protocol):
    """One compiled kernel."""

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
    ) -> None:
        """Submit one launch.

        Args:
            grid: blocks in x, y, z; each at least 1.
            block: threads in x, y, z; product at most 1024.
            arguments: per parameter a device or pinned array (C-contiguous), None (null), or a NumPy scalar of
                exactly the parameter's type.  Python numbers have no type and are refused.
            stream: where the launch goes.
            reads: pinned slices that the kernel reads, for checks of their re-use.
        """


class Module(Protocol):
    """Compiled kernels of one `ModuleSpec`."""

    @property
    def spec(self) -> ModuleSpec:
        """What was compiled."""

    def kernel(self, name: str) -> Kernel:
        """Give the kernel exported under `name`."""


class Graph(Protocol):
    """Recorded work with frozen arguments; replay reads memory at the recorded addresses (C15.1)."""

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The recorded nodes, in submission order."""

    def launch(self, stream: Stream) -> None:
        """Submit all nodes; one driver call."""

    def upload(self, stream: Stream) -> None:
        """Move the graph to the device ahead of its first launch."""


class Device(Protocol):
    """An executor of kernels, copies and calls on streams."""

    @property
    def name(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def description(self) -> str:
        """One line: which device this is, and why it was chosen."""

    @property
    def driver_calls(self) -> int:
        """Launches, copies, calls, records, waits, queries, synchronizations and graph launches so far."""

    def empty(
        self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None
    ) -> Array:
        """Allocate device memory; its content is poison on `cpu`.  `name` is for messages."""

    def zeros(
        self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None
    ) -> Array:
        """Allocate device memory of zero bytes; `name` is for messages."""

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate host memory that kernels and asynchronous copies may use; its address never changes."""

    def stream(self) -> Stream:
        """Make a stream."""

    def event(self) -> Event:
        """Make an event."""

    def load(self, spec: ModuleSpec) -> Module:
        """Compile, or take from the cache, and load."""

    def copy(self, destination: Array, source: Array, stream: Stream) -> None:
        """Submit a copy of equal dtype and byte count between C-contiguous arrays, either side host or device."""

    def readable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give a host array to read that an operation writes; the caller has waited for that operation.

        No driver call, and on a GPU no check either; the cpu device in deferred mode refuses a read that comes
        before the wait.
        """

    def call(self, stream: Stream, fn: Callable[..., Any], *arguments: Any) -> None:
        """Submit array work written in Python; what it may be: `calls.py`."""

    def begin_capture(self, stream: Stream) -> None:
        """Record submissions to `stream`, and to streams that join it, from here on."""

    def end_capture(self, stream: Stream) -> Graph:
        """Stop recording and give the graph."""

    def abort_capture(self, stream: Stream) -> None:
        """Stop recording and drop what was recorded."""

    def address(self, array: Array) -> int:
        """Give the device address of the first element."""

    def memory_bytes(self) -> tuple[int, int]:
        """Give free and total memory, in bytes, as the runtime reports them."""

    def empty_caches(self) -> int:
        """Give memory that this process's allocators keep for later back, and say how many bytes they held."""

    def close(self) -> None:
        """Release threads and workspaces; later use is refused, arrays stay readable."""


def scalar_bytes(value: np.generic) -> int:
    """Give the size of a NumPy scalar argument, in bytes."""
    return int(value.dtype.itemsize)
