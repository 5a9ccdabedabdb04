"""LeaseGrowth: entitlements that begin with a bounded window and grow between units.  (C9.2, C16.10, C16.17)

Why: if an activation reserves its whole budget of 20,000 output tokens, nobody else can use those pages, and most may
never be written.  With `kv_lease_growth` an activation reserves the pages that it needs soon, and a cushion:

    tokens   0 ---- source + prompt ---- window ---------- entitled_end ----------------- full
             [ comes from admission     )[ min(output, window)  )[ cushion              )[ not reserved )
                                                        grow_at ^
    full     prompt, whole output and the backend's lead, at most L: entitled_end never grows beyond it
    cushion  pages(W_max + forced_span_tokens) + 1, part of the reservation: the next launch and one forced span fit
             behind `grow_at`, so a row that was not extended needs no page before the next round
    forced   the last `forced_span_tokens` below entitled_end are for one forced span; decoding never uses them
    grow_at  entitled_end - cushion, or NO_GROWTH if the entitlement is full: a frontier beyond it makes the row *thin*

When a round begins, every thin row tries the rungs of the ladder (window, 128, 64 tokens) and takes the first that fits
in every pool, again and again until it is no longer thin.  If none fits, the row is *short*: it runs on while its next
launch and one forced span are both covered, and then the caller ends it with reason "length" (bounded completion).  So
the forced span can still be written.  Nothing shrinks before the sequence ends.

The pools of one row grow together or not at all, each from its own capacity; a full pool needs nothing.  This module
evicts nothing: to get pages for a short row, the caller releases continuations and begins the round again (C1.2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pagedkv.ledger.active_spaces import ActiveSpaces
from pagedkv.ledger.pool import try_reserve_bundle
from pagedkv.values.config import StoreConfig
from pagedkv.values.quantities import PAGE_TOKENS, pages_for_tokens

NO_GROWTH = np.int32(1 << 30)
"""`grow_at` of a row that is idle or has its full entitlement: beyond every frontier."""

LADDER_TOKENS = (128, 64)
"""Extensions to try after the whole window, in this order (C9.2)."""


class LeaseGrowth:
    """How far each row of a store may grow, and when; the methods below alone write it.

    Attributes:
        is_on: `kv_lease_growth`; if it is False, the columns below never change.
        widest_tokens: W_max + forced_span_tokens, the widest launch and one forced span.
        cushion_pages: pages(widest_tokens) + 1, of every row in every pool.
        full_pages: per pool (C,) int32, what the entitlement of a row may reach; 0 in idle rows.
        grow_at: per pool (C,) int32 tokens; a row whose frontier is beyond it is thin.
        round_frontier: per pool (C,) int32, the frontier of a row at its activation, or when the last round began that
            covered the widest launch and one forced span.
        short: (C,) bool, rows that were still thin after their last round began.
    """

    def __init__(self, config: StoreConfig, active: Mapping[str, ActiveSpaces]) -> None:
        rows = config.max_concurrency
        self.is_on = config.kv_lease_growth
        self.active = dict(active)
        self.window_tokens = config.lease_window_tokens
        self.widest_tokens = config.decode_columns + config.forced_span_tokens
        self.cushion_pages = pages_for_tokens(self.widest_tokens) + 1
        rungs = {pages_for_tokens(min(tokens, self.window_tokens)) for tokens in (self.window_tokens, *LADDER_TOKENS)}
        self.ladder_pages = tuple(sorted(rungs, reverse=True))
        self.full_pages = {name: np.zeros(rows, np.int32) for name in active}
        self.grow_at = {name: np.full(rows, NO_GROWTH, np.int32) for name in active}
        self.round_frontier = {name: np.zeros(rows, np.int32) for name in active}
        self.short = np.zeros(rows, np.bool_)
        self._has_short = False
        self._crossing = np.zeros(rows, np.bool_)
        self._none_crossing = self._crossing.tobytes()

    def first_pages(self, full_pages: int, *, filled_tokens: int) -> int:
        """Return the first entitlement, in pages: source and prompt (`filled_tokens`), window and cushion.  (C9.2)"""
        # Output below the window needs no case of its own: `full_pages`, with the lead, is the smaller number then.
        return min(full_pages, pages_for_tokens(filled_tokens + self.window_tokens) + self.cushion_pages)

    def open(self, row: int, full_pages: Mapping[str, int]) -> None:
        """Note how far an activated row, whose entitlement is set, may grow in each pool.  (C9.2)"""
        for name, pages in full_pages.items():
            self.full_pages[name][row] = pages
            self.round_frontier[name][row] = self.active[name].committed_end[row]
            self._set_grow_at(name, row)

    def close(self, row: int) -> None:
        """Forget a row whose sequence ends.  (C9.8)"""
        if not self.is_on:
            return
        for name in self.active:
            self.full_pages[name][row] = self.round_frontier[name][row] = 0
            self.grow_at[name][row] = NO_GROWTH
        self.short[row] = False

    def begin_round(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Extend the thin rows among `rows`, and return the indices of those that stay thin.  (C9.2)

        If no row is thin, this costs one comparison per pool.  The caller calls it only if growth is on.
        """
        thin = self._thin()
        unextended: list[int] = []
        if thin is not None:
            indices: list[int] = np.flatnonzero(thin[rows]).tolist()
            unextended = [index for index in indices if not self._extend(int(rows[index]))]
        if unextended or self._has_short:
            self.short[rows] = False
            self.short[rows[unextended]] = True
            self._has_short = bool(self.short.any())
        for name, spaces in self.active.items():
            frontiers = spaces.committed_end[rows]
            for index in unextended:
                row = int(rows[index])
                end, held = int(frontiers[index]) + self.widest_tokens, spaces.entitled_end.item(row)
                if held < min(end, int(self.full_pages[name][row]) * PAGE_TOKENS):  # not covered: the old one stays
                    frontiers[index] = self.round_frontier[name][row]
            self.round_frontier[name][rows] = frontiers
        return unextended

    # ---- helpers ----------------------------------------------------------------------------------

    def _thin(self) -> npt.NDArray[np.bool_] | None:
        """Return (C,) bool, rows that are thin in some pool, or None if there is none."""
        thin: npt.NDArray[np.bool_] | None = None
        for name, spaces in self.active.items():
            np.less(self.grow_at[name], spaces.committed_end, out=self._crossing)
            if self._crossing.tobytes() != self._none_crossing:
                thin = self._crossing.copy() if thin is None else thin | self._crossing
        return thin

    def _extend(self, row: int) -> bool:
        """Extend a row until it is no longer thin; return False if no rung fits before that."""
        while any(spaces.committed_end[row] > self.grow_at[name][row] for name, spaces in self.active.items()):
            if not self._extend_once(row):
                return False
        return True

    def _extend_once(self, row: int) -> bool:
        """Extend a row by the first rung that fits in every pool, at most to its full entitlement.  (C6.3)"""
        for rung in self.ladder_pages:
            missing = {
                name: min(rung, int(self.full_pages[name][row]) - spaces.entitlement_pages(row))
                for name, spaces in self.active.items()
            }
            requests = {name: pages for name, pages in missing.items() if pages}
            if try_reserve_bundle([(self.active[name].pool, pages) for name, pages in requests.items()]) is None:
                for name, pages in requests.items():
                    self.active[name].extend(row, pages=pages)
                    self._set_grow_at(name, row)
                return True
        return False

    def _set_grow_at(self, name: str, row: int) -> None:
        held = self.active[name].entitlement_pages(row)
        is_full = held >= self.full_pages[name][row]
        self.grow_at[name][row] = NO_GROWTH if is_full else (held - self.cushion_pages) * PAGE_TOKENS
