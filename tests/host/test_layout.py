"""One table of every device byte: what is planned is what is allocated.  (C4.2, C5.4, C11.1)"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagedkv.values.config import Backend, DraftFullBackend, ExplicitCapacity, KVGeometry, MTPBackend, StoreConfig
from pagedkv.values.layout import Slab, build_layout, control_words
from pagedkv.values.profiles import PROFILES
from tests.host.builders import DRAFT_GEOMETRY, make_config


def config_of(profile: str, *, pages: int, backend: Backend | None = None, max_concurrency: int = 2) -> StoreConfig:
    return StoreConfig(KVGeometry(3, 8, 2, 128), profile=profile, max_context=256, max_concurrency=max_concurrency,
                       kv_capacity=ExplicitCapacity(pages * 64), backend=backend)


def test_slabs_stand_in_plane_order_then_the_table_then_what_units_share() -> None:
    """Layer by layer, K code, V code, K scale, V scale, then the table (C, L) int32.  (C4.2, C11.1)"""
    layout = build_layout(config_of("int8-g64", pages=5))

    names = [f"main.{layer}.{role}" for layer in range(3) for role in ("k_code", "v_code", "k_scale", "v_scale")]
    assert [slab.name for slab in layout.slabs] == [*names, "main.block_table", "control.ingress", "control.egress",
                                                     "control.table_entries"]
    assert layout.slabs[0].shape == (5, 2, 64, 128)
    assert (layout.slabs[12].shape, layout.slabs[12].dtype) == ((2, 4), np.dtype(np.int32))


@pytest.mark.parametrize("backend", [None, MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)])
@pytest.mark.parametrize("profile", list(PROFILES))
def test_every_byte_has_one_owner(profile: str, backend: Backend | None) -> None:
    """Pages x PageBytes of every pool, tables, control buffers, allowance, alignment; nothing else.  (C3.11, C5.4)"""
    config = config_of(profile, pages=6, backend=backend)
    layout = build_layout(config)

    page_bytes = {f"pool {pool.name}": pool.pages * pool.page_bytes for pool in config.pools}
    others = {
        "block tables": len(config.pools) * 2 * 4 * 4,
        "control buffers": (1024 + 3) * 4 + (1024 + 1) * 4 + 2 * 4 * 2 * 8,
        "graph allowance": 2 * 12 * 2**20, "alignment": 255 * len(layout.slabs),
    }
    assert layout.bytes_by_owner() == page_bytes | others
    assert layout.charged_bytes == sum(page_bytes.values()) + sum(others.values())
    assert {slab.charged_bytes - slab.span_bytes for slab in layout.slabs} == {255}
    assert layout.span_bytes == layout.charged_bytes - others["graph allowance"] - others["alignment"]


def test_every_plane_slab_carries_its_geometry() -> None:
    """Shape and dtype of the allocation are the plane's own; the table is no plane.  (C5.4)"""
    layout = build_layout(make_config(backend=DraftFullBackend(DRAFT_GEOMETRY)))
    planes = [slab for slab in layout.slabs if slab.plane is not None]

    assert [(slab.shape, slab.dtype) for slab in planes] == [(s.plane.shape, s.plane.dtype) for s in planes if s.plane]
    assert [slab.plane.order for slab in planes if slab.plane] == ["page-major"] * 2 + ["head-major"] * 2
    assert [slab.name for slab in layout.slabs if slab.plane is None] == [
        "main.block_table", "draft.block_table", "control.ingress", "control.egress", "control.table_entries",
    ]  # fmt: skip


def test_sizes_pass_32_bits_without_wrapping() -> None:
    """A slab of 2^33 bytes is counted exactly.  (C3.10, S72)"""
    slab = Slab("pool main", "main.0.k_code", (1 << 20, 8, 64, 8), np.dtype(np.uint16))

    assert slab.span_bytes == 1 << 33
    assert dataclasses.replace(slab, shape=(1 << 36, 4096, 64, 256)).span_bytes == 1 << 63
    assert dataclasses.replace(slab, shape=(0, 8, 64, 8)).span_bytes == 0


@pytest.mark.parametrize(("max_concurrency", "backend", "ingress", "egress"), [
    (2, None, 1027, 1025), (300, None, 1200, 1025), (300, MTPBackend(5), 2700, 2100),
    (300, DraftFullBackend(DRAFT_GEOMETRY), 5700, 5100)
])  # fmt: skip
def test_control_buffers_fit_any_unit(max_concurrency: int, backend: Backend | None, ingress: int, egress: int) -> None:
    """C x (3 + W) and C x (1 + W) words with W = 1, K + 1 or 16, or one prefill of 1024 columns.  (C5.3, C15.1)"""
    pages = max(4, max_concurrency)
    layout = build_layout(config_of("bf16", pages=pages, backend=backend, max_concurrency=max_concurrency))

    sizes = {slab.name: slab.shape for slab in layout.slabs if slab.owner == "control buffers"}
    assert sizes == {"control.ingress": (ingress,), "control.egress": (egress,),
                     "control.table_entries": (2 * 4 * max_concurrency,)}
    assert control_words(batch=4, width=2) == (20, 12)
    assert control_words(batch=4, width=2, words=3) == (32, 12)


@pytest.mark.parametrize(("max_context", "decode_columns", "draft", "workspace"), [
    (512, 2, KVGeometry(1, 4, 4, 64), 0),  # one key group
    (513, 2, KVGeometry(1, 4, 4, 64), 3 * 2 * 8 * 2 * 130 * 4),  # Main's decode needs most
    (1024, None, KVGeometry(1, 16, 8, 128), 3 * 16 * 16 * 2 * 130 * 4),  # a draft block of 16 columns needs most
])
def test_the_workspace_is_that_of_the_widest_unit_of_any_pool(
    max_context: int, decode_columns: int | None, draft: KVGeometry, workspace: int
) -> None:
    """One for all units: rows x W x heads x key groups x (m, l, O[D]) in FP32; scratch.  (C5.3, C14.4)"""
    config = StoreConfig(KVGeometry(1, 8, 2, 128), profile="bf16", max_context=max_context, max_concurrency=3,
                         kv_capacity=ExplicitCapacity(1024), decode_columns_max=decode_columns,
                         backend=DraftFullBackend(draft))
    slabs = [slab for slab in build_layout(config).slabs if slab.owner == "attention workspace"]

    assert sum(slab.span_bytes for slab in slabs) == workspace
    assert all(slab.is_scratch for slab in slabs)


@pytest.mark.parametrize("backend", [None, MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)])
def test_sanitizer_mode_adds_a_guard_page_to_every_pool(backend: Backend | None) -> None:
    """One page group of each pool behind its last id, with an owner of its own; M does not change.  (C5.3, C11.1)"""
    plain = config_of("nvfp4-g16", pages=6, backend=backend)
    guarded = dataclasses.replace(plain, sanitizer=True)
    before, after = build_layout(plain).bytes_by_owner(), build_layout(guarded).bytes_by_owner()

    assert after.pop("guard pages") == sum(pool.page_bytes for pool in plain.pools)
    assert after == before
    assert [pool.pages for pool in guarded.pools] == [pool.pages for pool in plain.pools]


@pytest.mark.parametrize("backend", [None, MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)])
@pytest.mark.parametrize("profile", list(PROFILES))
def test_counting_codec_events_adds_three_words_to_every_quantized_pool(profile: str, backend: Backend | None) -> None:
    """Exactly, with an owner of their own; a bf16 pool counts nothing, and nothing else changes.  (C5.4, codecs 8)"""
    plain = config_of(profile, pages=6, backend=backend)
    counting = dataclasses.replace(plain, codec_events=True)
    before, after = build_layout(plain).bytes_by_owner(), build_layout(counting).bytes_by_owner()

    pools = sum(pool.profile.is_quantized for pool in plain.pools)
    assert after.pop("codec counters", 0) == 24 * pools
    assert after.pop("alignment") == before.pop("alignment") + 255 * pools
    assert after == before


def test_declared_state_is_charged_and_not_allocated() -> None:
    """Fixed, and for every lane.  (C5.3)"""
    plain = config_of("bf16", pages=6, max_concurrency=3)
    declared = dataclasses.replace(plain, state_bytes_per_lane=1000, state_bytes_fixed=77, graph_allowance_bytes=5)
    layout = build_layout(declared)

    assert layout.bytes_by_owner()["sequence state"] == 3077
    assert layout.bytes_by_owner()["graph allowance"] == 5
    assert layout.span_bytes == build_layout(plain).span_bytes
