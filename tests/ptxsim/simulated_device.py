"""A device whose kernels are NVRTC's PTX, executed and watched by the emulator `ptxsim`.

It offers what `PagedCache` and `Ops` use of the device protocol, so a test written for the cpu device runs here as it
stands: a second execution, by NVIDIA's own front end, of the branches that are compiled for a GPU.

    every array      an allocation of its exact bytes; unwritten bytes are known to be unwritten
    every launch     checked: bounds, alignment, races in shared memory, hazards within a warp, reads of what nobody
                     wrote; the launch's counters stay in `launches`

A faulty launch raises `SimulatorReport`.  Nothing is asynchronous, and nothing can be captured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.protocol import Extent, ModuleSpec
from pagedkv.devices.sources import module_text
from pagedkv.tools.kernels.report import read_headers
from tests.checkout import ROOT
from tests.kernels.kernel_texts import flat_text

ARCHITECTURE = "sm_90"
SIMULATOR_FOLDER = ROOT / "shared" / "ptxsim"
"""Where a checkout may have the emulator; beside the checkout is the other place."""


class SimulatorReport(AssertionError):
    """The emulator's sanitizer found something; `kinds` names the families of what it found."""

    def __init__(self, text: str, kinds: set[str]) -> None:
        super().__init__(f"{', '.join(sorted(kinds))}: {text}")
        self.kinds = kinds


@cache
def load_simulator() -> ModuleType:
    """Import ptxsim; skip the test where the emulator, its compiler or NVRTC is absent."""
    for folder in (SIMULATOR_FOLDER, ROOT.parent / "shared" / "ptxsim"):
        if (folder / "ptxsim" / "__init__.py").is_file():
            break
    else:
        pytest.skip("no emulator: shared/ptxsim is neither in nor beside the checkout")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import ptxsim  # type: ignore[import-not-found]

    simulator: ModuleType = ptxsim
    try:
        simulator.Module.from_cuda("__global__ void nothing() {}", arch=ARCHITECTURE)
    except simulator.CompileError as error:
        pytest.skip(f"no NVRTC for the emulator: {error}")
    return simulator


@dataclass(frozen=True)
class Launch:
    """One launch that has run, and what was counted."""

    kernel: str
    grid: Extent
    result: Any

    def plane(self, array: npt.NDArray[Any]) -> dict[str, int]:
        """Return the counters of one argument's allocation."""
        suffix = f"@{_address_of(array):x}"
        (found,) = (c for name, c in self.result.counters["allocs"].items() if name.endswith(suffix))
        counters: dict[str, int] = found
        return counters


class SimulatedDevice:
    """Memory with shadows, modules of PTX, and launches under the sanitizer."""

    name = "ptxsim"

    def __init__(self, simulator: ModuleType, *, sources: Mapping[str, str] | None = None) -> None:
        self.simulator = simulator
        self.sources = dict(read_headers() if sources is None else sources)
        self.launches: list[Launch] = []
        self.buffers: dict[int, Any] = {}
        self._modules: dict[ModuleSpec, SimulatedModule] = {}

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, align_bytes: int = 256) -> Any:
        """Allocate; reading it before a write is an error."""
        array = self.simulator.aligned(shape, np.dtype(dtype))
        array.reshape(-1).view(np.uint8)[:] = 0xFF
        name = f"{array.dtype}{array.shape}@{_address_of(array):x}"
        self.buffers[_address_of(array)] = self.simulator.Memory().register(name, array, init=False)
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, align_bytes: int = 256) -> Any:
        """Allocate zeros."""
        array = self.empty(shape, dtype)
        array[...] = 0
        self.buffers[_address_of(array)].valid[:] = 1
        return array

    def copy(self, destination: Any, source: Any, stream: object) -> None:
        """Copy at once; what a copy fills is written."""
        destination.reshape(-1)[:] = source.reshape(-1)
        if (buffer := self.buffers.get(_address_of(destination))) is not None:
            buffer.valid[:] = 1

    def address(self, array: Any) -> int:
        """Return the address at which the emulator has an array too."""
        return _address_of(array)

    def require_usable(self, what: str, array: object, *, is_written: bool) -> None:
        """Accept every array: the sanitizer looks at what a launch does with it."""

    def forget(self, array: Any) -> None:
        """Make every byte unwritten again, for the sanitizer; what it holds stays."""
        self.buffers[_address_of(array)].valid[:] = 0

    def stream(self) -> SimulatedStream:
        return SimulatedStream()

    def load(self, spec: ModuleSpec) -> SimulatedModule:
        """Compile with the flags of the shipped set, and translate."""
        if spec not in self._modules:
            options = ["--fmad=false", *(f"-D{name}={value}" for name, value in spec.defines)]
            text = flat_text(module_text(spec), self.sources)
            program = self.simulator.Module.from_cuda(text, arch=ARCHITECTURE, options=options, name=f"{spec.name}.cu")
            self._modules[spec] = SimulatedModule(self, program)
        return self._modules[spec]


class SimulatedStream:
    """A stream on which everything has run already."""

    is_capturing = False

    def synchronize(self) -> None:
        """Return."""


class SimulatedModule:
    """Kernels, each translated at its first launch."""

    def __init__(self, device: SimulatedDevice, program: Any) -> None:
        self.device = device
        self.program = program

    def kernel(self, name: str) -> SimulatedKernel:
        return SimulatedKernel(self, name)


class SimulatedKernel:
    """One kernel."""

    def __init__(self, module: SimulatedModule, name: str) -> None:
        self.module = module
        self.name = name

    def launch(
        self, grid: Extent, block: Extent, arguments: Sequence[Any], stream: object, *, through: Sequence[Any] = (),
        **ignored: object,
    ) -> None:
        device = self.module.device
        memory = device.simulator.Memory()
        values = []
        for argument in arguments:
            is_array = isinstance(argument, np.ndarray)
            values.append(device.buffers[_address_of(argument)] if is_array else argument)
            if is_array:
                memory.bufs[values[-1].name] = values[-1]
        for array in through:
            buffer = device.buffers[_address_of(array)]
            memory.bufs[buffer.name] = buffer
        result = self.module.program.launch(self.name, grid, block, values, mem=memory, check_warp=True,
                                            check_global_races=True, threads=1)
        if result.errors:
            kinds = {error.kind for error in result.errors}
            raise SimulatorReport(f"{self.name}:\n" + "\n".join(map(str, result.errors[:6])), kinds)
        device.launches.append(Launch(self.name, grid, result))


def _address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
