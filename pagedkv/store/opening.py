"""Opening a store: the device is chosen, automatic capacity is resolved, then the store is built.  (C5.3)"""

from __future__ import annotations

import logging
from os import PathLike

from pagedkv.devices import open_device
from pagedkv.devices.protocol import Device
from pagedkv.errors import Caught, MisuseError
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
            journal; operations stay valid, and `close` raises JournalFailed.

    Raises:
        ConfigError: `config` is not a StoreConfig, or asks for what this version lacks.
        CapacityError: automatic capacity, and too little memory is free; says what would fit.
        MissingRequirement: the device needs something that is not there; says how to get it.
        MisuseError: no such device, or a journal that cannot be written.
    """
    require_config(config)
    if not isinstance(device, str):
        return _open(config, device, journal, owns_device=False)
    chosen = open_device(device)
    try:
        return _open(config, chosen, journal, owns_device=True)
    except BaseException as error:
        with Caught(error):
            chosen.close()
        raise


def _open(
    config: StoreConfig, device: Device, target: str | PathLike[str] | TextSink | None, *, owns_device: bool
) -> Store:
    """Resolve automatic capacity, open the journal, and build the store; a failure closes the journal again."""
    if not all(hasattr(device, name) for name in ("description", "stream", "empty", "load")):
        raise MisuseError("the device", expected="auto, cpu, cuda or a Device", got=repr(device),
                          remedy="pass a name, or what open_device returned", clause="C1.1")
    _LOG.info("device: %s", device.description)
    resolved: CapacityPlan | None = None
    if isinstance(config.kv_capacity, AutoCapacity):
        cache_bytes = device.empty_caches()
        free_bytes, total_bytes = device.memory_bytes()
        resolved = plan(config, free_bytes, total_bytes=total_bytes, cache_bytes=cache_bytes)
        is_degraded = resolved.is_clamped and config.kv_capacity.min_tokens is None
        _LOG.log(logging.WARNING if is_degraded else logging.INFO, "%s", resolved.summary())
        config = resolved.config
    journal = None if target is None else Journal(target)
    try:
        return Store(config, device, plan=resolved, journal=journal, owns_device=owns_device)
    except BaseException as error:
        if journal is not None:
            journal.close_after(error)
        raise
