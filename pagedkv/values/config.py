"""The configuration of a store: geometry, profile, limits, capacity and backend.

A configuration is a value.  It is checked once, at construction; pools, pages and entitlements are
arithmetic on it.  (C3.3, C3.4, C4.5, C5.1, C5.2, C5.6)

    S  max_context       tokens a sequence may reach; never rounded
    C  max_concurrency   active sequences at once
    L  blocks            ceil(S / P), the width of every block table
    M  main_pages        page groups of the Main pool

The planner resolves an automatic capacity: `with_pages(M)` gives the configuration with that M as its explicit
capacity.  Ledgers, planes and views are built from a resolved configuration only.

A configuration in JSON has every field of the dataclasses by its own name.  An absent field takes its default, an
unknown field is refused:

    {"geometry": {"type": "KVGeometry", "layers": 1, ...}, "profile": "bf16", "max_context": 256, ...}
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from pagedkv.errors import ConfigError, shown
from pagedkv.values.attention_shape import DECODE_WIDTH_MAX
from pagedkv.values.checks import checked_integer
from pagedkv.values.planes import PageOrder, PageRecord, PlaneGeometry, plane_inventory
from pagedkv.values.profiles import (
    HEAD_DIMS_CONTEXT,
    KV_HEADS_MAX,
    PROFILES,
    QUERY_HEADS_MAX,
    Profile,
    check_head_dim,
    check_heads,
    resolve_profile,
)
from pagedkv.values.quantities import CONTEXT_TOKENS_MAX, PAGE_TOKENS, ceil_div, pages_for_tokens

VERIFY_WIDTH_MAX = DECODE_WIDTH_MAX
CONCURRENCY_MAX = 4096
CALLER_WORDS_MAX = 64
PREFILL_COLUMNS_MIN = 16
PREFILL_COLUMNS_MAX = 65_536
BYTES_MAX = 1 << 50
CAPACITY_TOKENS_MAX = 1 << 36
"""2^30 pages: ids are int32, and a backend's lead and the guard page come on top (C3.6, C5.6)."""

NO_BACKEND = "ordinary"
"""An alias of None as a backend, in any letter case.  (C0)"""

GRAPH_ALLOWANCE_BYTES_PER_LANE = 12 << 20
"""The default allowance for captured graphs, their buffers and allocator rounding, per lane.

An estimate, known from another implementation on an RTX 5090 without a draft.  `Store.graph_bytes` says how many
bytes the buffers of the captured units take; `graph_allowance_bytes` replaces the estimate."""


def _require_int(what: str, value: object, low: int, high: int, clause: str) -> None:
    checked_integer(what, value, low, high, remedy="correct the configuration", clause=clause, kind=ConfigError)


@dataclass(frozen=True)
class KVGeometry:
    """The shape of a model's attention: layers with a growing cache, heads and head_dim.  (C4.5)

    Raises:
        ConfigError: a number out of range, or a group of query heads that no kernel serves.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _require_int("layers", self.layers, 1, 4096, "C4.5")
        _require_int("kv_heads", self.kv_heads, 1, KV_HEADS_MAX, "C4.5")
        _require_int("query_heads", self.query_heads, 1, QUERY_HEADS_MAX, "C4.5")
        _require_int("head_dim", self.head_dim, 1, 65536, "C4.5")
        check_heads(self.query_heads, self.kv_heads)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class ExplicitCapacity:
    """Main capacity in tokens; M = ceil(tokens / P) and nothing is measured.  (C5.2)

    Raises:
        ConfigError: tokens is no positive integer.
    """

    tokens: int

    def __post_init__(self) -> None:
        _require_int("ExplicitCapacity.tokens", self.tokens, 1, CAPACITY_TOKENS_MAX, "C5.2")


@dataclass(frozen=True)
class AutoCapacity:
    """Main capacity from the memory that is free when the store opens, resolved once.  (C5.3)

    Open the store after the weights are loaded, so that their memory does not count as free.

    Args:
        headroom_bytes: R, free memory that the plan leaves alone.
        min_tokens: least acceptable Main capacity; a plan that reaches less is an error.  None accepts M_min, the
            least that the contract allows, and then a plan below M_max is logged as a warning.

    Raises:
        ConfigError: a number out of range.
    """

    headroom_bytes: int = 1 << 30
    min_tokens: int | None = None

    def __post_init__(self) -> None:
        _require_int("AutoCapacity.headroom_bytes", self.headroom_bytes, 0, BYTES_MAX, "C5.3")
        if self.min_tokens is not None:
            _require_int("AutoCapacity.min_tokens", self.min_tokens, 1, CAPACITY_TOKENS_MAX, "C5.3")


@dataclass(frozen=True)
class MTPBackend:
    """A multi-token-prediction draft: its own page-major pool in the engine's profile.  (C3.3, C5.6)

    Args:
        draft_window: K, drafted tokens a round; the pool may lead Main by K - 1 tokens per row.
        layers: layers of the draft that keep a growing cache.

    Raises:
        ConfigError: a number out of range.
    """

    draft_window: int
    layers: int = 1

    def __post_init__(self) -> None:
        _require_int("MTPBackend.draft_window", self.draft_window, 1, VERIFY_WIDTH_MAX - 1, "C5.6")
        _require_int("MTPBackend.layers", self.layers, 1, 64, "C3.3")


@dataclass(frozen=True)
class DraftFullBackend:
    """A draft with full-attention layers: its own head-major BF16 pool.  (C3.3, C3.4)

    Raises:
        ConfigError: no KVGeometry, or a head_dim other than 64 and 128: context attention has no other kernels.
    """

    geometry: KVGeometry

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, KVGeometry):
            raise ConfigError("DraftFullBackend.geometry", expected="a KVGeometry", got=shown(self.geometry),
                              remedy="describe the draft's own attention", clause="C3.4")
        if self.geometry.head_dim not in HEAD_DIMS_CONTEXT:
            raise ConfigError("head_dim of a Draft Full backend", expected=" or ".join(map(str, HEAD_DIMS_CONTEXT)),
                              got=shown(self.geometry.head_dim),
                              remedy="use a draft whose head_dim context attention serves", clause="C4.5")


Backend = MTPBackend | DraftFullBackend
Capacity = ExplicitCapacity | AutoCapacity


@dataclass(frozen=True)
class PoolConfig:
    """One resolved pool: the source of its ledger, planes and views.  (C3.1, C3.4)

    Attributes:
        pages: page groups that leases may name, ids 0 to pages - 1.
        lead_tokens: how far beyond the sequence's own budget a row may write provisionally; both together are
            reserved in whole pages.
        guard_pages: page groups behind the last id, which no lease names; 1 in sanitizer mode (C11.1).
        counts_events: whether appends count codec events; never for bf16, whose rows have no groups (codecs 8).
    """

    name: str
    profile: Profile
    geometry: KVGeometry
    order: PageOrder
    pages: int
    lead_tokens: int
    guard_pages: int = 0
    counts_events: bool = False

    @property
    def planes(self) -> tuple[PlaneGeometry, ...]:
        """Every plane in ordinal order.  (C4.2)"""
        return plane_inventory(
            self.profile, layers=self.geometry.layers, kv_heads=self.geometry.kv_heads,
            head_dim=self.geometry.head_dim, pages=self.pages + self.guard_pages, order=self.order,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page group over all planes.  (C3.11)"""
        return sum(plane.page_bytes for plane in self.planes)

    @property
    def record_bytes(self) -> int:
        """Bytes of one Host page: each plane's payload, rounded up to 256.  (C5.7, C8.1)"""
        return PageRecord(self.planes).total_bytes


@dataclass(frozen=True)
class StoreConfig:
    """Everything that is fixed when a store opens.  (C5.1 to C5.4)

    Args:
        geometry: the target model's attention.
        profile: a name or alias of the closed set, or a Profile.
        max_context: S in tokens.
        max_concurrency: C in sequences.
        kv_capacity: Main capacity: `ExplicitCapacity(tokens)`, or `AutoCapacity(headroom_bytes)`.
        backend: None, also as "ordinary"; `MTPBackend`; or `DraftFullBackend`, which is "DFlash Full"; at most one.
        decode_columns_max: W of the widest decode unit, 1 to 16; it sizes workspace and control buffers.  None is 1
            without a backend, K + 1 with MTP, 16 with Draft Full.
        prefill_columns_max: W of the widest prefill unit, 16 to 65,536.
        state_bytes_per_lane, state_bytes_fixed: device memory that the caller will allocate after the store opens, for
            each lane and once; charged, not allocated (C5.3).
        graph_allowance_bytes: device memory set aside for captured graphs, their buffers and allocator rounding;
            None is 12 MiB per lane.
        sanitizer: keep one guard page group a pool behind the last id; fresh table entries point at it (C11.1).
        codec_events: count saturated, non-finite and zero groups of every append on the device; `Store.codec_counts`
            returns them (codecs 8).
        host_arena_bytes: pinned host memory for host replicas; charged to no device (C5.7).
        retained_tokens: room for continuations beyond what all active rows can use; raises M_max (C5.1).
        kv_lease_growth: reserve a bounded window of the output budget and extend it at round boundaries, by
            `Store.begin_round` (C9.2).
        lease_window_tokens: output tokens that an activation reserves, and the most that an extension adds.
        forced_span_tokens: most tokens that the embedder appends at once without sampling.  Their room is left out of
            `Store.covered_columns`; with lease growth the cushion holds them, also at the end of a row.
        caller_words: K, int32 words of the embedder for each row of a unit, 0 to 64; the library does not read them.
            They are for sampling seeds, selectors of the model's state and the like (C15.1).

    What an activation asks for is reserved in whole pages: a row may write to the end of the last page of its budget,
    below `max_context`.  A backend's lead is added to the budget before that is rounded up: it is in whole pages too.

    Raises:
        ConfigError: a value outside its range, a head_dim or group that no kernel serves, or a
            capacity outside [max(L, C), C * L + ceil(retained_tokens / 64)] pages or below S tokens.
    """

    geometry: KVGeometry
    profile: str | Profile = field(kw_only=True)
    max_context: int = field(kw_only=True)
    max_concurrency: int = field(kw_only=True)
    kv_capacity: Capacity = field(kw_only=True)
    backend: Backend | None = field(default=None, kw_only=True)
    decode_columns_max: int | None = field(default=None, kw_only=True)
    prefill_columns_max: int = field(default=1024, kw_only=True)
    state_bytes_per_lane: int = field(default=0, kw_only=True)
    state_bytes_fixed: int = field(default=0, kw_only=True)
    graph_allowance_bytes: int | None = field(default=None, kw_only=True)
    sanitizer: bool = field(default=False, kw_only=True)
    codec_events: bool = field(default=False, kw_only=True)
    host_arena_bytes: int = field(default=0, kw_only=True)
    retained_tokens: int = field(default=0, kw_only=True)
    kv_lease_growth: bool = field(default=False, kw_only=True)
    lease_window_tokens: int = field(default=4096, kw_only=True)
    forced_span_tokens: int = field(default=0, kw_only=True)
    caller_words: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, KVGeometry):
            raise ConfigError("geometry", expected="a KVGeometry", got=shown(self.geometry),
                              remedy="describe the model's attention", clause="C4.5")
        object.__setattr__(self, "profile", resolve_profile(self.profile))
        check_head_dim(self.resolved_profile, self.geometry.head_dim)
        _require_int("max_context", self.max_context, 1, CONTEXT_TOKENS_MAX, "C5.1")
        _require_int("max_concurrency", self.max_concurrency, 1, CONCURRENCY_MAX, "C5.1")
        if isinstance(self.backend, str) and self.backend.lower() == NO_BACKEND:
            object.__setattr__(self, "backend", None)
        if self.backend is not None and not isinstance(self.backend, MTPBackend | DraftFullBackend):
            raise ConfigError("backend", expected=f"None or {NO_BACKEND!r}, an MTPBackend or a DraftFullBackend",
                              got=shown(self.backend),
                              remedy="choose one backend; they exclude each other", clause="C3.3")
        self._check_reservations()
        if isinstance(self.kv_capacity, ExplicitCapacity):
            self._check_capacity(self.kv_capacity.tokens)
        elif not isinstance(self.kv_capacity, AutoCapacity):
            raise ConfigError("kv_capacity", expected="an ExplicitCapacity or an AutoCapacity",
                              got=shown(self.kv_capacity), remedy="pass ExplicitCapacity(tokens=...)", clause="C5.2")
        elif self.kv_capacity.min_tokens is not None and self.pages_least > self.pages_max:
            raise ConfigError(
                "AutoCapacity.min_tokens", expected=f"at most {self.pages_max * PAGE_TOKENS} tokens",
                got=f"{self.kv_capacity.min_tokens} tokens",
                remedy="lower it, because nobody can use more than max_concurrency whole sequences, or ask for more "
                       "with retained_tokens", clause="C5.1",
            )

    def _check_reservations(self) -> None:
        if self.decode_columns_max is not None:
            _require_int("decode_columns_max", self.decode_columns_max, 1, DECODE_WIDTH_MAX, "C14.4")
        _require_int("prefill_columns_max", self.prefill_columns_max, PREFILL_COLUMNS_MIN, PREFILL_COLUMNS_MAX, "C14.4")
        _require_int("state_bytes_per_lane", self.state_bytes_per_lane, 0, BYTES_MAX, "C5.3")
        _require_int("state_bytes_fixed", self.state_bytes_fixed, 0, BYTES_MAX, "C5.3")
        if self.graph_allowance_bytes is not None:
            _require_int("graph_allowance_bytes", self.graph_allowance_bytes, 0, BYTES_MAX, "C5.4")
        _require_int("host_arena_bytes", self.host_arena_bytes, 0, BYTES_MAX, "C5.7")
        _require_int("retained_tokens", self.retained_tokens, 0, CAPACITY_TOKENS_MAX, "C5.1")
        _require_int("lease_window_tokens", self.lease_window_tokens, 1, CONTEXT_TOKENS_MAX, "C9.2")
        _require_int("forced_span_tokens", self.forced_span_tokens, 0, CONTEXT_TOKENS_MAX, "C9.2")
        _require_int("caller_words", self.caller_words, 0, CALLER_WORDS_MAX, "C15.1")
        for name, clause in (("sanitizer", "C11.1"), ("codec_events", "codecs 8"), ("kv_lease_growth", "C9.2")):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, expected="True or False", got=shown(getattr(self, name)),
                                  remedy="correct the configuration", clause=clause)

    def _check_capacity(self, tokens: int) -> None:
        pages = pages_for_tokens(tokens)
        if tokens < self.max_context:
            raise ConfigError(
                "kv_capacity", expected=f"at least max_context = {self.max_context} tokens", got=f"{tokens} tokens",
                remedy="raise kv_capacity or lower max_context: one sequence must be able to reach it", clause="C5.2",
            )
        if not self.pages_min <= pages <= self.pages_max:
            raise ConfigError(
                "kv_capacity", expected=f"{self.pages_min} to {self.pages_max} pages of 64 tokens",
                got=f"{tokens} tokens = {pages} pages",
                remedy="pass a capacity in this range: each of max_concurrency sequences needs one page, and none can "
                       "use more than max_context; retained_tokens asks for more", clause="C5.2",
            )

    @property
    def resolved_profile(self) -> Profile:
        """The profile as an object."""
        assert isinstance(self.profile, Profile), self.profile
        return self.profile

    @property
    def blocks(self) -> int:
        """L: entries of one block-table row."""
        return pages_for_tokens(self.max_context)

    @property
    def pages_min(self) -> int:
        """M_min = max(L, C).  (C5.1)"""
        return max(self.blocks, self.max_concurrency)

    @property
    def pages_max(self) -> int:
        """M_max = C * L, and the pages of `retained_tokens`.  (C5.1)"""
        return self.max_concurrency * self.blocks + pages_for_tokens(self.retained_tokens)

    @property
    def pages_least(self) -> int:
        """Least acceptable Main pages: M_min or the pages of `AutoCapacity.min_tokens`, the larger.  (C5.1, C5.3)"""
        least_tokens = self.kv_capacity.min_tokens if isinstance(self.kv_capacity, AutoCapacity) else None
        return max(self.pages_min, pages_for_tokens(least_tokens or 0))

    @property
    def decode_columns(self) -> int:
        """W of the widest decode unit, resolved: verify reads K drafted tokens and the one before them."""
        if self.decode_columns_max is not None:
            return self.decode_columns_max
        if self.backend is None:
            return 1
        return self.backend.draft_window + 1 if isinstance(self.backend, MTPBackend) else VERIFY_WIDTH_MAX

    @property
    def state_bytes(self) -> int:
        """Caller-declared state: fixed, and for every lane.  (C5.3)"""
        return self.state_bytes_fixed + self.max_concurrency * self.state_bytes_per_lane

    @property
    def allowance_bytes(self) -> int:
        """Graph allowance: as given, or the estimate for every lane.  (C5.4)"""
        if self.graph_allowance_bytes is not None:
            return self.graph_allowance_bytes
        return self.max_concurrency * GRAPH_ALLOWANCE_BYTES_PER_LANE

    @property
    def is_resolved(self) -> bool:
        """Whether M is known: capacity is explicit."""
        return isinstance(self.kv_capacity, ExplicitCapacity)

    @property
    def main_pages(self) -> int:
        """M: page groups of the Main pool.  (C5.2)

        Raises:
            ConfigError: capacity is automatic and not yet resolved.
        """
        if not isinstance(self.kv_capacity, ExplicitCapacity):
            raise ConfigError("main_pages", expected="a configuration whose capacity is resolved", got="AutoCapacity",
                              remedy="open it with open_store, or resolve it with plan(config, free_bytes).config",
                              clause="C5.3")
        return pages_for_tokens(self.kv_capacity.tokens)

    @property
    def pools(self) -> tuple[PoolConfig, ...]:
        """The growing pools: Main first, then the backend's.  (C3.3)"""
        return self.pools_at(self.main_pages)

    def with_pages(self, pages: int) -> StoreConfig:
        """Return this configuration with the explicit capacity of M = pages.  (C5.2, C5.3)"""
        return replace(self, kv_capacity=ExplicitCapacity(pages * PAGE_TOKENS))

    def pools_at(self, pages: int) -> tuple[PoolConfig, ...]:
        """Return the growing pools at M = pages; the configured capacity is ignored.  (C3.3, C5.6)"""
        guard = int(self.sanitizer)
        counts = self.codec_events and self.resolved_profile.is_quantized
        main = PoolConfig("main", self.resolved_profile, self.geometry, "page-major", pages, 0, guard, counts)
        backend = self.backend
        if isinstance(backend, MTPBackend):
            lead = backend.draft_window - 1
            draft = KVGeometry(backend.layers, self.geometry.query_heads, self.geometry.kv_heads,
                               self.geometry.head_dim)
            mtp_pages = pages + self.max_concurrency * ceil_div(lead, PAGE_TOKENS)
            return (main, PoolConfig("mtp", self.resolved_profile, draft, "page-major", mtp_pages, lead, guard, counts))
        if isinstance(backend, DraftFullBackend):
            return (main, PoolConfig("draft", PROFILES["bf16"], backend.geometry, "head-major", pages, 0, guard))
        return (main,)


# ---- JSON ------------------------------------------------------------------------------------------------------

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (KVGeometry, ExplicitCapacity, AutoCapacity, MTPBackend, DraftFullBackend)
}


def config_as_json(config: StoreConfig) -> dict[str, object]:
    """Return a configuration as dicts, strings, numbers and None; `config_from_json` reverses it.  (C5.2)"""
    return {part.name: _as_json(getattr(config, part.name)) for part in fields(config)}


def config_from_json(given: object) -> StoreConfig:
    """Return the configuration that `config_as_json` wrote; refuse anything else (ConfigError)."""
    if not isinstance(given, dict):
        raise _json_refusal("an object with the fields of a StoreConfig", given)
    config: StoreConfig = _build(StoreConfig, {name: _from_json(value) for name, value in given.items()})
    return config


def _as_json(value: object) -> object:
    if isinstance(value, Profile):
        return value.name
    if is_dataclass(value):
        parts = {part.name: _as_json(getattr(value, part.name)) for part in fields(value)}
        return {"type": type(value).__name__, **parts}
    return value


def _from_json(value: object) -> object:
    if not isinstance(value, dict):
        return value
    kind = _TYPES.get(str(value.get("type")))
    if kind is None:
        raise _json_refusal(f"a type of {sorted(_TYPES)}", value.get("type"))
    return _build(kind, {name: _from_json(part) for name, part in value.items() if name != "type"})


def _build(kind: type[Any], values: dict[str, object]) -> Any:
    known = {part.name for part in fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise _json_refusal(f"the fields {sorted(known)}", unknown)
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default is absent
        raise _json_refusal(f"every field of a {kind.__name__} that has no default", str(error)) from error


def _json_refusal(expected: str, got: object) -> ConfigError:
    return ConfigError("a configuration in JSON", expected=expected, got=shown(got),
                       remedy="use the output of config_as_json, with the same version of the library", clause="C5.2")
