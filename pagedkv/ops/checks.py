"""Checks of arrays that views and ops share: form, alignment, overlap.  (C14.2)

Every check refuses with MisuseError before anything is launched.  Nothing is converted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pagedkv.devices.protocol import Array
from pagedkv.errors import MisuseError
from pagedkv.values.planes import PlaneGeometry
from pagedkv.values.quantities import ROW_ALIGN_BYTES

NamedArrays = Sequence[tuple[str, Array]]


def describe(array: object) -> str:
    """Return dtype, shape and layout, as an error prints them."""
    dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
    if dtype is None or shape is None:
        return repr(array)
    return f"{dtype} {tuple(shape)}{'' if array.flags.c_contiguous else ', not C-contiguous'}"  # type: ignore[attr-defined]


def check_array(
    name: str, array: object, dtype: np.dtype[np.generic] | type[np.generic], shape: Sequence[int | None], clause: str
) -> None:
    """Refuse an array of another dtype, shape (None: any extent) or layout."""
    extents = getattr(array, "shape", None)
    if (
        extents is not None
        and len(extents) == len(shape)
        and all(expected is None or expected == extent for expected, extent in zip(shape, extents, strict=True))
        and array.dtype == dtype  # type: ignore[attr-defined]
        and array.flags.c_contiguous  # type: ignore[attr-defined]
    ):
        return
    axes = ", ".join("any" if extent is None else str(extent) for extent in shape)
    raise MisuseError(name, expected=f"C-contiguous {np.dtype(dtype)} ({axes})", got=describe(array),
                      remedy="pass an array of exactly this form; nothing is converted", clause=clause)


def check_aligned(arrays: NamedArrays, align_bytes: int = ROW_ALIGN_BYTES) -> None:
    """Refuse an array whose first byte is not aligned.  (C3.10)"""
    for name, array in arrays:
        remainder = address_range(array)[0] % align_bytes
        if remainder and array.nbytes:
            raise MisuseError(name, expected=f"a {align_bytes}-byte aligned address",
                              got=f"one {remainder} bytes behind", remedy="allocate it from the device", clause="C3.10")


def check_disjoint(arrays: NamedArrays, *, writes: Collection[str] | None) -> None:
    """Refuse two arrays that share bytes, unless both are only read (`writes` None: every pair counts)."""
    ranges = sorted((*address_range(array), name) for name, array in arrays if array.nbytes)
    for index, (_, end, name) in enumerate(ranges):
        for begin, _, other in ranges[index + 1 :]:
            if begin >= end:
                break
            if writes is None or name in writes or other in writes:
                raise MisuseError(f"{name} together with {other}", expected="arrays that share no byte",
                                  got="overlapping address ranges", remedy="give each its own memory", clause="C14.2")


def check_planes(planes: Sequence[tuple[Array, PlaneGeometry]]) -> NamedArrays:
    """Refuse a plane that is not of its geometry; return the planes by name."""
    named = [(f"plane {geometry.role} of layer {geometry.layer}", plane) for plane, geometry in planes]
    for (name, plane), (_, geometry) in zip(named, planes, strict=True):
        check_array(name, plane, geometry.dtype, geometry.shape, "C14.2")
    check_aligned(named)
    return named


def address_range(array: Array) -> tuple[int, int]:
    """Return the first byte address of an array and the one behind its last."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    begin = int(interface["data"][0])
    return begin, begin + int(array.nbytes)
