"""The capacity plan: one line, every byte by owner, and what was planned is what is allocated.  (C5)"""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.values.config import Backend
from pagedkv.values.layout import build_layout
from pagedkv.values.planner import CapacityCurve, advice, capacity_curve, plan
from pagedkv.values.profiles import PROFILES
from tests.checkout import ROOT
from tests.host.builders import DRAFT_GEOMETRY, GEOMETRY, make_config
from tests.host.refusals import refused

VECTORS = CapacityCurve(pages_min=2, pages_max=6, b_min=1000, b_step=128)
BACKENDS: list[Backend | None] = [None, pk.MTPBackend(3, layers=2), pk.DraftFullBackend(DRAFT_GEOMETRY)]


def auto_config(*, headroom_bytes: int = 0, min_tokens: int | None = None, **changed: Any) -> pk.StoreConfig:
    chosen = {"geometry": GEOMETRY, "profile": "bf16", "max_context": 256, "max_concurrency": 3, **changed}
    return pk.StoreConfig(**chosen, kv_capacity=pk.AutoCapacity(headroom_bytes, min_tokens))


class NoKernels:
    """A module whose kernels nobody launches: layouts need no compiler."""

    def kernel(self, name: str) -> str:
        return name


class MeteredDevice(CpuDevice):
    """The cpu device with memory that a test decides about, and without kernels."""

    def __init__(self, *, free_bytes: int = 1 << 40, total_bytes: int = 1 << 40, cache_bytes: int = 0) -> None:
        super().__init__(threads=1)
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes
        self.cache_bytes = cache_bytes

    def load(self, spec: pk.ModuleSpec) -> Any:
        return NoKernels()

    def empty_caches(self) -> int:
        held, self.cache_bytes = self.cache_bytes, 0
        self.free_bytes += held
        return held

    def memory_bytes(self) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes


@pytest.fixture(scope="module")
def shared_device() -> Iterator[MeteredDevice]:
    device = MeteredDevice()
    yield device
    device.close()


@pytest.fixture
def metered(shared_device: MeteredDevice) -> MeteredDevice:
    """One device for all tests, with abundant memory at the start of each."""
    shared_device.free_bytes, shared_device.cache_bytes = 1 << 40, 0
    return shared_device


# ---- the line -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("free_bytes", "headroom_bytes", "least", "most", "pages", "reserved_bytes"), [
    (1360, 50, 2, 6, 4, 1256),  # automatic
    (10_000, 50, 2, 6, 6, 1512),  # clamped to M_max
    (1200, 0, 3, 3, 3, 1128),  # explicit, 129 tokens
    (1050, 50, 2, 6, 2, 1000),  # just M_min
    *((free, 50, 2, 6, None, 0) for free in (1049, 49, 0)),  # F - R < B_min, F < R
    (1127, 0, 3, 3, None, 0), (1255, 0, 4, 6, None, 0),  # F below an explicit B(M), F below min_tokens
])
def test_pages_are_what_free_memory_above_headroom_holds(
    free_bytes: int, headroom_bytes: int, least: int, most: int, pages: int | None, reserved_bytes: int
) -> None:
    """M = min(M_max, M_min + floor((F - R - B_min) / B_step)), or no answer.  (C5.2, C5.3, S77)"""
    chosen = VECTORS.choose(budget_bytes=free_bytes - headroom_bytes, least=least, most=most)

    assert chosen == pages
    assert chosen is None or VECTORS.bytes_at(chosen) == reserved_bytes


def test_slack_stays_between_headroom_and_headroom_plus_a_step() -> None:
    """R <= slack < R + B_step while M < M_max, for every F.  (C5.3)"""
    headroom = 50
    seen = set()
    for free in range(1050, 1700):
        pages = VECTORS.choose(budget_bytes=free - headroom, least=2, most=6)
        assert pages is not None
        slack = free - VECTORS.bytes_at(pages)
        assert headroom <= slack
        assert pages == 6 or slack < headroom + 128
        seen.add(pages)
    assert seen == {2, 3, 4, 5, 6}
    assert VECTORS.pages_within(1 << 40) == 6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_concurrency", range(1, 9))
@pytest.mark.parametrize("profile", list(PROFILES))
def test_the_layout_builder_draws_a_line(profile: str, max_concurrency: int, backend: Backend | None) -> None:
    """B at every M from M_min to M_max equals B_min + (M - M_min) * B_step, exactly.  (C5.4)"""
    config = auto_config(geometry=pk.KVGeometry(3, 6, 3, 128), profile=profile, max_concurrency=max_concurrency,
                         backend=backend, sanitizer=True, codec_events=True, state_bytes_per_lane=1001)
    curve = capacity_curve(config)

    built = [build_layout(config, pages=pages).charged_bytes for pages in range(curve.pages_min, curve.pages_max + 1)]
    assert built == [curve.bytes_at(pages) for pages in range(curve.pages_min, curve.pages_max + 1)]
    assert curve.b_step == sum(pool.page_bytes for pool in config.pools_at(curve.pages_min))


BENT = """
import dataclasses
import pagedkv as pk
from pagedkv.values import planner
from pagedkv.values.layout import Allowance, build_layout

def bent(config, *, pages=None):
    layout = build_layout(config, pages=pages)
    return dataclasses.replace(layout, allowances=(Allowance("bend", int(pages == {bend})),))

config = pk.StoreConfig(pk.KVGeometry(1, 4, 2, 64), profile="bf16", max_context=256, max_concurrency=3,
                        kv_capacity=pk.AutoCapacity(0))
planner.build_layout = bent
try:
    planner.capacity_curve(config)
except AssertionError as error:
    print(error)
"""


@pytest.mark.parametrize("bend", [6, 8, 12])
def test_a_layout_that_is_not_affine_is_a_logic_error_under_o_too(bend: int) -> None:
    """The builder is evaluated beyond the two points that make a line, M_min 4 and 5.  (C5.4)"""
    done = subprocess.run([sys.executable, "-O", "-c", BENT.format(bend=bend)], cwd=ROOT, capture_output=True,
                          text=True, check=True)  # fmt: skip

    assert "B is not affine" in done.stdout


# ---- a plan -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_accounts_for_every_byte(backend: Backend | None) -> None:
    """The owners sum to B(M); free memory is B(M) and slack.  (C5.3, C5.4)"""
    config = auto_config(max_concurrency=4, backend=backend, headroom_bytes=1000, state_bytes_per_lane=3,
                         state_bytes_fixed=5, graph_allowance_bytes=7, sanitizer=True, max_context=1024)
    curve = capacity_curve(config)
    planned = plan(config, curve.bytes_at(20) + 1000)

    assert planned.pages == 20
    assert sum(planned.owners.values()) == planned.bytes == curve.bytes_at(20)
    assert (planned.slack, planned.free_bytes) == (1000, planned.bytes + 1000)
    assert (planned.owners["sequence state"], planned.owners["graph allowance"]) == (17, 7)
    assert {"guard pages", "block tables", "control buffers", "attention workspace"} <= planned.owners.keys()
    assert (planned.is_clamped, planned.bytes_max) == (True, curve.bytes_at(64))


@pytest.mark.parametrize("other", [
    {"state_bytes_fixed": 4096}, {"state_bytes_per_lane": 4096}, {"graph_allowance_bytes": 1 << 30},
    {"sanitizer": True}, {"decode_columns_max": 16}, {"prefill_columns_max": 4096}, {"max_context": 1088},
    {"backend": pk.MTPBackend(2)},
], ids=lambda other: next(iter(other)))
def test_every_owner_takes_from_the_pages(other: dict[str, Any]) -> None:
    """The complete reservation decides: whatever else is reserved raises B_min.  (C5.3)"""
    plain = auto_config(max_context=1024)

    assert capacity_curve(dataclasses.replace(plain, **other)).b_min > capacity_curve(plain).b_min


def test_one_lane_takes_its_single_point_although_memory_is_abundant() -> None:
    """C = 1: M_min = M_max = L.  (C5.3)"""
    planned = plan(auto_config(max_concurrency=1), 1 << 40)

    assert (planned.pages_min, planned.pages, planned.pages_max) == (4, 4, 4)
    assert planned.b_step > 0


@pytest.mark.parametrize(("backend", "lead"), [*zip(BACKENDS, (0, 1, 0), strict=True)])
def test_room_to_retain_is_planned_in_every_pool_up_to_its_limit(backend: Backend, lead: int) -> None:
    """C = 1 and 65 tokens to retain: M_max = L + 2, and less where memory is short.  (C5.1, C5.3, C5.6)"""
    config = auto_config(max_concurrency=1, retained_tokens=65, backend=backend, min_tokens=300)
    curve = capacity_curve(config)
    planned = plan(config, 1 << 40)
    scarce = plan(config, curve.bytes_at(6) - 1)

    assert (planned.pages_min, planned.pages, planned.pages_max, planned.is_clamped) == (4, 6, 6, False)
    assert planned.bytes == curve.bytes_at(6)
    assert (scarce.pages, scarce.is_clamped) == (5, True)
    assert [pool.pages for pool in planned.config.pools] == [6, 6 + lead][: 1 + (backend is not None)]
    with refused(pk.ConfigError, "C5.1", match="at most 384 tokens.*retained_tokens"):
        auto_config(max_concurrency=1, retained_tokens=65, backend=backend, min_tokens=385)


@pytest.mark.parametrize(
    ("backend", "pages"), [(pk.MTPBackend(1), 13), (pk.MTPBackend(2), 21), (pk.MTPBackend(5), 21), (BACKENDS[2], 13)]
)
def test_the_pool_of_a_backend_follows_main(backend: Backend, pages: int) -> None:
    """MTP of K = 1, 2, 5 with C = 8: M, M + 8, M + 8, and the lead is part of B_min; Draft Full: M.  (C5.6)"""
    config = auto_config(max_concurrency=8, backend=backend)
    planned = plan(config, capacity_curve(config).bytes_at(13))

    assert [pool.pages for pool in planned.config.pools] == [13, pages]


def test_an_explicit_capacity_is_taken_as_it_is_or_refused() -> None:
    """No headroom; F = B(M) is enough, one byte less is not.  (C5.2, C5.3)"""
    config = make_config(tokens=5 * 64 - 1)
    reserved = build_layout(config).charged_bytes
    planned = plan(config, reserved)

    assert (planned.pages, planned.tokens, planned.slack, planned.headroom_bytes) == (5, 320, 0, 0)
    with refused(pk.CapacityError, "C5.3") as caught:
        plan(config, reserved - 1)
    assert (caught.value.needed_bytes, caught.value.free_bytes, caught.value.pages) == (reserved, reserved - 1, 4)


def test_a_refusal_says_free_needed_least_and_got() -> None:
    """Four parts, and the numbers as attributes.  (C5.3, S81)"""
    config = auto_config(max_context=128, max_concurrency=2, headroom_bytes=1000, graph_allowance_bytes=0)
    curve = capacity_curve(config)
    with refused(pk.CapacityError, "C5.3") as caught:
        plan(config, curve.b_min + 999)

    assert str(caught.value) == (
        f"a plan of 4 Main pages, at least 2, was refused: expected {curve.b_min + 1000} free bytes ({curve.b_min} "
        f"bytes for 2 pages and 1000 bytes of headroom), got {curve.b_min + 999} free bytes, which hold 0 pages; "
        "free 1 bytes, or lower the headroom to 999 bytes, or lower max_context to 64, or lower max_concurrency to 1. "
        "(C5.3)"
    )


@pytest.mark.parametrize("free_bytes", [-1, 1.5, None, True])
def test_free_memory_is_a_count_of_bytes(free_bytes: Any) -> None:
    """A negative report is refused, not turned into negative pages.  (C5.3, S77)"""
    with refused(pk.ConfigError, "C5.3"):
        plan(auto_config(), free_bytes)


# ---- advice -------------------------------------------------------------------------------------------
def changed(config: pk.StoreConfig, hint: str, free_bytes: int, *, by: int = 0) -> tuple[pk.StoreConfig, int]:
    """Follow one hint of a refusal; `by` overshoots it (a little more memory, headroom, context or lanes)."""
    numbers = [int(number) for number in re.findall(r"\d+", hint)]
    if hint.startswith("free"):
        return config, free_bytes + numbers[0] - by
    what = hint.removeprefix("lower ").removeprefix("the ").split()[0]
    what = {"headroom": "headroom_bytes"}.get(what, what)
    changes: dict[str, Any] = {what: numbers[0] + by}
    if what in {"headroom_bytes", "min_tokens"}:
        changes = {"kv_capacity": dataclasses.replace(config.kv_capacity, **changes)}
    elif what == "capacity":
        changes = {"kv_capacity": pk.ExplicitCapacity(numbers[0] + by)}
    elif config.is_resolved:
        changes["kv_capacity"] = pk.ExplicitCapacity(max(numbers[0] + by, numbers[1]))
    return dataclasses.replace(config, **changes), free_bytes


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.2, 0.02])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [pk.AutoCapacity(100_000), pk.AutoCapacity(0), pk.AutoCapacity(0, 20 * 64),
                                      pk.ExplicitCapacity(17 * 64), pk.ExplicitCapacity(30 * 64)])  # fmt: skip
def test_every_hint_of_a_refusal_makes_the_plan_fit_and_asks_no_more_than_it_must(
    capacity: pk.ExplicitCapacity | pk.AutoCapacity, backend: Backend | None, share: float
) -> None:
    """Each alone is enough; a byte, token or lane more is refused.  (C5.3, S76)"""
    config = pk.StoreConfig(GEOMETRY, profile="int8-g64", max_context=1024, max_concurrency=5, kv_capacity=capacity,
                            backend=backend, graph_allowance_bytes=1000)
    with pytest.raises(pk.CapacityError) as caught:
        plan(config, 0)
    free_bytes = int((int(str(caught.value.needed_bytes)) - 1) * share)
    hints = advice(config, free_bytes)

    assert hints[0].startswith("free")
    for hint in hints:
        plan(*changed(config, hint, free_bytes))
        with pytest.raises((pk.CapacityError, pk.ConfigError)):
            plan(*changed(config, hint, free_bytes, by=1))


def test_advice_finds_what_fits_to_the_byte_and_keeps_min_tokens() -> None:
    """The reservation of a shorter context is enough for it, unless it could not use the least tokens.  (C5.1, C5.3)"""
    config = auto_config(max_context=256, max_concurrency=3)
    shorter = capacity_curve(dataclasses.replace(config, max_context=192)).b_min

    assert "lower max_context to 192" in advice(config, shorter)
    assert "lower max_context to 192" not in advice(config, shorter - 1)
    config = auto_config(max_context=256, max_concurrency=1, min_tokens=256)
    assert advice(config, capacity_curve(config).b_min - 1) == ["free 1 bytes"]


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_made_explicit_is_the_same_plan(profile: str, backend: Backend | None) -> None:
    """The tokens that a plan reports, given back, take the same pages and bytes of the same owners.  (C5.5, S76)"""
    config = auto_config(profile=profile, max_context=1000, max_concurrency=5, backend=backend, headroom_bytes=77)
    curve = capacity_curve(config)
    planned = plan(config, curve.bytes_at(40) + 500)
    again = plan(dataclasses.replace(config, kv_capacity=pk.ExplicitCapacity(planned.tokens)), planned.free_bytes)

    assert dataclasses.replace(again, headroom_bytes=77) == planned
    assert plan(planned.config, planned.free_bytes) == again


# ---- planned and allocated ----------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("max_concurrency", [1, 2, 3, 4])
@pytest.mark.parametrize("profile", list(PROFILES))
def test_what_was_planned_is_what_is_allocated(
    metered: MeteredDevice, profile: str, max_concurrency: int, head_dim: int, kv_heads: int, backend: Backend | None
) -> None:
    """To the byte, owner by owner; scale pages of 384 bytes (3 KV heads) included.  (C5.4, S76)"""
    config = auto_config(geometry=pk.KVGeometry(2, 4 * kv_heads, kv_heads, head_dim), profile=profile, max_context=600,
                         max_concurrency=max_concurrency, backend=backend, state_bytes_fixed=99, codec_events=True)
    curve = capacity_curve(config)
    metered.free_bytes = curve.bytes_at(min(curve.pages_min + 2, curve.pages_max))
    before = metered.allocated_bytes
    with pk.open_store(config, device=metered) as store:
        planned = store.plan
        allocated: dict[str, int] = {}
        for slab in store.layout.slabs:
            array = store._slabs[slab.name]
            assert (array.shape, array.dtype) == (slab.shape, slab.dtype)
            allocated[slab.owner] = allocated.get(slab.owner, 0) + array.nbytes

        later = ("sequence state", "graph allowance", "alignment")
        assert allocated == {owner: count for owner, count in planned.owners.items() if owner not in later}
        assert metered.allocated_bytes - before == sum(allocated.values())
        assert store.config == planned.config
        assert store.memory_summary()["main"]["capacity_pages"] == planned.pages
    del store, array
    assert metered.allocated_bytes == before


def test_sanitizer_mode_allocates_the_guard_page_and_points_fresh_tables_at_it(metered: MeteredDevice) -> None:
    """The guard page is the id behind the last, in every plane and head; its bytes are 0xFF.  (C5.3, C11.1)"""
    config = auto_config(profile="nvfp4-g16", sanitizer=True, backend=pk.DraftFullBackend(DRAFT_GEOMETRY))
    before = metered.allocated_bytes
    with pk.open_store(config, device=metered) as store:
        assert metered.allocated_bytes - before == store.layout.span_bytes
        for pool in store.config.pools:
            assert (store.block_tables[pool.name] == pool.pages).all()
            for plane in pool.planes:
                array = store._slabs[f"{pool.name}.{plane.layer}.{plane.role}"]
                pages = array if plane.order == "page-major" else array.swapaxes(0, 1)
                assert pages.shape[0] == pool.pages + 1
                assert (np.ascontiguousarray(pages[-1]).view(np.uint8) == 0xFF).all()
                assert not pages[:-1].any()
        store.check()


# ---- resolved when the store opens --------------------------------------------------------------------
def test_a_store_is_built_from_a_resolved_configuration() -> None:
    """Automatic capacity is nothing without free memory.  (C5.3)"""
    with refused(pk.ConfigError, "C5.3", match="free_bytes"):
        plan(auto_config(), None)


def test_memory_is_asked_for_after_the_caches_of_this_process_were_emptied() -> None:
    """F is what is free then; the plan says what the caches held.  (C5.3)"""
    config = auto_config()
    curve = capacity_curve(config)
    device = MeteredDevice(free_bytes=curve.bytes_at(6) - 5000, total_bytes=1 << 39, cache_bytes=5000)
    with pk.open_store(config, device=device) as store:
        planned = store.plan

        assert (planned.pages, planned.cache_bytes, planned.free_bytes) == (6, 5000, curve.bytes_at(6))
        assert planned.total_bytes == 1 << 39
    device.close()


def test_an_explicit_capacity_measures_nothing(metered: MeteredDevice, caplog: pytest.LogCaptureFixture) -> None:
    """The store reads neither caches nor free memory, and publishes its plan all the same.  (C5.2, C5.5)"""
    metered.free_bytes, metered.cache_bytes = 0, 9
    with caplog.at_level(logging.INFO, logger="pagedkv"), pk.open_store(make_config(), device=metered) as store:
        planned = store.plan
        assert (planned.free_bytes, planned.slack, metered.cache_bytes) == (None, None, 9)
        assert planned == dataclasses.replace(plan(make_config(), 1 << 40), free_bytes=None)
        assert planned.tokens == planned.pages * pk.PAGE_TOKENS == store.config.main_pages * 64
        assert planned.summary() in caplog.messages
        assert f"{planned.pages} pages as configured ({planned.tokens} tokens" in planned.summary()
        store.check()


def test_memory_that_others_hold_leaves_fewer_pages_or_a_refusal(metered: MeteredDevice) -> None:
    """S77: another process takes more and more; the plan fits what is left, or says how much is missing.  (C5.3)"""
    config = auto_config(max_context=1024, max_concurrency=4, headroom_bytes=1 << 20)
    curve = capacity_curve(config)
    whole = curve.bytes_at(curve.pages_max) + (1 << 20)
    needed = curve.b_min + (1 << 20)
    counts = []
    for held in range(0, whole - needed + 1, curve.b_step):
        metered.free_bytes = whole - held
        with pk.open_store(config, device=metered) as store:
            assert store.plan.bytes + (1 << 20) <= metered.free_bytes
            counts.append(store.plan.pages)

    assert counts == list(range(64, 15, -1))
    for free_bytes in (needed - 1, curve.b_min, 1 << 20, 0):
        metered.free_bytes = free_bytes
        with pytest.raises(pk.CapacityError) as caught:
            pk.open_store(config, device=metered)
        assert (caught.value.needed_bytes, caught.value.pages) == (needed, 0)


def test_a_pool_that_would_start_tiny_is_refused() -> None:
    """S81: memory for 16 of 3066 pages, where one sequence takes 511: an error with both numbers.  (C5.1, C5.3)"""
    config = auto_config(max_context=511 * 64, max_concurrency=6)
    curve = capacity_curve(config)
    with refused(pk.CapacityError, "C5.3", match="3066 Main pages, at least 511,") as caught:
        plan(config, curve.bytes_at(511) - 495 * curve.b_step)

    assert (caught.value.wanted_pages, caught.value.least_pages) == (3066, 511)


def test_fewer_tokens_than_the_least_acceptable_are_refused(metered: MeteredDevice) -> None:
    """S81: the caller says what is not worth serving.  (C5.3)"""
    config = auto_config(max_context=1024, max_concurrency=4, min_tokens=40 * 64 - 1)
    curve = capacity_curve(config)
    metered.free_bytes = curve.bytes_at(39)
    with refused(pk.CapacityError, "C5.3", match="at least 40, ") as caught:
        pk.open_store(config, device=metered)

    assert caught.value.pages == 39
    metered.free_bytes = curve.bytes_at(40)
    with pk.open_store(config, device=metered) as store:
        assert store.plan.pages == 40


@pytest.mark.parametrize(
    ("pages", "min_tokens", "level"), [(20, None, "WARNING"), (20, 1280, "INFO"), (64, None, "INFO")]
)
def test_a_capacity_below_the_maximum_is_a_visible_state(
    metered: MeteredDevice, caplog: pytest.LogCaptureFixture, pages: int, min_tokens: int | None, level: str
) -> None:
    """S81: free, wanted and got in one line; a warning unless the caller said that so much is enough.  (C5.3)"""
    config = auto_config(max_context=1024, max_concurrency=4, min_tokens=min_tokens)
    curve = capacity_curve(config)
    metered.free_bytes = curve.bytes_at(pages)
    with caplog.at_level(logging.INFO, logger="pagedkv"), pk.open_store(config, device=metered) as store:
        planned = store.plan

    (record,) = [record for record in caplog.records if record.getMessage().startswith("capacity:")]
    assert record.levelname == level
    assert record.getMessage() == planned.summary()
    assert f"got {pages} of 64 wanted pages" in planned.summary()
    assert f"{planned.bytes} of {planned.free_bytes} free bytes" in planned.summary()
    assert planned.is_clamped == (pages < 64)
    assert planned.whole_sequences == pages // 16


# ---- host ---------------------------------------------------------------------------------------------
def test_the_host_arena_is_charged_by_records() -> None:
    """Payloads rounded up to 256: a scale page of 384 bytes takes 512.  (C5.7, C8.1)"""
    config = auto_config(geometry=pk.KVGeometry(1, 3, 3, 64), profile="int8-g64", max_concurrency=4,
                         host_arena_bytes=100_000)
    (main,) = config.pools_at(4)
    planned = plan(config, 1 << 30)

    assert [plane.page_bytes for plane in main.planes] == [12_288, 12_288, 384, 384]
    assert main.record_bytes == 25_600
    assert planned.host_pages == {"main": 3}
    owners = planned.owners
    assert owners["host copies"] == 2 * (32 * 25_600 + 4 * planned.pages * 4) + 4 * 6 * 8
    assert "host copies" not in plan(dataclasses.replace(config, host_arena_bytes=0), 1 << 30).owners
