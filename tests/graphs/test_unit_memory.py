"""Memory of captured units: shared workspace and control words, buffers within the allowance.  (C5.4, C15.1)"""

from __future__ import annotations

import logging

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.graphs import DecodeLoop, GraphCache, Model
from pagedkv.graphs.key import key_for
from tests.toy_model import ToyModel, decode_all, prefilled

GEOMETRY = pk.KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=64)


def config_of(capacity: pk.ExplicitCapacity | pk.AutoCapacity, *, graph_allowance_bytes: int = 0) -> pk.StoreConfig:
    return pk.StoreConfig(GEOMETRY, profile="int8-g64", max_context=600, max_concurrency=3, kv_capacity=capacity,
                          prefill_columns_max=64, graph_allowance_bytes=graph_allowance_bytes)


class Nothing:
    """A model that enqueues no work."""

    def enqueue(self, unit: object) -> None:
        return


def capture_all(store: pk.Store, model: Model) -> GraphCache:
    """Capture every shape that a loop over this store can ask for."""
    cache = GraphCache(store, model)
    shapes: list[tuple[pk.Route, int, int]] = [("decode", 1, 1), ("decode", 2, 1), ("decode", 3, 1)]
    shapes += [("prefill", 1, 16), ("prefill", 1, 32), ("prefill", 1, 64)]
    for route, batch, width in shapes:
        cache.unit(key_for(store.config, unit=route, route=route, batch=batch, width=width))
    return cache


def test_units_of_every_shape_share_workspace_and_control_words() -> None:
    """One of each, the store's own, at fixed addresses.  (C5.3, C15.1)"""
    with pk.open_store(config_of(pk.ExplicitCapacity(1920)), device="cpu") as store:
        cache = capture_all(store, Nothing())
        address = store.device.address
        units = [graph.unit for graph in cache._graphs.values()]

        assert {address(unit.table_rows) for unit in units} == {address(store.control_ingress)}
        assert {address(unit.accepted) for unit in units} == {address(store.control_egress)}
        assert all(unit._workspace is store.workspace for unit in units)
        assert store.graph_bytes == 0


def test_all_captured_graphs_take_the_planned_bytes() -> None:
    """S76: plan with the measured allowance at 99 % of free memory, capture everything, run, compare."""
    device = CpuDevice()
    with pk.open_store(config_of(pk.ExplicitCapacity(1920)), device=device) as store:
        cache = capture_all(store, ToyModel(store))
        measured = store.graph_bytes
        del cache
        assert store.graph_bytes == 0
    assert device.allocated_bytes == device.pinned_bytes == 0, "a closed store holds no memory"

    before = device.allocated_bytes
    config = config_of(pk.AutoCapacity(0), graph_allowance_bytes=measured)
    plan = pk.plan(config, pk.plan(config, 1 << 40).bytes * 99 // 100)
    with pk.open_store(plan.config, device=device) as store:
        model = ToyModel(store)
        tables = device.allocated_bytes - before - store.layout.span_bytes
        cache = capture_all(store, model)
        loop = DecodeLoop(store, model, prefill_chunk=64)
        loop.graphs = cache
        sequence = prefilled(loop, list(range(100)), 4)
        assert len(decode_all(loop, [sequence])[0]) == 4
        allocated = device.allocated_bytes - before - tables

        assert plan.is_clamped
        assert plan.owners["graph allowance"] == measured == store.graph_bytes
        assert allocated == plan.bytes - plan.owners["alignment"]
        assert abs(allocated - plan.bytes) < 0.02 * plan.bytes
        store.finish(sequence)
        store.check()
    device.close()


@pytest.mark.parametrize(("route", "batch", "width", "option"), [
    ("decode", 1, 2, "decode_columns_max"), ("decode", 4, 1, "max_concurrency"),
    ("prefill", 1, 65, "prefill_columns_max")
])  # fmt: skip
def test_a_unit_wider_than_planned_is_refused(route: pk.Route, batch: int, width: int, option: str) -> None:
    """Nothing is allocated beyond the plan; the message names the option; so for a loop's chunk.  (C5.4)"""
    with pk.open_store(config_of(pk.ExplicitCapacity(1920)), device="cpu") as store:
        cache = GraphCache(store, Nothing())
        with pytest.raises(pk.ConfigError, match=option):
            cache.unit(key_for(store.config, unit=route, route=route, batch=batch, width=width))
        assert DecodeLoop(store, Nothing()).prefill_chunk == 64
        with pytest.raises(pk.ConfigError, match="16 to 64"):
            DecodeLoop(store, Nothing(), prefill_chunk=65)

        store.check()


@pytest.mark.parametrize(("capacity", "warnings"), [
    (pk.AutoCapacity(0), ["buffers of captured units take 101 bytes, 100 were planned; set graph_allowance_bytes"]),
    (pk.ExplicitCapacity(1920), []),
])
def test_buffers_beyond_the_allowance_of_a_plan_are_logged(
    caplog: pytest.LogCaptureFixture, capacity: pk.ExplicitCapacity | pk.AutoCapacity, warnings: list[str]
) -> None:
    """The excess is logged once, not refused, and again after buffers were dropped; explicit capacity has no limit.

    C5.4.
    """
    config = config_of(capacity, graph_allowance_bytes=100)
    with pk.open_store(config, device="cpu") as store, caplog.at_level(logging.WARNING, logger="pagedkv"):
        buffers = [store.graph_buffer((count,), np.uint8) for count in (60, 40, 1, 500)]
        assert store.graph_bytes == 601
        part = buffers.pop()[:100]
        assert store.graph_bytes == 601, "a part of it keeps it"
        del part
        assert store.graph_bytes == 101
        buffers.clear()
        assert store.graph_bytes == 0
        buffers.append(store.graph_buffer((101,), np.uint8))
    assert [record.getMessage() for record in caplog.records] == warnings * 2
