"""`pagedkv kernels report`: registers, spills, local and shared bytes and occupancy of every shipped kernel.

The set is the library's own list (`pagedkv.shipped_modules`).  NVRTC compiles each module for each architecture on any
machine, with the flags of a GPU.  A spill or local memory is a finding: it adds memory traffic to a kernel that memory
traffic bounds (C14.3).
"""

from __future__ import annotations

import importlib.resources
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import dumps

import click

import pagedkv as pk
from pagedkv.tools.console import EXIT_FINDING, json_option, positive, progress_line, say
from pagedkv.tools.kernels.nvrtc import KernelResources, compile_program, load_nvrtc, read_resources

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")
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


COLUMNS = ("name", "arch", "registers", "spill_load_bytes", "spill_store_bytes", "local_bytes", "shared_bytes",
           "occupancy")  # fmt: skip


@dataclass(frozen=True)
class KernelFigures:
    """One kernel of one module on one architecture."""

    module: str
    arch: str
    resources: KernelResources

    @property
    def name(self) -> str:
        """Module and kernel."""
        return f"{self.module}/{self.resources.kernel}"

    @property
    def has_finding(self) -> bool:
        """Whether the kernel spills or uses local memory."""
        return any((self.resources.spill_load_bytes, self.resources.spill_store_bytes, self.resources.local_bytes))

    @property
    def occupancy(self) -> float | None:
        """Resident over possible threads of a multiprocessor, for blocks of the launch bound's size; None without one.

        CUDA allocates registers per warp in units of 256, and shared bytes per block in units of 128 after a reserve
        of 1024.  255 registers and 128 threads on sm_90: a warp takes 8192 registers, 8 warps fit, which are 2 blocks
        or 256 of 2048 threads: 0.125.
        """
        if self.resources.threads_max is None:
            return None
        limits = LIMITS[self.arch]
        warps = -(-self.resources.threads_max // WARP_THREADS)
        warp_registers = -(-self.resources.registers * WARP_THREADS // limits.register_unit) * limits.register_unit
        block_shared = self.resources.shared_bytes + limits.shared_reserved_bytes
        block_shared = -(-block_shared // limits.shared_unit_bytes) * limits.shared_unit_bytes
        blocks = min(
            limits.blocks,
            limits.threads // (warps * WARP_THREADS),
            limits.registers // warp_registers // warps,
            limits.shared_bytes // block_shared,
        )
        return blocks * warps * WARP_THREADS / limits.threads

    def as_json(self) -> dict[str, object]:
        """Return the fields of the report."""
        own = ("name", "arch", "occupancy")
        return {column: getattr(self if column in own else self.resources, column) for column in COLUMNS}


class KernelCompileError(Exception):
    """The compiler refuses a shipped module; the text is its log."""


@click.command()
@json_option
@click.option("--arch", "architectures", multiple=True, help="Only this architecture, such as sm_90; repeatable.")
@click.option("--module", "modules", multiple=True, help="Only modules whose name contains this; repeatable.")
@click.option("--jobs", type=positive, help="Compilations at a time; the number of cores by default.")
def command(as_json: bool, architectures: tuple[str, ...], modules: tuple[str, ...], jobs: int | None) -> None:
    """Say what registers and memory every shipped kernel takes.

    Compiles the set with NVRTC for every architecture, and prints registers, spills, local and shared bytes; needs no
    GPU. A spill or local memory is a finding: exit code 1.
    """
    if unknown := sorted(set(architectures) - set(ARCHITECTURES)):
        raise click.BadParameter(f"{', '.join(unknown)} is not one of {', '.join(ARCHITECTURES)}")
    names = [spec.name for spec in pk.shipped_modules()]
    if unknown := [part for part in modules if not any(part in name for name in names)]:
        raise click.BadParameter(f"no module has {', '.join(unknown)} in its name; the modules are {', '.join(names)}")
    try:
        figures = compile_set(architectures=architectures or ARCHITECTURES, names=modules, jobs=jobs,
                              progress=progress_line)  # fmt: skip
    except KernelCompileError as error:
        say(f"pagedkv: {error}")
        sys.exit(EXIT_FINDING)
    progress_line("")
    if as_json:
        click.echo(dumps(report(figures)))
    else:
        print_table(figures)
    findings = [one for one in figures if one.has_finding]
    for finding in findings:
        found = finding.resources
        say(
            f"pagedkv: {finding.name} on {finding.arch}: expected no spill and no local memory, got "
            f"{found.spill_store_bytes} bytes of spill stores, {found.spill_load_bytes} of spill loads, "
            f"{found.local_bytes} of local memory"
        )
    compiled = len({(one.module, one.arch) for one in figures})
    say(f"{len(figures)} kernels compiled from {compiled} module(s), {len(findings)} with spills or local memory")
    if findings:
        sys.exit(EXIT_FINDING)


def print_table(figures: Sequence[KernelFigures]) -> None:
    """Print one line for each kernel and architecture."""
    width = max((len(one.name) for one in figures), default=0)
    head = "  ".join(f"{column.removesuffix('_bytes'):>11}" for column in COLUMNS[1:])
    click.echo(f"{'name':<{width}}  {head}")
    for one in figures:
        row = one.as_json() | {"occupancy": "-" if one.occupancy is None else f"{one.occupancy:.3f}"}
        click.echo(f"{one.name:<{width}}  " + "  ".join(f"{row[column]!s:>11}" for column in COLUMNS[1:]))


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
        progress: called with one line for each finished module.
    Raises:
        MissingRequirement: there is no NVRTC, or it does not know an architecture.
        KernelCompileError: the compiler reports errors.
    """
    nvrtc = load_nvrtc()
    unknown = [arch for arch in architectures if arch not in nvrtc.architectures]
    if unknown:
        raise pk.MissingRequirement(
            f"compiling for {', '.join(unknown)}",
            expected="an NVRTC that knows every architecture of the set",
            got=f"NVRTC {nvrtc.version}",
            remedy="install a newer one with `python -m pip install --upgrade nvidia-cuda-nvrtc`",
            clause="C4.5",
        )
    headers = read_headers()

    def compile_one(work: tuple[pk.ModuleSpec, str]) -> list[KernelFigures]:
        spec, arch = work
        text = "".join(f'#include "{source}"\n' for source in spec.sources)
        defines = [f"-D{name}={value}" for name, value in spec.defines]
        options = [f"--gpu-architecture={arch}", *OPTIONS, *defines]
        compiled = compile_program(nvrtc, text, name=f"module {spec.name}", headers=headers, options=options)
        if not compiled.is_ok:
            raise KernelCompileError(f"{spec.name} for {arch}:\n{compiled.log}")
        figures = [KernelFigures(spec.name, arch, kernel) for kernel in read_resources(compiled.log, compiled.ptx)]
        if progress:
            progress(f"{spec.name} {arch}: {len(figures)} kernels")
        return figures

    modules = [spec for spec in pk.shipped_modules() if not names or any(name in spec.name for name in names)]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        parts = pool.map(compile_one, itertools.product(modules, architectures))
        return sorted(itertools.chain(*parts), key=lambda one: (one.name, ARCHITECTURES.index(one.arch)))


def read_headers() -> dict[str, str]:
    """Return every file of `cuda_src` that a kernel may include, by name."""
    root = importlib.resources.files("pagedkv.cuda_src")
    return {
        f"{folder}/{file.name}": file.read_text(encoding="utf-8")
        for folder in ("kernels", "cpu_device")
        for file in (root / folder).iterdir()
        if file.name.endswith(HEADER_SUFFIXES)
    }


def report(figures: Sequence[KernelFigures]) -> dict[str, object]:
    """Return the JSON object of the command; `counts` holds figures of an emulator, and compiling has none."""
    return {"schema": 1, "kernels": [one.as_json() for one in figures], "counts": []}
