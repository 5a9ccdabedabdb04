"""The cpu device: CUDA kernel sources on this machine's cores, for tests and for machines without a GPU.

Every CUDA thread is a fiber; blocks run on a few OS threads.  In eager mode an operation runs when it is submitted, so
events always have passed; in deferred mode streams are real queues, and a seed picks among the legal orders
(`deferred.py`).  The device refuses what CUDA forbids under capture, so that code that works here works on a GPU.

It finds what a GPU does not: guard pages and canaries around every buffer, poison in fresh memory, exact errors for
divergent barriers and warp collectives, and a choice of thread orders (a data race gives different bits in another
order).

Clauses: C12.4 (faults are answers), C14.4 (streams are explicit), C15.1 (addresses are stable).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from pagedkv.devices.cpu.compiler import Announce, Compiler, announce_on_stderr, build, find_compiler
from pagedkv.devices.cpu.context import CpuContext
from pagedkv.devices.cpu.deferred import SCHEDULES
from pagedkv.devices.cpu.kernels import CpuModule
from pagedkv.devices.cpu.memory import address_of, host_memory_bytes
from pagedkv.devices.cpu.operations import CallOperation, CopyOperation, NodeOperation
from pagedkv.devices.cpu.runtime import ORDERS, load_library
from pagedkv.devices.cpu.streams import CpuEvent, CpuGraph, CpuStream
from pagedkv.devices.device import BaseDevice
from pagedkv.devices.protocol import ModuleSpec
from pagedkv.devices.sources import has_static_shared, module_text
from pagedkv.devices.streams import Capture
from pagedkv.errors import MisuseError

THREADS_DEFAULT_MAX = 16  # every OS thread reserves 128 MiB of address space for stacks
THREADS_MAX = 256
CHECKS = ("", "bounds")
MODES = ("eager", "deferred")


class CpuDevice(BaseDevice):
    """An executor of CUDA sources on fibers.

    Args:
        order: "ascending", "descending" or "random": order of lanes, warps and blocks.
        seed: of the random order, and of the schedule; every launch draws another order from it.
        mode: "eager" runs an operation at its submission, "deferred" when something forces it.
        schedule: "late", "early" or "random": how a deferred device picks the next operation.
        threads: OS threads that run blocks, the caller's included; by default the cores this process may use.
        checks: "bounds" builds modules that trap on misaligned accesses and on indices outside fixed arrays.
        compiler: by default that of `find_compiler`.
        announce: called with one line when something is compiled, which happens once per machine.
        spin_seconds: a block in which only spinning threads run for so long is a fault.
        reason: why this device was chosen; part of `description`.

    Raises:
        MissingRequirement: no C++ compiler.
        MisuseError: an option has no such value.
    """

    name = "cpu"
    array_words = "numpy.ndarray"
    _context: CpuContext

    def __init__(
        self,
        *,
        order: str = "ascending",
        seed: int = 0,
        mode: str = "eager",
        schedule: str = "late",
        threads: int | None = None,
        checks: str = "",
        compiler: Compiler | None = None,
        announce: Announce = announce_on_stderr,
        spin_seconds: float = 10.0,
        reason: str = "",
    ) -> None:
        self.threads = min(len(os.sched_getaffinity(0)), THREADS_DEFAULT_MAX) if threads is None else threads
        _require(1 <= self.threads <= THREADS_MAX, "threads", f"1 to {THREADS_MAX}", threads)
        for option, value, choices in (
            ("order", order, tuple(ORDERS)), ("checks", checks, CHECKS), ("mode", mode, MODES),
            ("schedule", schedule, SCHEDULES),
        ):
            _require(value in choices, option, f"one of {choices}", value)
        self.checks = checks
        self.mode = mode
        self.compiler = compiler or find_compiler()
        self._announce = announce
        self._deferred_words = f", deferred ({schedule}, seed {seed})" if mode == "deferred" else ""
        context = CpuContext(
            load_library(self.compiler, announce), threads=self.threads, order=order, seed=seed,
            spin_seconds=spin_seconds, schedule=schedule if mode == "deferred" else None,
        )
        super().__init__(context, reason)

    def _summary(self) -> str:
        threads = f"{self.threads} OS {'thread' if self.threads == 1 else 'threads'}"
        return f"cpu device: kernels as fibers on {threads}, compiled by {self.compiler.kind}{self._deferred_words}"

    @property
    def order_choices(self) -> int:
        """How often the seed decided the order of work or the time of an event, in deferred mode; else 0."""
        return 0 if self._context.queues is None else self._context.queues.choices

    def set_order(self, order: str, seed: int = 0) -> None:
        """Choose the order of lanes, warps and blocks for later launches."""
        self._context.check_usable()
        _require(order in ORDERS, "order", f"one of {tuple(ORDERS)}", order)
        self._context.set_order(order, seed)

    def memory_bytes(self) -> tuple[int, int]:
        """Give free and total memory of the host, in bytes, within its control group."""
        return host_memory_bytes()

    def empty_caches(self) -> int:
        """Return 0: freed buffers go back to the system at once."""
        return 0

    def check_canaries(self) -> None:
        """Check the slack around every buffer, and around the buffers freed since the last check.

        Raises:
            DeviceFault: something was written there.
        """
        self._context.raise_overwritten(self._context.memory.check())

    def stream(self) -> CpuStream:
        """Make a stream."""
        self._context.check_usable()
        self._streams_count += 1
        return CpuStream(self._context, self, self._streams_count - 1)

    def event(self) -> CpuEvent:
        """Make an event."""
        self._context.check_usable()
        return CpuEvent(self._context)

    def readable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give host memory for reading; in deferred mode StreamHazard for a read before the wait."""
        if self._context.queues is not None and array.nbytes:
            start = address_of(array)
            self._context.queues.require_readable((start, start + array.nbytes))
        return array

    # -- how checked work runs -----------------------------------------------------------------------------

    def _compile(self, spec: ModuleSpec) -> CpuModule:
        path = build(
            spec.name, module_text(spec), self.compiler,
            defines=spec.defines, checks=self.checks, announce=self._announce,
        )
        return CpuModule(self._context, spec, ctypes.CDLL(str(path)), is_serial=has_static_shared(spec))

    def _submit_copy(
        self, destination: npt.NDArray[Any], source: npt.NDArray[Any], stream: CpuStream, *, is_source_pageable: bool
    ) -> None:
        if not destination.nbytes:
            self._context.driver_calls += 1
            return
        if is_source_pageable and self._context.queues is not None:
            source = source.copy()  # at submission, as CUDA stages it
        addresses = (address_of(destination), address_of(source))
        stream.submit(CopyOperation(*addresses, destination.nbytes, (destination.view(), source.view())))

    def _submit_call(self, name: str, fn: Callable[..., Any], arguments: tuple[Any, ...], stream: CpuStream) -> None:
        stream.submit(CallOperation(name, fn, arguments))

    def _begin_native(self, stream: CpuStream) -> None:
        pass

    def _end_native(self, stream: CpuStream) -> None:
        pass

    def _graph(self, capture: Capture[NodeOperation], native: None) -> CpuGraph:  # noqa: ARG002 - there is no driver
        return CpuGraph(self._context, capture)


def _require(holds: bool, what: str, expected: str, got: object) -> None:
    if not holds:
        raise MisuseError(f"{what} of the cpu device", expected=expected, got=got, remedy="correct it", clause="C14.4")
