"""The shared state of one device: whether it is open, which stream captures, and which arrays it owns.

Streams, kernels and graphs hold the context, not the device, so imports go one way.  Clauses: C12.4, C15.1.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from threading import get_ident
from typing import Any

import numpy as np

from pagedkv.devices.memory import BaseMemory, lies_within
from pagedkv.devices.users import Users
from pagedkv.errors import CaptureRefused, Caught, MisuseError, shown

_contexts: weakref.WeakSet[BaseContext] = weakref.WeakSet()


class BaseContext(ABC):
    """The shared state that both devices have.

    Attributes:
        name: "cpu" or "cuda".
        memory: the device's allocations.
        users: the open stores of the device; while there are any, only their thread may use it.
        unusable: why the device cannot be used; empty while it is open.
        capturing_on: label of the stream on which a capture began; empty when none is on.  The device writes it.
    """

    memory: BaseMemory

    def __init__(self, name: str, users: Users) -> None:
        self.name = name
        self.users = users
        self.capturing_on = ""
        self.unusable = ""
        _contexts.add(self)

    @property
    @abstractmethod
    def driver_calls(self) -> int:
        """Counted calls so far."""

    def check_usable(self) -> None:
        """Refuse use by another thread than the stores', after `close`, and in the child of a fork."""
        if self.users.thread != get_ident():
            self.users.check_thread(f"use of the {self.name} device")
        if self.unusable:
            raise MisuseError(
                f"use of the {self.name} device", expected="an open device in the process that made it",
                got=self.unusable, remedy="open a new one, and close a device only after its stores",
                clause="C12.4",
            )

    def check_outside_capture(self, what: str) -> None:
        """Refuse an unusable device, and what CUDA forbids while any stream captures."""
        self.check_usable()
        if self.capturing_on:
            raise CaptureRefused(
                what, expected="no capture on this device", got=f"one that began on {self.capturing_on}",
                remedy="do it before begin_capture or after end_capture", clause="C15.1",
            )

    def close(self) -> bool:
        """Become unusable; False when it was closed already."""
        if self.unusable:
            return False
        self.unusable = "a closed device"
        self.capturing_on = ""
        return True

    def note_fork(self) -> None:
        """Become unusable in the child of a fork."""
        self.unusable = self.unusable or "a device of the parent process, after fork"

    # -- arrays --------------------------------------------------------------------------------------------

    @abstractmethod
    def is_array(self, value: object) -> bool:
        """Is it an array of a type that this device takes?  Subclasses of numpy.ndarray are not."""

    @abstractmethod
    def is_own(self, array: Any) -> bool:
        """Does all of it lie in memory of this device, pinned memory included?"""

    def lies_within(self, array: Any) -> bool:
        """Does all of an array that `is_array` accepts lie in the memory that it is over?"""
        return lies_within(array)

    @abstractmethod
    def address(self, array: Any) -> int:
        """Give the address of the first element."""

    @abstractmethod
    def view(self, array: Any) -> Any:
        """Give an own array as the functions of `call` see it."""

    @abstractmethod
    def address_of(self, argument: Any, *, is_read_only: bool) -> int | None:
        """Give the address of an array that a kernel may use, None for anything else."""

    def pinned_slice(self, item: Any) -> tuple[int, int] | None:
        """Give address and bytes of a contiguous pinned slice, None for anything else."""
        if isinstance(item, np.ndarray) and item.flags.c_contiguous:
            allocation = self.memory.owner(item)
            if allocation is not None and allocation.is_pinned:
                return int(item.ctypes.data), item.nbytes
        return None

    def explain(self, argument: Any) -> tuple[str, str]:
        """Describe an argument that `address_of` did not accept, and say what to do."""
        text = value_text(argument)
        if not self.is_array(argument):
            is_subclass = isinstance(argument, np.ndarray)
            return text, "pass a plain numpy.ndarray" if is_subclass else "pass the array itself"
        if not self.is_own(argument):
            remedy = "allocate it with device.empty, and copy to it"
            return f"{text} of pageable host memory or of another device, or beyond its buffer", remedy
        if not argument.flags.c_contiguous:
            return text, "pass the whole array and its strides as scalars"
        if self.address(argument) % argument.dtype.itemsize:
            return f"{text} at an address that is no multiple of {argument.dtype.itemsize}", "pass an aligned array"
        return f"{text}, read-only", "pass a writable array"


def value_text(value: Any) -> str:
    """Describe an argument for a message: type, dtype and shape of an array, type and value of anything else."""
    if isinstance(value, np.generic):
        return f"numpy.{type(value).__name__}({value})"
    with Caught():  # an object that raises where an array has attributes is none
        if all(hasattr(value, attribute) for attribute in ("dtype", "shape", "strides", "flags")):
            strides = "" if value.flags.c_contiguous else f" with strides {value.strides}"
            return f"{type(value).__name__} {value.dtype} {value.shape}{strides}"
    return f"{type(value).__name__} {shown(value)}"


def _note_fork_everywhere() -> None:
    for context in list(_contexts):
        context.note_fork()


os.register_at_fork(after_in_child=_note_fork_everywhere)
