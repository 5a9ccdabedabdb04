"""The model runner on the cuda device: its array functions obey CuPy's rules under capture; its words are the cpu's.

A model of two layers with random weights, with the store, the loop and the kernels; CuPy's arithmetic is NumPy's here.
"""

from __future__ import annotations

import numpy as np

import pagedkv as pk
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.graphs import DecodeLoop, GraphCache, Sampling
from pagedkv.graphs.key import key_for
from pagedkv.tools.llama.model import KernelLinear, LlamaModel, linear_for, numpy_linear
from tests.kernels.cpu_helpers import cpu_device
from tests.model.tiny import TINY, random_weights
from tests.toy_model import decode_all, opened_store, prefilled


def generate(device: pk.Device, prompts: list[list[int]], *, use_graphs: bool = True) -> list[list[int]]:
    """Return six new tokens of each prompt, decoded together, with the kernel's products."""
    weights = random_weights(TINY, seed=11)
    model = LlamaModel(weights, device, max_context=128, linear=KernelLinear(device))
    with opened_store(model.geometry, max_context=128, concurrency=4, device=device) as store:
        loop = DecodeLoop(store, model, prefill_chunk=32, use_graphs=use_graphs)
        return decode_all(loop, [prefilled(loop, ids, 6) for ids in prompts])


def test_the_runner_says_the_same_on_both_devices(fake_device: CudaDevice) -> None:
    """C14.6, C15.3: captured on cuda, captured on cpu; three rows, one across a page."""
    prompts = [np.random.default_rng(n).integers(0, TINY.vocabulary, n).tolist() for n in (5, 40, 62)]
    with cpu_device() as below:
        expected = generate(below, prompts)

    assert generate(fake_device, prompts) == expected


def sampled(device: pk.Device) -> list[list[int]]:
    """Return the tokens of one captured verify unit, run with two choices of words: of two rows, one of them greedy."""
    model = LlamaModel(random_weights(TINY, seed=11), device, max_context=128, linear=KernelLinear(device))
    with opened_store(model.geometry, max_context=128, concurrency=4, device=device, caller_words=4,
                      decode_columns_max=4) as store:
        graph = GraphCache(store, model).unit(key_for(store.config, unit="verify", route="decode", batch=4, width=4))
        rows = [store.activate(prompt_tokens=4, output_tokens=8) for _ in range(2)]
        batch, results = store.batch(rows), []
        for seed in (1, 2):
            unit = store.begin_unit(batch, 4)
            words = np.array([(*Sampling(2.0, 0.9, seed=seed).words, 9), (0, 0, 0, 9)], np.int32)
            tokens = np.array([[5, 6, 7, 8]] * 2, np.int32)
            graph.unit.control.write(batch.rows, unit.first_positions["main"], 4, tokens, words)
            graph.run()
            store.wait(unit)
            results += graph.unit.control.read_next_tokens(2).tolist()
            store.commit(unit, 0)
            store.trim(batch)
        for row in rows:
            store.finish(row)
    return results


def test_sampled_tokens_are_the_same_on_both_devices(fake_device: CudaDevice) -> None:
    """C14.6, C15.3: one graph for both seeds; the greedy row says the same twice, the other one does not."""
    with cpu_device() as below:
        expected = sampled(below)

    assert sampled(fake_device) == expected
    assert expected[1] == expected[3]
    assert len({tuple(text) for text in expected}) == 3


def test_each_device_has_its_linear_function(fake_device: CudaDevice) -> None:
    """NumPy's products where they may be captured, the kernel elsewhere."""
    with cpu_device() as below:
        assert linear_for(below) is numpy_linear
    assert isinstance(linear_for(fake_device), KernelLinear)
