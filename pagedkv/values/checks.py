"""Checks of what a caller hands in: numbers, iterables, shapes and dtypes, counts per entry.

Each returns the value as a plain one that runs no code of the caller when it is used later, or refuses it.  Reading a
value may run such code, so every error of it becomes the refusal.  Arrays of a device: `ops/checks.py`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import Caught, MisuseError, shown

__all__ = ["array_form", "checked_counts", "checked_integer", "checked_items", "checked_number", "form_bytes",
           "has_method", "is_on_the_stack", "require_hashable", "shown"]

AXES_MAX = 32
"""Most axes of an array: the limit of NumPy 1; that of NumPy 2 is 64."""

INT64_MAX = (1 << 63) - 1
"""The largest count of bytes that an allocator takes."""


def checked_integer(
    what: str, value: object, low: int, high: int, *, remedy: str, clause: str, kind: type[MisuseError] = MisuseError,
    takes_numpy: bool = False,
) -> int:
    """Return a plain integer from low to high; refuse others, with an error of class `kind`.

    A bool is no integer here, and neither is an integer of NumPy, unless `takes_numpy`.
    """
    if takes_numpy and isinstance(value, np.integer):
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise kind(what, expected=f"an integer from {low} to {high}", got=shown(value), remedy=remedy, clause=clause)
    return value


def checked_number(what: str, value: object, magnitude_max: float, *, remedy: str, clause: str) -> float:
    """Return a finite number as a float: a Python integer or float, or a NumPy one of at most 64 bits; no bool."""
    is_number = type(value) in (int, float) or (isinstance(value, np.floating) and value.dtype.itemsize <= 8)
    if not is_number or not abs(value) <= magnitude_max:  # type: ignore[arg-type]  # NaN compares false
        raise MisuseError(what, expected=f"a number from {-magnitude_max:g} to {magnitude_max:g}", got=shown(value),
                          remedy=remedy, clause=clause)
    return float(value)  # type: ignore[arg-type]


def checked_items(what: str, value: object, *, expected: str, remedy: str, clause: str) -> tuple[Any, ...]:
    """Return the items of an iterable, read once; refuse what is none, and one that raises while it is read."""
    items: tuple[Any, ...] | None = None
    with Caught(but=MemoryError) as caught:
        items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray) else None
    if items is None:
        raise MisuseError(what, expected=expected, got=shown(value), remedy=remedy, clause=clause) from caught.error
    return items


def has_method(value: object, name: str) -> bool:
    """Say whether an object has a method of that name; one that raises when it is asked has none."""
    method: object = None
    with Caught(but=MemoryError):
        method = getattr(value, name, None)
    return callable(method)


def is_on_the_stack(call: FrameType) -> bool:
    """Say whether a call has not ended.  A flag that the call resets could stay set after an interrupt."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def require_hashable(what: str, value: object, *, remedy: str, clause: str) -> None:
    """Refuse a value that cannot be hashed."""
    with Caught(but=MemoryError) as caught:
        hash(value)
    if caught.error is not None:
        raise MisuseError(what, expected="something that can be hashed", got=shown(value), remedy=remedy, clause=clause)


def checked_counts(what: str, value: object, *, remedy: str, clause: str) -> int | npt.NDArray[np.integer[Any]]:
    """Return an integer, or a copy of integers as a plain array of any shape; refuse masked arrays and other types."""
    if type(value) is int:
        return value
    counts: npt.NDArray[Any] | None = None
    with Caught(but=MemoryError) as caught:
        if not isinstance(value, np.ndarray) or type(value) is np.ndarray:
            counts = np.array(value)
    if counts is None or type(counts) is not np.ndarray or counts.dtype.kind not in "iu" or not counts.dtype.isnative:
        raise MisuseError(what, expected="an integer, or a plain array or list of integers", got=shown(value),
                          remedy=remedy, clause=clause) from caught.error
    return counts


def array_form(shape: object, dtype: object) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an array to allocate, as plain integers and a NumPy dtype.  (C15.1)

    Raises:
        MisuseError: no shape of integers from 0 on, or too many axes; no dtype, or one that is not a native boolean,
            integer, float or complex number, which are those that both devices have.
    """
    extents: tuple[int, ...] | None = None
    resolved: np.dtype[Any] | None = None
    with Caught(but=MemoryError) as caught:
        given = (shape,) if not isinstance(shape, tuple | list) else tuple(shape)
        if not any(isinstance(extent, bool | np.bool_) for extent in given):
            extents = tuple(int(operator.index(extent)) for extent in given)
        resolved = None if dtype is None else np.dtype(dtype)  # type: ignore[call-overload]
    is_form = (
        extents is not None and resolved is not None and min(extents, default=0) >= 0 and len(extents) <= AXES_MAX
        and resolved.kind in "biufc" and resolved.isnative and resolved.char not in "gG"
    )
    if not is_form or extents is None or resolved is None:
        raise MisuseError(
            "an allocation", expected="a shape of integers from 0 on, and a dtype of native numbers",
            got=f"shape {shown(shape)}, dtype {shown(dtype)}", remedy="pass the shape and dtype of the array",
            clause="C15.1",
        ) from caught.error
    return extents, resolved


def form_bytes(extents: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array as NumPy limits them: it counts an extent of 0 as 1."""
    return math.prod(extent or 1 for extent in extents) * dtype.itemsize
