"""What an observer believes from events alone, held against what the ledger knows."""

from __future__ import annotations

from collections import Counter

import pagedkv as pk
from pagedkv.ledger.ledger import Ledger


class Picture:
    """The membership of every row, and every leased page group, as the events of a store tell them."""

    def __init__(self, *, kinds: Counter[str] | None = None) -> None:
        self.rows: dict[tuple[str, int], dict[int, int]] = {}
        self.leased: dict[str, set[int]] = {}
        self.kinds: Counter[str] = Counter() if kinds is None else kinds
        self.events: list[pk.PageEvent] = []

    def __call__(self, event: pk.PageEvent) -> None:
        """Believe one event; one that contradicts what is believed is an error."""
        self.events.append(event)
        self.kinds[event.kind] += 1
        leased = self.leased.setdefault(event.pool, set())
        held = {} if event.row is None else self.rows.setdefault((event.pool, event.row), {})
        blocks = range(event.first_block, event.first_block + len(event.page_ids))
        told = dict(zip(blocks, event.page_ids, strict=True))
        match event.kind:
            case "materialize":
                assert not leased & set(event.page_ids), f"{event}: leased already"
                leased |= set(event.page_ids)
                if event.row is not None:
                    held |= told
            case "publish":
                assert leased >= set(event.page_ids), f"{event}: published before it was materialized"
                held |= told
            case "restore":
                assert not leased & set(event.page_ids), f"{event}: leased already"
                leased |= set(event.page_ids)
            case "demote":
                assert leased >= set(event.page_ids), f"{event}: not leased"
                assert not any(set(event.page_ids) & set(row.values()) for (pool, _), row in self.rows.items()
                               if pool == event.pool), f"{event}: a row maps it"
                leased -= set(event.page_ids)
            case "trim":
                assert {block: held.pop(block) for block in blocks} == told, f"{event}: held {held}"
                leased -= set(event.page_ids)
            case "release":
                assert leased >= set(event.page_ids), f"{event}: not leased"
                assert event.row is None or told.items() <= held.items(), f"{event}: held {held}"
                leased -= set(event.page_ids)
                held.clear()

    def row(self, row: int, pool: str = "main") -> list[int]:
        """Return the page groups of a row, in block order."""
        held = self.rows.get((pool, row), {})
        assert sorted(held) == list(range(len(held))), f"row {row} of {pool} has gaps: {held}"
        return [held[block] for block in sorted(held)]

    def compare(self, ledger: Ledger) -> None:
        """Assert that every row and every lease is as the ledger says."""
        for name, spaces in ledger.active.items():
            for row in range(ledger.sequences.serials.size):
                assert self.row(row, name) == spaces.mapped_ids(row).tolist(), f"row {row} of pool {name}"
            leased = {page_id for page_id, is_leased in enumerate(spaces.mapped_mask()) if is_leased}
            assert self.leased.get(name, set()) == leased, f"leases of pool {name}"
