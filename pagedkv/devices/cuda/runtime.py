"""The one door to CuPy: every call of CUDA goes through `CudaRuntime.invoke`, which counts it.

    device modules ── invoke("cuda.runtime.memcpyAsync", ...) ──> cupy ──> the driver
                             a path below the module `cupy`

A path is text, so a test reads every call of this package from the source and compares it with CuPy's own signatures.
The door takes any module of CuPy's form, so a test without a GPU passes one that refuses what CUDA refuses.  Errors of
CuPy become errors of ours: CaptureRefused for work that CUDA forbids under capture, CapacityError for missing memory,
and DeviceFault, which latches a store, for everything else.  Clauses: C12.4, C15.1.

`invoke` counts what `Device.driver_calls` promises: launches, copies, records, waits, queries, synchronizations and
graph launches.  It does not count the making of streams, memory and modules.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagedkv.devices.users import Users
from pagedkv.errors import CapacityError, CaptureRefused, DeviceFault, MissingRequirement

CUPY_MAJOR_MIN = 14
CAPABILITY_MIN = (8, 0)

COUNTED = frozenset(
    (
        "cuda.driver.launchKernel",
        "cuda.runtime.memcpyAsync",
        "cuda.runtime.eventRecord",
        "cuda.runtime.eventQuery",
        "cuda.runtime.eventSynchronize",
        "cuda.runtime.streamWaitEvent",
        "cuda.runtime.streamSynchronize",
        "cuda.Graph.launch",
        "cuda.Graph.upload",
    )
)

# cudaError_t, from cuda_runtime_api.h
_NO_MEMORY = 2
_NOT_READY = 600
_ILLEGAL_STATE = 401  # the end of a capture on a stream that does not capture
_CAPTURE_ERRORS = (_ILLEGAL_STATE, *range(900, 909))  # cudaErrorStreamCaptureUnsupported ... WrongThread
# cudaDeviceAttr, from cuda_runtime_api.h
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76

_INSTALL = "run `python -m pip install 'pagedkv[cuda13]'` (or cuda12, as the driver allows)"
_DRIVER = "install NVIDIA's driver and make a GPU visible to this process, or use device 'cpu'"


class CudaRuntime:
    """CuPy, called through one counting function.

    Attributes:
        calls: counted calls so far: those of `COUNTED`, and those of `count`.
        users: of the device; each learns of every fault.
        array_type: `cupy.ndarray`.
        compile_error: NVRTC's error for a source that it refuses.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._targets: dict[str, Any] = {}
        self.calls = 0
        self.users = Users()
        self.array_type: type = cupy.ndarray
        self.compile_error: type[Exception] = self.find("cuda.nvrtc.NVRTCError")
        self._errors: tuple[type[Exception], ...] = (
            self.find("cuda.runtime.CUDARuntimeError"),
            self.find("cuda.driver.CUDADriverError"),
            self.find("cuda.memory.OutOfMemoryError"),  # a MemoryError
        )

    def find(self, path: str) -> Any:
        """Give the object at a path below `cupy`, for example a constant."""
        target = self._targets.get(path)
        if target is None:
            target = self._targets[path] = operator.attrgetter(path)(self._cupy)
        return target

    def invoke(self, path: str, *arguments: Any, **options: Any) -> Any:
        """Call the function, class or unbound method at a path below `cupy`."""
        if path in COUNTED:
            self.calls += 1
        try:
            return self.find(path)(*arguments, **options)
        except self._errors as error:
            raise self.refusal(path, error) from error

    def count(self) -> None:
        """Count work without an `invoke`: an embedder's array function, or a copy of nothing."""
        self.calls += 1

    def is_done(self, path: str, handle: int) -> bool:
        """Ask an event whether its point has passed.

        CuPy's query function returns CUDA's status instead of raising it, so a fault would read "not yet" for ever.
        """
        status = int(self.invoke(path, handle))
        if status not in (0, _NOT_READY):
            raise self._fault(path, f"cudaError {status}", status)
        return status == 0

    @contextmanager
    def current(self, stream: Any, pool: Any, what: str) -> Iterator[None]:
        """Let CuPy's array functions run on a stream and allocate from a pool; errors name `what`."""
        try:
            with stream, self.find("cuda.using_allocator")(pool.malloc):
                yield
        except self._errors as error:
            raise self.refusal(what, error) from error
        except RuntimeError as error:
            # CuPy's own refusals: NotImplementedError of cuBLAS, cuSPARSE and cuRAND, "calling ... API during stream
            # capture is unsupported", and RuntimeError of synchronous copies.
            if "captur" not in str(error):
                raise
            raise CaptureRefused(
                what,
                expected="no library matrix product and no synchronous copy under capture, because CuPy refuses both",
                got=_line(error), remedy="use a kernel, and read nothing back", clause="C15.1",
            ) from error

    def refusal(self, what: str, error: Exception) -> CaptureRefused | CapacityError | DeviceFault:
        """Turn an error of CUDA into ours."""
        status = int(getattr(error, "status", -1))
        if status == _NO_MEMORY or isinstance(error, MemoryError):
            return CapacityError(
                what, expected="memory for it", got=_line(error), remedy="build a smaller store", clause="C5.4"
            )
        if status in _CAPTURE_ERRORS:
            return CaptureRefused(
                what,
                expected="work that CUDA can capture: launches and asynchronous copies, memory reserved by a warm-up",
                got=_line(error), clause="C15.1", status=status,
                remedy="run the same work once before begin_capture, and read nothing back inside",
            )
        return self._fault(what, _line(error), status)

    def _fault(self, what: str, got: str, status: int) -> DeviceFault:
        fault = DeviceFault(
            what, expected="work that CUDA runs to its end", got=got,
            remedy="look for a kernel that reads or writes out of bounds; this process cannot use the GPU any more",
            clause="C12.4", kernel="", block=None, thread=None, status=status,
        )
        self.users.report(fault)
        return fault


def find_cupy(load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Import CuPy and check the current GPU; MissingRequirement says exactly what is missing, and how to get it."""
    try:
        cupy = load("cupy")
    except ModuleNotFoundError as error:
        got = "CuPy is not installed" if error.name == "cupy" else f"CuPy lacks the module {error.name}"
        raise _missing(got, _INSTALL) from None
    except ImportError as error:
        raise _missing(f"CuPy does not load: {_line(error)}", _INSTALL) from error
    version = str(cupy.__version__)
    if int(version.partition(".")[0]) < CUPY_MAJOR_MIN:
        raise _missing(f"CuPy {version}", _INSTALL)
    api = cupy.cuda.runtime
    if api.is_hip:
        raise _missing(f"CuPy {version} for ROCm", _INSTALL)
    if not api.driverGetVersion():
        raise _missing("no NVIDIA driver", _DRIVER)
    try:
        if not api.getDeviceCount():
            raise _missing("no GPU", _DRIVER)
        index = api.getDevice()
        capability = tuple(api.deviceGetAttribute(number, index) for number in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
    except (api.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        raise _missing(_line(error), _DRIVER) from error
    if capability < CAPABILITY_MIN:
        remedy = "make a newer GPU the current one with cupy.cuda.Device(n).use(), or use device 'cpu'"
        raise _missing(f"GPU {index} with compute capability {capability[0]}.{capability[1]}", remedy)
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise _missing(f"no NVRTC: {_line(error)}", _INSTALL) from error
    return cupy


def _missing(got: str, remedy: str) -> MissingRequirement:
    return MissingRequirement(
        "device cuda", got=got, remedy=remedy, clause="C12.4",
        expected=f"CuPy {CUPY_MAJOR_MIN} or newer, NVRTC, and a GPU of compute capability 8.0 or newer",
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
