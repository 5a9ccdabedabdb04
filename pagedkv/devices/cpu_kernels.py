"""Modules and kernels of the cpu device: loading, and the check of every launch against the real signature.

A kernel's entry takes 8-byte slots; its signature comes out of the C++ types (`PK_EXPORT`), so a count, kind or
size that does not fit is refused before anything runs.  Clause C14.4.

Read next: `cpu_operations.py`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.cpu_context import CpuContext
from pagedkv.devices.cpu_memory import address_of
from pagedkv.devices.cpu_operations import KernelOperation
from pagedkv.devices.cpu_streams import own_stream
from pagedkv.devices.protocol import (
    BLOCK_EXTENT_MAX,
    GRID_EXTENT_MAX,
    THREADS_PER_BLOCK_MAX,
    Extent,
    ModuleSpec,
    Stream,
)
from pagedkv.errors import CaptureRefused, MisuseError

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


class CpuKernel:
    """One compiled kernel.  Made by `CpuModule.kernel`."""

    def __init__(
        self,
        context: CpuContext,
        module: CpuModule,
        name: str,
        entry: int,
        signature: Sequence[int],
        *,
        is_serial: bool,
    ) -> None:
        self.name = name
        self.parameters: tuple[str, ...] = tuple(_describe(word) for word in signature)
        self._context = context
        self._module = module  # keeps the library
        self._entry = entry
        self._launch = f"launch of {name}"
        self._is_read_only = tuple(word & 0xFF == KIND_CONST_POINTER for word in signature)
        self._is_serial = is_serial
        self._name_bytes = ctypes.create_string_buffer(name.encode())
        self._name_address = ctypes.addressof(self._name_bytes)
        # Per parameter None for a pointer, else the scalar type.
        self._types: tuple[type[np.generic] | None, ...] = tuple(
            None if word & 0xFF <= KIND_CONST_POINTER else _SCALARS[word & 0xFF, word >> 8][0] for word in signature
        )
        self._pack = struct.Struct(
            "<"
            + "".join(
                "Q" if word & 0xFF <= KIND_CONST_POINTER else _SCALARS[word & 0xFF, word >> 8][1] for word in signature
            )
        ).pack

    def launch(
        self,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Any],
        stream: Stream,
        *,
        reads: Sequence[npt.NDArray[Any]] = (),
    ) -> None:
        """Submit one launch; see `protocol.Kernel.launch`.

        Raises:
            MisuseError: extents, argument count, kind or size, an array that is not this device's or not
                C-contiguous, or a stream of another device.  Nothing ran.
            DeviceFault: the kernel failed (in deferred mode, whoever forces it is told).
        """
        context = self._context
        context.check_usable()
        context.raise_violations()
        own = own_stream(context, stream, self._launch)
        types = self._types
        if len(arguments) != len(types):
            raise self._refusal(f"{len(types)} arguments", f"{len(arguments)}", "pass one per parameter")
        values: list[Any] = []
        keep: list[npt.NDArray[Any]] = []
        owner = context.memory.owner
        for position, (argument, expected) in enumerate(zip(arguments, types, strict=True)):
            if expected is None:
                if argument is None:
                    values.append(0)
                    continue
                if type(argument) is not np.ndarray or owner(argument) is None:
                    raise self._array_refusal(position, argument)
                flags = argument.flags
                if not flags.c_contiguous or not (flags.writeable or self._is_read_only[position]):
                    raise self._array_refusal(position, argument)
                values.append(address_of(argument))
                keep.append(argument)
            elif type(argument) is expected:
                values.append(argument)
            else:
                raise self._scalar_refusal(position, argument, expected)
        grid, block = self._extents(grid, block)
        operation = KernelOperation(
            self.name,
            grid,
            block,
            self._entry,
            self._name_address,
            self._is_serial,
            self._pack(*values),
            tuple(keep),
            tuple(self._pinned_slice(item) for item in reads) if reads else (),
            self._is_read_only,
            self,
        )
        context.driver_calls += 1
        own.submit(operation)

    def _extents(self, grid: Extent, block: Extent) -> tuple[Extent, Extent]:
        try:
            gx, gy, gz = map(index, grid)
            bx, by, bz = map(index, block)
        except (TypeError, ValueError):
            raise self._refusal(
                "three integers each for grid and block", f"{grid} and {block}", "pass x, y, z"
            ) from None
        if not (0 < gx <= GRID_EXTENT_MAX[0] and 0 < gy <= GRID_EXTENT_MAX[1] and 0 < gz <= GRID_EXTENT_MAX[2]):
            raise self._refusal(f"a grid from (1, 1, 1) to {GRID_EXTENT_MAX}", f"{grid}", "launch nothing for no work")
        if not (0 < bx <= BLOCK_EXTENT_MAX[0] and 0 < by <= BLOCK_EXTENT_MAX[1] and 0 < bz <= BLOCK_EXTENT_MAX[2]):
            raise self._refusal(f"a block from (1, 1, 1) to {BLOCK_EXTENT_MAX}", f"{block}", "use a smaller block")
        if bx * by * bz > THREADS_PER_BLOCK_MAX:
            raise self._refusal(
                f"at most {THREADS_PER_BLOCK_MAX} threads in a block",
                f"{bx * by * bz} in {block}",
                "use a smaller block",
            )
        return (gx, gy, gz), (bx, by, bz)

    def _pinned_slice(self, item: object) -> tuple[int, int]:
        if isinstance(item, np.ndarray) and item.flags.c_contiguous:
            allocation = self._context.memory.owner(item)
            if allocation is not None and allocation.is_pinned:
                return address_of(item), item.nbytes
        raise self._refusal(
            "reads= of C-contiguous pinned slices", _describe_value(item), "pass slices of device.pinned arrays"
        )

    def _array_refusal(self, position: int, argument: object) -> MisuseError:
        expected = (
            f"argument {position} ({self.parameters[position]}) to be a C-contiguous device or pinned array, or None"
        )
        if not isinstance(argument, np.ndarray):
            return self._refusal(expected, _describe_value(argument), "pass the array itself", position)
        if type(argument) is not np.ndarray:
            return self._refusal(expected, _describe_value(argument), "pass a plain numpy.ndarray", position)
        if self._context.memory.owner(argument) is None:
            got = f"{_describe_value(argument)} of pageable host memory or of another device"
            return self._refusal(expected, got, "allocate it with device.empty, and copy to it", position)
        if argument.flags.c_contiguous:
            return self._refusal(expected, f"{_describe_value(argument)}, read-only", "pass a writable array", position)
        got = f"{_describe_value(argument)} with strides {argument.strides}"
        return self._refusal(expected, got, "pass the whole array and its strides as scalars", position)

    def _scalar_refusal(self, position: int, argument: object, expected: type[np.generic]) -> MisuseError:
        return self._refusal(
            f"argument {position} ({self.parameters[position]}) to be numpy.{expected.__name__}",
            _describe_value(argument),
            f"write numpy.{expected.__name__}(...): a Python number has no size",
            position,
        )

    def _refusal(self, expected: str, got: str, remedy: str, position: int | None = None) -> MisuseError:
        return MisuseError(self._launch, expected=expected, got=got, remedy=remedy, clause="C14.4", argument=position)


class CpuModule:
    """Compiled kernels of one spec.  Made by `CpuDevice.load`; its library stays loaded for the process."""

    def __init__(self, context: CpuContext, spec: ModuleSpec, library: ctypes.CDLL, *, is_serial: bool) -> None:
        self.spec = spec
        self._context = context
        self._library = library
        self._is_serial = is_serial
        self._kernels: dict[str, CpuKernel] = {}

    def kernel(self, name: str) -> CpuKernel:
        """Give the kernel exported under `name`.

        Raises:
            MisuseError: the module exports none of that name.
        """
        found = self._kernels.get(name)
        if found is not None:
            return found
        try:
            entry = ctypes.cast(self._library[f"pk_entry_{name}"], ctypes.c_void_p).value
            words = self._library[f"pk_signature_{name}"]
        except AttributeError:
            raise MisuseError(
                f"kernel {name} of module {self.spec.name}",
                expected="a name exported with PK_EXPORT or listed in ModuleSpec.kernels",
                got=repr(name),
                remedy="export it",
                clause="C14.4",
            ) from None
        words.restype = ctypes.POINTER(ctypes.c_uint32)
        pointer = words()
        signature: list[int] = []
        while pointer[len(signature)]:
            signature.append(int(pointer[len(signature)]))
        kernel = CpuKernel(self._context, self, name, entry or 0, signature, is_serial=self._is_serial)
        self._kernels[name] = kernel
        return kernel


def refuse_load_in_capture(name: str) -> CaptureRefused:
    """Give the error for compiling or loading while a capture is on."""
    return CaptureRefused(
        f"load of module {name}",
        expected="every module loaded before the capture",
        got="a load during it",
        remedy="load it before begin_capture",
        clause="C15.1",
    )


def _describe(word: int) -> str:
    kind, size = word & 0xFF, word >> 8
    if kind == KIND_POINTER:
        return "pointer"
    if kind == KIND_CONST_POINTER:
        return "pointer to const"
    return np.dtype(_SCALARS[kind, size][0]).name


def _describe_value(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype} {value.shape}"
    if isinstance(value, np.generic):
        return f"numpy.{type(value).__name__}({value})"
    return f"{type(value).__name__} {value!r}"
