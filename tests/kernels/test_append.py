"""append and append_prefix: the codec's bytes at the rows they address, and no other byte.  (C4.4, C14.4)

Every comparison is of whole planes, which were full of noise before: neighbouring pages, heads and rows are guards.
The codec that gives the expected bytes is compared with an oracle written apart in `tests/host/test_codec_rows.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pagedkv import codecs
from pagedkv.devices.protocol import Device
from pagedkv.errors import ConfigError, MisuseError
from pagedkv.ops.ops import Ops
from pagedkv.values.planes import PageOrder
from pagedkv.values.profiles import HEAD_DIMS_QUANTIZED, PROFILES
from tests.host.codec_cases import F32, next_down, next_up, row_of
from tests.host.codec_sides import QUANTIZED_SIDES, Side
from tests.kernels.arrays import BF16_NAN, Bits, Rng, bf16_noise, scattered_table, to_device, to_host
from tests.kernels.paged_cache import PagedCache, assert_same_planes, kill_columns

VARIANTS = [
    (profile.name, head_dim) for profile in PROFILES.values()
    for head_dim in (HEAD_DIMS_QUANTIZED if profile.is_quantized else (16, 64, 80, 96, 128, 192, 256))
]
BF16_INFINITY, BF16_LARGEST = 0x7F80, 0x7F7F


@pytest.fixture
def ops(device: Device) -> Ops:
    return Ops(device)


def rows_like(rng: Rng, cache: PagedCache, batch: int, width: int) -> tuple[Bits, Bits]:
    k, v = (bf16_noise(rng, (batch, width, cache.view.num_kv_heads, cache.view.head_dim)) for _ in "kv")
    return k, v


def check_append(
    cache: PagedCache, k: Bits, v: Bits, positions: list[int], rows: list[int], live: list[int] | None = None
) -> None:
    """Append, and compare whole planes with `codecs.encode` placed by hand; rows -1 write nothing."""
    before = cache.host_planes()

    cache.append(k, v, positions, rows, live)

    written = live or [k.shape[1] if row >= 0 else 0 for row in rows]
    assert_same_planes(cache.with_rows(before, k, v, positions, rows, written), cache.host_planes())


# ---- bytes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("profile", "head_dim"), VARIANTS)
def test_an_append_across_pages_writes_codec_bytes_only(device: Device, rng: Rng, profile: str, head_dim: int) -> None:
    """C4.4: three columns from position 63, pages 2p + 1."""
    cache = PagedCache.build(device, profile, head_dim=head_dim, table=scattered_table(1, 3), rng=rng)

    check_append(cache, *rows_like(rng, cache, 1, 3), [63], [0])


@pytest.mark.parametrize(("profile", "choices", "width", "positions", "rows"), [
    # C4.4: 129 columns from position 61 touch three pages.
    *((name, {}, 129, [61], [1]) for name in PROFILES),
    # C3.7, C3.8: the same rows through head and page strides of either order; an odd head count.
    *((name, {"kv_heads": 3, "order": order}, 4, [62, 0], [1, 0])
      for name in ("bf16", "k8v4") for order in ("page-major", "head-major")),
    # C14.4: widths around warps and pages, with a batch that does not fill the last block.
    *(("int8-g64", {}, width, [0, 1, 63], [1, 2, 0]) for width in (1, 2, 16, 17, 65, 127, 128)),
])  # fmt: skip
def test_every_shape_writes_the_codec_bytes_and_no_other(
    device: Device, rng: Rng, profile: str, choices: dict[str, Any], width: int, positions: list[int], rows: list[int]
) -> None:
    cache = PagedCache.build(device, profile, table=scattered_table(3, 4, permutation=rng), rng=rng, **choices)

    check_append(cache, *rows_like(rng, cache, len(rows), width), positions, rows)


@pytest.mark.deferred
@pytest.mark.parametrize("profile", PROFILES)
def test_dead_columns_and_inert_entries_change_nothing(device: Device, rng: Rng, profile: str) -> None:
    """C14.4: live columns are a prefix; an entry without any may have table row -1; dead inputs are NaN."""
    cache = PagedCache.build(device, profile, table=scattered_table(3, 2), rng=rng)
    live = [5, 0, 2]
    k, v = rows_like(rng, cache, 3, 5)
    kill_columns((k, v), live)

    check_append(cache, k, v, [60, 7, 126], [2, -1, 0], live)


def test_an_entry_without_a_table_row_writes_nothing(device: Device, rng: Rng) -> None:
    """C14.4: row -1 is never looked up, whatever the columns say."""
    cache = PagedCache.build(device, "bf16", table=scattered_table(2, 2), rng=rng)

    check_append(cache, *rows_like(rng, cache, 2, 3), [0, 9], [-1, 1])


@pytest.mark.deferred
@pytest.mark.parametrize("order", ["page-major", "head-major"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_prefix_append_leaves_the_rejected_tail(device: Device, rng: Rng, profile: str, order: PageOrder) -> None:
    """C14.4: counts 0, 1, 7, 16 at positions 0, 63, 60, 120, rejected inputs NaN."""
    cache = PagedCache.build(device, profile, order=order, table=scattered_table(4, 3), rng=rng)
    before = cache.host_planes()
    counts, positions, rows = [0, 1, 7, 16], [0, 63, 60, 120], [3, 1, 0, 2]
    k, v = rows_like(rng, cache, 4, 16)
    kill_columns((k, v), counts)

    cache.ops.append_prefix(cache.view, cache.put(k), cache.put(v), cache.ints(positions), cache.ints(counts),
                            cache.ints(rows), stream=cache.stream)

    assert_same_planes(cache.with_rows(before, k, v, positions, rows, counts), cache.host_planes())


# ---- codec edges ---------------------------------------------------------------------------------------------------
def edge_rows(head_dim: int, rng: Rng) -> F32:
    """Rows of codecs 6 and 8, one case a row, in the first, a middle and the last group."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    rows = [
        row_of({}, head_dim), row_of({}, head_dim, fill=-0.0),
        row_of([*magnitudes, *(-m for m in magnitudes)], head_dim),
        row_of([6.0, *ties, -6.0, *(-t for t in ties)], head_dim),
        row_of([6.0, *map(next_up, ties), -6.0, *map(next_down, ties)], head_dim),
        row_of({0: 49.0, 1: 0.0013885498046875, head_dim - 1: -0.0013885498046875}, head_dim),
        row_of({0: 422.0, 7: -421.0, 9: 1.0}, head_dim),
        row_of([2.0**-20, -(2.0**-20), 3 * 2.0**-21, 2.0**-24, 2.0**-30], head_dim),
    ]
    nonfinite = [np.nan, np.inf, -np.inf]
    beyond = [3.0e38, 8.4e6, 448.0 * 65504.0, next_up(448.0 * 65504.0), 2688.0, next_up(2688.0), 3072.0, 1.0e30]
    tiny = [1.0e-45, 2.0**-126, 2.0**-9 * 6, 2.0**-10 * 6, 2.0**-24 * 448, 2.0**-25 * 448, 6.375, 127 * 2.0**-25]
    for place, value in itertools.product((0, head_dim // 2 + 3, head_dim - 1), (*nonfinite, *beyond, *tiny, -1.0)):
        row = np.ones((1, head_dim), np.float32) if np.isnan(value) else np.zeros((1, head_dim), np.float32)
        row[0, place] = value
        rows.append(row)
    # Under every scale: each tie, where x / S is exact and x * fl(1 / S) often is not, and its neighbours.
    scales = codecs.e4m3_decode(np.arange(1, 0x7F, dtype=np.uint8))
    for steps in (ties, [next_up(tie) for tie in ties], [next_down(tie) for tie in ties]):
        group = np.array([6.0, *steps, -6.0, *(-step for step in steps)], np.float32)
        groups = scales[:, np.newaxis] * group
        rows.append(np.resize(groups, (-(-len(groups) * 16 // head_dim), head_dim)))
    for exponent in (-40, -20, -8, 0, 8, 20, 40):
        noise = rng.standard_normal((16, head_dim)).astype(np.float32)
        rows.append(noise * np.float32(2.0**exponent))
    bits = rng.integers(0, 1 << 32, (64, head_dim), dtype=np.uint32).view(np.float32)
    rows.append(np.where(np.isfinite(bits), bits, np.float32(1.0)))
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("head_dim", HEAD_DIMS_QUANTIZED)
@pytest.mark.parametrize("side", QUANTIZED_SIDES, ids="-".join)
def test_unrotated_encoding_equals_the_codec(device: Device, ops: Ops, rng: Rng, side: Side, head_dim: int) -> None:
    """codecs 6 and 8: every edge, through the entry that does not rotate."""
    values = edge_rows(head_dim, rng)
    code, scale = codecs.encode_unrotated(*side, values)
    assert scale is not None
    stream = device.stream()
    codes, scales = device.empty(code.shape, np.uint8), device.empty(scale.shape, np.uint8)

    ops.encode_unrotated(*side, to_device(device, stream, values), codes, scales, stream=stream)

    np.testing.assert_array_equal(scale, to_host(device, stream, scales))
    np.testing.assert_array_equal(code, to_host(device, stream, codes))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("profile", [p.name for p in PROFILES.values() if p.is_quantized])
def test_edges_survive_rotation(device: Device, rng: Rng, profile: str, head_dim: int) -> None:
    """codecs 6 and 8: constant rows and non-finite values in the first, middle and last token and head."""
    cache = PagedCache.build(device, profile, head_dim=head_dim, kv_heads=3, table=scattered_table(1, 1), rng=rng)
    k, v = rows_like(rng, cache, 1, 9)
    special = (BF16_NAN, BF16_INFINITY, BF16_INFINITY | 0x8000, BF16_LARGEST, 0x0000, 0x8000, 0x0001)
    for index, bits in enumerate(special):
        place = (0, (0, 4, 8)[index % 3], index % 3)
        k[(*place, (0, head_dim // 2, head_dim - 1)[index % 3])] = bits
        v[(*place, (head_dim - 1, 0, head_dim // 2)[index % 3])] = bits
    k[0, 1, :] = [[0x3F80] * head_dim, [0x0000] * head_dim, [0x8000] * head_dim]
    v[0, 1, :] = [[0xC2F7] * head_dim, [0x7F7F] * head_dim, [0x0001] * head_dim]

    check_append(cache, k, v, [0], [0])


@pytest.mark.deferred
def test_bf16_rows_keep_every_bit(device: Device, rng: Rng) -> None:
    """codecs 2: NaN payloads, infinities and signed zeros survive; all 65,536 patterns."""
    cache = PagedCache.build(device, "bf16", head_dim=256, kv_heads=4, table=scattered_table(1, 1), rng=rng)
    rows = np.arange(1 << 16, dtype=np.uint16).reshape(1, 64, 4, 256)

    cache.append(rows, rows[:, ::-1].copy(), [0], [0])

    planes = cache.host_planes()
    np.testing.assert_array_equal(rows[0], planes["k_code"][1].transpose(1, 0, 2))
    np.testing.assert_array_equal(rows[0, ::-1], planes["v_code"][1].transpose(1, 0, 2))


# ---- refusals ------------------------------------------------------------------------------------------------------
def test_the_edge_entry_refuses_what_has_no_codec(device: Device, ops: Ops) -> None:
    """codecs 2 and 6: bf16 rows are copied, and another head_dim is no row."""
    stream = device.stream()
    rows, bytes_ = device.zeros((1, 64), np.float32), device.zeros((1, 64), np.uint8)

    with pytest.raises(MisuseError, match="quantized profile"):
        ops.encode_unrotated("bf16", "k", rows, bytes_, bytes_, stream=stream)
    with pytest.raises(ConfigError, match="head_dim"):
        ops.encode_unrotated("int8-g64", "k", device.zeros((1, 80), np.float32), bytes_, bytes_, stream=stream)
    with pytest.raises(MisuseError, match="the scales"):
        ops.encode_unrotated("int8-g64", "k", rows, bytes_, bytes_, stream=stream)
