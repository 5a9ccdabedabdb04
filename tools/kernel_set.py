"""What the shipped kernels cost on every architecture: registers, spills, local and shared bytes, occupancy.

The set is the library's own list (`pagedkv.shipped_modules`).  Each module is compiled by NVRTC for each
architecture on any machine, with the flags a GPU would get; a spill or local memory is a finding, because
it would cost memory traffic in a kernel whose only business is memory traffic (C14.3).
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import pagedkv as pk
from pagedkv.tools.nvrtc import KernelResources, Nvrtc, compile_program, load_nvrtc, read_resources

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
HEADER_SUFFIXES = (".cu", ".cuh", ".h")
WARP_THREADS = 32


@dataclass(frozen=True)
class MultiprocessorLimits:
    """What one multiprocessor can hold.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """

    threads: int
    blocks: int
    shared_bytes: int
    registers: int = 65_536
    register_unit: int = 256
    shared_unit_bytes: int = 128
    shared_reserved_bytes: int = 1024


LIMITS = {
    "sm_80": MultiprocessorLimits(threads=2048, blocks=32, shared_bytes=164 * 1024),
    "sm_89": MultiprocessorLimits(threads=1536, blocks=24, shared_bytes=100 * 1024),
    "sm_90": MultiprocessorLimits(threads=2048, blocks=32, shared_bytes=228 * 1024),
    "sm_100": MultiprocessorLimits(threads=2048, blocks=32, shared_bytes=228 * 1024),
    "sm_120": MultiprocessorLimits(threads=1536, blocks=24, shared_bytes=100 * 1024),
}
assert set(LIMITS) == set(ARCHITECTURES), "every architecture of the set has limits"


@dataclass(frozen=True)
class KernelFigures:
    """One kernel of one module on one architecture; `occupancy` is None for a kernel without a launch bound."""

    name: str
    arch: str
    registers: int
    spill_load_bytes: int
    spill_store_bytes: int
    local_bytes: int
    shared_bytes: int
    occupancy: float | None

    @property
    def has_finding(self) -> bool:
        """True when the kernel spills or uses local memory."""
        return bool(self.spill_load_bytes or self.spill_store_bytes or self.local_bytes)

    def as_json(self) -> dict[str, object]:
        """Return the fields under the names that the report promises."""
        return asdict(self)


class KernelCompileError(Exception):
    """A shipped module is refused by the compiler; the text is its log."""


def compile_set(
    *,
    architectures: Sequence[str] = ARCHITECTURES,
    names: Sequence[str] = (),
    jobs: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[KernelFigures]:
    """Compile the shipped set and return its figures, sorted by module, kernel and architecture.

    Args:
        architectures: some of `ARCHITECTURES`.
        names: keep modules whose name contains one of these; empty keeps all.
        jobs: compilations at a time; None takes the number of cores, and more than that gains nothing.
        progress: told one line for each finished module.
    Raises:
        MissingRequirement: there is no NVRTC, or it does not know an architecture.
        KernelCompileError: the compiler reports errors.
    """
    nvrtc = load_nvrtc()
    unknown = [arch for arch in architectures if arch not in nvrtc.architectures]
    if unknown:
        version = ".".join(map(str, nvrtc.version))
        raise pk.MissingRequirement(
            f"compiling for {', '.join(unknown)}",
            expected="an NVRTC that knows every architecture of the set",
            got=f"NVRTC {version} ({nvrtc.path})",
            remedy="install a newer one with `python -m pip install --upgrade nvidia-cuda-nvrtc`",
            clause="C4.5",
        )
    modules = [spec for spec in pk.shipped_modules() if not names or any(name in spec.name for name in names)]
    headers = read_headers()
    work = [(spec, arch) for spec in modules for arch in architectures]
    figures: list[KernelFigures] = []

    def one(item: tuple[pk.ModuleSpec, str]) -> list[KernelFigures]:
        spec, arch = item
        result = compile_module(nvrtc, spec, arch, headers)
        if progress:
            progress(f"{spec.name} {arch}: {len(result)} kernels")
        return result

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        for result in pool.map(one, work):
            figures += result
    return sorted(figures, key=lambda f: (f.name, ARCHITECTURES.index(f.arch)))


def read_headers() -> dict[str, str]:
    """Return every file of `cuda_src` that a kernel may include, by name."""
    root = importlib.resources.files("pagedkv.cuda_src")
    return {
        f"{folder}/{file.name}": file.read_text(encoding="utf-8")
        for folder in ("kernels", "cpu_device")
        for file in (root / folder).iterdir()
        if file.name.endswith(HEADER_SUFFIXES)
    }


def compile_module(nvrtc: Nvrtc, spec: pk.ModuleSpec, arch: str, headers: dict[str, str]) -> list[KernelFigures]:
    """Compile one module for one architecture.

    Raises:
        KernelCompileError: the compiler reports errors.
    """
    text = "".join(f'#include "{source}"\n' for source in spec.sources)
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--fmad=false",
        "--ptxas-options=-v",
        *(f"-D{name}={value}" for name, value in spec.defines),
    ]
    compiled = compile_program(nvrtc, text, name=f"module {spec.name}", headers=headers, options=options)
    if not compiled.is_ok:
        raise KernelCompileError(f"{spec.name} for {arch}:\n{compiled.log}")
    return [figures(spec.name, arch, resources) for resources in read_resources(compiled)]


def figures(module: str, arch: str, resources: KernelResources) -> KernelFigures:
    """Return the report line of one kernel."""
    return KernelFigures(
        name=f"{module}/{resources.kernel}",
        arch=arch,
        registers=resources.registers,
        spill_load_bytes=resources.spill_load_bytes,
        spill_store_bytes=resources.spill_store_bytes,
        local_bytes=resources.local_bytes,
        shared_bytes=resources.shared_bytes,
        occupancy=occupancy(arch, resources),
    )


def occupancy(arch: str, resources: KernelResources) -> float | None:
    """Return resident over possible threads of a multiprocessor, for blocks of the launch bound's size.

    CUDA's arithmetic: registers are given out per warp in units of 256, shared bytes per block in units of 128
    after a reserve of 1024.  255 registers and 128 threads on sm_90: a warp takes 8192 registers, 8 warps fit,
    that is 2 blocks or 256 of 2048 threads, so 0.125.
    """
    if resources.threads_max is None:
        return None
    limits = LIMITS[arch]
    warps = -(-resources.threads_max // WARP_THREADS)
    warp_registers = -(-resources.registers * WARP_THREADS // limits.register_unit) * limits.register_unit
    block_shared = resources.shared_bytes + limits.shared_reserved_bytes
    block_shared = -(-block_shared // limits.shared_unit_bytes) * limits.shared_unit_bytes
    blocks = min(
        limits.blocks,
        limits.threads // (warps * WARP_THREADS),
        limits.registers // warp_registers // warps,
        limits.shared_bytes // block_shared,
    )
    return blocks * warps * WARP_THREADS / limits.threads


def report(figures_list: Sequence[KernelFigures]) -> dict[str, object]:
    """Return the JSON object of `pagedkv kernels report`.

    `counts` holds what an emulator counted, and is empty here: compiling counts nothing.
    """
    return {"schema": 1, "kernels": [f.as_json() for f in figures_list], "counts": []}
