"""Views: what a kernel may be told about a cache is checked once, when the view is made.  (C14.1, C14.2)"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.protocol import Device
from pagedkv.errors import ConfigError, MisuseError
from pagedkv.ops.ops import Ops
from pagedkv.ops.views import PagedKVBatchLayerView, PagedKVLayerView
from pagedkv.values.attention_shape import Route
from pagedkv.values.planes import plane_inventory
from pagedkv.values.profiles import PROFILES
from tests.kernels.arrays import Rng, bf16_noise, scattered_table, to_device
from tests.kernels.paged_cache import PagedCache, assert_same_planes

ROLE_OF = {"k_pages": "k_code", "v_pages": "v_code", "k_scale_pages": "k_scale", "v_scale_pages": "v_scale"}


def parts(device: Device, profile: str = "k8v4", *, pages: int = 5) -> dict[str, Any]:
    """Return the arguments of a legal view: 3 KV heads, D = 64, page-major, a (2, 4) table."""
    planes = {
        plane.role: device.zeros(plane.shape, plane.dtype)
        for plane in plane_inventory(profile, layers=1, kv_heads=3, head_dim=64, pages=pages, order="page-major")
    }
    arguments: dict[str, Any] = {name: planes.get(role) for name, role in ROLE_OF.items()}  # type: ignore[call-overload]
    return {
        **arguments, "block_tables": device.zeros((2, 4), np.int32), "head_dim": 64, "num_kv_heads": 3,
        "storage": profile, "order": "page-major", "max_context": 200,
    }  # fmt: skip


def one_row(cache: PagedCache, row: int) -> PagedKVLayerView:
    """Return the view of one table row of a cache."""
    view = cache.view
    return PagedKVLayerView(view.k_pages, view.v_pages, view.k_scale_pages, view.v_scale_pages, view.block_tables[row],
                            view.head_dim, view.num_kv_heads, view.storage, view.order, view.max_context)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_view_hands_kernels_the_strides_of_its_planes(device: Device, profile: str) -> None:
    """C3.7: four pointers, then head and page strides of each role; zero where there is no plane."""
    arguments = parts(device, profile)

    view = PagedKVBatchLayerView(**arguments)

    strides = [int(stride) for stride in view.arguments[4:]]  # type: ignore[call-overload]
    expected = []
    for name in ROLE_OF:
        plane = arguments[name]
        expected += [0, 0] if plane is None else [plane.strides[1], plane.strides[0]]
    assert expected == strides
    assert view.pages == 5


def test_an_alias_names_the_profile(device: Device) -> None:
    """C0: aliases are accepted on input."""
    view = PagedKVBatchLayerView(**{**parts(device, "nvfp4-g16"), "storage": "NVFP4-G16"})

    assert view.storage is PROFILES["nvfp4-g16"]


@pytest.mark.parametrize(("change", "named"), [
    (lambda d, a: {"k_scale_pages": None}, "plane k_scale"),
    (lambda d, a: {"v_scale_pages": None}, "plane v_scale"),
    (lambda d, a: {"k_pages": a["k_pages"].view(np.int8)}, "plane k_code"),
    (lambda d, a: {"v_pages": a["k_pages"]}, "plane v_code"),
    (lambda d, a: {"order": "head-major"}, "plane k_code"),
    (lambda d, a: {"order": "sideways"}, "page order"),
    (lambda d, a: {"k_pages": a["k_pages"][:, :, ::-1]}, "not C-contiguous"),
    (lambda d, a: {"v_pages": a["v_pages"][1:]}, "plane v_code"),
    (lambda d, a: {"k_pages": a["k_pages"].reshape(-1)}, "plane k_code"),
    (lambda d, a: {"block_tables": d.zeros((2, 4), np.int64)}, "block table"),
    (lambda d, a: {"block_tables": d.zeros((8,), np.int32)}, "block table"),
    (lambda d, a: {"block_tables": d.zeros((2, 8), np.int32)[:, ::2]}, "block table .* C-contiguous int32"),
    (lambda d, a: {"block_tables": np.ma.array(d.pinned((2, 4), np.int32), copy=False)}, "block table"),
    (lambda d, a: {"max_context": 257}, "max_context"),
    (lambda d, a: {"max_context": 0}, "max_context"),
    (lambda d, a: {"num_kv_heads": 2}, "plane k_code"),
    (lambda d, a: {"num_kv_heads": 0}, "num_kv_heads"),
])  # fmt: skip
def test_a_view_that_lies_is_refused(device: Device, change: Any, named: str) -> None:
    """C14.2, S5, S67: a lacking scale plane, other strides, another order, a table too narrow or of stride 2."""
    arguments = parts(device)

    with pytest.raises(MisuseError, match=named):
        PagedKVBatchLayerView(**{**arguments, **change(device, arguments)})


def test_planes_that_bf16_has_not_share_bytes_or_are_misaligned_are_refused(device: Device) -> None:
    """C4, C14.2, C3.10: a superfluous plane is not ignored; a base one row late is not 256-byte aligned."""
    arguments = parts(device, "bf16", pages=6)
    late = arguments["k_pages"].reshape(-1)[64 : 64 + 5 * 3 * 64 * 64].reshape(5, 3, 64, 64)
    for change, named in (
        ({"k_scale_pages": device.zeros((6, 3, 64, 1), np.uint16)}, "plane k_scale of profile bf16"),
        ({"v_pages": arguments["k_pages"]}, "k_code together with v_code"),
        ({"k_pages": late, "v_pages": arguments["v_pages"][:5]}, "128 bytes behind"),
    ):
        with pytest.raises(MisuseError, match=named):
            PagedKVBatchLayerView(**{**arguments, **change})


def test_an_unsupported_head_dim_is_refused_at_construction(device: Device) -> None:
    """C4.5: with the reason."""
    with pytest.raises(ConfigError, match="head_dim of profile k8v4"):
        PagedKVBatchLayerView(**{**parts(device), "head_dim": 80})


def test_a_view_of_one_sequence_is_a_table_of_one_row(device: Device, rng: Rng) -> None:
    """C14.1: the same bits through `batched` with table_rows = [0]."""
    cache = PagedCache.build(device, "bf16", table=scattered_table(3, 2), rng=rng)
    cache.fill(rng, 2, 70)
    q = bf16_noise(rng, (1, 1, 4, 64))
    expected, _ = cache.attend(q, [69], [2], route="decode")
    view = cache.view
    row = to_device(device, cache.stream, cache.table[2])

    single = PagedKVLayerView(
        view.k_pages, view.v_pages, None, None, row, 64, 2, "bf16", "page-major", 128  # type: ignore[arg-type]
    )

    out = cache.put(np.zeros_like(q))
    Ops(device).causal_attention_cached(single.batched, cache.put(q), out, cache.ints([69]), cache.ints([0]),
                                        route="decode", workspace=None, stream=cache.stream)
    np.testing.assert_array_equal(expected, cache.get(out))
    with pytest.raises(MisuseError, match="table row"):
        dataclasses.replace(single, block_table=view.block_tables)


@pytest.mark.parametrize("profile", ["bf16", "k8v4"])
def test_a_view_of_one_sequence_gives_the_bits_of_the_batch(device: Device, rng: Rng, profile: str) -> None:
    """C14.1: append, prefix, both routes and the cached variant, with no table_rows."""
    caches = [PagedCache.build(device, profile, table=scattered_table(3, 2), rng=np.random.default_rng(7))
              for _ in range(2)]
    q, k, v = bf16_noise(rng, (1, 5, 4, 64)), *(bf16_noise(rng, (1, 5, 2, 64)) for _ in range(2))
    outputs: list[list[Any]] = []
    for cache, is_single in zip(caches, (False, True), strict=True):
        view = one_row(cache, 1) if is_single else cache.view
        rows: dict[str, Any] = {} if is_single else {"table_rows": cache.ints([1])}
        put, ops, stream = cache.put, cache.ops, cache.stream
        outputs.append([])
        ops.append(view, put(k), put(v), cache.ints([0]), **rows, valid_columns=cache.ints([4]), stream=stream)
        ops.append_prefix(view, put(v), put(k), cache.ints([4]), cache.ints([3]), **rows, stream=stream)
        routes: tuple[tuple[Route, int], ...] = (("decode", 7), ("prefill", 62))
        for route, first in routes:
            out = put(np.zeros_like(q))
            ops.causal_attention(view, put(q), put(k), put(v), out, cache.ints([first]), **rows, route=route,
                                 workspace=None, stream=stream)
            outputs[-1].append(cache.get(out))
        ops.causal_attention_cached(view, put(q), out, cache.ints([3]), **rows, route="decode", workspace=None,
                                    stream=stream)
        outputs[-1].append(cache.get(out))

    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert_same_planes(caches[0].host_planes(), caches[1].host_planes())


def test_context_attention_takes_a_view_of_one_sequence(device: Device, rng: Rng) -> None:
    """C14.1, C14.4: the same bits as with the batch view."""
    cache = PagedCache.build(device, "bf16", order="head-major", table=scattered_table(3, 2), rng=rng)
    cache.fill(rng, 2, 70)
    q, k, v = bf16_noise(rng, (1, 5, 4, 64)), *(bf16_noise(rng, (1, 5, 2, 64)) for _ in range(2))
    expected, _ = cache.attend(q, [70], [2], route="context", new_rows=(k, v))
    out = cache.put(np.zeros_like(q))

    cache.ops.context_attention(one_row(cache, 2), cache.put(q), cache.put(k), cache.put(v), out, cache.ints([70]),
                                workspace=None, stream=cache.stream)

    np.testing.assert_array_equal(expected, cache.get(out))


@pytest.mark.parametrize(("batch", "has_rows"), [(1, True), (2, False)])
def test_a_view_of_one_sequence_has_one_row_and_no_table_rows(device: Device, batch: int, has_rows: bool) -> None:
    """C14.1: and a view of a batch needs table_rows."""
    cache = PagedCache.build(device, "bf16", table=scattered_table(2, 2), rng=None)
    k = cache.put(np.zeros((batch, 1, 2, 64), np.uint16))
    v, positions, rows = cache.put(np.zeros((batch, 1, 2, 64), np.uint16)), cache.ints([0] * batch), cache.ints([0])

    with pytest.raises(MisuseError, match="B = 1 and no table_rows"):
        cache.ops.append(one_row(cache, 0), k, v, positions, rows if has_rows else None, stream=cache.stream)
    with pytest.raises(MisuseError, match="table_rows was refused"):
        cache.ops.append(cache.view, k, v, positions, stream=cache.stream)
