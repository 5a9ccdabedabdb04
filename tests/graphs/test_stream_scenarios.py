"""Host memory that is re-used or read while the device still works: bugs of other systems.  (S19, S21, S22)

Each test runs eagerly and deferred; only the deferred device can show the failure.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from tests.toy_model import ToyModel, opened_store

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=2, head_dim=16)

pytestmark = pytest.mark.deferred


def open_small_store(*, sanitizer: bool = False) -> AbstractContextManager[pk.Store]:
    return opened_store(GEOMETRY, max_context=512, concurrency=2, sanitizer=sanitizer)


def test_the_device_of_a_deferred_test_defers(device_mode: int | None) -> None:
    """The option and the marker reach a store that opens its device by name."""
    with open_small_store() as store:
        assert ("deferred" in store.device.description) == (device_mode is not None)


@pytest.mark.parametrize("sets", [2, 3])
def test_each_step_sees_the_table_that_was_published_for_it(sets: int) -> None:
    """S19: several tables are published before anything has run; a copy queued between two sees the earlier one.

    In sanitizer mode, where each new page is published by a copy of its own.
    """
    with open_small_store(sanitizer=True) as store:
        sequence = store.activate(prompt_tokens=512, output_tokens=0)
        copies = [np.zeros(8, np.int32) for _ in range(sets)]
        for number, copy in enumerate(copies):
            store.ensure_mapped_to_tokens(sequence, 64 * (number + 1))
            store.device.copy(copy, store.block_tables["main"][sequence.row], store.stream)
        store.stream.synchronize()
        ids, guard = store.page_ids(sequence), store.memory_summary()["main"]["capacity_pages"]

        for number, copy in enumerate(copies):
            assert copy.tolist() == ids[: number + 1] + [guard] * (7 - number)


def test_host_memory_may_change_as_soon_as_a_call_returned() -> None:
    """S22: the host overwrites the mirror right after the publication; the device table has the published entries."""
    with open_small_store() as store:
        sequence = store.activate(prompt_tokens=512, output_tokens=0)
        mirror = store._ledger.active["main"].table
        store.ensure_mapped_to_tokens(sequence, 512)
        published = mirror.copy()
        mirror[:] = 0x55AA
        store.stream.synchronize()
        mirror[:] = published


def test_results_are_not_read_before_the_unit_has_run(device_mode: int | None) -> None:
    """S21: between launch and wait the host reads no old token: the device refuses the read, or the unit has run."""
    with open_small_store() as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=16, output_tokens=4)
        loop.prefill(sequence, range(16))
        (graph,) = loop.graphs._graphs.values()
        control, batch = graph.unit.control, store.batch([sequence])
        control.egress_host[:] = -7
        unit = store.begin_unit(batch, 2, name="prefill")
        control.write(batch.rows, unit.first_positions["main"], 2, np.zeros((1, graph.unit.width), np.int32))
        graph.run()
        if device_mode is not None:
            assert -7 not in control.egress_host
            with pytest.raises(pk.StreamHazard, match=r"a host read of .*'egress host"):
                control.read_next_tokens(1)
        store.wait(unit)
        assert (control.read_next_tokens(1)[0, :2] >= 0).all()
        store.commit(unit)
