"""The model runner on the cuda device: its array functions obey CuPy's rules under capture; its words are the cpu's.

A model of two layers with random weights, with the store, the loop and the kernels; CuPy's arithmetic is NumPy's here.
"""

from __future__ import annotations

import contextlib

import numpy as np

import pagedkv as pk
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.graphs import DecodeLoop
from pagedkv.tools.llama.model import KernelLinear, LlamaModel, linear_for, numpy_linear
from tests.kernels.cpu_helpers import cpu_device
from tests.model.tiny import TINY, random_weights


def generate(device: pk.Device, prompts: list[list[int]], *, use_graphs: bool = True) -> list[list[int]]:
    """Return six new tokens of each prompt, decoded together, with the kernel's products."""
    weights = random_weights(TINY, seed=11)
    model = LlamaModel(weights, device, max_context=128, linear=KernelLinear(device))
    config = pk.StoreConfig(model.geometry, profile="bf16", max_context=128, max_concurrency=4,
                            kv_capacity=pk.ExplicitCapacity(512))
    with pk.open_store(config, device=device) as store:
        loop = DecodeLoop(store, model, prefill_chunk=32, use_graphs=use_graphs)
        sequences = [store.activate(prompt_tokens=len(ids), output_tokens=6) for ids in prompts]
        for sequence, ids in zip(sequences, prompts, strict=True):
            loop.prefill(sequence, ids)
        texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
        for step in loop.decode(sequences):
            for sequence, tokens in step.items():
                texts[sequence] += tokens
        store.check()
    return [texts[sequence] for sequence in sequences]


def test_the_runner_says_the_same_on_both_devices(fake_device: CudaDevice) -> None:
    """C14.6, C15.3: captured on cuda, captured on cpu; three rows, one across a page."""
    prompts = [np.random.default_rng(n).integers(0, TINY.vocabulary, n).tolist() for n in (5, 40, 62)]
    with contextlib.ExitStack() as stack:
        below = stack.enter_context(cpu_device())
        expected = generate(below, prompts)

    assert generate(fake_device, prompts) == expected


def test_each_device_has_its_linear_function(fake_device: CudaDevice) -> None:
    """NumPy's products where they may be captured, the kernel elsewhere."""
    with cpu_device() as below:
        assert linear_for(below) is numpy_linear
    assert isinstance(linear_for(fake_device), KernelLinear)
