"""One table of every device byte: what is planned is what is allocated.  (C4.2, C5.4, C11.1)"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagedkv.config import Backend, DraftFullBackend, ExplicitCapacity, KVGeometry, MTPBackend, StoreConfig
from pagedkv.layout import Slab, build_layout
from pagedkv.profiles import PROFILES
from tests.host.builders import DRAFT_GEOMETRY, make_config


def config_of(profile: str, *, pages: int, backend: Backend | None = None, max_concurrency: int = 2) -> StoreConfig:
    return StoreConfig(
        KVGeometry(3, 8, 2, 128), profile=profile, max_context=256, max_concurrency=max_concurrency,
        kv_capacity=ExplicitCapacity(pages * 64), backend=backend,
    )  # fmt: skip


def test_slabs_stand_in_plane_order_with_the_block_table_last() -> None:
    """Layer by layer, K code, V code, K scale, V scale, then the table (C, L) int32.  (C4.2, C11.1)"""
    layout = build_layout(config_of("int8-g64", pages=5))

    names = [f"main.{layer}.{role}" for layer in range(3) for role in ("k_code", "v_code", "k_scale", "v_scale")]
    assert [slab.name for slab in layout.slabs] == [*names, "main.block_table"]
    assert layout.slabs[0].shape == (5, 2, 64, 128)
    assert (layout.slabs[-1].shape, layout.slabs[-1].dtype) == ((2, 4), np.dtype(np.int32))


@pytest.mark.parametrize("backend", [None, MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)])
@pytest.mark.parametrize("profile", list(PROFILES))
def test_the_total_is_the_pages_and_the_tables(profile: str, backend: Backend | None) -> None:
    """Bytes of all slabs = pages x PageBytes of every pool + tables; nothing else is there.  (C3.11, C5.4)"""
    config = config_of(profile, pages=6, backend=backend)
    layout = build_layout(config)

    page_bytes = {f"pool {pool.name}": pool.pages * pool.page_bytes for pool in config.pools}
    tables = {"block tables": len(config.pools) * 2 * 4 * 4}
    assert layout.bytes_by_owner() == page_bytes | tables
    assert layout.span_bytes == sum(page_bytes.values()) + sum(tables.values())


def test_a_slab_is_charged_its_span_and_a_constant_alignment() -> None:
    """255 bytes each, whatever the size.  (C5.4)"""
    layout = build_layout(config_of("k8v4", pages=5))

    assert [slab.charged_bytes - slab.span_bytes for slab in layout.slabs] == [255] * 13
    assert layout.charged_bytes == layout.span_bytes + 13 * 255


@pytest.mark.parametrize("max_concurrency", range(1, 9))
@pytest.mark.parametrize("profile", list(PROFILES))
def test_bytes_are_affine_in_pages(profile: str, max_concurrency: int) -> None:
    """B(M) = B_min + (M - M_min) * B_step exactly, for C from 1 to 8.  (C5.4)"""
    pages_min, pages_max = max(4, max_concurrency), 4 * max_concurrency
    charged = [
        build_layout(
            config_of(profile, pages=pages, backend=MTPBackend(3), max_concurrency=max_concurrency)
        ).charged_bytes
        for pages in range(pages_min, pages_max + 1)
    ]

    config = config_of(profile, pages=pages_min, backend=MTPBackend(3), max_concurrency=max_concurrency)
    step = sum(pool.page_bytes for pool in config.pools)
    assert charged == [charged[0] + i * step for i in range(len(charged))]


def test_every_plane_slab_carries_its_geometry() -> None:
    """Shape and dtype of the allocation are the plane's own; the table is no plane.  (C5.4)"""
    layout = build_layout(make_config(backend=DraftFullBackend(DRAFT_GEOMETRY)))
    planes = [slab for slab in layout.slabs if slab.plane is not None]

    assert [(slab.shape, slab.dtype) for slab in planes] == [(s.plane.shape, s.plane.dtype) for s in planes if s.plane]
    assert [slab.plane.order for slab in planes if slab.plane] == ["page-major"] * 2 + ["head-major"] * 2
    assert [slab.name for slab in layout.slabs if slab.plane is None] == ["main.block_table", "draft.block_table"]


def test_sizes_pass_32_bits_without_wrapping() -> None:
    """A slab of 2^33 bytes is counted exactly.  (C3.10, S72)"""
    slab = Slab("pool main", "main.0.k_code", (1 << 20, 8, 64, 8), np.dtype(np.uint16))

    assert slab.span_bytes == 1 << 33
    assert dataclasses.replace(slab, shape=(0, 8, 64, 8)).span_bytes == 0
