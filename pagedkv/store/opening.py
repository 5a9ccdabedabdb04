"""Opening a store: the device is chosen, automatic capacity is resolved, then the store is built.  (C5.3)"""

from __future__ import annotations

import logging
from os import PathLike

from pagedkv.devices import open_device
from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError
from pagedkv.ledger.undo import undo_all
from pagedkv.record.journal import Journal, TextSink
from pagedkv.store.store import Store, require_config
from pagedkv.values.config import AutoCapacity, StoreConfig
from pagedkv.values.planner import CapacityPlan, plan

_LOG = logging.getLogger("pagedkv")


def open_store(
    config: StoreConfig, device: str | Device = "auto", *, journal: str | PathLike[str] | TextSink | None = None
) -> Store:
    """Open a store on a device: "auto", "cpu", "cuda" or a Device.  A device that is named closes with the store.

    Says in one line of the `pagedkv` log which device it is and why.  Automatic capacity is resolved here, once, with
    the memory that is free after this process's caches were emptied (C5.3): a second line says what was free, wanted
    and got, as a warning when the caller named no `min_tokens` and got less than every lane can use.

    Args:
        journal: where to write every ledger decision as a JSON line, for `replay_journal`: a path, whose file is made
            anew and closed with the store, or an open text file.  A line that cannot be written is logged and ends the
            journal; every operation stands, and `close` raises JournalFailed.

    Raises:
        ConfigError: `config` is not a StoreConfig, or asks for what this version lacks.
        CapacityError: automatic capacity, and too little memory is free; says what would fit.
        MissingRequirement: the device needs something that is not there; says how to get it.
        MisuseError: no such device, or a journal that cannot be written.
    """
    require_config(config)
    if isinstance(device, str):
        return _open_owning(config, open_device(device), journal)
    return _open(config, device, journal)


def _open_owning(config: StoreConfig, device: Device, journal: str | PathLike[str] | TextSink | None) -> Store:
    """Open a store that closes its device, which is closed too when there will be no store."""
    try:
        store = _open(config, device, journal)
    except BaseException as error:
        undo_all([(type(device).close, device)], error)
        raise
    store.owns_device = True
    return store


def _open(config: StoreConfig, chosen: Device, journal: str | PathLike[str] | TextSink | None) -> Store:
    """Resolve automatic capacity and build the store."""
    if not all(hasattr(chosen, name) for name in ("description", "stream", "empty", "load")):
        raise MisuseError("the device", expected="auto, cpu, cuda or a Device", got=repr(chosen),
                          remedy="pass a name, or what open_device returned", clause="C1.1")
    _LOG.info("device: %s", chosen.description)
    if not isinstance(config.kv_capacity, AutoCapacity):
        return _build(config, chosen, None, journal)
    cache_bytes = chosen.empty_caches()
    free_bytes, total_bytes = chosen.memory_bytes()
    made = plan(config, free_bytes, total_bytes=total_bytes, cache_bytes=cache_bytes)
    is_degraded = made.is_clamped and config.kv_capacity.min_tokens is None
    _LOG.log(logging.WARNING if is_degraded else logging.INFO, "%s", made.summary())
    return _build(made.config, chosen, made, journal)


def _build(
    config: StoreConfig, device: Device, made: CapacityPlan | None, target: str | PathLike[str] | TextSink | None
) -> Store:
    """Build the store with its journal, whose file is closed again when the store cannot be built."""
    journal = None if target is None else Journal(target)
    try:
        return Store(config, device, plan=made, journal=journal)
    except BaseException as error:
        if journal is not None:
            journal.close_after(error)
        raise
