"""A real card and the cpu device compute the same bits, because nothing is fused, flushed or approximated.  (C14.6)"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.graphs import DecodeLoop
from tests.kernels.cpu_helpers import cpu_device
from tests.kernels.test_linear import product
from tests.model.tiny import TINY, random_weights
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, prompt

GEOMETRY = pk.KVGeometry(layers=2, query_heads=6, kv_heads=2, head_dim=64)


def host(device: pk.Device, array: Any) -> np.ndarray:
    """Copy a device array to the host."""
    return copied(device, np.empty(array.shape, array.dtype), array)  # type: ignore[no-any-return]


def copied(device: pk.Device, destination: Any, source: Any) -> Any:
    """Copy, wait, and return the destination."""
    stream = device.stream()
    device.copy(destination, source, stream)
    stream.synchronize()
    return destination


def decoded(device: pk.Device, profile: str, *, use_graphs: bool = True) -> tuple[list[list[int]], list[np.ndarray]]:
    """Decode three prompts together; give their tokens, and every plane of the cache while they are in it."""
    with opened_store(GEOMETRY, profile=profile, max_context=1280, concurrency=4, device=device,
                      placement_seed=3) as store:
        loop = DecodeLoop(store, ToyModel(store), use_graphs=use_graphs)
        texts = decode_all(loop, [prefilled(loop, prompt(tokens, tokens), 6) for tokens in (63, 64, 700)])
        planes = [host(device, plane) for view in store.views["main"] for plane, _ in view.planes]
    return texts, planes


@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_the_loop_says_and_stores_the_same(gpu: CudaDevice, profile: str) -> None:
    """Append, both attention routes and the merge: tokens equal, every byte of every plane equal."""
    with cpu_device(threads=None) as below:
        expected, expected_planes = decoded(below, profile)
    got, got_planes = decoded(gpu, profile)

    assert got == expected
    for mine, other in zip(got_planes, expected_planes, strict=True):
        assert np.array_equal(mine, other)


def test_replay_says_what_eager_says(gpu: CudaDevice) -> None:
    """C15.3."""
    assert decoded(gpu, "bf16")[0] == decoded(gpu, "bf16", use_graphs=False)[0]


def test_products_have_the_same_bits_subnormals_too(gpu: CudaDevice) -> None:
    """`linear_rows`; CuPy's own compilation would have flushed them."""
    random = np.random.default_rng(5)
    scale = np.float32(2.0**-70)
    for rows, columns, depth in ((1, 5, 31), (17, 130, 192)):
        x, weight = (random.standard_normal((n, depth)).astype(np.float32) * scale for n in (rows, columns))
        with cpu_device() as below:
            expected = product(below, x, weight)
        assert np.any((expected != 0) & (np.abs(expected) < np.finfo(np.float32).tiny))

        assert np.array_equal(product(gpu, x, weight).view(np.uint32), expected.view(np.uint32))


def test_conversions_have_the_same_bits(gpu: CudaDevice) -> None:
    """Every exponent, NaN payloads and ties."""
    values = np.random.default_rng(6).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    results = []
    with contextlib.ExitStack() as stack:
        for device in (stack.enter_context(cpu_device()), gpu):
            ops, stream = pk.Ops(device), device.stream()
            source, back = (device.empty(values.shape, np.float32) for _ in range(2))
            bits = device.empty(values.shape, np.uint16)
            copied(device, source, values)
            ops.bf16_from_f32(bits, source, stream=stream)
            ops.f32_from_bf16(back, bits, stream=stream)
            stream.synchronize()
            results.append((host(device, bits), host(device, back).view(np.uint32)))

    assert all(np.array_equal(mine, other) for mine, other in zip(*results, strict=True))


def test_the_model_runner_gives_a_row_the_same_words_in_any_batch(gpu: CudaDevice) -> None:
    """C14.6: its array functions are CuPy's here, whose sums must not depend on the other rows."""
    from tests.cuda.test_model_on_fake import generate

    assert random_weights(TINY, seed=11).config == TINY
    prompts = [np.random.default_rng(n).integers(0, TINY.vocabulary, n).tolist() for n in (5, 40, 62)]

    assert generate(gpu, prompts) == [generate(gpu, [ids])[0] for ids in prompts]
    assert generate(gpu, prompts) == generate(gpu, prompts, use_graphs=False)
