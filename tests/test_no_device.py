"""A store on no device: ledgers and host tables at full speed, no planes, no kernels.  (C5.3, C11.1)"""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, PromptLookup, Scheduler, Unit

CONFIG = pk.StoreConfig(
    pk.KVGeometry(layers=32, query_heads=32, kv_heads=8, head_dim=128), profile="bf16", max_context=131_072,
    max_concurrency=8, kv_capacity=pk.ExplicitCapacity(8 * 131_072), host_arena_bytes=64 << 30,
)


class NoModel:
    """A model that enqueues nothing: every token is 0."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue nothing."""


def test_a_large_store_takes_no_memory_and_keeps_its_ledgers() -> None:
    """128 GiB of planes and a Host arena of 64: everything of a store works but bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pk.open_store(CONFIG, device="none") as store:
        assert "no device" in store.device.description
        sequence = store.activate(prompt_tokens=1000, output_tokens=0)
        unit = store.begin_unit(store.batch([sequence]), 1000)
        store.wait(unit)
        store.commit(unit)
        assert len(store.page_ids(sequence)) == 16
        kept = store.finish(sequence, retain=True, state="state")
        assert kept is not None
        assert store.demote(kept, wait=False) == 16
        assert not store.poll_copies()
        again = store.activate(source=kept, prompt_tokens=1, output_tokens=1)
        assert store.committed_tokens(again) == 1000
        store.check()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 300 << 10, "KiB"


def test_a_scheduler_runs_without_a_device() -> None:
    """Requests come and go, and each output is all zeros."""
    with pk.open_store(CONFIG, device="none") as store:
        scheduler = Scheduler(store, NoModel())
        requests = [scheduler.submit(range(tokens), 20, n=2) for tokens in (1, 100, 900)]
        while not scheduler.is_idle:
            scheduler.step()
        assert [output.tokens for request in requests for output in request.outputs] == [[0] * 20] * 6
        assert store.memory_summary()["main"]["allocated_pages"] == 0


@pytest.mark.parametrize(("changed", "named"), [
    ({"sanitizer": True}, "sanitizer"), ({"codec_events": True}, "codec_events"),
    ({"kv_capacity": pk.AutoCapacity(headroom_bytes=0)}, "AutoCapacity"),
])
def test_what_needs_bytes_is_refused(changed: dict[str, Any], named: str) -> None:
    """C5.3, C12.4: nothing there measures memory, poisons pages or counts groups."""
    values: dict[str, Any] = {"profile": "int8-g64", "max_context": 256, "max_concurrency": 2,
                              "kv_capacity": pk.ExplicitCapacity(512), **changed}
    config = pk.StoreConfig(pk.KVGeometry(1, 1, 1, 64), **values)
    with pytest.raises(pk.ConfigError, match=named):
        pk.open_store(config, device="none")


def test_more_bytes_than_addresses_are_too_much_capacity() -> None:
    """C5.4: the system's error becomes the one of the other devices, with the bytes and the name of the array."""
    with pytest.raises(pk.CapacityError, match="for the arena") as caught:
        pk.open_device("none").pinned(1 << 50, np.uint8, name="the arena")
    assert caught.value.bytes == (1 << 50) + 256, "with the room to align it"


def test_a_draft_on_no_device_is_refused() -> None:
    """C13.1: nobody computes what is accepted, so a loop says so before the first unit."""
    with pk.open_store(replace(CONFIG, decode_columns_max=8), device="none") as store:
        for kind in (DecodeLoop, Scheduler):
            with pytest.raises(pk.ConfigError, match="a draft of a loop on no device"):
                kind(store, NoModel(), draft=PromptLookup())
        Scheduler(store, NoModel())


def test_auto_is_a_device_that_computes() -> None:
    """C12.4: without a GPU it is the cpu device."""
    device = pk.open_device("auto")
    assert device.keeps_bytes
    device.close()
