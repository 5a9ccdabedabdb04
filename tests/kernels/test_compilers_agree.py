"""Other compilers, levels and orders give the cpu device's bits for the shipped kernels.  (C14.6)

`test_cpu_compiler.py` says so for arithmetic; here are the kernels themselves.  Zig stands for Clang: it takes the
other branch of every compiler switch in `cuda_src`, and it is the compiler of machines that have none.
"""

from __future__ import annotations

import importlib.util

import pytest

from pagedkv.devices.cpu import compiler as cpu_compiler
from pagedkv.devices.cpu.compiler import zig_compiler
from pagedkv.values.profiles import PROFILES
from tests.kernels.cpu_helpers import cpu_device
from tests.kernels.every_kernel import assert_same_bits, run_every_kernel

needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no package ziglang")


@needs_zig
@pytest.mark.parametrize("profile", [
    pytest.param(name, marks=() if name in {"bf16", "k8v4"} else (pytest.mark.long,)) for name in PROFILES
])  # fmt: skip
def test_kernels_compiled_by_zig_give_the_same_bits(profile: str) -> None:
    """Also where the machine has a compiler of its own: planes, outputs and lse of every kernel of a module."""
    with cpu_device() as device:
        expected = run_every_kernel(device, profile, 64)

    with cpu_device(compiler=zig_compiler()) as device:
        found = run_every_kernel(device, profile, 64)

    assert_same_bits(expected, found)


@pytest.mark.long
@pytest.mark.parametrize("profile", PROFILES)
def test_kernels_without_vector_extensions_give_the_same_bits(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old machine: no 256-bit vectors, and fused multiply-adds from the C library."""
    with cpu_device() as device:
        expected = run_every_kernel(device, profile, 64)

    monkeypatch.setattr(cpu_compiler, "cpu_features", frozenset)
    with cpu_device() as device:
        assert_same_bits(expected, run_every_kernel(device, profile, 64))


@pytest.mark.parametrize("profile", PROFILES)
def test_the_trap_build_finds_nothing_and_gives_the_same_bits(profile: str) -> None:
    """Misaligned accesses and indices outside fixed arrays trap; every order of threads gives the same bits."""
    with cpu_device() as device:
        expected = run_every_kernel(device, profile, 64)

    for order, seed in (("descending", 0), ("random", 1)):
        with cpu_device(order, seed=seed, checks="bounds", threads=2) as device:
            assert_same_bits(expected, run_every_kernel(device, profile, 64))
