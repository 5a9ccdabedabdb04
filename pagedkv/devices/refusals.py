"""What both devices refuse, in the same words.

An embedder develops on `cpu` and deploys on `cuda`: a mistake has the same name on both.  Each function gives one
error, ready to raise; deciding stays with the device.  Clauses: C12.4, C14.4, C15.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.errors import CaptureRefused, MisuseError


def unusable(device: str, state: str) -> MisuseError:
    """Use of a closed device, or of one that a fork left behind."""
    return MisuseError(
        f"use of the {device} device",
        expected="an open device in the process that made it",
        got=state,
        remedy="open a device in this process",
        clause="C12.4",
    )


def setting(device: str, what: str, expected: str, got: object) -> MisuseError:
    """A constructor argument that makes no sense."""
    return MisuseError(
        f"{what} of the {device} device", expected=expected, got=got, remedy="correct it", clause="C14.4"
    )


# ---- arrays and copies ---------------------------------------------------------------------------------------------


def array_text(value: object) -> str:
    """Say what an argument is: dtype, shape and strides where it has them."""
    if all(hasattr(value, attribute) for attribute in ("dtype", "shape", "strides", "flags")):
        return f"{type(value).__name__} {value.dtype} {value.shape} strides {value.strides}"  # type: ignore[attr-defined]
    return f"{type(value).__name__} {value!r}"


def foreign_array(what: str, array: object) -> MisuseError:
    """An array that is not the device's."""
    return MisuseError(
        what,
        expected="an array of this device",
        got=array_text(array),
        remedy="allocate it with device.empty, zeros or pinned",
        clause="C15.1",
    )


def copy_sides(expected: str, got: str) -> MisuseError:
    """A copy between arrays that do not fit."""
    return MisuseError(
        "copy",
        expected=expected,
        got=got,
        remedy="pass equal, contiguous arrays of which one is the device's",
        clause="C14.4",
    )


def allocation_shape(extents: tuple[int, ...], dtype: object) -> MisuseError:
    """An allocation of objects, or with a negative extent."""
    return MisuseError(
        "an allocation",
        expected="a shape without negative extents and a dtype of plain bytes",
        got=f"shape {extents}, dtype {dtype}",
        remedy="pass the shape and dtype of the array",
        clause="C15.1",
    )


def allocation_alignment(align_bytes: object, align_bytes_max: int) -> MisuseError:
    """An alignment that is no power of two, or too large."""
    return MisuseError(
        "an allocation",
        expected=f"align_bytes a power of two from 1 to {align_bytes_max}",
        got=align_bytes,
        remedy="use 256 for planes and 16 for rows",
        clause="C3.8",
    )


def call_argument(fn: Callable[..., Any], argument: object) -> MisuseError:
    """An argument of a call that is neither the device's array nor a scalar."""
    return MisuseError(
        f"call of {getattr(fn, '__qualname__', fn)}",
        expected="arrays of this device, pinned arrays and scalars as arguments",
        got=array_text(argument),
        remedy="allocate it with device.empty or device.pinned",
        clause="C15.1",
    )


def unknown_kernel(name: str, module: str) -> MisuseError:
    """A kernel that its module does not export."""
    return MisuseError(
        f"kernel {name} of module {module}",
        expected="a name exported with PK_EXPORT or listed in ModuleSpec.kernels",
        got=repr(name),
        remedy="export it",
        clause="C14.4",
    )


# ---- streams and events --------------------------------------------------------------------------------------------


def foreign_stream(what: str, got: str) -> MisuseError:
    """A stream of another device, or none."""
    return MisuseError(
        what, expected="a stream of this device", got=got, remedy="make it with device.stream()", clause="C14.4"
    )


def foreign_event(what: str, event: object) -> MisuseError:
    """An event of another device, or none."""
    return MisuseError(
        what,
        expected="an event of this device",
        got=type(event).__name__,
        remedy="make it with device.event()",
        clause="C14.4",
    )


# ---- capture -------------------------------------------------------------------------------------------------------


def in_capture(what: str, capturing_on: str) -> CaptureRefused:
    """What CUDA forbids while any stream captures."""
    return CaptureRefused(
        what,
        expected="no capture on this device",
        got=f"one that began on {capturing_on}",
        remedy="do it before begin_capture or after end_capture",
        clause="C15.1",
    )


def load_in_capture(name: str) -> CaptureRefused:
    """Compiling or loading while a capture is on."""
    return CaptureRefused(
        f"load of module {name}",
        expected="every module loaded before the capture",
        got="a load during it",
        remedy="load it before begin_capture",
        clause="C15.1",
    )


def pageable_in_capture() -> CaptureRefused:
    """A captured copy from or to pageable memory, whose address is not for keeps."""
    return CaptureRefused(
        "copy under capture",
        expected="device or pinned memory on both sides",
        got="pageable host memory",
        remedy="stage it through device.pinned",
        clause="C15.1",
    )


def event_from_outside(stream: str) -> CaptureRefused:
    """A capturing stream that waits for work that is not captured."""
    return CaptureRefused(
        f"wait on {stream}",
        expected="an event recorded in the same capture",
        got="an event recorded outside of it",
        remedy="wait before begin_capture, or record the event on a stream that takes part",
        clause="C15.1",
    )


def captured_event(what: str) -> CaptureRefused:
    """An event that stands for captured work, used outside of its capture."""
    return CaptureRefused(
        what,
        expected="an event recorded outside of a capture, or in the same open one",
        got="an event recorded in another capture",
        remedy="record it again",
        clause="C15.1",
    )


def not_the_origin(what: str, got: str) -> CaptureRefused:
    """An end of a capture on a stream where none began."""
    return CaptureRefused(
        what,
        expected="the stream on which the capture began",
        got=got,
        remedy="call it once per begin_capture, on the same stream",
        clause="C15.1",
    )


def unjoined(streams: list[str], origin: str) -> CaptureRefused:
    """A capture with work that its first stream does not wait for."""
    return CaptureRefused(
        "end_capture",
        expected="every stream of the capture joined back to the first",
        got=f"work of {', '.join(streams)} that {origin} does not wait for",
        remedy="record an event there and wait for it on the first stream; capture again",
        clause="C15.1",
    )


def nested_graph() -> CaptureRefused:
    """A graph launched on a capturing stream."""
    return CaptureRefused(
        "graph.launch",
        expected="a stream that is not capturing",
        got="a capturing one",
        remedy="end the capture first; graphs do not nest",
        clause="C15.1",
    )
