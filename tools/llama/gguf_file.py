"""A GGUF file: its metadata and the places of its tensors, with every size bounded by the file.

    magic "GGUF" | version u32 | tensor count u64 | field count u64
    fields     key, type u32, value; a string is a length u64 and UTF-8 bytes, an array a type u32 and a count u64
    tensors    name, dimension count u32, dimensions u64 (the row length first), type u32, offset u64
    data       begins at a multiple of the alignment; tensors follow in order, each padded to the alignment

The reader of the package `gguf` believes counts and lengths, and its errors are raw.  Here every count is compared with
the bytes that are left before anything is allocated.  The package only dequantizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Value = bool | int | float | str | tuple[Any, ...]

VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file names no other
DIMENSIONS_MAX = 4
FIELD_BYTES_MIN = 13  # empty key 8, type 4, value 1
TENSOR_BYTES_MIN = 32  # empty name 8, dimension count 4, one dimension 8, type 4, offset 8

NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
"""NumPy's name of each type of number in the metadata."""
BOOL, STRING, ARRAY = 7, 8, 9

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2),
}  # fmt: skip
"""Types of tensors that are read: name, and elements and bytes of a block."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: `shape` ends with the row length; its bytes begin at `begin` of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    begin: int
    bytes_count: int


class GGUFFile:
    """The header of a file, checked as a whole; `read` gives the numbers of one tensor.

    Attributes:
        fields: metadata by key.
        tensors: by name, in file order.

    Raises:
        MisuseError: the file cannot be opened, is no GGUF, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Value] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            with path.open("rb") as stream:
                self._read_header(_Cursor(self, stream))
        except OSError as error:
            raise self.refusal("reading it", "a file that can be read", error) from error

    def refusal(
        self, what: str, expected: object, got: object, remedy: str = "get the file again: it is damaged"
    ) -> pk.MisuseError:
        """Return the error of something in this file."""
        return pk.MisuseError(f"the GGUF file {self.path}: {_shortened(what)}", expected=expected,
                              got=_shortened(str(got)), remedy=remedy, clause="C1.2")  # fmt: skip

    def read(self, entry: TensorEntry) -> npt.NDArray[np.float32]:
        """Return a tensor as float32.

        Raises:
            MisuseError: a number that is not finite, or a file that has changed since.
        """
        from gguf import GGMLQuantizationType, dequantize

        with self.path.open("rb") as stream:
            stream.seek(entry.begin)
            data = np.frombuffer(stream.read(entry.bytes_count), np.uint8)
        if data.size != entry.bytes_count:
            raise self.refusal(f"tensor {entry.name}", f"{entry.bytes_count} bytes", f"{data.size} bytes")
        with np.errstate(all="ignore"):  # numbers that are not finite are refused below
            numbers = dequantize(data.reshape(prod(entry.shape[:-1]), -1), GGMLQuantizationType[entry.kind])
        values = np.asarray(numbers, np.float32).reshape(entry.shape)
        if not np.isfinite(values).all():
            count = int(np.count_nonzero(~np.isfinite(values)))
            raise self.refusal(f"tensor {entry.name}", "finite numbers", f"{count} of {values.size} that are not")
        return values

    def _read_header(self, cursor: _Cursor) -> None:
        magic, version = cursor.take(4, "magic"), cursor.number("<u4", "version")
        if magic != b"GGUF" or version not in VERSIONS:
            raise self.refusal("its first 8 bytes", f"GGUF, version {VERSIONS[0]} or {VERSIONS[1]}, little-endian",
                               f"{magic!r}, version {version}", "use a GGUF file")
        tensor_count = cursor.count(TENSOR_BYTES_MIN, "count of tensors")
        for _ in range(cursor.count(FIELD_BYTES_MIN, "count of metadata fields")):
            key = cursor.string("key of a metadata field")
            if key in self.fields:
                raise self.refusal(f"metadata {key!r}", "each key once", "a second one")
            self.fields[key] = cursor.value(cursor.number("<u4", f"type of {key!r}"), f"metadata {key!r}")
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.refusal("general.alignment", "a power of two", repr(alignment))
        heads = [self._read_tensor_head(cursor) for _ in range(tensor_count)]
        begin = _align(cursor.offset, alignment)
        offset = 0
        for name, shape, kind, bytes_count, stated_offset in heads:
            if name in self.tensors:
                raise self.refusal(f"tensor {name!r}", "each name once", "a second one")
            if stated_offset != offset or begin + offset + bytes_count > cursor.size:
                raise self.refusal(
                    f"tensor {name!r}", f"{bytes_count} bytes at {offset} of the data, behind the tensor before",
                    f"offset {stated_offset}, data of {max(cursor.size - begin, 0)} bytes",
                )  # fmt: skip
            self.tensors[name] = TensorEntry(name, shape, kind, begin + offset, bytes_count)
            offset = _align(offset + bytes_count, alignment)
        if cursor.size > begin + offset:
            raise self.refusal("its end", f"at most {begin + offset} bytes", f"{cursor.size}, which no tensor uses")

    def _read_tensor_head(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
        """Return name, shape, type, bytes and offset of the next tensor."""
        name = cursor.string("name of a tensor")
        dimensions = cursor.number("<u4", f"dimension count of {name!r}")
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise self.refusal(f"tensor {name!r}", f"1 to {DIMENSIONS_MAX} dimensions", dimensions)
        shape = tuple(cursor.number("<u8", f"a dimension of {name!r}") for _ in range(dimensions))[::-1]
        kind_id = cursor.number("<u4", f"type of {name!r}")
        if kind_id not in BLOCKS:
            kinds = ", ".join(kind for kind, *_ in BLOCKS.values())
            raise self.refusal(f"tensor {name!r}", f"a type of {kinds}", f"type {kind_id}", "convert the file")
        kind, block_elements, block_bytes = BLOCKS[kind_id]
        if min(shape) < 1 or shape[-1] % block_elements:
            raise self.refusal(f"tensor {name!r}", f"rows of whole blocks of {block_elements} elements", shape)
        bytes_count = prod(shape) // block_elements * block_bytes
        return name, shape, kind, bytes_count, cursor.number("<u8", f"offset of {name!r}")


class _Cursor:
    """Takes the header of a file piece by piece; no piece is longer than the bytes that are left."""

    def __init__(self, file: GGUFFile, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self.size = stream.seek(0, 2)
        self.offset = stream.seek(0)

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes."""
        data = self._stream.read(count) if count <= self.size - self.offset else b""
        if len(data) != count:
            raise self._file.refusal(what, f"{count} bytes at {self.offset}", f"{self.size - self.offset} bytes left")
        self.offset += count
        return data

    def number(self, dtype: str, what: str) -> Any:
        """Return the next number."""
        return np.frombuffer(self.take(np.dtype(dtype).itemsize, what), dtype)[0].item()

    def count(self, bytes_min: int, what: str) -> int:
        """Return the next count of things that take at least so many bytes each, and that the file can hold."""
        count: int = self.number("<u8", what)
        count_max = (self.size - self.offset) // bytes_min
        if count > count_max:
            raise self._file.refusal(what, f"at most {count_max}, by the file's size", count)
        return count

    def string(self, what: str) -> str:
        """Return the next string."""
        data = self.take(self.count(1, f"length of the {what}"), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._file.refusal(what, "UTF-8", repr(data)) from error

    def value(self, kind: int, what: str) -> Value:
        """Return the next value of a metadata type."""
        if kind in NUMBERS:
            number: int | float = self.number(NUMBERS[kind], what)
            return number
        if kind == BOOL:
            return self._booleans(1, what)[0]
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY:
            raise self._file.refusal(what, "a type of 0 to 12", f"type {kind}")
        kind = self.number("<u4", f"type of the array {what}")
        if kind in NUMBERS:
            dtype = np.dtype(NUMBERS[kind])
            count = self.count(dtype.itemsize, f"length of {what}")
            return tuple(np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist())
        if kind == BOOL:
            return self._booleans(self.count(1, f"length of {what}"), what)
        if kind == STRING:
            return tuple(self.string(what) for _ in range(self.count(8, f"length of {what}")))
        raise self._file.refusal(what, "an array of numbers, booleans or strings", f"an array of type {kind}")

    def _booleans(self, count: int, what: str) -> tuple[bool, ...]:
        data = self.take(count, what)
        if not set(data) <= {0, 1}:
            raise self._file.refusal(what, "booleans 0 or 1", f"{max(data)}")
        return tuple(byte == 1 for byte in data)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _shortened(text: str) -> str:
    """Return the beginning of a text from a file, which may be long."""
    return text if len(text) <= 200 else f"{text[:200]}..."
