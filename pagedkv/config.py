"""What a store is built from: geometry, profile, limits, capacity and backend.

A configuration is a value: it is checked once, when it is made, and everything derived from it
(pools, pages, entitlement arithmetic) is arithmetic on it.  (C3.3, C3.4, C4.5, C5.1, C5.2, C5.6)

    S  max_context       tokens a sequence may reach; never rounded
    C  max_concurrency   active sequences at once
    L  blocks            ceil(S / P), the width of every block table
    M  main_pages        page groups of the Main pool

Read next: `layout.py` turns a configuration into bytes; `pool.py` starts the ledgers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedkv.errors import ConfigError
from pagedkv.planes import PageOrder, PlaneGeometry, plane_inventory
from pagedkv.profiles import PROFILES, QUERY_GROUP_MAX, Profile, check_head_dim, resolve_profile
from pagedkv.quantities import CONTEXT_TOKENS_MAX, ceil_div, pages_for_tokens

VERIFY_WIDTH_MAX = 16
CONCURRENCY_MAX = 4096


def _require_int(what: str, value: object, low: int, high: int, clause: str) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(what, expected=f"an integer from {low} to {high}", got=repr(value),
                          remedy="correct the configuration", clause=clause)


@dataclass(frozen=True)
class KVGeometry:
    """The shape of a model's attention: layers with a growing cache, heads and head_dim.  (C4.5)"""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _require_int("layers", self.layers, 1, 4096, "C4.5")
        _require_int("kv_heads", self.kv_heads, 1, 4096, "C4.5")
        _require_int("query_heads", self.query_heads, 1, 65536, "C4.5")
        _require_int("head_dim", self.head_dim, 1, 65536, "C4.5")
        if self.query_heads % self.kv_heads or self.query_heads // self.kv_heads > QUERY_GROUP_MAX:
            raise ConfigError(
                "the head geometry", expected=f"query_heads = kv_heads times 1 to {QUERY_GROUP_MAX}",
                got=f"{self.query_heads} query heads over {self.kv_heads} KV heads",
                remedy="use a supported group size", clause="C4.5",
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class ExplicitCapacity:
    """Main capacity in tokens; M = ceil(tokens / P) and nothing is measured.  (C5.2)"""

    tokens: int

    def __post_init__(self) -> None:
        _require_int("ExplicitCapacity.tokens", self.tokens, 1, 1 << 40, "C5.2")


@dataclass(frozen=True)
class MTPBackend:
    """A multi-token-prediction draft: its own page-major pool in the engine's profile.  (C3.3, C5.6)

    Args:
        draft_window: K, drafted tokens a round; the pool may lead Main by K - 1 tokens per row.
        layers: layers of the draft that keep a growing cache.
    """

    draft_window: int
    layers: int = 1

    def __post_init__(self) -> None:
        _require_int("MTPBackend.draft_window", self.draft_window, 1, VERIFY_WIDTH_MAX - 1, "C5.6")
        _require_int("MTPBackend.layers", self.layers, 1, 64, "C3.3")


@dataclass(frozen=True)
class DraftFullBackend:
    """A draft with full-attention layers: its own head-major BF16 pool.  (C3.3, C3.4)"""

    geometry: KVGeometry

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, KVGeometry):
            raise ConfigError("DraftFullBackend.geometry", expected="a KVGeometry", got=repr(self.geometry),
                              remedy="describe the draft's own attention", clause="C3.4")
        check_head_dim(PROFILES["bf16"], self.geometry.head_dim)


Backend = MTPBackend | DraftFullBackend


@dataclass(frozen=True)
class PoolConfig:
    """One pool, resolved: what its ledger, planes and views are built from.  (C3.1, C3.4)

    `lead_tokens` is how far beyond the sequence's own budget a row may write provisionally.
    """

    name: str
    profile: Profile
    geometry: KVGeometry
    order: PageOrder
    pages: int
    lead_tokens: int

    @property
    def planes(self) -> tuple[PlaneGeometry, ...]:
        """Every plane in ordinal order.  (C4.2)"""
        return plane_inventory(
            self.profile, layers=self.geometry.layers, kv_heads=self.geometry.kv_heads,
            head_dim=self.geometry.head_dim, pages=self.pages, order=self.order,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page group over all planes.  (C3.11)"""
        return sum(plane.page_bytes for plane in self.planes)


@dataclass(frozen=True)
class StoreConfig:
    """Everything that is fixed when a store opens.  (C5.1, C5.2)

    Args:
        geometry: the target model's attention.
        profile: a name or alias of the closed set, or a Profile.
        max_context: S in tokens.
        max_concurrency: C in sequences.
        kv_capacity: Main capacity; `ExplicitCapacity(tokens)`.
        backend: None, `MTPBackend` or `DraftFullBackend`; at most one.

    Raises:
        ConfigError: a value outside its range, a head_dim or group that no kernel serves, or a
            capacity outside [max(L, C), C * L] pages or below S tokens.
    """

    geometry: KVGeometry
    profile: str | Profile = field(kw_only=True)
    max_context: int = field(kw_only=True)
    max_concurrency: int = field(kw_only=True)
    kv_capacity: ExplicitCapacity = field(kw_only=True)
    backend: Backend | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, KVGeometry):
            raise ConfigError("geometry", expected="a KVGeometry", got=repr(self.geometry),
                              remedy="describe the model's attention", clause="C4.5")
        object.__setattr__(self, "profile", resolve_profile(self.profile))
        check_head_dim(self.resolved_profile, self.geometry.head_dim)
        _require_int("max_context", self.max_context, 1, CONTEXT_TOKENS_MAX, "C5.1")
        _require_int("max_concurrency", self.max_concurrency, 1, CONCURRENCY_MAX, "C5.1")
        if self.backend is not None and not isinstance(self.backend, MTPBackend | DraftFullBackend):
            raise ConfigError("backend", expected="None, an MTPBackend or a DraftFullBackend", got=repr(self.backend),
                              remedy="choose one backend; they exclude each other", clause="C3.3")
        if not isinstance(self.kv_capacity, ExplicitCapacity):
            raise ConfigError("kv_capacity", expected="an ExplicitCapacity", got=repr(self.kv_capacity),
                              remedy="pass ExplicitCapacity(tokens=...)", clause="C5.2")
        self._check_capacity(self.kv_capacity.tokens)

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
                remedy="every lane needs one page and none can use more than ceil(max_context / 64)", clause="C5.2",
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
        """M_max = C * L.  (C5.1)"""
        return self.max_concurrency * self.blocks

    @property
    def main_pages(self) -> int:
        """M: page groups of the Main pool.  (C5.2)"""
        return pages_for_tokens(self.kv_capacity.tokens)

    @property
    def pools(self) -> tuple[PoolConfig, ...]:
        """The growing pools: Main first, then the backend's.  (C3.3)"""
        pages = self.main_pages
        main = PoolConfig("main", self.resolved_profile, self.geometry, "page-major", pages, 0)
        backend = self.backend
        if isinstance(backend, MTPBackend):
            lead = backend.draft_window - 1
            draft = KVGeometry(backend.layers, self.geometry.query_heads, self.geometry.kv_heads,
                               self.geometry.head_dim)
            lead_pages = self.max_concurrency * ceil_div(lead, 64)
            return (main, PoolConfig("mtp", self.resolved_profile, draft, "page-major", pages + lead_pages, lead))
        if isinstance(backend, DraftFullBackend):
            return (main, PoolConfig("draft", PROFILES["bf16"], backend.geometry, "head-major", pages, 0))
        return (main,)
