"""The address of every byte of a plane, in both orders, with worked numbers.  (C3.7-C3.11)"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pagedkv.values.config import DraftFullBackend, ExplicitCapacity, KVGeometry, MTPBackend, StoreConfig
from pagedkv.values.planes import PageOrder, PlaneGeometry, plane_inventory
from pagedkv.values.profiles import PROFILES, Role
from pagedkv.values.quantities import PAGE_TOKENS

ORDERS: tuple[PageOrder, ...] = ("page-major", "head-major")


def byte_offset(plane: PlaneGeometry, *, x: int, position: int, head: int, group: int) -> int:
    """Return the offset of one element: x*nb0 + o*nb1 + h*nb_head + g*nb_page, o = position & 63."""
    return (
        x * plane.dtype.itemsize + (position & 63) * plane.row_bytes + head * plane.head_stride_bytes
        + group * plane.page_stride_bytes
    )


def bf16_plane(order: PageOrder, *, pages: int = 10) -> PlaneGeometry:
    return PlaneGeometry("k_code", 0, np.dtype(np.uint16), 128, kv_heads=8, pages=pages, order=order)


@pytest.mark.parametrize(
    ("order", "head_stride", "page_stride"), [("page-major", 16_384, 131_072), ("head-major", 163_840, 16_384)]
)
def test_an_address_as_worked_in_numbers(order: PageOrder, head_stride: int, page_stride: int) -> None:
    """BF16, D = 128, H = 8, N = 10: position 70 of head 2 in page group 5.  (C3.7, C3.8, C3.9)"""
    plane = bf16_plane(order)

    assert (plane.row_bytes, plane.head_stride_bytes, plane.page_stride_bytes) == (256, head_stride, page_stride)
    expected = 5 * page_stride + 2 * head_stride + 6 * 256 + 3 * 2
    assert byte_offset(plane, x=3, position=70, head=2, group=5) == expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", list(PROFILES))
def test_shape_strides_and_addresses_are_one_thing(name: str, order: PageOrder) -> None:
    """A contiguous array of `shape` has exactly the strides of the contract, for every plane.  (C3.7, C3.8)"""
    for plane in plane_inventory(name, layers=1, kv_heads=3, head_dim=64, pages=5, order=order):
        array = np.zeros(plane.shape, plane.dtype)
        pages, heads = (0, 1) if order == "page-major" else (1, 0)

        assert array.shape[2:] == (PAGE_TOKENS, plane.extent)
        assert (array.shape[pages], array.shape[heads]) == (5, 3)
        assert array.strides[pages] == plane.page_stride_bytes
        assert array.strides[heads] == plane.head_stride_bytes
        assert array.strides[2:] == (plane.row_bytes, plane.dtype.itemsize)
        assert array.nbytes == plane.span_bytes


@pytest.mark.parametrize("order", ORDERS)
def test_every_element_has_its_own_address_inside_the_span(order: PageOrder) -> None:
    """All (x, o, h, g) of a small plane: distinct offsets that fill the slab.  (C3.7, C3.8)"""
    plane = PlaneGeometry("k_scale", 0, np.dtype(np.uint16), 2, kv_heads=2, pages=3, order=order)

    places = itertools.product(range(2), range(PAGE_TOKENS), range(2), range(3))
    offsets = {byte_offset(plane, x=x, position=o, head=h, group=g) for x, o, h, g in places}

    assert offsets == set(range(0, plane.span_bytes, 2))


@pytest.mark.parametrize("order", ORDERS)
def test_page_bytes_do_not_depend_on_the_order(order: PageOrder) -> None:
    """PageBytes is bytes per token times P; the span is exactly N of them.  (C3.11)"""
    plane = bf16_plane(order, pages=7)

    assert plane.token_bytes == 8 * 128 * 2
    assert plane.page_bytes == 64 * 2048
    assert plane.span_bytes == 7 * 131_072


def test_offsets_pass_32_bits_without_wrapping() -> None:
    """A slab beyond 2^32 bytes has exact strides and span.  (C3.10, S72)"""
    plane = PlaneGeometry("v_code", 0, np.dtype(np.uint16), 256, kv_heads=8, pages=100_000, order="head-major")

    assert plane.head_stride_bytes == 100_000 * 64 * 512
    assert plane.span_bytes == 8 * plane.head_stride_bytes == 26_214_400_000
    assert byte_offset(plane, x=255, position=63, head=7, group=99_999) == plane.span_bytes - 2


def test_planes_are_ordered_layer_by_layer() -> None:
    """Within a layer K code, V code, K scale, V scale: that ordinal is the plane's number.  (C4.2)"""
    planes = plane_inventory("k8v4", layers=3, kv_heads=2, head_dim=64, pages=4, order="page-major")

    roles: list[Role] = ["k_code", "v_code", "k_scale", "v_scale"]
    assert [(plane.layer, plane.role) for plane in planes] == [(layer, role) for layer in range(3) for role in roles]


# Page bytes of models in use: (layers, KV heads, D) of Main -> bytes of a page in bf16 and int8-g64.
@pytest.mark.parametrize(
    ("layers", "query_heads", "kv_heads", "bf16_bytes", "int8_bytes"),
    [(16, 24, 4, 4 << 20, 2_162_688), (10, 16, 2, 1_310_720, 660 << 10)],
)
def test_pages_of_main_and_mtp(layers: int, query_heads: int, kv_heads: int, bf16_bytes: int, int8_bytes: int) -> None:
    """16 x 4 x 256 and 10 x 2 x 256; the draft is one such layer; other profiles by their bytes a token.  (C3.11)"""
    geometry = KVGeometry(layers, query_heads, kv_heads, 256)
    expected = {"bf16": bf16_bytes, "int8-g64": int8_bytes}
    expected |= {"fp8-e4m3-row": 64 * layers * kv_heads * 516, "nvfp4-g16": 64 * layers * kv_heads * 288}
    expected |= {"k8v4": 64 * layers * kv_heads * 402}

    for name, page_bytes in expected.items():
        config = StoreConfig(geometry, profile=name, max_context=128, max_concurrency=2,
                             kv_capacity=ExplicitCapacity(256), backend=MTPBackend(draft_window=1))
        main, draft = config.pools
        assert main.page_bytes == page_bytes
        assert draft.page_bytes == page_bytes // layers


def test_page_bytes_of_draft_full() -> None:
    """One layer of 8 x 128 in BF16 is 0.25 MiB a page, whatever the engine's profile.  (C3.4, C3.11)"""
    config = StoreConfig(KVGeometry(10, 16, 2, 256), profile="nvfp4-g16", max_context=128, max_concurrency=2,
                         kv_capacity=ExplicitCapacity(256), backend=DraftFullBackend(KVGeometry(1, 32, 8, 128)))

    assert config.pools[1].page_bytes == 262_144
