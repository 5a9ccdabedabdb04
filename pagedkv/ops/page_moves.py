"""Page moves: page groups filled, packed, unpacked, or copied in part; table entries; conversions.  (C10.5, C14.4)

The planes of a call are (array, geometry) pairs.  Page ids are (n,) int32 on the device, 0 <= id < N.  The ops trust
them; n = 0 does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.devices.protocol import Array, Kernel, Stream
from pagedkv.errors import MisuseError, shown
from pagedkv.ops.checks import check_array, check_memory, check_planes, is_array
from pagedkv.ops.modules import HasKernels
from pagedkv.values.checks import checked_integer
from pagedkv.values.layout import PLANE_WORDS
from pagedkv.values.planes import PageRecord, PlaneGeometry
from pagedkv.values.quantities import PAGE_TOKENS, ROW_ALIGN_BYTES, ceil_div

CONVERT_THREADS = 256
FILL_THREADS = 128
MOVE_PAGES_THREADS = 128
SET_THREADS = 256
PAGES_MAX = 1 << 31
"""Page ids are int32 everywhere on a device (C11.1)."""

Planes = Sequence[tuple[Array, PlaneGeometry]]


def zero_pages(ops: HasKernels, planes: Planes, page_ids: Array, *, stream: Stream) -> None:
    """Clear every byte of the listed page groups in every plane given; launches: one per plane.  (C14.4)"""
    fill_pages(ops, planes, page_ids, [0] * len(check_planes(planes)), stream=stream)


def fill_pages(ops: HasKernels, planes: Planes, page_ids: Array, words: Sequence[int], *, stream: Stream) -> None:
    """Write words[i] over every four bytes of the listed page groups in plane i.  (C14.4)

    Launches: one per plane.

    Args:
        words: one 32-bit pattern per plane, 0 to 2^32 - 1.
    """
    check_array("the page ids", page_ids, np.int32, (None,), "C14.4")
    named = check_planes(planes)
    is_list = isinstance(words, tuple | list)
    if not is_list or len(words) != len(planes) or any(type(word) is not int or word >> 32 for word in words):
        raise MisuseError("the words to fill pages with", expected=f"{len(planes)} numbers of 32 bits",
                          got=shown(words), remedy="pass one pattern per plane", clause="C14.4")
    check_memory(ops, (("the page ids", page_ids), *named), writes=[name for name, _ in named])
    count = int(page_ids.shape[0])
    if not count:
        return
    kernel = ops.kernels.page_moves()["fill_pages"]
    for (plane, geometry), word in zip(planes, words, strict=True):
        arguments = (plane, page_ids, *_strides(geometry), np.int32(PAGE_TOKENS * geometry.row_bytes), np.uint32(word))
        kernel.launch((count, geometry.kv_heads, 1), (FILL_THREADS, 1, 1), arguments, stream)


@dataclass(frozen=True, eq=False)
class PlaneTable:
    """Every plane of a pool, as kernels that move whole page groups read it; made by `plane_table`.

    Attributes:
        planes: every plane with its geometry, in ordinal order.
        record: the layout of one page group outside them.
        words: (planes, 6) int64 on the device.
    """

    planes: Planes
    record: PageRecord
    words: Array


def plane_table(ops: HasKernels, planes: Planes, words: Array, *, stream: Stream) -> PlaneTable:
    """Describe planes in `words`, (planes, 6) int64 on the device, for `pack_pages` and `unpack_pages`.  (C14.4)

    Of each plane: address, head stride, page stride, heads, bytes of one head of a page, and offset in a record.
    """
    named = check_planes(planes)
    check_array("the words of a plane table", words, np.int64, (len(planes), PLANE_WORDS), "C14.4")
    check_memory(ops, (("the words of a plane table", words), *named), writes=("the words of a plane table",))
    record = PageRecord(tuple(geometry for _, geometry in planes))
    device = ops.kernels.device
    rows = [
        (device.address(plane), *_strides(geometry), geometry.kv_heads, PAGE_TOKENS * geometry.row_bytes, offset)
        for (plane, geometry), offset in zip(planes, record.offsets_bytes, strict=True)
    ]
    device.copy(words, np.array(rows, np.int64), stream)
    return PlaneTable(tuple(planes), record, words)


def pack_pages(ops: HasKernels, table: PlaneTable, page_ids: Array, records: Array, *, stream: Stream) -> None:
    """Gather the listed page groups of every plane into records, in listed order; one launch.  (C14.4, C8.1, C8.3)

    Args:
        table: of `plane_table`.
        records: uint8 on the device, at least `table.record.total_bytes` for each page, one record after another.
    """
    _move_pages(ops, "pack_pages", table, page_ids, records, stream)


def unpack_pages(ops: HasKernels, table: PlaneTable, page_ids: Array, records: Array, *, stream: Stream) -> None:
    """Scatter records to the listed page groups of every plane: the reverse of `pack_pages`; one launch.  (C14.4)

    page_ids are distinct.
    """
    _move_pages(ops, "unpack_pages", table, page_ids, records, stream)


def copy_columns(
    ops: HasKernels, planes: Planes, source: int, destination: int, columns: int, *, stream: Stream
) -> None:
    """Copy the first columns of every head of one page group to another, in every plane given.  (C10.5, C14.4)

    What a private tail needs of the page it is copied from: the rest of the destination keeps its bytes.

    Launches: one per plane.  The three numbers are frozen at capture.

    Args:
        source: page id, 0 <= source < N of every plane; nothing of it changes.
        destination: another page id, 0 <= destination < N of every plane.
        columns: committed columns, 1 to 64; behind them nothing is read or written.

    Raises:
        MisuseError: a number outside its range, or one page id for both.
    """
    named = check_planes(planes)
    pages = min((geometry.pages for _, geometry in planes), default=PAGES_MAX)
    source, destination, columns = (
        checked_integer(f"the {name} of copied columns", number, low, high, takes_numpy=True, clause="C10.5",
                        remedy="take page ids and columns from the ledgers")
        for name, number, low, high in (
            ("source page", source, 0, pages - 1), ("destination page", destination, 0, pages - 1),
            ("number", columns, 1, PAGE_TOKENS),
        )
    )
    if source == destination:
        raise MisuseError("the destination page of copied columns", expected=f"another page than source {source}",
                          got=str(destination), remedy="copy into a page of its own", clause="C10.5")
    check_memory(ops, named, writes=[name for name, _ in named])
    kernel = ops.kernels.page_moves()["copy_columns"]
    for plane, geometry in planes:
        arguments = (plane, np.int32(source), np.int32(destination), *_strides(geometry),
                     np.int32(columns * geometry.row_bytes))
        kernel.launch((geometry.kv_heads, 1, 1), (MOVE_PAGES_THREADS, 1, 1), arguments, stream)


def set_entries(kernel: Kernel, table: Array, entries: Array, count: int, *, stream: Stream) -> None:
    """Set single entries of a block table, in one launch; the store's own call, without checks.  (C11.2)

    Args:
        kernel: `set_entries` of the module of page moves.
        table: (C, L) int32.
        entries: int64: row * L + block of each of `count` entries, which occurs once, and then their page ids.
    """
    grid = ((count + SET_THREADS - 1) // SET_THREADS, 1, 1)
    kernel.launch(grid, (SET_THREADS, 1, 1), (table, entries, np.int32(count)), stream)


def bf16_from_f32(ops: HasKernels, destination: Array, source: Array, *, stream: Stream) -> None:
    """Round float32 to BF16 bits (uint16): RNE; a NaN keeps sign and upper payload and becomes quiet.  (C14.4)"""
    _convert(ops, "bf16_from_f32", destination, np.uint16, source, np.float32, stream)


def f32_from_bf16(ops: HasKernels, destination: Array, source: Array, *, stream: Stream) -> None:
    """Promote BF16 bits (uint16) to float32, exactly.  (C14.4)"""
    _convert(ops, "f32_from_bf16", destination, np.float32, source, np.uint16, stream)


def _move_pages(
    ops: HasKernels, kernel: str, table: PlaneTable, page_ids: Array, records: Array, stream: Stream
) -> None:
    if type(table) is not PlaneTable:
        raise MisuseError("a plane table", expected="what plane_table returned", got=shown(table), clause="C14.4",
                          remedy="describe the planes with plane_table first")
    check_array("the page ids", page_ids, np.int32, (None,), "C14.4")
    check_array("the records", records, np.uint8, (None,), "C14.4", align_bytes=ROW_ALIGN_BYTES)
    count, record_bytes = int(page_ids.shape[0]), table.record.total_bytes
    if not count:
        return
    if records.nbytes < count * record_bytes:
        raise MisuseError("the records", expected=f"at least {count * record_bytes} bytes for {count} pages",
                          got=f"{records.nbytes} bytes", remedy="size them with PageRecord.total_bytes", clause="C14.4")
    planes = [plane for plane, _ in table.planes]
    named = [(f"plane {index}", plane) for index, plane in enumerate(planes)]
    check_memory(ops, (("the records", records), ("the page ids", page_ids), *named),
                 writes=("the records",) if kernel == "pack_pages" else [name for name, _ in named])
    ops.kernels.page_moves()[kernel].launch(
        (count, len(planes), 1), (MOVE_PAGES_THREADS, 1, 1), (records, table.words, page_ids, np.int64(record_bytes)),
        stream, through=planes,
    )


def _convert(
    ops: HasKernels, kernel: str, destination: Array, destination_dtype: type[np.generic], source: Array,
    source_dtype: type[np.generic], stream: Stream,
) -> None:
    axes = source.ndim if is_array(source) else 1
    check_array("the source", source, source_dtype, (None,) * axes, "C14.4")
    check_array("the destination", destination, destination_dtype, source.shape, "C14.4")
    check_memory(ops, (("the destination", destination), ("the source", source)), writes=("the destination",))
    count = int(source.size)
    if count:
        grid = (ceil_div(count, CONVERT_THREADS), 1, 1)
        arguments = (destination, source, np.int64(count))
        ops.kernels.page_moves()[kernel].launch(grid, (CONVERT_THREADS, 1, 1), arguments, stream)


def _strides(geometry: PlaneGeometry) -> tuple[np.int64, np.int64]:
    return np.int64(geometry.head_stride_bytes), np.int64(geometry.page_stride_bytes)
