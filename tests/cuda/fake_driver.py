"""NVIDIA's driver as ctypes shows it, on a machine of the test's choice."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

NO_DEVICE, INVALID_DEVICE = 100, 101


class FakeDriver:
    """The functions of libcuda that look for GPUs; version 13010 is CUDA 13.1, and `code` is cuInit's answer."""

    def __init__(self, *, version: int = 13010, gpus: int = 1, code: int = 0, major: int = 9) -> None:
        self.version, self.gpus, self.code, self.major = version, gpus, code, major

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0 if index < self.gpus else INVALID_DEVICE

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> int:
        name.value = b"H200"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = self.major if attribute == 75 else 0
        return 0


def load_of(driver: FakeDriver | None) -> Callable[[str], Any]:
    """Give what stands for `ctypes.CDLL`; None: there is no driver."""

    def load(name: str) -> Any:
        if driver is None or name != "libcuda.so.1":
            raise OSError(name)
        return driver

    return load
