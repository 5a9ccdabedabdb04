"""Modules and kernels of the cuda device, and the one place that launches.

The driver gets pointers into the checked slots: CuPy's own launch would pass None as a missing parameter instead of a
null pointer, and would accept values of another type.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pagedkv.devices.cuda.compiler import CompiledModule
from pagedkv.devices.cuda.context import CudaContext
from pagedkv.devices.cuda.streams import CudaStream
from pagedkv.devices.kernels import BaseKernel, BaseModule, Launch, Signature
from pagedkv.devices.protocol import ModuleSpec
from pagedkv.errors import DeviceFault

SLOT_BYTES = 8


class CudaKernel(BaseKernel):
    """One compiled kernel.  Made by `CudaModule.kernel`."""

    _context: CudaContext

    def __init__(self, context: CudaContext, code: object, signature: Signature, function: Any) -> None:
        super().__init__(context, code, signature)
        self._function = function

    def _submit(self, launch: Launch, stream: CudaStream) -> None:
        grid, block, slots, keep, reads, through = launch
        # The driver copies the parameters before it returns, so `buffer` may end with this method.
        buffer = ctypes.create_string_buffer(slots, max(len(slots), 1))
        first = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(len(self.parameters), 1))(*range(first, first + len(slots), SLOT_BYTES))
        try:
            self._context.api.invoke(
                "cuda.driver.launchKernel", self._function.ptr, *grid, *block, 0, stream.native.ptr,
                ctypes.addressof(pointers), 0,
            )
        except DeviceFault as fault:
            fault.fields["kernel"] = self.name
            raise
        stream.note((*keep, *through), "kernel", self.name, grid, block, slots, reads)


class CudaModule(BaseModule):
    """Compiled kernels of one spec.  Made by `CudaDevice.load`."""

    def __init__(self, context: CudaContext, spec: ModuleSpec, compiled: CompiledModule) -> None:
        super().__init__(spec)
        self._context = context
        self._signatures = compiled.signatures
        self._native: Any = context.api.invoke("cuda.function.Module")
        context.api.invoke("cuda.function.Module.load", self._native, compiled.cubin)

    def _find(self, name: str) -> CudaKernel | None:
        if name not in self._signatures:
            return None
        function = self._context.api.invoke("cuda.function.Module.get_function", self._native, name)
        return CudaKernel(self._context, self._native, Signature(name, self._signatures[name]), function)
