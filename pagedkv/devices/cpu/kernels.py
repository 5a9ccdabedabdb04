"""Modules and kernels of the cpu device: loading, and the check of every launch against the real signature.

A kernel's entry takes 8-byte slots; its signature comes with it (`PK_EXPORT`).  Clause C14.4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices import refusals
from pagedkv.devices.cpu.context import CpuContext
from pagedkv.devices.cpu.memory import address_of
from pagedkv.devices.cpu.operations import KernelOperation
from pagedkv.devices.cpu.streams import own_stream
from pagedkv.devices.protocol import Extent, ModuleSpec, Stream
from pagedkv.devices.signatures import Signature, describe_value


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
        self.signature = Signature(name, signature)
        self.parameters = self.signature.parameters
        self._context = context
        self._module = module  # keeps the library
        self._entry = entry
        self._is_serial = is_serial
        self._name_bytes = ctypes.create_string_buffer(name.encode())
        self._name_address = ctypes.addressof(self._name_bytes)

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
        signature = self.signature
        own = own_stream(context, stream, signature.launch)
        slots, keep = signature.pack(arguments, self._address_of, self._describe_array)
        grid, block = signature.extents(grid, block)
        read = tuple(self._pinned_slice(item) for item in reads) if reads else ()
        operation = self.operation(grid, block, slots, keep=keep, reads=read)
        context.driver_calls += 1
        own.submit(operation)

    def operation(
        self,
        grid: Extent,
        block: Extent,
        slots: bytes,
        *,
        keep: tuple[npt.NDArray[Any], ...] = (),
        reads: tuple[tuple[int, int], ...] = (),
    ) -> KernelOperation:
        """Give what a stream carries for one launch; everything was checked."""
        return KernelOperation(
            self.name,
            grid,
            block,
            self._entry,
            self._name_address,
            self._is_serial,
            slots,
            keep,
            reads,
            self.signature.is_read_only,
            self,
        )

    def _address_of(self, argument: Any, is_read_only: bool) -> int | None:
        if type(argument) is not np.ndarray or self._context.memory.owner(argument) is None:
            return None
        flags = argument.flags
        if not flags.c_contiguous or not (flags.writeable or is_read_only):
            return None
        return address_of(argument)

    def _describe_array(self, argument: object) -> tuple[str, str]:
        described = describe_value(argument)
        if not isinstance(argument, np.ndarray):
            return described, "pass the array itself"
        if type(argument) is not np.ndarray:
            return described, "pass a plain numpy.ndarray"
        if self._context.memory.owner(argument) is None:
            return f"{described} of pageable host memory or of another device", (
                "allocate it with device.empty, and copy to it"
            )
        if argument.flags.c_contiguous:
            return f"{described}, read-only", "pass a writable array"
        return f"{described} with strides {argument.strides}", "pass the whole array and its strides as scalars"

    def _pinned_slice(self, item: object) -> tuple[int, int]:
        if isinstance(item, np.ndarray) and item.flags.c_contiguous:
            allocation = self._context.memory.owner(item)
            if allocation is not None and allocation.is_pinned:
                return address_of(item), item.nbytes
        raise self.signature.reads_refusal(item)


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
            raise refusals.unknown_kernel(name, self.spec.name) from None
        words.restype = ctypes.POINTER(ctypes.c_uint32)
        pointer = words()
        signature: list[int] = []
        while pointer[len(signature)]:
            signature.append(int(pointer[len(signature)]))
        kernel = CpuKernel(self._context, self, name, entry or 0, signature, is_serial=self._is_serial)
        self._kernels[name] = kernel
        return kernel
