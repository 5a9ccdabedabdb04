"""Compilers of the cpu device: which one, the cache, embedder text, and equal bits from all of them."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.devices.cache_folder import CacheFolder
from pagedkv.devices.cpu import compiler as cpu_compiler
from pagedkv.devices.cpu import runtime as cpu_runtime
from pagedkv.devices.cpu.compiler import Compiler, build, find_compiler, zig_compiler
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cpu.memory import Buffer
from pagedkv.devices.protocol import ModuleSpec
from pagedkv.devices.sources import SOURCE_FOLDER, has_static_shared, module_text
from pagedkv.errors import MissingRequirement, MisuseError
from pagedkv.tools.kernels.nvrtc import compile_program, load_nvrtc
from pagedkv.tools.kernels.report import read_headers
from tests.kernels.cpu_helpers import cpu_device, launch

ARITHMETIC = r"""
extern "C" __global__ void arithmetic(const float* a, const float* b, const float* c, float* out, int n) {
    PK_SHARED(float, tile, 64);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float x = i < n ? a[i] : 0.0f, y = i < n ? b[i] : 1.0f, z = i < n ? c[i] : 0.0f;
    float v = x * y + z;                       // two roundings
    float w = fmaf(x, y, z);                   // one
    float q = __fdiv_rn(v, y) + sqrtf(fabsf(w)) + __frcp_rn(y);
    float r = rintf(q) + truncf(w) + floorf(v) + fmaxf(x, z) + fminf(y, w);
    tile[threadIdx.x] = r;
    __syncthreads();
    float acc = 0.0f;
    for (int k = 0; k < 64; ++k) acc += tile[k] * 0.1f;
    float lanes[5] = {v, w, q, r, acc};
    pk_warp_sum(lanes);
    unsigned bits = __float_as_uint(lanes[0]) ^ __byte_perm(__float_as_uint(lanes[1]), __float_as_uint(q), 0x5140);
    if (i < n) out[i] = lanes[2] + lanes[3] * acc + (float)(bits & 0xFFFF) + (float)(__clz(bits | 1) * __popc(bits));
}
"""


def arithmetic(device: CpuDevice, inputs: npt.NDArray[np.float32]) -> bytes:
    a, b, c = (device.empty(inputs.shape[1], np.float32) for _ in range(3))
    for target, source in zip((a, b, c), inputs, strict=True):
        target[:] = source
    out = device.empty(inputs.shape[1], np.float32)
    launch(device, "arithmetic", ARITHMETIC, 16, 64, (a, b, c, out, np.int32(out.size)))
    assert np.isfinite(out).any()
    return bytes(out)


NO_ZIG = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no package ziglang")
OTHER_COMPILERS = [
    pytest.param("zig", marks=NO_ZIG), "without vectors",
    *(pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"no {name}"))
      for name in ("clang++", "g++")),
]  # fmt: skip


def compiler_named(name: str, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    if name == "zig":
        return zig_compiler()
    if name == "without vectors":
        monkeypatch.setattr(cpu_compiler, "cpu_features", frozenset)
    else:
        monkeypatch.setenv("CXX", name)
    return find_compiler()


@pytest.mark.parametrize("name", OTHER_COMPILERS)
def test_every_compiler_gives_equal_bits(name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Contraction is off, fused operations are explicit, and reductions are not reassociated.

    Without vectors a fused multiply-add comes from the C library, correctly rounded and slow.
    """
    inputs = rng.standard_normal((3, 1000), np.float32)
    with cpu_device() as device:
        expected = arithmetic(device, inputs)

    with cpu_device(compiler=compiler_named(name, monkeypatch)) as device:
        assert expected == arithmetic(device, inputs)


WHOLE_DEVICE_WITH_ZIG = """
import numpy as np
from tests.kernels.cpu_helpers import cpu_device, launch
from tests.devices.test_cpu_threads import REDUCE
from pagedkv.errors import DeviceFault
with cpu_device("random", threads=2) as device:
    values, sums = device.empty((3, 128), np.float32), device.empty(3, np.float32)
    values[:] = 1
    launch(device, "reduce", REDUCE, 3, 128, (values, sums, np.int32(128)))
    try:
        launch(device, "reduce", REDUCE, 4, 128, (values, sums, np.int32(128)))
    except DeviceFault as fault:
        print(device.compiler.kind, sums.tolist(), fault.fields["block"][0])
"""


@NO_ZIG
def test_the_runtime_itself_builds_with_ziglang(root: Path) -> None:
    """$CXX names it, so the process has no other compiler's code: fibers, threads and faults work."""
    environment = {**os.environ, "CXX": f"{sys.executable} -m ziglang c++ -nostdlib++"}
    result = subprocess.run([sys.executable, "-c", WHOLE_DEVICE_WITH_ZIG], cwd=root, env=environment,
                            capture_output=True, text=True, timeout=300, check=False)

    assert ("zig [128.0, 128.0, 128.0] 3\n", 0) == (result.stdout, result.returncode), result.stderr


def test_the_first_compiler_in_order_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX, g++, clang++, ziglang."""
    present: set[str] = set()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in present else None)
    monkeypatch.setattr(cpu_compiler, "_examine",
                        lambda words: Compiler("clang" if "clang" in words[0] else "gcc", words, words[0]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in present else None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    found = []
    for name in ("ziglang", "clang++", "g++", "my-compiler"):
        present.add(name)
        if name == "my-compiler":
            monkeypatch.setenv("CXX", "my-compiler -m64")
        found.append(find_compiler().command)

    assert found == [
        (sys.executable, "-m", "ziglang", "c++", "-nostdlib++"), ("clang++",), ("g++",), ("my-compiler", "-m64")
    ]


def test_a_machine_without_a_compiler_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingRequirement, match=r"pip install 'pagedkv\[cpu\]'"):
        find_compiler()


@pytest.mark.parametrize(("variable", "value", "message"), [
    ("CXX", "no-such-compiler -O2", "CXX='no-such-compiler -O2', which is not on PATH"),
    ("CXX", f"{sys.executable} -c 1/0", "-c 1/0 --version` with exit code 1"),
    ("XDG_CACHE_HOME", __file__, "set XDG_CACHE_HOME to a writable folder"),
])  # fmt: skip
def test_a_setting_that_serves_no_build_is_named(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is not there or does not answer --version, and a cache below a file."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(MissingRequirement, match=message):
        build("nowhere", "int f() { return 1; }", find_compiler(), announce=lambda line: None)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without libraries; zig's own files stay where they are, since it takes 6 s to make them again."""
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(cpu_compiler.zig_cache_folder()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return CacheFolder("cpu").path


def test_equal_text_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device takes the library from the cache; text, defines and checks make another one."""
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    text = 'extern "C" __global__ void cached(int* out) { *out = PK_VALUE; }'
    specs = [
        (ModuleSpec("cached", text=text, kernels=("cached",), defines=(("PK_VALUE", "1"),)), ""),
        (ModuleSpec("cached", text=text, kernels=("cached",), defines=(("PK_VALUE", "1"),)), ""),
        (ModuleSpec("cached", text=text, kernels=("cached",), defines=(("PK_VALUE", "2"),)), ""),
        (ModuleSpec("cached", text=text + "\n", kernels=("cached",), defines=(("PK_VALUE", "2"),)), ""),
        (ModuleSpec("cached", text=text, kernels=("cached",), defines=(("PK_VALUE", "1"),)), "bounds"),
    ]
    compiled, values = [], []
    for spec, checks in specs:
        said.clear()
        device = CpuDevice(threads=1, checks=checks, announce=said.append)
        out = device.zeros(1, np.int32)
        device.load(spec).kernel("cached").launch((1, 1, 1), (1, 1, 1), (out,), device.stream())
        device.load(spec)
        values.append(int(out[0]))
        compiled.append([line for line in said if "compiled cached in " in line])
        device.close()

    assert [1, 0, 1, 1, 1] == [len(lines) for lines in compiled]
    assert values == [1, 1, 2, 2, 1]
    assert not [path for path in (tmp_path / "pagedkv" / "cpu").iterdir() if path.suffix != ".so"]


def test_a_changed_header_compiles_again(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key covers what is included, directly or not."""
    folder = tmp_path / "sources"
    shutil.copytree(SOURCE_FOLDER, folder)
    monkeypatch.setattr("pagedkv.devices.sources.SOURCE_FOLDER", folder)
    monkeypatch.setattr("pagedkv.devices.cpu.compiler.SOURCE_FOLDER", folder)
    (folder / "inner.cuh").write_text("#define INNER 1\n", encoding="utf-8")
    (folder / "outer.cuh").write_text('#include "inner.cuh"\n', encoding="utf-8")
    text = '#include "outer.cuh"\nextern "C" int inner() { return INNER; }\n'
    first = build("inner", text, find_compiler(), announce=lambda line: None)
    again = build("inner", text, find_compiler(), announce=lambda line: None)
    (folder / "inner.cuh").write_text("#define INNER 2\n", encoding="utf-8")
    other = build("inner", text, find_compiler(), announce=lambda line: None)

    assert first == again
    assert first != other


def test_processes_that_build_at_the_same_time_agree(empty_cache: Path, root: Path) -> None:
    """Written aside and renamed: whoever is last replaces a file by an equal one."""
    program = (
        "import sys\n"
        "from pagedkv.devices.cpu.compiler import build, find_compiler\n"
        "print(build('parallel', 'extern \"C\" int f() { return 1; }', find_compiler()))\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = {process.communicate(timeout=60)[0] for process in running}

    assert [0, 0, 0] == [process.returncode for process in running]
    assert outputs == {f"{library}\n".encode() for library in empty_cache.iterdir()}


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words() -> None:
    """The line number counts in the embedder's text."""
    text = 'extern "C" __global__ void broken() {\n    undeclared = 1;\n}'
    with cpu_device() as device, pytest.raises(MisuseError, match="module test_broken was refused") as caught:
        launch(device, "broken", text, 1, 1)

    assert "test_broken.cu:2" in str(caught.value)
    assert "undeclared" in str(caught.value.fields["compiler_output"])


@pytest.mark.parametrize(
    "spec", [ModuleSpec("empty"), ModuleSpec("a/b", text=""), ModuleSpec("missing", sources=("no_such.cu",))],
    ids=lambda s: s.name,
)
def test_a_spec_that_names_nothing_is_refused(spec: ModuleSpec) -> None:
    """Neither sources nor text, a name that is no file name, a file that is not there."""
    with pytest.raises(MisuseError, match=r"module .* was refused"):
        module_text(spec)


EMBEDDER = r"""
// A kernel as an embedder has it: plain CUDA C++, a __shared__ array, no macro of ours.
template <int kBlock>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float partial[kBlock];
    partial[threadIdx.x] = value;
    __syncthreads();
    for (int stride = kBlock / 2; stride > 0; stride >>= 1) {
        if (threadIdx.x < stride) partial[threadIdx.x] += partial[threadIdx.x + stride];
        __syncthreads();
    }
    return partial[0];
}

extern "C" __global__ void __launch_bounds__(64)
row_sums(const float* __restrict__ in, float* __restrict__ out, int n) {
    float value = 0.0f;
    for (int i = threadIdx.x; i < n; i += 64) value += in[(size_t)blockIdx.x * n + i];
    float total = block_sum<64>(value);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}

extern "C" __global__ void widen(const uint16_t* in, float4* out) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    out[i] = make_float4(__uint_as_float((uint32_t)in[i] << 16), 0.f, max(1, 2), min(3u, 4u));
}
"""
EMBEDDER_SPEC = ModuleSpec("embedder", text=EMBEDDER, kernels=("row_sums", "widen"))


@pytest.mark.parametrize("threads", [1, 3])
def test_plain_cuda_text_of_an_embedder_runs(threads: int, rng: np.random.Generator) -> None:
    """A `__shared__` array is static, so the blocks of such a module run one after another."""
    values = rng.integers(-8, 8, (400, 200)).astype(np.float32)
    with cpu_device("random", threads=threads) as device:
        source, sums, wide = (
            device.empty(values.shape, np.float32), device.empty(400, np.float32), device.empty((64, 4), np.float32)
        )
        stream = device.stream()
        device.copy(source, values, stream)
        module = device.load(EMBEDDER_SPEC)
        module.kernel("row_sums").launch((400, 1, 1), (64, 1, 1), (source, sums, np.int32(200)), stream)
        bits = device.empty(64, np.uint16)
        bits[:] = 0x3F80
        module.kernel("widen").launch((2, 1, 1), (32, 1, 1), (bits, wide), stream)

        assert np.array_equal(values.sum(axis=1), sums)
        assert wide.tolist() == [[1.0, 0.0, 2.0, 3.0]] * 64
        assert has_static_shared(EMBEDDER_SPEC)


def test_static_shared_is_seen_in_code_and_not_in_comments() -> None:
    """Sources of ours use PK_SHARED and run in parallel."""
    assert not has_static_shared(ModuleSpec("a", text="// no __shared__ here\n/* __shared__ */"))
    assert not has_static_shared(ModuleSpec("moves", sources=("kernels/page_moves.cu",)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(
    "spec", [EMBEDDER_SPEC, ModuleSpec("arithmetic", text=ARITHMETIC, kernels=("arithmetic",))], ids=lambda s: s.name
)
def test_the_same_text_compiles_with_nvrtc(spec: ModuleSpec, arch: str) -> None:
    """`runtime.cuh` gives both compilers the same words."""
    try:
        nvrtc = load_nvrtc()
    except pk.MissingRequirement as missing:
        pytest.skip(f"no NVRTC: {missing.remedy}")
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--fmad=false"]
    compiled = compile_program(nvrtc, module_text(spec), name=spec.name, headers=read_headers(), options=options)

    assert compiled.is_ok, compiled.log
    assert all(f".entry {name}(" in compiled.ptx for name in spec.kernels)


LAYOUTS = r"""
#include "cpu_device/state.h"
#include <stddef.h>
extern "C" __attribute__((visibility("default"))) const size_t layouts[5] = {
    sizeof(pk_node), sizeof(pk_fault), offsetof(pk_fault, address), offsetof(pk_fault, text), sizeof(pk_buffer)};
"""


def test_layouts_in_python_are_those_of_the_runtime() -> None:
    """Sizes and a few offsets, asked of the compiler."""
    library = build("layouts", LAYOUTS, find_compiler(), announce=lambda line: None)
    found = (ctypes.c_size_t * 5).in_dll(ctypes.CDLL(str(library)), "layouts")

    fault = cpu_runtime.Fault
    expected = (
        cpu_runtime.NODE.size, ctypes.sizeof(fault), fault.address.offset, fault.text.offset, ctypes.sizeof(Buffer)
    )
    assert expected == tuple(found)


@NO_ZIG
def test_the_aarch64_switch_assembles(tmp_path: Path) -> None:
    """Compiled, not run: the other architecture's assembly and signal context are at least accepted."""
    source = SOURCE_FOLDER / "cpu_device/runtime.cpp"
    command = [
        *zig_compiler().command, "-target", "aarch64-linux-gnu.2.28", "-std=c++17", "-O2", "-fPIC",
        f"-I{SOURCE_FOLDER}", "-c", str(source),
    ]
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cpu_compiler.zig_cache_folder())}
    result = subprocess.run([*command, "-o", str(tmp_path / "runtime.o")], env=environment, capture_output=True,
                            text=True, check=False)

    assert result.returncode == 0, result.stderr[:2000]
