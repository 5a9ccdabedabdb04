"""causal_attention against the FP64 oracle, over a pairwise covering of what shapes a call.  (C14.5, codecs 7)

Group sizes, page orders and input ranges are axes here, so no other test walks through them; group sizes beyond 16 are
refused by `tests/host/test_config.py` and by the shapes of `test_attention.py` (S74).

The quick run takes the cases with little work, and for every value of every axis the cheapest case that holds it; the
long run takes the whole covering, a second one of another seed, and longer contexts.  Masked calls feed NaN into their
dead columns, and on route decode carry a second entry without a table row.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache as remember
from typing import Any

import numpy as np
import pytest

from pagedkv import codecs
from pagedkv.devices.protocol import Device
from pagedkv.ops.modules import SHIPPED_HEAD_DIMS_BF16
from pagedkv.values.profiles import HEAD_DIMS_QUANTIZED, PROFILES
from tests.kernels.arrays import BF16_NAN, Bits, Rng, bf16_noise, scattered_table
from tests.kernels.covering import Case, Choice, legal_pairs, pairs_of, pairwise_covering
from tests.kernels.criterion import check_causal, rows_of
from tests.kernels.paged_cache import PagedCache
from tests.oracle.attention_oracle import CRITERIA, StoredRows, attend, bf16_values

CONTEXTS = (0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 8191, 8192)
AXES: dict[str, tuple[Any, ...]] = {
    "variant": tuple(
        (profile.name, head_dim) for profile in PROFILES.values()
        for head_dim in (HEAD_DIMS_QUANTIZED if profile.is_quantized else SHIPPED_HEAD_DIMS_BF16)
    ),
    "group_size": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
    "width": tuple(range(1, 17)),
    "columns": ("dense", "masked"),
    "context": CONTEXTS,
    "route": ("decode", "prefill"),
    "inputs": ("unit", "loud", "narrow"),
    "writer": ("append", "cached"),
    "order": ("page-major", "head-major"),
}
QUICK_WORK = 8_000_000
"""Scores times head_dim that a case of the quick run may ask for, unless it stands for a value of its own."""


def is_legal(first: Choice, second: Choice) -> bool:
    """codecs 7 asks for RMS 1.8 at W = 16 only."""
    chosen = dict((first, second))
    return chosen.get("inputs") != "loud" or chosen.get("width", 16) == 16


@remember
def covering(seed: int) -> list[Case]:
    return pairwise_covering(AXES, is_legal, seed=seed)


def kv_heads_of(case: Case) -> int:
    """Two heads, so that a head stride matters; one at long contexts, where the oracle takes its time."""
    return 2 if case["context"] < 4096 else 1  # type: ignore[operator]


def work_of(case: Case) -> int:
    """Scores times head_dim, about."""
    values: dict[str, Any] = case
    keys = values["context"] + values["width"]
    return int(keys * values["width"] * values["group_size"] * kv_heads_of(case) * values["variant"][1])


def quick_cases(cases: list[Case]) -> list[Case]:
    """Pick what the quick run takes: the cheap ones, and a case for each value."""
    by_work = sorted(cases, key=work_of)
    wanted: set[tuple[str, Hashable]] = {(axis, value) for axis, values in AXES.items() for value in values}
    picked = []
    for case in by_work:
        if work_of(case) <= QUICK_WORK or wanted & set(case.items()):
            picked.append(case)
            wanted -= set(case.items())
    assert not wanted, f"no case holds {wanted}"
    return picked


def name_of(case: Case) -> str:
    values: dict[str, Any] = case
    profile, head_dim = values["variant"]
    words = (profile, f"d{head_dim}", f"g{values['group_size']}", f"w{values['width']}", f"c{values['context']}")
    return "-".join((*words, *(str(values[axis]) for axis in ("columns", "route", "inputs", "writer", "order"))))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        seed = int(metafunc.config.option.seed)
        quick = {name_of(case): case for case in quick_cases(covering(seed))}
        every = {name_of(case): case for case in (*covering(seed), *covering(seed + 1))}
        metafunc.parametrize("case", [
            pytest.param(case, marks=() if name in quick else (pytest.mark.long,), id=name)
            for name, case in every.items()
        ])  # fmt: skip


def draw_rows(rng: Rng, inputs: str, shape: tuple[int, ...]) -> Bits:
    """Return one of the three input sets of codecs 7."""
    if inputs == "narrow":
        return codecs.f32_to_bf16(rng.uniform(-0.25, 0.25, shape).astype(np.float32))
    return bf16_noise(rng, shape, 1.8 if inputs == "loud" else 1.0)


def test_a_case_of_the_covering_meets_the_criterion(device: Device, rng: Rng, case: Case) -> None:
    """C3.4, C4.5, C14.5, S74, codecs 7: relL2, gross error, no non-finite value; dead columns are exact +0."""
    values: dict[str, Any] = case
    (profile, head_dim), context, width = values["variant"], values["context"], values["width"]
    kv_heads, inputs = kv_heads_of(case), values["inputs"]
    blocks = -(-(context + width) // 64)
    cache = PagedCache.build(device, profile, head_dim=head_dim, kv_heads=kv_heads, order=values["order"],
                             table=scattered_table(1, blocks, permutation=rng), rng=rng)
    k, v = (draw_rows(rng, inputs, (1, context + width, kv_heads, head_dim)) for _ in "kv")
    batch = 2 if values["columns"] == "masked" and values["route"] == "decode" else 1
    q = draw_rows(rng, inputs, (batch, width, kv_heads * values["group_size"], head_dim))
    live = width if values["columns"] == "dense" else (width + 1) // 2
    k[:, context + live :] = v[:, context + live :] = q[:, live:] = BF16_NAN

    new_rows = None
    old_tokens = context if values["writer"] == "append" else context + live
    if old_tokens:
        cache.append(k[:, :old_tokens].copy(), v[:, :old_tokens].copy(), [0], [0])
    if values["writer"] == "append":
        new_rows = (np.repeat(k[:, context:], batch, axis=0), np.repeat(v[:, context:], batch, axis=0))
    valid = None if values["columns"] == "dense" else [live, width][:batch]
    out, lse = cache.attend(q, [context] * batch, [0, -1][:batch], route=values["route"], new_rows=new_rows,
                          valid_columns=valid)  # fmt: skip

    check_causal(cache, q[0, :live], out[0, :live], lse[0, :live], position=context)
    assert not out[0, live:].any()
    assert not out[1:].any()


@pytest.mark.long
@pytest.mark.parametrize("profile", PROFILES)
def test_long_contexts_meet_the_criterion(device: Device, rng: Rng, profile: str) -> None:
    """codecs 7: 40,000 keys, 26 key groups, both routes; the two agree bit for bit."""
    cache = PagedCache.build(device, profile, kv_heads=1, table=scattered_table(1, 626, permutation=rng), rng=rng)
    cache.fill(rng, 0, 40_000)
    q, k, v = (bf16_noise(rng, (1, 3, heads, 64)) for heads in (3, 1, 1))

    out, lse = cache.attend(q, [40_000], [0], route="decode", new_rows=(k, v))
    prefilled, _ = cache.attend(q, [40_000], [0], route="prefill")

    check_causal(cache, q[0], out[0], lse[0], position=40_000)
    np.testing.assert_array_equal(out, prefilled)


def test_the_covering_holds_every_legal_pair_and_no_other(seed: int) -> None:
    """The quick part holds every single value besides."""
    cases = covering(seed)
    quick = quick_cases(cases)

    held = set().union(*map(pairs_of, cases))
    print(f"covering of seed {seed}: {len(cases)} cases, {len(quick)} of them quick, {len(held)} pairs")

    assert legal_pairs(AXES, is_legal) == held
    assert all(case["width"] == 16 for case in cases if case["inputs"] == "loud")


def test_equal_seeds_give_equal_coverings() -> None:
    """Every worker of a parallel run collects the same tests."""
    axes = {"a": (0, 1, 2), "b": "xyz", "c": (False, True)}

    first, second = (pairwise_covering(axes, lambda a, b: True, seed=3) for _ in range(2))

    assert first == second
    assert set().union(*map(pairs_of, first)) == legal_pairs(axes, lambda a, b: True)
    assert len(first) < 3 * 3 * 2


@pytest.mark.parametrize("profile", PROFILES)
def test_the_criterion_sees_a_five_percent_error_in_k(device: Device, rng: Rng, profile: str) -> None:
    """codecs 7: with unit-RMS inputs; the narrow set would hide it, which is why it is not the only one."""
    errors = {}
    for inputs in ("unit", "narrow"):
        cache = PagedCache.build(device, profile, table=scattered_table(1, 3), rng=rng)
        k, v = (draw_rows(rng, inputs, (1, 150, 2, 64)) for _ in "kv")
        cache.append(k, v, [0], [0])
        q = draw_rows(rng, inputs, (1, 1, 8, 64))
        out, _ = cache.attend(q, [149], [0], route="decode")
        rows = rows_of(cache, 0, 150)
        reference, _ = attend(profile, q[0], StoredRows(rows.k * 1.05, rows.v), positions=[149], scale=64**-0.5)
        errors[inputs] = float(np.linalg.norm(bf16_values(out[0]) - reference) / np.linalg.norm(reference))
        if inputs == "unit":
            with pytest.raises(AssertionError, match="relL2"):
                CRITERIA[profile].assert_met(out[0], reference)

    print(f"{profile}: {errors['unit']:.2e} with unit inputs, {errors['narrow']:.2e} with narrow ones")
    assert errors["unit"] > 1.6e-2 > errors["narrow"] * 2
