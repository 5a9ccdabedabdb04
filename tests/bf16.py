"""BF16 as uint16 bits, in NumPy, for tests; written apart from the library's own conversion."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bf16_from_f32(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to the nearest BF16, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def f32_from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Promote BF16 bits exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
