"""context_attention: the numerical criterion, masks, read-only cache, refusals.  (C14.2, C14.4, C14.5, codecs 7)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.devices.protocol import Device
from pagedkv.errors import ConfigError, MisuseError
from pagedkv.ops.modules import context_module, shipped_modules
from pagedkv.ops.ops import Ops
from pagedkv.values.attention_shape import AttentionShape, workspace_bytes
from pagedkv.values.planes import PageOrder
from tests.kernels.arrays import BF16_NAN, Rng, Table, bf16_noise, scattered_table
from tests.kernels.criterion import check_block, check_context, draft_block, draft_cache
from tests.kernels.paged_cache import PagedCache, assert_same_planes, kill_columns


def long_table(blocks: int, used: int) -> Table:
    """A table row whose first `used` entries are scattered pages; the rest names no page, and is never read."""
    table = np.full((1, blocks), np.iinfo(np.int32).min, np.int32)
    table[0, :used] = scattered_table(1, used, permutation=np.random.default_rng(used))
    return table


# ---- the criterion -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("context", [0, 1, 31, 32, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_draft_block_meets_the_criterion(device: Device, rng: Rng, head_dim: int, context: int) -> None:
    """codecs 7: contexts around pages, W = 5, group 4, unit RMS."""
    check_block(device, rng, scattered_table(2, 3, permutation=rng), context=context, width=5, head_dim=head_dim, row=1)


@pytest.mark.parametrize("width", range(1, 17))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_width_meets_the_criterion(device: Device, rng: Rng, head_dim: int, width: int) -> None:
    """C14.4: W 1 to 16, whose rows fill whole tiles and parts of tiles."""
    check_block(device, rng, scattered_table(1, 2), context=70, width=width, group_size=3, head_dim=head_dim)


@pytest.mark.parametrize("group_size", [1, 4, 6, 8, 16])
def test_every_group_size_reads_its_own_kv_head(device: Device, rng: Rng, group_size: int) -> None:
    """C4.5: query head h reads KV head h // (Hq / Hkv), in the cache and in the temporary rows."""
    check_block(device, rng, scattered_table(1, 2), context=66, width=3, group_size=group_size, kv_heads=3)


@pytest.mark.parametrize(("width", "context", "max_context"), [
    (1, 0, 64), (2, 1, 64), (1, 63, 64), (2, 64, 64), (4, 65, 128), (8, 95, 4096), (16, 65, 65_537), (16, 257, 320),
    (1, 4096, 4096),
])  # fmt: skip
def test_longer_plans_meet_the_criterion(device: Device, rng: Rng, width: int, context: int, max_context: int) -> None:
    """C14.4, C15.3: the launch is sized for the envelope; entries behind L are not read, and none where L is 0."""
    table = long_table(-(-max_context // 64), -(-context // 64))
    check_block(device, rng, table, context=context, width=width, head_dim=128, max_context=max_context)


@pytest.mark.parametrize("context", [0, 1, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 8192])
def test_contexts_of_several_key_groups_meet_the_criterion(device: Device, rng: Rng, context: int) -> None:
    """C14.6: around the ends of key groups, where the merge folds them and then the temporary rows."""
    table = long_table(129, -(-context // 64))
    check_block(device, rng, table, context=context, width=4, group_size=3, kv_heads=1)


@pytest.mark.parametrize(("rms", "width"), [(0.25, 5), (1.8, 16)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_input_ranges_meet_the_criterion(device: Device, rng: Rng, head_dim: int, rms: float, width: int) -> None:
    """codecs 7: the narrow set, and RMS 1.8 at W = 16."""
    check_block(device, rng, scattered_table(1, 3), context=100, width=width, head_dim=head_dim, rms=rms)


@pytest.mark.parametrize("scale", [0.0, 0.03, 1.0, -0.125])
def test_the_scale_multiplies_the_scores(device: Device, rng: Rng, scale: float) -> None:
    """C14.4: any finite scale; zero makes the softmax uniform over context and temporary rows."""
    check_block(device, rng, scattered_table(1, 2), context=80, width=3, scale=scale)


@pytest.mark.parametrize(("context_score", "own_score"), [(100.0, -100.0), (-100.0, 100.0), (-90.0, -90.0)])
def test_far_apart_scores_keep_their_softmax(device: Device, context_score: float, own_score: float) -> None:
    """C14.5: the context's scores far above, far below, and all far below zero: each part has its own maximum."""
    rng = np.random.default_rng(4)
    cache = draft_cache(device, scattered_table(1, 11), rng, kv_heads=1)
    q, k, v = (bf16_noise(rng, (1, 2, heads, 64)) for heads in (2, 1, 1))
    q[...] = 0
    q[..., 0] = 0x3F80  # one
    for rows, score in ((context_rows := bf16_noise(rng, (1, 600, 1, 64)), context_score), (k, own_score)):
        rows[..., 0] = np.array(score, np.float32).view(np.uint32) >> 16
    cache.append(context_rows, bf16_noise(rng, (1, 600, 1, 64)), [0], [0])

    out, lse = cache.attend_context(q, k, v, [600], [0], scale=1.0)

    check_context(cache, (q, k, v), out, lse, context=600, scale=1.0)


def test_one_column_without_context_gives_its_own_value(device: Device, rng: Rng) -> None:
    """C14.4: its only key is itself."""
    cache = draft_cache(device, scattered_table(1, 1), rng)
    q, k, v = draft_block(rng, cache, width=1)

    out, _ = cache.attend_context(q, k, v, [0], [0])

    np.testing.assert_array_equal(np.repeat(v[0, 0], 4, axis=0), out[0, 0])


# ---- visibility ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [1, 2], ids=["k", "v"])
def test_the_last_column_changes_every_output(device: Device, rng: Rng, kind: int) -> None:
    """C14.4: non-causal: an earlier column sees later ones, and only those of its own row."""
    cache = draft_cache(device, scattered_table(2, 2), rng)
    for row in range(2):
        cache.fill(rng, row, 65)
    inputs = draft_block(rng, cache, batch=2, width=6)
    before, _ = cache.attend_context(*inputs, [65, 65], [0, 1])
    inputs[kind][0, 5] ^= 0x8000

    after, _ = cache.attend_context(*inputs, [65, 65], [0, 1])

    assert (before[0] != after[0]).any(axis=-1).all()
    np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.deferred
def test_inert_columns_are_zero_and_not_read(device: Device, rng: Rng) -> None:
    """C14.4: valid columns 0, 7, 16 of 16: exact +0, lse -infinity, NaN inputs harmless, no cache byte changes."""
    cache = draft_cache(device, scattered_table(3, 3), rng)
    contexts, rows, valid = [60, 0, 130], [-1, 2, 0], [0, 7, 16]
    cache.fill(rng, 0, 130)
    before = cache.host_planes()
    inputs = draft_block(rng, cache, batch=3, width=16)
    kill_columns(inputs, valid)

    out, lse = cache.attend_context(*inputs, contexts, rows, valid_columns=valid)

    assert_same_planes(before, cache.host_planes())
    for entry, count in enumerate(valid):
        assert not out[entry, count:].any(), "inert columns are exact +0"
        assert np.isneginf(lse[entry, count:]).all()
        if count:
            check_context(cache, inputs, out, lse, context=contexts[entry], entry=entry, row=rows[entry], live=count)


def test_an_entry_without_a_table_row_is_inert(device: Device, rng: Rng) -> None:
    """C14.4: row -1 gives exact +0, whatever columns and lengths say."""
    cache = draft_cache(device, scattered_table(2, 10), rng)
    inputs = draft_block(rng, cache, width=3)

    out, lse = cache.attend_context(*inputs, [600], [-1])

    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("context", [0, 1, 70, 128, 600])
def test_stale_bytes_behind_the_frontier_have_no_effect(device: Device, rng: Rng, context: int) -> None:
    """C9.6: NaN behind the last context position, in its page and in all others, changes no bit."""
    results = []
    for stale in (0x00, 0xFF):
        seeded = np.random.default_rng(7)
        cache = draft_cache(device, scattered_table(1, 11), rng)
        cache.overwrite(stale)
        cache.fill(seeded, 0, context)
        results.append(cache.attend_context(*draft_block(seeded, cache, width=5), [context], [0])[0])

    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("where", ["context", "temporary"])
@pytest.mark.parametrize("context", [70, 600])
def test_nan_of_a_visible_key_reaches_every_output(device: Device, rng: Rng, context: int, where: str) -> None:
    """C14.5: nothing turns a NaN that is seen into a number; as the one NaN of arithmetic."""
    cache = draft_cache(device, scattered_table(1, 10), rng)
    cache.fill(rng, 0, context)
    q, k, v = draft_block(rng, cache, width=5)
    nan_row = np.full((1, 1, 2, 64), BF16_NAN, np.uint16)
    if where == "context":
        cache.append(nan_row, nan_row, [context - 3], [0])
    else:
        k[0, 2] = v[0, 2] = BF16_NAN

    out, _ = cache.attend_context(q, k, v, [context], [0])

    assert (out == 0x7FFF).all()


def test_the_cache_is_only_read(device: Device, rng: Rng) -> None:
    """C14.4: no byte of any page changes, with one key group and with several."""
    cache = draft_cache(device, scattered_table(2, 10), rng)
    for row, tokens in ((0, 600), (1, 33)):
        cache.fill(rng, row, tokens)
    before = cache.host_planes()

    cache.attend_context(*draft_block(rng, cache, batch=2, width=16), [600, 33], [0, 1])

    assert_same_planes(before, cache.host_planes())


@pytest.mark.deferred
def test_rows_may_stand_in_any_order(device: Device, rng: Rng) -> None:
    """C11.3: B = 2 with lengths 65 and 1 in table rows 1 and 0."""
    cache = draft_cache(device, scattered_table(2, 2), rng)
    cache.fill(rng, 1, 65)
    cache.fill(rng, 0, 1)
    inputs = draft_block(rng, cache, batch=2, width=4)

    out, lse = cache.attend_context(*inputs, [65, 1], [1, 0])

    for entry, (context, row) in enumerate(((65, 1), (1, 0))):
        check_context(cache, inputs, out, lse, context=context, entry=entry, row=row)


@pytest.mark.eager_only  # the deferred device compares what a launch may write: 6 GB of mapped memory here
def test_pages_and_heads_behind_4_gib_are_addressed(device: Device) -> None:
    """C3.10: a head-major plane of 6 GB, of which a few pages have memory; the last pages give what the first give."""
    if device.name != "cpu":
        pytest.skip("only the cpu device maps memory that nobody touches for nothing")
    pages = 3 * 2**31 // (4 * 64 * 64 * 2)
    results = []
    for ids in ([0, 1], [pages - 2, pages - 3]):
        rng = np.random.default_rng(12)
        cache = PagedCache.build(device, "bf16", kv_heads=4, order="head-major", rng=None, allocate=device.zeros,
                                 table=np.array([[*ids, pages - 2]], np.int32))  # fmt: skip
        assert cache.view.k_pages.nbytes > 2**32
        cache.fill(rng, 0, 100)
        results.append(cache.attend_context(*draft_block(rng, cache, width=2), [100], [0])[0])
        del cache

    np.testing.assert_array_equal(results[0], results[1])


# ---- modules, workspace and refusals -------------------------------------------------------------------------------
def test_context_modules_ship_and_others_are_refused() -> None:
    """C14.4: D 64 and 128, and no other."""
    assert {"context_d64", "context_d128"} <= {spec.name for spec in shipped_modules()}
    for head_dim in (16, 256, 64.0):
        with pytest.raises(ConfigError, match="64 or 128"):
            context_module(head_dim)  # type: ignore[arg-type]


def test_a_prepared_draft_pool_loads_nothing_under_capture(device: Device) -> None:
    """C15.1: `prepare` with the pool's order loads context attention too; its nodes by name."""
    ops = Ops(device)
    ops.prepare("bf16", 64, order="head-major")
    table = scattered_table(1, 10)
    cache = PagedCache.build(device, "bf16", order="head-major", table=table, rng=np.random.default_rng(1), ops=ops)
    q, k, v, out = (device.zeros((1, 2, 2, 64), np.uint16) for _ in range(4))
    selectors = (cache.ints([0]), cache.ints([0]))
    workspace = device.empty((workspace_bytes(AttentionShape("decode", 1, 2, 2, 2, 64, 640)),), np.uint8)

    graph = cache.capture(ops.context_attention, q, k, v, out, *selectors, workspace=workspace)

    assert [node.name for node in graph.nodes] == ["context_attention", "context_attention_merge"]


@pytest.mark.parametrize(("profile", "head_dim", "order"), [
    ("bf16", 64, "page-major"), ("bf16", 256, "head-major"), ("int8-g64", 64, "head-major"),
])  # fmt: skip
def test_other_pools_are_refused(device: Device, rng: Rng, profile: str, head_dim: int, order: PageOrder) -> None:
    """C3.4, C14.4: head-major bf16 planes of head_dim 64 or 128."""
    cache = PagedCache.build(device, profile, head_dim=head_dim, order=order, table=scattered_table(1, 1), rng=rng)

    with pytest.raises(MisuseError, match="head-major bf16"):
        cache.attend_context(*draft_block(rng, cache, width=1), [0], [0])
