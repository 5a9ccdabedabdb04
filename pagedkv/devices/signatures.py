"""A kernel's signature, and the check of every launch against it; the same on both devices.

The words come out of the C++ types (`cuda_src/kernels/export.cuh`), so a count, kind or size that does not fit is
refused before anything runs, with the same text wherever the kernel would have run.  Arguments end as 8-byte slots:

    pointer   address, or 0 for None        scalar   its bytes, padded with zeros

What an acceptable array is differs by device: each passes its own two functions.  Clause C14.4.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import numpy as np

from pagedkv.devices.protocol import BLOCK_EXTENT_MAX, GRID_EXTENT_MAX, THREADS_PER_BLOCK_MAX, Extent
from pagedkv.errors import MisuseError

KIND_POINTER, KIND_CONST_POINTER, KIND_SIGNED, KIND_UNSIGNED, KIND_FLOAT, KIND_BOOL = range(1, 7)

# (kind, bytes) -> scalar type and its format in a slot of 8 bytes.
_SCALARS: dict[tuple[int, int], tuple[type[np.generic], str]] = {
    (KIND_SIGNED, 1): (np.int8, "b7x"),
    (KIND_SIGNED, 2): (np.int16, "h6x"),
    (KIND_SIGNED, 4): (np.int32, "i4x"),
    (KIND_SIGNED, 8): (np.int64, "q"),
    (KIND_UNSIGNED, 1): (np.uint8, "B7x"),
    (KIND_UNSIGNED, 2): (np.uint16, "H6x"),
    (KIND_UNSIGNED, 4): (np.uint32, "I4x"),
    (KIND_UNSIGNED, 8): (np.uint64, "Q"),
    (KIND_FLOAT, 4): (np.float32, "f4x"),
    (KIND_FLOAT, 8): (np.float64, "d"),
    (KIND_BOOL, 1): (np.bool_, "?7x"),
}

AddressOf = Callable[[Any, bool], int | None]
"""(argument, the kernel only reads it) -> its address, or None when it is not acceptable."""

DescribeArray = Callable[[Any], tuple[str, str]]
"""An argument that is not acceptable -> what it is, and what to do."""


class Signature:
    """One kernel's name and parameters.

    Attributes:
        name: the kernel's name.
        words: per parameter, kind | bytes << 8.
        parameters: per parameter, how messages call it.
        is_read_only: per parameter, is it a pointer to const?
    """

    def __init__(self, name: str, words: Sequence[int]) -> None:
        self.name = name
        self.words = tuple(words)
        self.parameters: tuple[str, ...] = tuple(_describe(word) for word in words)
        self.launch = f"launch of {name}"
        self.is_read_only = tuple(word & 0xFF == KIND_CONST_POINTER for word in words)
        # Per parameter None for a pointer, else the scalar type.
        self._types: tuple[type[np.generic] | None, ...] = tuple(
            None if word & 0xFF <= KIND_CONST_POINTER else _SCALARS[word & 0xFF, word >> 8][0] for word in words
        )
        self._pack = struct.Struct(
            "<"
            + "".join(
                "Q" if word & 0xFF <= KIND_CONST_POINTER else _SCALARS[word & 0xFF, word >> 8][1] for word in words
            )
        ).pack

    def pack(
        self, arguments: Sequence[Any], address_of: AddressOf, describe_array: DescribeArray
    ) -> tuple[bytes, tuple[Any, ...]]:
        """Check arguments and give their slots, 8 bytes each, and the arrays behind the addresses.

        Raises:
            MisuseError: argument count, kind or size, or an array that `address_of` does not accept.
        """
        types = self._types
        if len(arguments) != len(types):
            raise self.refusal(f"{len(types)} arguments", f"{len(arguments)}", "pass one per parameter")
        values: list[Any] = []
        keep: list[Any] = []
        for position, (argument, expected) in enumerate(zip(arguments, types, strict=True)):
            if expected is None:
                if argument is None:
                    values.append(0)
                    continue
                address = address_of(argument, self.is_read_only[position])
                if address is None:
                    raise self._array_refusal(position, argument, describe_array)
                values.append(address)
                keep.append(argument)
            elif type(argument) is expected:
                values.append(argument)
            else:
                raise self._scalar_refusal(position, argument, expected)
        return self._pack(*values), tuple(keep)

    def extents(self, grid: Extent, block: Extent) -> tuple[Extent, Extent]:
        """Check grid and block and give them as plain integers.

        Raises:
            MisuseError: they are not three integers each, or beyond what CUDA launches.
        """
        try:
            gx, gy, gz = map(index, grid)
            bx, by, bz = map(index, block)
        except (TypeError, ValueError):
            raise self.refusal(
                "three integers each for grid and block", f"{grid} and {block}", "pass x, y, z"
            ) from None
        if not (0 < gx <= GRID_EXTENT_MAX[0] and 0 < gy <= GRID_EXTENT_MAX[1] and 0 < gz <= GRID_EXTENT_MAX[2]):
            raise self.refusal(f"a grid from (1, 1, 1) to {GRID_EXTENT_MAX}", f"{grid}", "launch nothing for no work")
        if not (0 < bx <= BLOCK_EXTENT_MAX[0] and 0 < by <= BLOCK_EXTENT_MAX[1] and 0 < bz <= BLOCK_EXTENT_MAX[2]):
            raise self.refusal(f"a block from (1, 1, 1) to {BLOCK_EXTENT_MAX}", f"{block}", "use a smaller block")
        if bx * by * bz > THREADS_PER_BLOCK_MAX:
            raise self.refusal(
                f"at most {THREADS_PER_BLOCK_MAX} threads in a block",
                f"{bx * by * bz} in {block}",
                "use a smaller block",
            )
        return (gx, gy, gz), (bx, by, bz)

    def reads_refusal(self, item: object) -> MisuseError:
        """Give the error for a `reads=` that is no pinned slice."""
        return self.refusal(
            "reads= of C-contiguous pinned slices", describe_value(item), "pass slices of device.pinned arrays"
        )

    def refusal(self, expected: str, got: str, remedy: str, position: int | None = None) -> MisuseError:
        """Give the error of this kernel's launch."""
        return MisuseError(self.launch, expected=expected, got=got, remedy=remedy, clause="C14.4", argument=position)

    def _array_refusal(self, position: int, argument: object, describe_array: DescribeArray) -> MisuseError:
        expected = (
            f"argument {position} ({self.parameters[position]}) to be a C-contiguous device or pinned array, or None"
        )
        got, remedy = describe_array(argument)
        return self.refusal(expected, got, remedy, position)

    def _scalar_refusal(self, position: int, argument: object, expected: type[np.generic]) -> MisuseError:
        return self.refusal(
            f"argument {position} ({self.parameters[position]}) to be numpy.{expected.__name__}",
            describe_value(argument),
            f"write numpy.{expected.__name__}(...): a Python number has no size",
            position,
        )


def describe_value(value: object) -> str:
    """Say what an argument is, as messages tell it."""
    if isinstance(value, np.generic):
        return f"numpy.{type(value).__name__}({value})"
    if all(hasattr(value, attribute) for attribute in ("dtype", "shape", "strides")):
        return f"{type(value).__name__} {value.dtype} {value.shape}"  # type: ignore[attr-defined]
    return f"{type(value).__name__} {value!r}"


def _describe(word: int) -> str:
    kind, size = word & 0xFF, word >> 8
    if kind == KIND_POINTER:
        return "pointer"
    if kind == KIND_CONST_POINTER:
        return "pointer to const"
    return np.dtype(_SCALARS[kind, size][0]).name
