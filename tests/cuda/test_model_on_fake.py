"""The model runner on the cuda device: its array functions obey CuPy's rules under capture; its words are the cpu's.

A model of two layers with random weights, with the store, the loop and the kernels; CuPy's arithmetic is NumPy's here.
"""

from __future__ import annotations

import numpy as np

import pagedkv as pk
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.graphs import DecodeLoop
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


def test_each_device_has_its_linear_function(fake_device: CudaDevice) -> None:
    """NumPy's products where they may be captured, the kernel elsewhere."""
    with cpu_device() as below:
        assert linear_for(below) is numpy_linear
    assert isinstance(linear_for(fake_device), KernelLinear)
