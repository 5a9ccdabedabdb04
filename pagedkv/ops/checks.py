"""Checks of arrays that views and ops share: form, alignment, ownership, overlap.  (C14.2)

Every check refuses with MisuseError before anything is launched.  Nothing is converted.  Form and alignment need no
device, so a view is checked where it is made; `check_memory` asks the device of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pagedkv.devices.protocol import Array
from pagedkv.errors import Caught, MisuseError, shown
from pagedkv.ops.modules import HasKernels
from pagedkv.values.planes import PlaneGeometry
from pagedkv.values.quantities import ROW_ALIGN_BYTES

NamedArrays = Sequence[tuple[str, Array]]


def describe(array: object) -> str:
    """Return dtype, shape and layout, as an error prints them; of anything else its repr."""
    text = ""
    with Caught():
        if is_array(array):
            form: Any = array
            text = f"{form.dtype} {tuple(form.shape)}{'' if form.flags.c_contiguous else ', not C-contiguous'}"
    return text or shown(array)


def is_array(value: object) -> bool:
    """Is it exactly a numpy.ndarray, or an array of a GPU library?  A subclass has a meaning that no kernel sees."""
    return type(value) is np.ndarray or hasattr(type(value), "__cuda_array_interface__")


def check_array(
    name: str, array: object, dtype: np.dtype[np.generic] | type[np.generic], shape: Sequence[int | None], clause: str,
    *, align_bytes: int = 1,
) -> None:
    """Refuse an array of another dtype, shape (None: any extent), layout or alignment, and what is no plain array.

    The address is a multiple of the dtype's bytes, and of `align_bytes` (C3.10).
    """
    is_form, address = False, 0
    with Caught(but=MemoryError) as caught:
        if is_array(array):
            form: Any = array
            is_form = (
                len(form.shape) == len(shape)
                and all(expected in (None, extent) for expected, extent in zip(shape, form.shape, strict=True))
                and form.dtype == dtype
                and form.flags.c_contiguous
            )
            address = address_range(form)[0] if is_form and form.nbytes else 0
    if not is_form or caught.error is not None:
        axes = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise MisuseError(name, expected=f"a plain C-contiguous {np.dtype(dtype)} array ({axes})", got=describe(array),
                          remedy="pass an array of exactly this form; nothing is converted",
                          clause=clause) from caught.error
    align_bytes = max(align_bytes, np.dtype(dtype).itemsize)
    if address % align_bytes:
        raise MisuseError(name, expected=f"a {align_bytes}-byte aligned address",
                          got=f"one {address % align_bytes} bytes behind", remedy="allocate it from the device",
                          clause="C3.10")


def check_memory(ops: HasKernels, arrays: NamedArrays, *, writes: Collection[str]) -> None:
    """Refuse an array that the device of `ops` does not own or may not write, and two that share bytes.  (C14.2)

    `writes` names those that the call writes; arrays that are only read may share bytes.
    """
    for name, array in arrays:
        ops.kernels.device.require_usable(name, array, is_written=name in writes)
    check_disjoint(arrays, writes=writes)


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
    """Refuse planes that are no pairs, or a plane that is not of its geometry; return the planes by name."""
    is_list = isinstance(planes, tuple | list)
    if not is_list or not all(type(pair) is tuple and len(pair) == 2 and isinstance(pair[1], PlaneGeometry)
                              for pair in planes):
        raise MisuseError("the planes", expected="a list of (array, PlaneGeometry) pairs", got=shown(planes),
                          remedy="pass `planes` of a view", clause="C14.2")
    named = [(f"plane {geometry.role} of layer {geometry.layer}", plane) for plane, geometry in planes]
    for (name, plane), (_, geometry) in zip(named, planes, strict=True):
        check_array(name, plane, geometry.dtype, geometry.shape, "C14.2", align_bytes=ROW_ALIGN_BYTES)
    return named


def address_range(array: Array) -> tuple[int, int]:
    """Return the first byte address of an array and the one behind its last."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    begin = int(interface["data"][0])
    return begin, begin + int(array.nbytes)
