"""Modules and kernels of the cpu device: compiled entries that take slots of 8 bytes, with their signatures."""

from __future__ import annotations

import ctypes

from pagedkv.devices.cpu.context import CpuContext
from pagedkv.devices.cpu.operations import KernelOperation
from pagedkv.devices.cpu.streams import CpuStream
from pagedkv.devices.kernels import BaseKernel, BaseModule, Launch, Signature
from pagedkv.devices.protocol import ModuleSpec


class CpuKernel(BaseKernel):
    """One compiled kernel.  Made by `CpuModule.kernel`."""

    _context: CpuContext

    def __init__(
        self, context: CpuContext, code: ctypes.CDLL, signature: Signature, entry: int, *, is_serial: bool
    ) -> None:
        super().__init__(context, code, signature)
        self._entry = entry
        self._is_serial = is_serial
        self._name_bytes = ctypes.create_string_buffer(self.name.encode())
        self._name_address = ctypes.addressof(self._name_bytes)

    def operation(self, launch: Launch) -> KernelOperation:
        """Make the operation of a checked launch."""
        is_read_only = self.signature.is_read_only
        return KernelOperation(self.name, launch, self._entry, self._name_address, self._is_serial, is_read_only, self)

    def _submit(self, launch: Launch, stream: CpuStream) -> None:
        if self._context.memory.violations:
            self._context.raise_violations()
        stream.submit(self.operation(launch))


class CpuModule(BaseModule):
    """Compiled kernels of one spec.  Made by `CpuDevice.load`; its library stays loaded for the process.

    `is_serial`: the module has static `__shared__` arrays, so its blocks run one after another.
    """

    def __init__(self, context: CpuContext, spec: ModuleSpec, library: ctypes.CDLL, *, is_serial: bool) -> None:
        super().__init__(spec)
        self._context = context
        self._library = library
        self._is_serial = is_serial

    def _find(self, name: str) -> CpuKernel | None:
        try:
            entry = ctypes.cast(self._library[f"pk_entry_{name}"], ctypes.c_void_p).value
            words = self._library[f"pk_signature_{name}"]
        except AttributeError:
            return None
        words.restype = ctypes.POINTER(ctypes.c_uint32)
        pointer = words()
        signature: list[int] = []
        while word := int(pointer[len(signature)]):
            signature.append(word)
        found = Signature(name, signature)
        return CpuKernel(self._context, self._library, found, entry or 0, is_serial=self._is_serial)
