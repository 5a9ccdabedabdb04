"""The capacity plan: how many page groups Main gets, and the owner of every device byte.  (C5)

    B(M) = B_min + (M - M_min) * B_step           complete device reservation at M page groups of Main

    |<----------------------------- F, free memory ------------------------------>|
    |<------------- B(M) ------------->|<------------------ slack --------------->|
    | B_min        | step | step | ... |  the rest of a step      |  R, headroom   |

    automatic    M = min(M_max, M_min + floor((F - R - B_min) / B_step)), refused unless F >= R + B_min
    explicit     M = ceil(K_main / P), refused unless F >= B(M) where F is known

Example: M_min 2, M_max 6, B_min 1000, B_step 128.  F 1360 and R 50 leave 310 bytes above B_min, which are 2 steps:
M = 4, B = 1256, slack = 104, and R <= slack < R + B_step.

B has no formula of its own: `layout.py` is evaluated at several M, and again at the chosen M, and the results must be
on one line.  The planner measures nothing and allocates nothing: the caller passes the free memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagedkv.errors import CapacityError, ConfigError, shown
from pagedkv.values.checks import INT64_MAX, checked_integer
from pagedkv.values.config import CAPACITY_TOKENS_MAX, AutoCapacity, StoreConfig
from pagedkv.values.layout import StoreLayout, build_layout
from pagedkv.values.quantities import PAGE_TOKENS, pages_for_tokens


@dataclass(frozen=True)
class CapacityCurve:
    """B(M) from M_min to M_max: a line.  (C5.3)"""

    pages_min: int
    pages_max: int
    b_min: int
    b_step: int

    def __post_init__(self) -> None:
        assert 1 <= self.pages_min <= self.pages_max, self
        assert self.b_min > 0, self
        assert self.b_step > 0, f"a page group takes no bytes: {self}"

    def bytes_at(self, pages: int) -> int:
        """Return B(M), in bytes."""
        return self.b_min + (pages - self.pages_min) * self.b_step

    def pages_within(self, budget_bytes: int) -> int | None:
        """Return the most pages whose reservation fits a budget; None when not even M_min does.  (C5.3)"""
        if budget_bytes < self.b_min:
            return None
        return min(self.pages_max, self.pages_min + (budget_bytes - self.b_min) // self.b_step)

    def choose(self, *, budget_bytes: int, least: int, most: int) -> int | None:
        """Return M: the pages that a budget F - R holds, at most `most`; None when it holds fewer than `least`."""
        within = self.pages_within(budget_bytes)
        return None if within is None or within < least else min(within, most)


@dataclass(frozen=True)
class CapacityPlan:
    """A capacity that fits, with every byte by owner; `plan` returns it.

    Attributes:
        config: the configuration with M as its explicit capacity.
        pages: M, page groups of Main.
        pages_min, pages_max: M_min and M_max (C5.1).
        bytes: B(M), the complete device reservation.
        b_min, b_step: B at M_min, and the bytes of each further page group.
        bytes_max: B(M_max), the reservation for every lane at its ceiling.
        free_bytes: F; None for an explicit capacity that nobody compared with free memory.
        headroom_bytes: R; 0 for an explicit capacity.
        slack: F - B(M), bytes; None without F.
        owners: owner -> bytes, alignment last; their sum is `bytes`.
        total_bytes: memory of the device, if known.
        cache_bytes: bytes in the runtime's caches of this process before they were emptied (C5.3).
        host_arena_bytes: pinned host memory for replicas.
        host_pages: pool -> most page groups that one extent of the whole arena could hold (C5.7).
    """

    config: StoreConfig
    pages: int
    pages_min: int
    pages_max: int
    bytes: int
    b_min: int
    b_step: int
    bytes_max: int
    free_bytes: int | None
    headroom_bytes: int
    owners: dict[str, int]
    total_bytes: int | None = None
    cache_bytes: int = 0
    host_arena_bytes: int = 0
    host_pages: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Public Main capacity, M * P token-equivalents; S is not raised by it.  (C5.5)"""
        return self.pages * PAGE_TOKENS

    @property
    def slack(self) -> int | None:
        """Free bytes that the plan leaves; with automatic capacity below M_max, R <= slack < R + B_step."""
        return None if self.free_bytes is None else self.free_bytes - self.bytes

    @property
    def whole_sequences(self) -> int:
        """How many sequences can reach max_context together; at least 1, at most C.  (C5.1)"""
        return min(self.pages // self.config.blocks, self.config.max_concurrency)

    @property
    def is_clamped(self) -> bool:
        """Whether memory, and not the ceiling of the lanes, decided: M < M_max."""
        return self.pages < self.pages_max

    def summary(self) -> str:
        """Return one line: free, wanted and got; without F, what was asked for.  (C5.3, C5.5)"""
        room = (f"({self.tokens} tokens, {self.whole_sequences} of {self.config.max_concurrency} sequences at "
                "max_context)")
        if self.free_bytes is None:
            return f"capacity: {self.pages} pages as configured {room}; {self.bytes} bytes"
        return (
            f"capacity: got {self.pages} of {self.pages_max} wanted pages {room}; {self.bytes} of "
            f"{self.free_bytes} free bytes, headroom {self.headroom_bytes}, wanted {self.bytes_max}"
        )


def capacity_curve(config: StoreConfig) -> CapacityCurve:
    """Return the line that the layout builder draws between M_min and M_max, checked at five M.  (C5.3, C5.4)"""
    low, high = config.pages_min, config.pages_max
    b_min = build_layout(config, pages=low).charged_bytes
    b_step = build_layout(config, pages=low + 1).charged_bytes - b_min
    curve = CapacityCurve(low, high, b_min, b_step)
    for pages in (low + 2, (low + high) // 2, high):
        _layout_on(curve, config, pages)
    return curve


def _layout_on(curve: CapacityCurve, config: StoreConfig, pages: int) -> StoreLayout:
    """Build the layout at M; also under `python -O`, raise AssertionError if its bytes are not on the line.  (C5.4)"""
    layout = build_layout(config, pages=pages)
    if layout.charged_bytes != curve.bytes_at(pages):
        raise AssertionError(f"B is not affine: {layout.charged_bytes} bytes at {pages} pages, {curve}")
    return layout


def plan(
    config: StoreConfig, free_bytes: int | None, *, total_bytes: int | None = None, cache_bytes: int = 0
) -> CapacityPlan:
    """Choose M for a configuration and a count of free bytes, and account for every byte.  (C5.3)

    Args:
        config: automatic or explicit capacity.
        free_bytes: F: free device memory after this process's caches were emptied.  None, for an explicit capacity
            alone, compares the plan with no memory.
        total_bytes, cache_bytes: reported beside the plan.

    Raises:
        CapacityError: too little memory; `free_bytes`, `needed_bytes`, `pages` and `curve` are fields, and the
            remedy names changes that fit.
        ConfigError: a negative count, or automatic capacity without F.
    """
    if not isinstance(config, StoreConfig):
        raise ConfigError("the configuration", expected="a StoreConfig", got=shown(config),
                          remedy="build a StoreConfig first", clause="C5.2")
    is_free_known = free_bytes is not None or not config.is_resolved
    counts = {"free_bytes": free_bytes if is_free_known else 0,
              "total_bytes": 0 if total_bytes is None else total_bytes, "cache_bytes": cache_bytes}
    for name, count in counts.items():
        checked_integer(name, count, 0, INT64_MAX, remedy="pass what the device reports", clause="C5.3",
                        kind=ConfigError)
    curve = capacity_curve(config)
    least, most = acceptable_pages(config)
    pages = most
    if free_bytes is not None:
        chosen = curve.choose(budget_bytes=free_bytes - headroom_bytes(config), least=least, most=most)
        if chosen is None:
            raise _too_little(config, curve, free_bytes)
        pages = chosen
    resolved = config.with_pages(pages)
    layout = _layout_on(curve, resolved, pages)
    return CapacityPlan(
        config=resolved, pages=pages, pages_min=curve.pages_min, pages_max=curve.pages_max,
        bytes=layout.charged_bytes, b_min=curve.b_min, b_step=curve.b_step,
        bytes_max=curve.bytes_at(curve.pages_max), free_bytes=free_bytes, headroom_bytes=headroom_bytes(config),
        owners=layout.bytes_by_owner(), total_bytes=total_bytes, cache_bytes=cache_bytes,
        host_arena_bytes=config.host_arena_bytes,
        host_pages={pool.name: host_pages(resolved, pool.name) for pool in resolved.pools}
        if config.host_arena_bytes else {},
    )


def acceptable_pages(config: StoreConfig) -> tuple[int, int]:
    """Return the least and the most acceptable pages of Main; equal when capacity is explicit.  (C5.2, C5.3)"""
    if config.is_resolved:
        return config.main_pages, config.main_pages
    return config.pages_least, min(config.pages_max, pages_for_tokens(CAPACITY_TOKENS_MAX))


def headroom_bytes(config: StoreConfig) -> int:
    """Return R: automatic capacity leaves it free, explicit capacity leaves nothing."""
    return config.kv_capacity.headroom_bytes if isinstance(config.kv_capacity, AutoCapacity) else 0


def advice(config: StoreConfig, free_bytes: int) -> list[str]:
    """Return changes that make a refused plan fit, each enough by itself and each the smallest of its kind.  (C5.3)

    Lowered contexts are whole pages.  The first entry is always to free memory.
    """
    curve = capacity_curve(config)
    least, _ = acceptable_pages(config)
    headroom = headroom_bytes(config)
    budget = free_bytes - headroom
    hints = [f"free {headroom + curve.bytes_at(least) - free_bytes} bytes"]
    if headroom and free_bytes >= curve.bytes_at(least):
        hints.append(f"lower the headroom to {free_bytes - curve.bytes_at(least)} bytes")
    within = curve.pages_within(budget)
    if within is not None:  # M_min fits, and only a larger minimum does not
        hints.append(f"lower the {'capacity' if config.is_resolved else 'min_tokens'} to {within * PAGE_TOKENS} tokens")
        return hints

    shorter = _largest_fitting(
        config, config.blocks, budget, lambda base, blocks: replace(base, max_context=blocks * PAGE_TOKENS)
    )
    fewer = _largest_fitting(
        config, config.max_concurrency, budget, lambda base, lanes: replace(base, max_concurrency=lanes)
    )
    for name, smaller in (("max_context", shorter), ("max_concurrency", fewer)):
        if smaller is not None:
            also = f" and the capacity to {smaller.pages_min * PAGE_TOKENS} tokens" if config.is_resolved else ""
            hints.append(f"lower {name} to {getattr(smaller, name)}{also}")
    return hints


def _largest_fitting(
    config: StoreConfig, limit: int, budget_bytes: int, build: Callable[[StoreConfig, int], StoreConfig]
) -> StoreConfig | None:
    """Return `build` of the largest value below `limit` whose least reservation fits a budget; None if none fits.

    More context or more lanes only add bytes, so bisection finds the value.  It must also allow `min_tokens`.
    """
    capacity = config.kv_capacity
    least_pages = pages_for_tokens(capacity.min_tokens or 0) if isinstance(capacity, AutoCapacity) else 0
    base = replace(config, kv_capacity=AutoCapacity())
    largest = None
    low, high = 1, limit - 1
    while low <= high:
        middle = (low + high) // 2
        smaller = build(base, middle)
        pages = max(smaller.pages_min, least_pages)
        if build_layout(smaller, pages=pages).charged_bytes <= budget_bytes:
            largest, low = smaller, middle + 1
        else:
            high = middle - 1
    return largest if largest is not None and least_pages <= largest.pages_max else None


def host_pages(config: StoreConfig, pool_name: str) -> int:
    """Return the most page groups of a pool that the whole host arena could hold.  (C5.7)"""
    pool = next(pool for pool in config.pools if pool.name == pool_name)
    return config.host_arena_bytes // pool.record_bytes


def _too_little(config: StoreConfig, curve: CapacityCurve, free_bytes: int) -> CapacityError:
    """Return the refusal of a plan that does not fit: free, wanted, least and got."""
    least, most = acceptable_pages(config)
    headroom = headroom_bytes(config)
    needed = headroom + curve.bytes_at(least)
    got = curve.pages_within(free_bytes - headroom) or 0
    at_least = f", at least {least}," if least < most else ""
    beside = f" and {headroom} bytes of headroom" if headroom else ""
    return CapacityError(
        f"a plan of {most} Main pages{at_least}",
        expected=f"{needed} free bytes ({curve.bytes_at(least)} bytes for {least} pages{beside})",
        got=f"{free_bytes} free bytes, which hold {got} pages",
        remedy=", or ".join(advice(config, free_bytes)), clause="C5.3",
        free_bytes=free_bytes, needed_bytes=needed, pages=got, least_pages=least, wanted_pages=most, curve=curve,
    )
