"""Modules and kernels of the cuda device, and the one helper that launches.

Every launch is checked against the real signature (`signatures.py`), takes its stream, and is noted when a capture is
on.  The driver gets pointers into the checked slots: CuPy's own launch would turn None into a null parameter instead
of a null pointer, and accept what has no exact type.  Clause C14.4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices import refusals
from pagedkv.devices.cuda.compiler import CompiledModule
from pagedkv.devices.cuda.context import CudaContext
from pagedkv.devices.cuda.streams import CapturedNode, own_stream
from pagedkv.devices.protocol import Extent, ModuleSpec, Stream
from pagedkv.devices.signatures import Signature, describe_value
from pagedkv.errors import DeviceFault

SLOT_BYTES = 8


class CudaKernel:
    """One compiled kernel.  Made by `CudaModule.kernel`."""

    def __init__(self, context: CudaContext, module: CudaModule, function: Any, signature: Signature) -> None:
        self.name = signature.name
        self.signature = signature
        self.parameters = signature.parameters
        self._context = context
        self._module = module  # keeps the code loaded
        self._function = function

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
                C-contiguous, or a stream of another device.  Nothing was submitted.
            DeviceFault: the launch failed, or earlier work did.
        """
        context, signature = self._context, self.signature
        context.check_usable()
        own = own_stream(context, stream, signature.launch)
        slots, keep = signature.pack(arguments, self._address_of, self._describe_array)
        grid, block = signature.extents(grid, block)
        read = tuple(self._pinned_slice(item) for item in reads)
        # The driver copies the parameters before it returns; `buffer` need not live longer.
        buffer = ctypes.create_string_buffer(slots, max(len(slots), 1))
        first = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(len(signature.words), 1))(*range(first, first + len(slots), SLOT_BYTES))
        try:
            context.api.invoke(
                "cuda.driver.launchKernel",
                self._function.ptr,
                *grid,
                *block,
                0,
                own.native.ptr,
                ctypes.addressof(pointers),
                0,
            )
        except DeviceFault as fault:
            fault.fields["kernel"] = self.name
            raise
        own.note(CapturedNode("kernel", self.name, grid, block, slots, read, keep))

    def _address_of(self, argument: Any, is_read_only: bool) -> int | None:
        return self._context.address_of(argument, is_read_only=is_read_only)

    def _describe_array(self, argument: Any) -> tuple[str, str]:
        described = describe_value(argument)
        is_native = isinstance(argument, self._context.api.array_type)
        if not is_native and not isinstance(argument, np.ndarray):
            return described, "pass the array itself"
        if not is_native and type(argument) is not np.ndarray:
            return described, "pass a plain numpy.ndarray"
        if not argument.flags.c_contiguous:
            return f"{described} with strides {argument.strides}", "pass the whole array and its strides as scalars"
        if is_native or self._context.memory.owner(argument) is None:
            return f"{described} of pageable host memory or of another device", (
                "allocate it with device.empty, and copy to it"
            )
        return f"{described}, read-only", "pass a writable array"

    def _pinned_slice(self, item: object) -> tuple[int, int]:
        found = self._context.pinned_slice(item)
        if found is None:
            raise self.signature.reads_refusal(item)
        return found


class CudaModule:
    """Compiled kernels of one spec.  Made by `CudaDevice.load`."""

    def __init__(self, context: CudaContext, spec: ModuleSpec, compiled: CompiledModule) -> None:
        self.spec = spec
        self._context = context
        self._signatures = compiled.signatures
        self._native: Any = context.api.invoke("cuda.function.Module")
        context.api.invoke("cuda.function.Module.load", self._native, compiled.cubin)
        self._kernels: dict[str, CudaKernel] = {}

    def kernel(self, name: str) -> CudaKernel:
        """Give the kernel exported under `name`.

        Raises:
            MisuseError: the module exports none of that name.
        """
        found = self._kernels.get(name)
        if found is None:
            if name not in self._signatures:
                raise refusals.unknown_kernel(name, self.spec.name)
            function = self._context.api.invoke("cuda.function.Module.get_function", self._native, name)
            found = CudaKernel(self._context, self, function, Signature(name, self._signatures[name]))
            self._kernels[name] = found
        return found
