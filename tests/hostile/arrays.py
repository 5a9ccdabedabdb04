"""The hostile arrays: what takes the place of a legal array of a call.

`hostile_arrays` yields (name, array) for a legal array of a device.  `op_calls` yields every op with legal arguments,
and which of them are arrays that the op writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedkv.devices import CpuDevice
from pagedkv.devices.protocol import Device
from pagedkv.ops.views import PagedKVBatchLayerView
from pagedkv.values.attention_shape import AttentionShape, workspace_bytes
from pagedkv.values.layout import PLANE_WORDS
from tests.hostile.values import Thorny
from tests.kernels.paged_cache import PagedCache

READ_ONLY = "read-only"
"""The one hostile array that is legal where a call only reads."""


def hostile_arrays(device: Device, other: CpuDevice, legal: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, array); arrays that pretend to be legal have the same bytes."""
    shape, dtype, size = legal.shape, legal.dtype, legal.dtype.itemsize
    raw = device.zeros((legal.nbytes + 64,), np.uint8)
    host = np.array(legal)
    last = legal.reshape(-1)[-1:]
    frozen = legal.view()
    frozen.flags.writeable = False
    foreign = other.zeros(shape, dtype)
    strided = device.zeros((*shape[:-1], 2 * shape[-1]), dtype)
    yield from (
        ("none for it", None if legal.ndim > 1 else ...), ("a list", host.tolist()), ("its bytes", host.tobytes()),
        ("a buffer", memoryview(host.tobytes())), ("a number", 5), ("a thorny object", Thorny()),
        ("pageable memory", host),
        ("another device", foreign), ("a 0-d array", legal.reshape(-1)[:1].reshape(())),
        ("another rank", legal.reshape(1, *shape)), ("no element", legal.reshape(-1)[:0]),
        ("one element less", legal.reshape(-1)[:-1]), ("floats", device.zeros(shape, np.float64)),
        ("booleans", device.zeros(shape, np.bool_)),
        ("the other sign", legal.view(f"{'i' if dtype.kind == 'u' else 'u'}{size}")),
        ("big-endian", legal.view(dtype.newbyteorder(">")) if size > 1 else legal.view("S1")),
        ("structured", legal.view([("x", dtype)])), ("texts", legal.view(f"S{size}")),
        ("times", device.zeros(shape, np.int64).view("m8[s]")), ("objects", np.full(shape, None, object)),
        ("masked", np.ma.array(legal, copy=False, mask=True)), ("a record", legal.view(np.recarray)),
        ("a matrix", np.matrix(legal.reshape(-1, shape[-1]), copy=False)),
        ("strided", strided[..., ::2]), ("reversed", legal[..., ::-1] if shape[-1] > 1 else strided[..., ::-2]),
        ("Fortran order", legal.T if legal.ndim > 1 else strided[::2]), ("broadcast", np.broadcast_to(last, shape)),
        ("an odd address", raw[1 : 1 + legal.nbytes].view(dtype).reshape(shape)),
        ("beyond its buffer", np.lib.stride_tricks.as_strided(last, shape, legal.strides)),
        ("before its buffer", np.lib.stride_tricks.as_strided(last, shape, [-stride for stride in legal.strides])),
        ("a false interface", SimpleNamespace(__array_interface__=host.__array_interface__, shape=shape, dtype=dtype)),
        (READ_ONLY, frozen),
    )  # fmt: skip


@dataclass
class OpCall:
    """One op with legal arguments: `run(**arguments)`.

    `writes` names the arrays that it writes, `lists` those of any length.
    """

    name: str
    run: Callable[..., None]
    arguments: dict[str, Any]
    writes: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()


def op_calls(device: Device, cache: PagedCache, draft: PagedCache) -> Iterator[OpCall]:
    """Yield every op over a page-major cache and a head-major one of two rows each, with 2 columns."""

    def bits(*shape: int) -> Any:
        return device.zeros(shape, np.uint16)

    def ints(*values: int) -> Any:
        array = device.zeros((len(values),), np.int32)
        array[...] = values
        return array

    ops, stream = cache.ops, cache.stream
    shape = AttentionShape("decode", 2, 2, 4, 2, 64, cache.view.max_context)
    rows = {"k": bits(2, 2, 2, 64), "v": bits(2, 2, 2, 64)}
    causal = {"first_positions": ints(3, 0), "table_rows": ints(0, 1), "valid_columns": ints(2, 1)}
    prefix = {"first_positions": ints(3, 0), "table_rows": ints(0, 1), "counts": ints(1, 2)}
    context = {"context_lengths": ints(3, 0), "table_rows": ints(0, 1), "valid_columns": ints(2, 1)}
    out = {"out": bits(2, 2, 4, 64), "lse": device.zeros((2, 2, 4), np.float32)}
    queries = {"q": bits(2, 2, 4, 64), **out, "workspace": device.zeros((workspace_bytes(shape),), np.uint8)}
    written = ("out", "lse", "workspace")
    for name, view, arguments, writes in (
        ("append", cache.view, rows | causal, ()), ("append_prefix", cache.view, rows | prefix, ()),
        ("causal_attention", cache.view, rows | queries | causal | {"route": "decode"}, written),
        ("causal_attention_cached", cache.view, queries | causal | {"route": "decode"}, written),
        ("context_attention", draft.view, rows | queries | context, written),
    ):
        yield OpCall(name, partial(getattr(ops, name), view, stream=stream),
                     arguments, writes)
    view = cache.view
    parts = {"k_pages": view.k_pages, "v_pages": view.v_pages, "k_scale_pages": None, "v_scale_pages": None,
             "block_tables": view.block_tables, "head_dim": 64, "num_kv_heads": 2, "storage": "bf16",
             "order": "page-major", "max_context": 640}  # fmt: skip
    k, v = rows.values()
    yield OpCall(
        "a view", lambda **given: ops.append(PagedKVBatchLayerView(**given), k, v, **causal, stream=stream), parts,
        ("k_pages", "v_pages"),
    )
    planes, page_ids = cache.view.planes, ints(1, 2)
    words = device.zeros((len(planes), PLANE_WORDS), np.int64)
    table = ops.plane_table(planes, words, stream=stream)
    packed = {"page_ids": page_ids, "records": device.zeros((2 * table.record.total_bytes,), np.uint8)}
    floats, codes = device.zeros((4, 64), np.float32), device.zeros((4, 64), np.int8).view(np.uint8)
    yield OpCall("fill_pages", lambda page_ids: ops.fill_pages(planes, page_ids, [0, 0], stream=stream),
                 {"page_ids": page_ids}, lists=("page_ids",))

    def describe(words: Any) -> None:
        ops.plane_table(planes, words, stream=stream)

    yield OpCall("plane_table", describe, {"words": words}, ("words",))
    yield OpCall("pack_pages", lambda **given: ops.pack_pages(table, **given, stream=stream), packed, ("records",),
                 ("page_ids",))
    yield OpCall("unpack_pages", lambda **given: ops.unpack_pages(table, **given, stream=stream), packed,
                 lists=("page_ids",))
    yield OpCall("bf16_from_f32", lambda **given: ops.bf16_from_f32(**given, stream=stream),
                 {"destination": bits(4, 64), "source": floats}, ("destination",))
    yield OpCall("f32_from_bf16", lambda **given: ops.f32_from_bf16(**given, stream=stream),
                 {"destination": floats, "source": bits(4, 64)}, ("destination",))
    yield OpCall("encode_unrotated", lambda **given: ops.encode_unrotated("int8-g64", "k", **given, stream=stream),
                 {"rows": floats, "codes": codes, "scales": device.zeros((4, 2), np.uint8)}, ("codes", "scales"))
