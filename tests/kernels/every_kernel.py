"""One run of every kernel of a (profile, head_dim), for comparing executions: results, and every byte of planes.

Planes start as the device allocates them, unwritten, which is 0xFF in all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.ops.ops import Ops
from pagedkv.values.profiles import CODEC_EVENTS, HEAD_DIMS_CONTEXT, PROFILES, plane_schema
from tests.kernels.arrays import BF16_NAN, bf16_noise, scattered_table, to_device, to_host
from tests.kernels.paged_cache import PagedCache

Results = dict[str, npt.NDArray[Any]]



def run_every_kernel(device: Any, profile: str, head_dim: int) -> Results:
    """Run every kernel of one (profile, head_dim), context attention's too, and return what they wrote."""
    results = append_and_attend(device, profile, head_dim)
    if profile == "bf16" and head_dim in HEAD_DIMS_CONTEXT:
        results |= attend_contexts(device, head_dim)
    if PROFILES[profile].is_quantized:
        results |= encode_rows(device, profile, head_dim) | count_events(device, profile, head_dim)
    return results


def append_and_attend(device: Any, profile: str, head_dim: int) -> Results:
    """Run every kernel of one module: ragged appends, both routes, several key groups, dead columns, a NaN key."""
    rng = np.random.default_rng(17)
    results: Results = {}
    cache = PagedCache.build(device, profile, head_dim=head_dim, table=scattered_table(3, 9, permutation=rng), rng=None)
    for row, tokens in ((0, 515), (1, 70)):
        cache.fill(rng, row, tokens)
    q, k, v = (bf16_noise(rng, (3, 4, heads, head_dim)) for heads in (6, 2, 2))
    results["out"], results["lse"] = cache.attend(q, [515, 62, 0], [0, 1, 2], route="decode", new_rows=(k, v),
                                                  valid_columns=[4, 2, 1])
    k[0, 1], v[2, 0] = BF16_NAN, BF16_NAN
    cache.ops.append_prefix(cache.view, cache.put(k), cache.put(v), cache.ints([513, 60, 1]), cache.ints([3, 0, 4]),
                            cache.ints([0, -1, 2]), stream=cache.stream)  # fmt: skip
    q = bf16_noise(rng, (1, 9, 6, head_dim))
    results["prefill"], results["prefill lse"] = cache.attend(q, [507], [0], route="prefill")
    return {**results, **cache.host_planes()}


def attend_contexts(device: Any, head_dim: int) -> Results:
    """Draft blocks over an empty context, one key group and two; dead columns, NaN in a dead and in a live row."""
    rng = np.random.default_rng(23)
    cache = PagedCache.build(device, "bf16", head_dim=head_dim, order="head-major", rng=None,
                             table=scattered_table(4, 9, permutation=rng))  # fmt: skip
    for row, tokens in ((0, 515), (1, 70), (3, 512)):
        cache.fill(rng, row, tokens)
    q, k, v = (bf16_noise(rng, (4, 5, heads, head_dim)) for heads in (6, 2, 2))
    k[2, 3:], v[2, 3:], k[3, 1] = BF16_NAN, BF16_NAN, BF16_NAN
    out, lse = cache.attend(q, [515, 70, 0, 512], [0, 1, 2, 3], route="context", new_rows=(k, v),
                            valid_columns=[5, 1, 3, 2])  # fmt: skip
    return {"context": out, "context lse": lse, **{f"draft {role}": p for role, p in cache.host_planes().items()}}


def encode_rows(device: Any, profile: str, head_dim: int) -> Results:
    """Encode rows that are taken as rotated: ordinary ones, and some outside the domain."""
    rows = np.random.default_rng(5).standard_normal((7, head_dim)).astype(np.float32)
    rows *= np.float32(10.0) ** np.arange(-3, 4, dtype=np.float32)[:, np.newaxis]
    rows[0], rows[1, 3], rows[2, 40], rows[3, :8] = 0.0, np.nan, np.inf, [0.25, -0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    stream, results = device.stream(), {}
    row_bytes: dict[str, int] = {plane.role: plane.row_bytes for plane in plane_schema(profile, head_dim)}
    source = to_device(device, stream, rows)
    for kind in ("k", "v"):
        codes = device.empty((7, row_bytes[f"{kind}_code"]), np.uint8)
        scales = device.empty((7, row_bytes[f"{kind}_scale"]), np.uint8)
        Ops(device).encode_unrotated(profile, kind, source, codes, scales, stream=stream)
        for name, array in ((f"{kind} codes", codes), (f"{kind} scales", scales)):
            results[name] = to_host(device, stream, array)
    return results


def count_events(device: Any, profile: str, head_dim: int) -> Results:
    """Append rows of noise, zeros, NaN and large values with counters; one of three columns is dead."""
    rng, results = np.random.default_rng(29), {}
    cache = PagedCache.build(device, profile, head_dim=head_dim, table=scattered_table(2, 2), rng=None)
    cache.view = replace(cache.view, codec_counts=device.zeros(len(CODEC_EVENTS), np.uint64))
    k, v = (bf16_noise(rng, (2, 3, 2, head_dim)) for _ in "kv")
    k[0, 0], v[0, 1, 0], k[1, 1, 1, 5], v[1, 0] = 0, BF16_NAN, BF16_NAN, 0x4F80
    cache.append(k, v, [63, 5], [0, 1], [3, 2])
    cache.ops.append_prefix(cache.view, cache.put(v), cache.put(k), cache.ints([70, 9]), cache.ints([1, 3]),
                            cache.ints([1, 0]), stream=cache.stream)  # fmt: skip
    results["event counts"] = cache.get(cache.view.codec_counts)
    return {**results, **{f"counted {role}": plane for role, plane in cache.host_planes().items()}}


def assert_same_bits(expected: Results, found: Results) -> None:
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(array, found[name], err_msg=name)
