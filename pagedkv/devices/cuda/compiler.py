"""NVRTC for the cuda device, and its cache of machine code.

The device calls NVRTC directly, not through `cupy.RawModule`, which adds `-ftz=true` to every compilation: that flushes
subnormals, so the bits would differ from those of the cpu device.  `RawModule` also looks for CUDA's headers, which our
sources do not need.  NVRTC gets every included file of `cuda_src` as a named header.

The name of a cached file is a hash of all inputs of its compilation, so nothing is ever stale.  A file of
`devices/cache_folder.py` holds

    signatures as one line of JSON, {"append_rows": [kind | bytes << 8, ...], ...}
    the cubin

The signatures come from the PTX, where `PK_EXPORT` leaves them as data.  Knows no array and no stream.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from pagedkv.devices.cache_folder import SEAL_HEAD, Announce, CacheFolder, content_of
from pagedkv.devices.cuda.runtime import CudaRuntime
from pagedkv.devices.protocol import ModuleSpec
from pagedkv.devices.sources import module_text, reached_files
from pagedkv.errors import MissingRequirement, MisuseError, shown

# The kernel report uses the same: explicit fmaf only, and never ftz or approximations (C14.6).
OPTIONS = ("--std=c++17", "--fmad=false")
CHANGES_BITS = ("use_fast_math", "ftz", "fmad", "prec-div", "prec-sqrt")

_TABLE = re.compile(r"\.b8 pk_signature_(\w+)\[(\d+)\](?:\s*=\s*\{([^}]*)\})?")


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """Machine code of one module.

    Attributes:
        cubin: the machine code for the driver.
        signatures: per exported kernel its words (`devices/kernels.py`).
    """

    cubin: bytes
    signatures: dict[str, tuple[int, ...]]


def compile_module(
    api: CudaRuntime, spec: ModuleSpec, architecture: str, *, options: tuple[str, ...], announce: Announce
) -> CompiledModule:
    """Compile a module for an architecture such as "sm_90", or take it from the cache."""
    text = module_text(spec)
    headers = {name: path.read_bytes() for name, path in reached_files(text)}
    defines = (f"-D{name}={value}" for name, value in spec.defines)
    every = (f"--gpu-architecture={architecture}", *OPTIONS, *options, *defines)
    version = ".".join(map(str, api.invoke("cuda.nvrtc.getVersion")))
    # The head of the seal is part of the key: files from before seals have other names.
    digest = hashlib.sha256("\0".join((version, *every, text)).encode() + SEAL_HEAD)
    for name, content in headers.items():
        digest.update(name.encode() + b"\0" + content + b"\0")

    def compile_to(target: Path) -> None:
        started = time.monotonic()
        announce(f"pagedkv: compiling {spec.name} for {architecture} with NVRTC {version} (once)")
        compiled = _compile(api, spec, text, headers, every, is_ours=spec.text is None and not options)
        target.write_bytes(json.dumps(compiled.signatures).encode() + b"\n" + compiled.cubin)
        announce(f"pagedkv: compiled {spec.name} in {time.monotonic() - started:.1f} s")

    name = f"{spec.name}-{architecture}-{digest.hexdigest()[:32]}.cubin"
    head, _, cubin = content_of(CacheFolder("cuda", announce=announce).file(name, compile_to)).partition(b"\n")
    return CompiledModule(cubin, {kernel: tuple(words) for kernel, words in json.loads(head).items()})


def check_options(options: tuple[str, ...]) -> None:
    """Refuse options that approximate, flush subnormals or fuse operations: both devices compute the same bits."""
    for option in options:
        if option.lstrip("-").split("=")[0] in CHANGES_BITS:
            raise MisuseError(
                "options of the cuda device", expected="none of those that change bits: " + ", ".join(CHANGES_BITS),
                got=shown(option), remedy="leave it out; use explicit intrinsics in the kernel that needs them",
                clause="C14.6",
            )


def read_signatures(ptx: str) -> dict[str, tuple[int, ...]]:
    """Read the tables of PK_EXPORT from PTX: little-endian words; the compiler leaves trailing zero bytes out."""
    signatures: dict[str, tuple[int, ...]] = {}
    for name, byte_count, content in _TABLE.findall(ptx):
        raw = bytes(int(byte) for byte in content.split(",")) if content else b""
        raw = raw.ljust(int(byte_count), b"\0")
        words = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
        signatures[name] = tuple(words[:-1])  # the last word is the end mark
    return signatures


def _compile(
    api: CudaRuntime, spec: ModuleSpec, text: str, headers: dict[str, bytes], options: tuple[str, ...], *, is_ours: bool
) -> CompiledModule:
    # CuPy's binding takes source and name as text, headers and their names as bytes.  The unit has a name of its own,
    # because NVRTC takes an include of the same name for the unit itself.
    names = tuple(name.encode() for name in headers)
    program = api.invoke("cuda.nvrtc.createProgram", text, f"unit-{spec.name}.cu", tuple(headers.values()), names)
    try:
        try:
            api.invoke("cuda.nvrtc.compileProgram", program, options)
        except api.compile_error as error:
            log = str(api.invoke("cuda.nvrtc.getProgramLog", program)).strip() or str(error)
            if is_ours:
                raise MissingRequirement(
                    "the cuda device", expected="NVRTC that compiles the sources of this library",
                    got=f"{error}:\n{log}\n", remedy="install another version of NVRTC (CUDA 12 or newer)",
                    clause="C12.4",
                ) from error
            raise MisuseError(
                f"module {spec.name}", expected="CUDA C++ that NVRTC compiles", got=f"{error}:\n{log}\n",
                remedy=f"correct the text of ModuleSpec {spec.name!r} (compiled after runtime.cuh) or the options",
                clause="C14.4", compiler_output=log,
            ) from error
        ptx = api.invoke("cuda.nvrtc.getPTX", program).decode()
        return CompiledModule(bytes(api.invoke("cuda.nvrtc.getCUBIN", program)), read_signatures(ptx))
    finally:
        api.invoke("cuda.nvrtc.destroyProgram", program)
