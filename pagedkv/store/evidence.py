"""StoreEvidence: what a store tells about itself, and its journal's end.  (C3.11, C9.6, C12.4)

    memory_summary    pages and bytes of each pool now                  also when latched
    inspect           a copy of everything the ledgers show, for tests and tools
    event_counts      pages and bytes by kind of event so far           also when latched
    observe           events as they happen, at the end of the operation that caused them
"""

from __future__ import annotations

from collections.abc import Callable

from pagedkv.devices.protocol import Device
from pagedkv.ledger.events import PageObserver
from pagedkv.ledger.inspect import StoreInspection, inspect_ledgers
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.record.journal import Journal
from pagedkv.store.access import StoreLife
from pagedkv.values.config import StoreConfig


class StoreEvidence(StoreLife):
    """The part of a store that answers for itself.

    Attributes:
        config: what the store was built from; fixed.
    """

    _ledgers: StoreLedgers
    """Set by the store."""

    def __init__(self, config: StoreConfig, device: Device, journal: Journal | None) -> None:
        super().__init__(device)
        self.config = config
        self._journal = journal

    def close(self) -> None:
        """Wait for the stream, give the slabs back, and close a device opened by name and the journal, once.

        Raises:
            DeviceFault, CaptureRefused: as `StoreLife.close`.
            JournalFailed: a line of the journal could not be written; the store is closed.
        """
        try:
            super().close()
        except BaseException as error:
            if self._is_closed and self._journal is not None:
                self._journal.close_after(error)
            raise
        if self._journal is not None:
            self._journal.close()

    def memory_summary(self) -> dict[str, dict[str, int]]:
        """Return, per pool, pages (capacity, allocated, reserved, available) and bytes; works when latched."""
        summary = {}
        for pool in self.config.pools:
            counters = self._ledgers.spaces[pool.name].pool
            summary[pool.name] = {
                "capacity_pages": counters.capacity,
                "allocated_pages": counters.allocated,
                "reserved_pages": counters.reserved,
                "available_pages": counters.available,
                "page_bytes": pool.page_bytes,
                "slab_bytes": pool.page_bytes * pool.pages,
            }
        return summary

    def inspect(self) -> StoreInspection:
        """Return a copy of everything the ledgers show, for tests and tools; linear in pages.  (C16)"""
        self._enter("inspect")
        return inspect_ledgers(self._ledgers)

    def observe(self, observer: PageObserver) -> Callable[[], None]:
        """Call `observer` with every later PageEvent, at the end of the operation that caused it.  (C9.6, C13.3)

        In the order in which things happened, and never for what was refused or aborted.  An observer that raises is
        logged: the operation stands and the others are told.  See `events.py` for what each kind means.

        Returns:
            What ends it; calling that again is harmless.

        Raises:
            MisuseError: the observer cannot be called.
        """
        self._enter("observe")
        return self._ledgers.events.observe(observer)

    def event_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return, per pool and kind of event, pages and bytes so far, observed or not; works when latched.  (C3.11)

        Bytes are those of the page groups in all planes, of "publish" too, which copies table entries only.
        """
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for pool in self.config.pools:
            pages, page_bytes = self._ledgers.spaces[pool.name].events.pages, pool.page_bytes
            counts[pool.name] = {kind: {"pages": n, "bytes": n * page_bytes} for kind, n in pages.items()}
        return counts
