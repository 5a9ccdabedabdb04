"""Devices: what executes kernels, copies and calls.

`open_device` chooses one and says why.  Importing this package needs neither CuPy nor a compiler.

Read next: `protocol.py`, then `cpu.py`.
"""

from __future__ import annotations

from pagedkv.devices.cpu import CpuDevice
from pagedkv.devices.protocol import Device
from pagedkv.errors import MissingRequirement, MisuseError

NAMES = ("auto", "cpu", "cuda")


def open_device(name: str = "auto") -> Device:
    """Open a device: "cpu", "cuda", or "auto" for the better one that is usable here.

    Raises:
        MisuseError: another name.
        MissingRequirement: what the device needs is not there, and how to get it.
    """
    if name == "cpu":
        return CpuDevice(reason="asked for")
    if name == "auto":
        return CpuDevice(reason="chosen because this build has no cuda device")
    if name == "cuda":
        raise MissingRequirement(
            "device cuda",
            expected="a build with the cuda device",
            got="one without it",
            remedy="use device 'cpu', which runs the same kernels",
            clause="C12.4",
        )
    raise MisuseError("device", expected=f"one of {NAMES}", got=repr(name), remedy="name one of them", clause="C12.4")


__all__ = ["CpuDevice", "Device", "open_device"]
