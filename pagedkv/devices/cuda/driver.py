"""NVIDIA's driver, asked without CuPy: where CuPy is missing, only the driver knows whether there is a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


def visible_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Give the name of the first GPU that this process sees; empty when the driver is missing or shows none."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return ""
    driver.cuDeviceGetName(name, len(name), device)
    return name.value.decode(errors="replace")
