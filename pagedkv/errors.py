"""The exception tree: every error of the library, and when it is raised.

A message says what was refused, what was expected, what was passed instead, what to do, and the clause
that decides.  The same facts are attributes, so a caller never parses text.  A refusal changes no state.
Scarcity inside a step is an answer (a value), never an exception (C10.9, C16.17).

    PagedKVError
      MisuseError (also ValueError)     a rule was broken by the caller
        ConfigError                     a configuration that cannot be honoured (construction)
        EntitlementExceeded             a mapping beyond the entitlement of the space (C9.3)
        UnitInFlight                    the row is frozen by a unit that has not completed (C12.2)
        CaptureRefused                  an operation that stream capture forbids
      StaleHandle                       a handle whose object is gone (C6.1)
      CapacityError                     scarcity while a store is built
      TransferFailed                    a copy of pages could not be queued; nothing was published
      ActivationRefused                 scarcity at `activate`; carries the Refusal (C10.9)
      SnapshotRefused                   scarcity, or provisional pages, at `snapshot`; carries the Refusal (C10.6)
      DeviceFault                       a kernel failed: kernel, block and thread
        Corruption                      bytes or entries changed that must not change (sanitizer mode)
        StreamHazard                    work in the wrong order, memory re-used too early (cpu device, deferred)
      JournalFailed                     lines of a journal could not be written; operations stay valid
      BrokenOff                         an operation broke off between its first and its last write (C12.4)
      StoreLatched                      the store stopped after one of the errors above (C12.4)
      MissingRequirement                a compiler, driver, package or model is not there
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self


class PagedKVError(Exception):
    """Base of every error raised by pagedkv.

    Args:
        refused: the refused operation or value, in names that the caller knows.
        expected: the accepted values.
        got: the value instead.
        remedy: the next step for the caller.
        clause: the deciding clause, for example ``"C9.3"`` or ``"codecs 4"``.
        fields: further facts of the refusal; each is an attribute.
    """

    def __init__(
        self, refused: str, *, expected: object, got: object, remedy: str, clause: str, **fields: object
    ) -> None:
        expected_text, got_text = shown(expected, str), shown(got, str)
        super().__init__(f"{refused} was refused: expected {expected_text}, got {got_text}; {remedy}. ({clause})")
        self.refused = refused
        self.expected = expected
        self.got = got
        self.remedy = remedy
        self.clause = clause
        self.fields = fields

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle with every field: an error crosses a process boundary whole."""
        return _rebuild, (type(self), self.refused, self.expected, self.got, self.remedy, self.clause, self.fields)

    def __getattr__(self, name: str) -> object:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)


class MisuseError(PagedKVError, ValueError):
    """A rule was broken by the caller; nothing changed."""


class ConfigError(MisuseError):
    """A configuration that cannot be honoured."""


class EntitlementExceeded(MisuseError):
    """A mapping that needs more pages than the space's entitlement (C9.3)."""


class UnitInFlight(MisuseError):
    """The row is selected by a unit that has not completed (C12.2)."""


class CaptureRefused(MisuseError):
    """An operation that stream capture forbids."""


class StaleHandle(PagedKVError):
    """A handle whose generation is no longer current (C6.1)."""


class CapacityError(PagedKVError):
    """Not enough memory or pages to build a store."""


class ActivationRefused(PagedKVError):
    """`activate` could not be honoured now; `refusal` carries the numbers (C10.9)."""


class SnapshotRefused(PagedKVError):
    """`snapshot` could not be honoured now; `refusal` carries the numbers (C10.6)."""


class TransferFailed(PagedKVError):
    """A copy of page groups could not be queued: the transfer is aborted, its source is as it was (C7.4)."""


class JournalFailed(PagedKVError):
    """A line of a journal could not be written.  Operations stay valid; field `lines` counts the lines before it."""


class DeviceFault(PagedKVError):
    """A kernel failed on the device; fields `kernel`, `block` and `thread` say where."""


class Corruption(DeviceFault):
    """Device memory differs from the ledgers; sanitizer mode finds it and latches the store (C12.4).

    Fields: `pool`; `row` and `block` of a table entry, or `page_id`, `role` and `layer` of a page's bytes.
    """


class StreamHazard(DeviceFault):
    """The order of work, or the re-use of memory, is wrong; the cpu device finds it in deferred mode.

    Fields: `operation` (the next operation to run, or the host's access), `buffer`, and `other` (the operation that
    it races with; empty when the host is the other side).
    """


class BrokenOff(PagedKVError):
    """An operation broke off between its first and its last write: field `operation`; latches the store (C12.4)."""


class StoreLatched(PagedKVError):
    """The store stopped after a device error or a broken operation; only closing and evidence remain (C12.4)."""


class MissingRequirement(PagedKVError):
    """Something outside the library is missing; the message says how to get it."""


def _rebuild(
    kind: type[PagedKVError], refused: str, expected: object, got: object, remedy: str, clause: str,
    fields: dict[str, object],
) -> PagedKVError:
    return kind(refused, expected=expected, got=got, remedy=remedy, clause=clause, **fields)


class Caught:
    """Holds the Exception that left the block, if one did, instead of letting it out.

        with Caught() as caught:
            observer(event)
        if caught.error is not None: ...

    For code of others, where any Exception is an answer, and for cleaning up, where an error must not replace the first
    one: `Caught(first)` adds a note to `first`.  An interrupt or an exit is no Exception: it leaves the block, or with
    `all_kinds` is held too, and the caller raises it later.  What is an instance of `but` leaves the block in any case:
    `but=MemoryError` where the block reads a value that would be refused, which a lack of memory is no reason for.
    """

    def __init__(
        self, first: BaseException | None = None, *, all_kinds: bool = False, but: type[Exception] | tuple[()] = ()
    ) -> None:
        self.error: BaseException | None = None
        self._first = first
        self._kind = BaseException if all_kinds else Exception
        self._but = but

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, self._kind) and not isinstance(error, self._but):
            self.error = error
            if self._first is not None:
                self._first.add_note(f"and cleaning up failed: {shown(error)}")
        return self.error is not None


def shown(value: object, form: Callable[[object], str] = repr) -> str:
    """Return `repr(value)`, or another form, for a message.  A value that cannot be printed is named by its type."""
    text = ""
    with Caught() as caught:
        text = form(value)
    return text if caught.error is None else f"<{type(value).__name__}: its repr raised {type(caught.error).__name__}>"
