"""Opening a store: choose the device, resolve automatic capacity, then build the store.  (C5.3)"""

from __future__ import annotations

import logging
from os import PathLike

from pagedkv.devices import open_device
from pagedkv.devices.protocol import Device
from pagedkv.errors import Caught, ConfigError, MisuseError, shown
from pagedkv.record.journal import Journal, TextSink
from pagedkv.store.store import Store, require_config
from pagedkv.values.config import AutoCapacity, StoreConfig
from pagedkv.values.planner import plan

_LOG = logging.getLogger("pagedkv")


def open_store(
    config: StoreConfig, device: str | Device = "auto", *, journal: str | PathLike[str] | TextSink | None = None
) -> Store:
    """Open a store on a device: "auto", "cpu", "cuda", "none" or a Device.  A device that is named closes with it.

    On "none" the store has its ledgers and host tables only: kernels are not compiled, planes take no memory, and
    copies complete at once.  So a policy runs at the speed of the ledgers.  Device tables are not checked there.

    One line of the `pagedkv` log names the device and why it was chosen.  Automatic capacity is resolved here, once,
    with the memory that is free after this process's caches were emptied (C5.3).  A second log line gives the capacity
    in pages and token-equivalents, and where it was automatic, the free and the requested bytes; it is a warning if the
    caller set no `min_tokens` and the store gets fewer tokens than all lanes can use.

    Args:
        journal: records every decision of the ledger as a JSON line, for `replay_journal`.  A path, whose file is
            overwritten and closed with the store, or an open text file.  The lines of a call are written before the
            next call returns.  If a line cannot be written, that is logged and the journal ends; operations stay valid,
            and `close` raises JournalFailed.

    Several stores of one thread may be opened on one Device.  What they share, and what is refused, is in `Store`.

    Raises:
        ConfigError: `config` is not a StoreConfig, or asks for automatic capacity, the sanitizer or codec events on a
            device that keeps no bytes.
        CapacityError: capacity is automatic and too little memory is free; the error says what would fit.
        MissingRequirement: the device needs a package or a tool that is missing; the error says how to get it.
        MisuseError: no such device, one that is closed or that stores of another thread use, or a journal that cannot
            be written.
        CaptureRefused: a stream of the device captures.
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
    """Resolve automatic capacity, open the journal, and build the store; after an error, close the journal."""
    if not all(hasattr(device, name) for name in ("description", "state", "stream", "empty", "load")):
        raise MisuseError("the device", expected="auto, cpu, cuda, none or a Device", got=shown(device),
                          remedy="pass a name, or what open_device returned", clause="C1.1")
    device.state.check_outside_capture("opening a store")
    wanted = {"AutoCapacity": isinstance(config.kv_capacity, AutoCapacity), "sanitizer": config.sanitizer,
              "codec_events": config.codec_events}
    if not device.keeps_bytes and any(wanted.values()):
        raise ConfigError("a store on no device", expected="explicit capacity, no sanitizer and no codec events",
                          got=", ".join(name for name, is_wanted in wanted.items() if is_wanted), clause="C5.3",
                          remedy="leave them out, or open it on a device with memory")
    _LOG.info("device: %s", device.description)
    if isinstance(config.kv_capacity, AutoCapacity):
        cache_bytes = device.empty_caches()
        free_bytes, total_bytes = device.memory_bytes()
        resolved = plan(config, free_bytes, total_bytes=total_bytes, cache_bytes=cache_bytes)
        is_degraded = resolved.is_clamped and config.kv_capacity.min_tokens is None
    else:
        resolved, is_degraded = plan(config, None), False
    _LOG.log(logging.WARNING if is_degraded else logging.INFO, "%s", resolved.summary())
    journal = None if target is None else Journal(target)
    try:
        return Store(resolved, device, journal=journal, owns_device=owns_device)
    except BaseException as error:
        if journal is not None:
            journal.close_after(error)
        raise
