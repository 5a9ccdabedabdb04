"""Modules and kernels as both devices keep them, and the check of every launch against the kernel's signature.

The signature comes from the C++ types (`cuda_src/kernels/export.cuh`), so a wrong count, kind or size is refused
before anything runs, with the same text on both devices.  Arguments become slots of 8 bytes:

    pointer   address, or 0 for None        scalar   its bytes, padded with zeros

Each device adds how a launch is submitted.  Clause C14.4.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.devices.context import BaseContext, value_text
from pagedkv.devices.protocol import (
    BLOCK_EXTENT_MAX,
    GRID_EXTENT_MAX,
    THREADS_PER_BLOCK_MAX,
    Extent,
    ModuleSpec,
    Stream,
)
from pagedkv.devices.streams import own_stream
from pagedkv.errors import Caught, MisuseError, shown

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
_POINTERS = {KIND_POINTER: "pointer", KIND_CONST_POINTER: "pointer to const"}


class Signature:
    """One kernel's name and parameters.

    Attributes:
        name: the kernel's name.
        words: per parameter, kind | bytes << 8.
        parameters: per parameter, its type for messages.
        is_read_only: per parameter, is it a pointer to const?
    """

    def __init__(self, name: str, words: Sequence[int]) -> None:
        self.name = name
        self.words = tuple(words)
        self.launch = f"launch of {name}"
        kinds = [(word & 0xFF, word >> 8) for word in words]
        self.is_read_only = tuple(kind == KIND_CONST_POINTER for kind, _ in kinds)
        # Per parameter None for a pointer, else the scalar type.
        self._types = tuple(None if kind in _POINTERS else _SCALARS[kind, size][0] for kind, size in kinds)
        self.parameters: tuple[str, ...] = tuple(
            _POINTERS[kind] if scalar is None else np.dtype(scalar).name
            for (kind, _), scalar in zip(kinds, self._types, strict=True)
        )
        formats = ["Q" if kind in _POINTERS else _SCALARS[kind, size][1] for kind, size in kinds]
        self._pack = struct.Struct("<" + "".join(formats)).pack

    def pack(self, arguments: Sequence[Any], context: BaseContext) -> tuple[bytes, tuple[Any, ...]]:
        """Check arguments; give their slots, 8 bytes each, and the arrays behind the addresses."""
        types = self._types
        if not isinstance(arguments, tuple | list):
            raise self.refusal("a list or tuple of arguments", value_text(arguments), "pass one per parameter")
        if len(arguments) != len(types):
            raise self.refusal(f"{len(types)} arguments", f"{len(arguments)}", "pass one per parameter")
        values: list[Any] = []
        keep: list[Any] = []
        for position, (argument, expected) in enumerate(zip(arguments, types, strict=True)):
            if expected is None:
                if argument is None:
                    values.append(0)
                    continue
                address = context.address_of(argument, is_read_only=self.is_read_only[position])
                if address is None:
                    raise self._argument_refusal(
                        position, "a C-contiguous device or pinned array, or None", *context.explain(argument)
                    )
                values.append(address)
                keep.append(argument)
            elif type(argument) is expected:
                values.append(argument)
            else:
                name = f"numpy.{expected.__name__}"
                remedy = f"write {name}(...): a Python number has no size"
                raise self._argument_refusal(position, name, value_text(argument), remedy)
        return self._pack(*values), tuple(keep)

    def extents(self, grid: Extent, block: Extent) -> tuple[Extent, Extent]:
        """Check that CUDA launches such a grid and block, and give them as plain integers."""
        with Caught(but=MemoryError) as caught:
            gx, gy, gz = map(index, grid)
            bx, by, bz = map(index, block)
        if caught.error is not None:
            expected = "three integers each for grid and block"
            raise self.refusal(expected, f"{shown(grid)} and {shown(block)}", "pass x, y, z") from caught.error
        if not (0 < gx <= GRID_EXTENT_MAX[0] and 0 < gy <= GRID_EXTENT_MAX[1] and 0 < gz <= GRID_EXTENT_MAX[2]):
            raise self.refusal(f"a grid from (1, 1, 1) to {GRID_EXTENT_MAX}", shown(grid), "launch nothing for no work")
        if not (0 < bx <= BLOCK_EXTENT_MAX[0] and 0 < by <= BLOCK_EXTENT_MAX[1] and 0 < bz <= BLOCK_EXTENT_MAX[2]):
            raise self.refusal(f"a block from (1, 1, 1) to {BLOCK_EXTENT_MAX}", shown(block), "use a smaller block")
        if bx * by * bz > THREADS_PER_BLOCK_MAX:
            expected = f"at most {THREADS_PER_BLOCK_MAX} threads in a block"
            raise self.refusal(expected, f"{bx * by * bz} in {shown(block)}", "use a smaller block")
        return (gx, gy, gz), (bx, by, bz)

    def pinned_slice(self, item: object, context: BaseContext) -> tuple[int, int]:
        """Check one item of `reads`; give its address and bytes."""
        span = context.pinned_slice(item)
        if span is None:
            expected = "reads= of C-contiguous pinned slices"
            raise self.refusal(expected, value_text(item), "pass slices of device.pinned arrays")
        return span

    def refusal(self, expected: str, got: str, remedy: str, position: int | None = None) -> MisuseError:
        """Give the error of this kernel's launch."""
        return MisuseError(self.launch, expected=expected, got=got, remedy=remedy, clause="C14.4", argument=position)

    def _argument_refusal(self, position: int, expected: str, got: str, remedy: str) -> MisuseError:
        expected = f"argument {position} ({self.parameters[position]}) to be {expected}"
        return self.refusal(expected, got, remedy, position)


class Launch(NamedTuple):
    """One checked launch.

    Attributes:
        grid: blocks.
        block: threads.
        slots: 8 bytes per argument.
        keep: arrays whose memory the launch uses.
        reads: (address, bytes) of the declared pinned slices.
        through: arrays that it reaches through addresses in memory.
    """

    grid: Extent
    block: Extent
    slots: bytes
    keep: tuple[Any, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    through: tuple[Any, ...] = ()


class BaseKernel(ABC):
    """One compiled kernel.  Made by `Module.kernel`."""

    def __init__(self, context: BaseContext, code: object, signature: Signature) -> None:
        self.name = signature.name
        self.signature = signature
        self.parameters = signature.parameters
        self._code = code  # keeps it loaded; not the module, because a module holds its kernels
        self._context = context

    def launch(
        self,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Any],
        stream: Stream,
        *,
        reads: Sequence[npt.NDArray[Any]] = (),
        through: Sequence[Any] = (),
    ) -> None:
        """Check and submit one launch; see `protocol.Kernel.launch`."""
        context, signature = self._context, self.signature
        own = own_stream(context, stream, signature.launch)
        slots, keep = signature.pack(arguments, context)
        grid, block = signature.extents(grid, block)
        if not isinstance(reads, tuple | list):
            raise signature.refusal("reads= in a list or tuple", value_text(reads), "pass slices of pinned arrays")
        spans = tuple(signature.pinned_slice(item, context) for item in reads) if reads else ()
        for array in through:
            if context.address_of(array, is_read_only=False) is None:
                raise signature.refusal("through= of C-contiguous device arrays", value_text(array),
                                        "pass the arrays whose addresses the kernel reads")
        self._submit(Launch(grid, block, slots, keep, spans, tuple(through)), own)

    @abstractmethod
    def _submit(self, launch: Launch, stream: Any) -> None:
        """Give a checked launch to an own stream."""


class BaseModule(ABC):
    """Compiled kernels of one spec.  Made by `Device.load`."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec
        self._kernels: dict[str, BaseKernel] = {}

    def kernel(self, name: str) -> BaseKernel:
        """Give the kernel exported under `name`; see `protocol.Module.kernel`."""
        is_text = isinstance(name, str)
        kernel = (self._kernels.get(name) or self._find(name)) if is_text else None
        if kernel is None:
            raise MisuseError(
                f"kernel {shown(name, str)} of module {self.spec.name}", got=shown(name), remedy="export it",
                clause="C14.4",
                expected="a name exported with PK_EXPORT or listed in ModuleSpec.kernels",
            )
        self._kernels[name] = kernel
        return kernel

    @abstractmethod
    def _find(self, name: str) -> BaseKernel | None:
        """Give the exported kernel of that name, or None."""
