"""Users: the open stores of one device.  They are of one thread, and each of them learns of every fault.  (C12.4)

A fault of CUDA is sticky: nothing on that GPU ends well afterwards.  So the device tells all its users, also where a
launch of another user failed, or where the caller caught the error.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from types import TracebackType
from typing import Protocol

from pagedkv.errors import DeviceFault, MisuseError


class User(Protocol):
    """Somebody whose work on a device must end after a fault."""

    def latch(self, fault: DeviceFault) -> None:
        """Begin no further work; the first fault is the evidence."""


class Users:
    """The users of one device, held weakly.  As a context manager it reports a fault that leaves the block.

    Attributes:
        thread: the identifier of the users' thread; 0 before the first one.
    """

    def __init__(self) -> None:
        self.thread = 0
        self._users: weakref.WeakSet[User] = weakref.WeakSet()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DeviceFault):
            self.report(error)

    def join(self, user: User) -> None:
        """Add a user; refuse one of another thread than the others'."""
        self.check_thread("opening a store on this device")
        self.thread = get_ident()
        self._users.add(user)

    def leave(self, user: User) -> None:
        """Remove a user; one that has left already is ignored."""
        self._users.discard(user)

    def has_others(self, user: User) -> bool:
        """Say whether anybody but `user` uses the device."""
        return any(other is not user for other in self._users)

    def report(self, fault: DeviceFault) -> None:
        """Latch every user."""
        for user in tuple(self._users):
            user.latch(fault)

    def check_thread(self, what: str) -> None:
        """Refuse another thread while there are users; a device without users belongs to no thread."""
        if get_ident() != self.thread and len(self._users):
            raise MisuseError(what, expected="the thread and process that opened the store", got="another",
                              remedy="use one store per thread, each on a device of its own, and none across fork",
                              clause="C12.4")
