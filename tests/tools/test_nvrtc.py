"""The NVRTC binding and the arithmetic of the kernel report."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.tools.kernels.nvrtc import KernelResources, Nvrtc, compile_program, load_nvrtc, read_resources
from pagedkv.tools.kernels.report import LIMITS, KernelFigures, read_headers, report

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
ptxas         .     400 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 408 bytes cumulative stack size, 1200 bytes smem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""
PTX = """\
.visible .entry second(
    .param .u64 a
)
.maxntid 64, 2, 1
{
}
.visible .entry first(
    .param .u64 a
)
{
}
"""


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    """NVRTC, an external tool that may be absent."""
    try:
        return load_nvrtc()
    except pk.MissingRequirement as missing:
        pytest.skip(f"no NVRTC: {missing.remedy}")


def figures(arch: str = "sm_90", *, registers: int = 32, threads: int | None = 128, **fields: Any) -> KernelFigures:
    kernel = {"spill_load_bytes": 0, "spill_store_bytes": 0, "local_bytes": 0, "shared_bytes": 0} | fields
    return KernelFigures("bf16_d64", arch, KernelResources("append_rows", registers, threads_max=threads, **kernel))


def test_an_assembler_log_is_read_kernel_by_kernel() -> None:
    """Figures of a function that was not inlined are charged to its kernel."""
    assert read_resources(LOG, PTX) == [
        KernelResources("first", 32, 0, 0, 0, 0, None), KernelResources("second", 255, 20, 12, 408, 1200, 128)
    ]


@pytest.mark.parametrize(("arch", "registers", "threads", "shared_bytes", "expected"), [
    ("sm_90", 255, 128, 0, 2 * 128 / 2048),  # 8192 registers a warp: 8 warps, 2 blocks
    ("sm_90", 32, 128, 0, 1.0),
    ("sm_90", 32, 32, 0, 32 * 32 / 2048),  # the number of blocks is the limit
    ("sm_80", 40, 128, 48 * 1024, 3 * 128 / 2048),  # 49 KiB with the reserve: 3 blocks in 164 KiB
    ("sm_89", 128, 256, 0, 2 * 256 / 1536),
    *((arch, 32, None, 0, None) for arch in LIMITS),  # without a launch bound the block size is not known
])
def test_occupancy_is_limited_by_the_scarcest_resource(
    arch: str, registers: int, threads: int | None, shared_bytes: int, expected: float | None
) -> None:
    """Registers, blocks, shared bytes and threads, each as the limit once."""
    assert figures(arch, registers=registers, threads=threads, shared_bytes=shared_bytes).occupancy == expected


def test_the_report_has_the_promised_fields() -> None:
    """Others rely on these names."""
    assert report([figures()]) == {
        "schema": 1,
        "kernels": [{
            "name": "bf16_d64/append_rows", "arch": "sm_90", "registers": 32, "spill_load_bytes": 0,
            "spill_store_bytes": 0, "local_bytes": 0, "shared_bytes": 0, "occupancy": 1.0,
        }],
        "counts": [],
    }  # fmt: skip


@pytest.mark.parametrize("field", ["spill_load_bytes", "spill_store_bytes", "local_bytes"])
def test_spills_and_local_memory_are_findings(field: str) -> None:
    """Each of the three alone is enough."""
    spill: dict[str, Any] = {field: 4}

    assert (False, True) == (figures(shared_bytes=4096).has_finding, figures(**spill).has_finding)


def test_a_real_compilation_reports_local_memory_and_the_launch_bound(nvrtc: Nvrtc) -> None:
    """An array indexed at run time lives in local memory; headers come from memory; errors are the compiler's words."""
    text = """
        #include "size.h"
        extern "C" __global__ void __launch_bounds__(64) indexed(float* o) {
            float x[SIZE];
            for (int i = 0; i < SIZE; i++) x[i] = o[i];
            o[0] = x[(int)o[3]];
        }
    """
    options = ["--gpu-architecture=sm_90", "--ptxas-options=-v"]
    compiled = compile_program(nvrtc, text, name="t.cu", headers={"size.h": "#define SIZE 100"}, options=options)
    (kernel,) = read_resources(compiled.log, compiled.ptx)

    assert ("indexed", 400, 64) == (kernel.kernel, kernel.local_bytes, kernel.threads_max)
    compiled = compile_program(nvrtc, "oops", name="wrong.cu", headers={}, options=options)
    assert not compiled.is_ok
    assert "wrong.cu" in compiled.log


def test_without_cupy_the_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come with one extra; a GPU is not needed.  (C4.5)"""
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)

    with pytest.raises(pk.MissingRequirement, match=r"pagedkv\[cuda13\]"):
        load_nvrtc.__wrapped__()


def test_every_kernel_source_is_handed_to_the_compiler() -> None:
    """A module includes by name; the names are the files' own."""
    names = set(read_headers())

    assert {source for spec in pk.shipped_modules() for source in spec.sources} <= names
