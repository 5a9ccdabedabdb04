"""Devices: what executes kernels, copies and calls.

`open_device` chooses one and says why.  Importing this package needs neither CuPy nor a compiler.
"""

from __future__ import annotations

from pagedkv.devices.cache_folder import announce_on_stderr
from pagedkv.devices.counting import CountingDevice
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.driver import visible_gpu
from pagedkv.devices.protocol import Device
from pagedkv.errors import MissingRequirement, MisuseError, shown

NAMES = ("auto", "cpu", "cuda", "none")


def open_device(name: str = "auto") -> Device:
    """Open a device: "cpu", "cuda", "none", or "auto" for `cuda` where a GPU answers, else `cpu`.

    "none" keeps no bytes and computes nothing: a store on it has its ledgers and host tables only.  Where "auto" leaves
    a GPU unused, for example because CuPy is not installed, it says so on stderr.

    Raises:
        MisuseError: another name.
        MissingRequirement: what the device needs is not there, and how to get it.
    """
    if not isinstance(name, str):
        name = shown(name)
    if name == "cpu":
        return CpuDevice(reason="asked for")
    if name == "cuda":
        return CudaDevice(reason="asked for")
    if name == "none":
        return CountingDevice()
    if name == "auto":
        try:
            return CudaDevice(reason="chosen because it answers")
        except MissingRequirement as missing:
            if gpu := visible_gpu():
                announce_on_stderr(
                    f"pagedkv: this machine has a GPU, {gpu}, but the store runs on the cpu device: "
                    f"{missing.got}; {missing.remedy}"
                )
            return CpuDevice(reason=f"chosen because there is no cuda device: {missing.got}")
    raise MisuseError("device", expected=f"one of {NAMES}", got=name, remedy="name one of them", clause="C12.4")


__all__ = ["CpuDevice", "CudaDevice", "Device", "open_device"]
