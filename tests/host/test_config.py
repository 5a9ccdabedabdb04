"""What a store is built from: pools, capacity, and every configuration that is refused.  (C3.3, C4.5, C5)"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pagedkv.errors import ConfigError, MisuseError, PagedKVError
from pagedkv.values.config import (
    AutoCapacity,
    Backend,
    DraftFullBackend,
    ExplicitCapacity,
    KVGeometry,
    MTPBackend,
    StoreConfig,
    config_as_json,
    config_from_json,
)
from tests.host.builders import DRAFT_GEOMETRY, GEOMETRY, make_config
from tests.host.refusals import refused


@pytest.mark.parametrize(("max_context", "max_concurrency", "blocks", "pages_min", "pages_max"), [
    (256, 3, 4, 4, 12), (64, 1, 1, 1, 1), (65, 1, 2, 2, 2), (128, 8, 2, 8, 16), (1, 4, 1, 4, 4), (1000, 2, 16, 16, 32),
    (100, 1, 2, 2, 2),  # the context stays 100 although its two pages hold 128
])
def test_capacity_limits_follow_context_and_concurrency(
    max_context: int, max_concurrency: int, blocks: int, pages_min: int, pages_max: int
) -> None:
    """M_min = max(L, C), M_max = C * L; rounding to pages does not raise the context.  (C5.1, C5.5)"""
    config = make_config(max_context=max_context, max_concurrency=max_concurrency)

    assert (config.blocks, config.pages_min, config.pages_max) == (blocks, pages_min, pages_max)
    assert (config.main_pages, config.max_context) == (pages_max, max_context)


@pytest.mark.parametrize(("tokens", "max_context", "max_concurrency", "pages"), [
    *((tokens, 256, 3, pages) for tokens, pages in ((256, 4), (257, 5), (320, 5), (321, 6), (767, 12), (768, 12))),
    (449, 128, 8, 8),  # one page for each of 8 lanes
    (256, 256, 1, 4),  # the single point of one lane
])
def test_capacity_is_rounded_up_to_pages(tokens: int, max_context: int, max_concurrency: int, pages: int) -> None:
    """M = ceil(K_main / P), from M_min to M_max.  (C5.1, C5.2)"""
    assert make_config(max_context=max_context, max_concurrency=max_concurrency, tokens=tokens).main_pages == pages


@pytest.mark.parametrize(("tokens", "max_context", "max_concurrency", "reason"), [
    *((tokens, 256, 3, "at least max_context = 256 tokens") for tokens in (1, 192, 255)),  # K_main >= S (S80)
    *((tokens, 256, 3, "4 to 12 pages") for tokens in (769, 832, 1 << 36)),  # M <= C * L
    (448, 128, 8, "8 to 16 pages"),  # M >= C even when L is smaller
    (257, 256, 1, "4 to 4 pages"),  # C = 1: M_min = M_max = L
])
def test_capacity_beyond_limits_is_refused(tokens: int, max_context: int, max_concurrency: int, reason: str) -> None:
    """A whole sequence, a page for every lane, and no more than all lanes can use.  (C5.1, C5.2)"""
    with refused(ConfigError, "C5.2", match=reason):
        make_config(max_context=max_context, max_concurrency=max_concurrency, tokens=tokens)


@pytest.mark.parametrize(("backend", "lead_pages", "lead_tokens"), [
    (MTPBackend(1), 0, 0), (MTPBackend(2), 8, 1), (MTPBackend(5), 8, 4), (MTPBackend(15), 8, 14),
    (DraftFullBackend(DRAFT_GEOMETRY), 0, 0),
])
def test_the_pool_of_a_backend_lets_every_row_lead(backend: Backend, lead_pages: int, lead_tokens: int) -> None:
    """M + C * ceil((K - 1) / P) pages at C = 8: M, M + 8, M + 8; Draft Full: M, and no provisional lead.  (C5.6)"""
    main, draft = make_config(max_context=256, max_concurrency=8, backend=backend).pools

    assert (main.pages, draft.pages) == (32, 32 + lead_pages)
    assert (main.lead_tokens, draft.lead_tokens) == (0, lead_tokens)


@pytest.mark.parametrize(("backend", "names", "columns"), [
    (None, ["main"], 1), (MTPBackend(1), ["main", "mtp"], 2), (MTPBackend(15), ["main", "mtp"], 16),
    (DraftFullBackend(DRAFT_GEOMETRY), ["main", "draft"], 16),
])
def test_a_backend_brings_one_pool_and_the_decode_width(
    backend: Backend | None, names: list[str], columns: int
) -> None:
    """Main first; backends exclude each other.  1, K + 1 or 16 columns, unless the caller says.  (C3.3, C14.4)"""
    config = make_config(backend=backend)

    assert [pool.name for pool in config.pools] == names
    assert config.decode_columns == columns
    assert dataclasses.replace(config, decode_columns_max=7).decode_columns == 7


def test_main_and_mtp_share_profile_order_and_heads() -> None:
    """The engine's profile, page-major; the draft has its own layers.  (C3.4)"""
    main, draft = dataclasses.replace(make_config(backend=MTPBackend(2, layers=3)), geometry=KVGeometry(5, 8, 2, 128),
                                      profile="k8v4").pools

    assert [(pool.profile.name, pool.order) for pool in (main, draft)] == [("k8v4", "page-major")] * 2
    assert (main.geometry.layers, draft.geometry.layers) == (5, 3)
    assert draft.geometry.kv_heads == main.geometry.kv_heads


def test_draft_full_is_bf16_and_head_major_whatever_the_engine_uses() -> None:
    """Its own profile, geometry and order.  (C3.4)"""
    _, draft = dataclasses.replace(make_config(backend=DraftFullBackend(DRAFT_GEOMETRY)), profile="int8-g64").pools

    assert (draft.profile.name, draft.order, draft.geometry) == ("bf16", "head-major", DRAFT_GEOMETRY)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16])
def test_every_group_size_from_1_to_16_is_served(group: int) -> None:
    """Any integer Hq / Hkv.  (C4.5, S74)"""
    assert KVGeometry(1, 3 * group, 3, 64).group_size == group


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(17, 1), (24, 1), (32, 1), (4, 3), (2, 4), (1, 2)])
def test_other_group_sizes_are_refused_at_construction(query_heads: int, kv_heads: int) -> None:
    """17 and more, fractions, and fewer query heads than KV heads.  (C4.5, S74)"""
    with refused(ConfigError, "C4.5", match="times 1 to 16"):
        KVGeometry(1, query_heads, kv_heads, 64)


def geometry_with(**changed: Any) -> Callable[[], object]:
    return partial(dataclasses.replace, GEOMETRY, **changed)


def store_with(**changed: Any) -> Callable[[], object]:
    return partial(dataclasses.replace, make_config(), **changed)


REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("no layers", geometry_with(layers=0), "C4.5"),
    ("too many layers", geometry_with(layers=4097), "C4.5"),
    ("layers of another type", geometry_with(layers=1.0), "C4.5"),
    ("no query heads", geometry_with(query_heads=0), "C4.5"),
    ("no KV heads", geometry_with(kv_heads=0), "C4.5"),
    ("negative KV heads", geometry_with(kv_heads=-2), "C4.5"),
    ("head_dim zero", geometry_with(head_dim=0), "C4.5"),
    ("head_dim true", geometry_with(head_dim=True), "C4.5"),
    ("no geometry", store_with(geometry=None), "C4.5"),
    ("head_dim that bf16 lacks", store_with(geometry=KVGeometry(1, 4, 2, 72)), "C4.5"),
    ("head_dim that int8 lacks", store_with(profile="int8-g64", geometry=KVGeometry(1, 4, 2, 96)), "C4.5"),
    ("an unknown profile", store_with(profile="fp16"), "C4.1"),
    ("no context", store_with(max_context=0), "C5.1"),
    ("negative context", store_with(max_context=-64), "C5.1"),
    ("a context beyond int32 positions", store_with(max_context=(1 << 30) + 1), "C5.1"),
    ("context of another type", store_with(max_context="256"), "C5.1"),
    ("no concurrency", store_with(max_concurrency=0), "C5.1"),
    ("too much concurrency", store_with(max_concurrency=4097), "C5.1"),
    ("capacity as a number", store_with(kv_capacity=512), "C5.2"),
    ("no capacity", store_with(kv_capacity=None), "C5.2"),
    ("an unknown backend", store_with(backend="mtp"), "C3.3"),
    ("a draft window of zero", partial(MTPBackend, 0), "C5.6"),
    ("a draft window beyond the verify width", partial(MTPBackend, 16), "C5.6"),
    ("a fractional draft window", partial(MTPBackend, 2.5), "C5.6"),  # type: ignore[arg-type]
    ("a draft without layers", partial(MTPBackend, 2, layers=0), "C3.3"),
    ("a draft with too many layers", partial(MTPBackend, 2, layers=65), "C3.3"),
    ("a draft without geometry", partial(DraftFullBackend, None), "C3.4"),  # type: ignore[arg-type]
    ("a draft with a head_dim of no kernel", partial(DraftFullBackend, KVGeometry(1, 8, 4, 40)), "C4.5"),
    ("a draft with a head_dim that nothing reads", partial(DraftFullBackend, KVGeometry(1, 8, 4, 256)), "C4.5"),
    ("capacity of zero tokens", partial(ExplicitCapacity, 0), "C5.2"),
    ("negative capacity", partial(ExplicitCapacity, -64), "C5.2"),
    ("fractional capacity", partial(ExplicitCapacity, 64.0), "C5.2"),  # type: ignore[arg-type]
    ("absurd capacity", partial(ExplicitCapacity, (1 << 36) + 1), "C5.2"),
    ("negative headroom", partial(AutoCapacity, -1), "C5.3"),
    ("fractional headroom", partial(AutoCapacity, 1.0), "C5.3"),  # type: ignore[arg-type]
    ("least tokens of zero", partial(AutoCapacity, 0, 0), "C5.3"),
    ("more least tokens than all lanes hold", store_with(kv_capacity=AutoCapacity(0, 2 * 4 * 64 + 1)), "C5.1"),
    ("negative state", store_with(state_bytes_fixed=-1), "C5.3"),
    ("no state per lane", store_with(state_bytes_per_lane=None), "C5.3"),
    ("a negative graph allowance", store_with(graph_allowance_bytes=-1), "C5.4"),
    ("too wide a decode unit", store_with(decode_columns_max=17), "C14.4"),
    ("too narrow a prefill unit", store_with(prefill_columns_max=15), "C14.4"),
    ("a number for sanitizer", store_with(sanitizer=1), "C11.1"),
    ("a number for codec events", store_with(codec_events=1), "codecs 8"),
    ("a negative host arena", store_with(host_arena_bytes=-1), "C5.7"),
    ("a number for lease growth", store_with(kv_lease_growth=1), "C9.2"),
    ("a lease window of zero", store_with(lease_window_tokens=0), "C9.2"),
    ("a fractional lease window", store_with(lease_window_tokens=1.5), "C9.2"),
    ("a negative forced span", store_with(forced_span_tokens=-1), "C9.2"),
    ("more caller's words than 64", store_with(caller_words=65), "C15.1"),
    ("caller's words true", store_with(caller_words=True), "C15.1"),
    ("a forced span true", store_with(forced_span_tokens=True), "C9.2"),
]


@pytest.mark.parametrize(("build", "clause"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_configuration_that_cannot_be_honoured_is_refused(build: Callable[[], object], clause: str) -> None:
    """At construction, with the clause that decides; a ConfigError is a MisuseError and a ValueError.  (C4.5, C5)"""
    with refused(ConfigError, clause) as caught:
        build()
    assert isinstance(caught.value, MisuseError)
    assert isinstance(caught.value, ValueError)


def test_a_refusal_has_four_parts_and_a_clause() -> None:
    """What was refused, expected, got, what to do: as text and as attributes."""
    with refused(ConfigError, "C5.2") as caught:
        make_config(tokens=128)

    error: PagedKVError = caught.value
    assert str(error) == (
        "kv_capacity was refused: expected at least max_context = 256 tokens, got 128 tokens; "
        "raise kv_capacity or lower max_context: one sequence must be able to reach it. (C5.2)"
    )
    assert (error.refused, error.got) == ("kv_capacity", "128 tokens")


def test_a_configuration_is_a_value() -> None:
    """Aliases compare equal to names, and nothing can be changed later.  (C0)"""
    config = make_config()

    assert config == make_config()
    assert config == StoreConfig(GEOMETRY, profile="BF16", max_context=256, max_concurrency=2,
                                 kv_capacity=ExplicitCapacity(512))
    with pytest.raises(AttributeError):
        config.max_context = 512  # type: ignore[misc]


def test_an_unresolved_configuration_has_no_pages_yet() -> None:
    """Everything downstream of the planner sees a resolved one.  (C5.3)"""
    config = dataclasses.replace(make_config(), kv_capacity=AutoCapacity())
    with refused(ConfigError, "C5.3", match="resolved"):
        _ = config.pools

    assert not config.is_resolved
    assert config.with_pages(5).main_pages == 5
    assert [pool.pages for pool in config.with_pages(5).pools] == [5]


@pytest.mark.parametrize("alias", ["ordinary", "Ordinary"])
def test_an_alias_names_no_backend(alias: str) -> None:
    """C0: accepted on input."""
    assert make_config(backend=alias).backend is None  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [None, MTPBackend(5)])
def test_room_to_retain_raises_the_most_pages(backend: MTPBackend | None) -> None:
    """With one row nothing kept can stand beside a request of full length otherwise.  (C5.1, C5.6)"""
    def config(tokens: int, retained_tokens: int = 0) -> StoreConfig:
        return make_config(max_context=256, max_concurrency=1, tokens=tokens, backend=backend,
                           retained_tokens=retained_tokens)

    with refused(ConfigError, "C5.2", match="4 to 4 pages"):
        config(320)
    with refused(ConfigError, "C5.2", match="4 to 6 pages"):
        config(448, 65)
    wide = config(384, 65)
    assert (wide.pages_min, wide.pages_max, wide.main_pages) == (4, 6, 6)
    assert config_from_json(json.loads(json.dumps(config_as_json(wide)))) == wide
    for wrong in (-1, 1.5, True):
        with refused(ConfigError, "C5.1"):
            config(256, wrong)  # type: ignore[arg-type]
