"""Arrays of kernel tests: BF16 bits, noise, block tables, and copies between host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import codecs
from pagedkv.devices.protocol import Array, Device, Stream

Bits = npt.NDArray[np.uint16]
Rng = np.random.Generator
Table = npt.NDArray[np.int32]

BF16_NAN = 0x7FC0
MARK_BF16 = 0x7FC1
"""What output buffers hold before a kernel writes them: a NaN that no kernel produces."""


def scattered_table(rows: int, blocks: int, *, permutation: Rng | None = None) -> Table:
    """Return a (rows, blocks) table of distinct odd page ids: 2p + 1, or a permutation of these."""
    ids = np.arange(rows * blocks, dtype=np.int32)
    if permutation is not None:
        ids = permutation.permutation(ids).astype(np.int32)
    return (2 * ids + 1).reshape(rows, blocks)


def bf16_noise(rng: Rng, shape: tuple[int, ...], scale: float = 1.0) -> Bits:
    """Return Gaussian BF16 values of the given root mean square, as bits."""
    return codecs.f32_to_bf16((rng.standard_normal(shape) * scale).astype(np.float32))


def to_floats(bits: Bits) -> npt.NDArray[np.float32]:
    """Return the numbers of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_device(device: Device, stream: Stream, array: npt.NDArray[Any]) -> Array:
    """Copy a host array to a device array of its own."""
    target = device.empty(array.shape, array.dtype)
    device.copy(target, np.ascontiguousarray(array), stream)
    return target


def to_host(device: Device, stream: Stream, array: Array) -> npt.NDArray[Any]:
    """Copy a device array to the host, after everything on the stream."""
    host = np.empty(array.shape, array.dtype)
    device.copy(host, array, stream)
    stream.synchronize()
    return host
