"""Every hostile array in every op: refused before a launch, with a clause, and no byte changes.  (C14.2)"""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.devices import CpuDevice
from pagedkv.errors import Caught
from tests.hostile.arrays import READ_ONLY, OpCall, hostile_arrays, op_calls
from tests.hostile.values import hostile_values
from tests.kernels.arrays import scattered_table
from tests.kernels.paged_cache import PagedCache, assert_same_planes

CASES_MIN = 2151
CLAUSE = re.compile(r"C\d+(\.\d+)?|codecs \d+")


class Corpus:
    """The cases of one device: runs a call with one argument replaced, and counts."""

    def __init__(self, device: CpuDevice) -> None:
        self.cache = PagedCache.build(device, "bf16", table=scattered_table(2, 10), rng=np.random.default_rng(1))
        self.draft = PagedCache.build(device, "bf16", order="head-major", table=scattered_table(2, 10),
                                      rng=np.random.default_rng(2), ops=self.cache.ops)
        self.raw: list[str] = []
        self.count = 0

    def check(self, call: OpCall, case: str, changed: dict[str, Any], *, is_legal: bool = False) -> None:
        """Run a call with changed arguments and note what is not one of our refusals."""
        self.count += 1
        before = self.cache.device.driver_calls
        with Caught() as caught:
            call.run(**(call.arguments | changed))
        error, is_launched = caught.error, self.cache.device.driver_calls != before
        is_ours = isinstance(error, pk.PagedKVError) and CLAUSE.fullmatch(error.clause) and not is_launched
        if not (error is None if is_legal else is_ours):
            self.raw.append(f"{case}: launched {is_launched}, {type(error).__name__} {error}")


def test_a_hostile_array_is_refused_before_anything_is_launched() -> None:
    """Each array argument by each hostile array, each pair that shares bytes, and the numbers by hostile values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device, other = CpuDevice(reason="hostile"), CpuDevice(reason="another")
        corpus = Corpus(device)
        planes = corpus.cache.host_planes(), corpus.draft.host_planes()
        for call in op_calls(device, corpus.cache, corpus.draft):
            arrays = {name: value for name, value in call.arguments.items() if isinstance(value, np.ndarray)}
            before = {name: array.copy() for name, array in arrays.items()}
            for name, legal in arrays.items():
                for case, array in hostile_arrays(device, other, legal):
                    is_read = case == READ_ONLY and name not in call.writes
                    is_read |= name in call.lists and case in ("no element", "one element less")
                    if not is_read and not (array is None and name in ("lse", "valid_columns", "workspace")):
                        corpus.check(call, f"{call.name} {name}: {case}", {name: array})
            for written, read in itertools.product(call.writes, arrays):
                if written != read and arrays[read].nbytes >= 4:
                    shared = arrays[read].reshape(-1).view(np.uint8)[: arrays[written].nbytes]
                    if shared.nbytes == arrays[written].nbytes:
                        shared = shared.view(arrays[written].dtype).reshape(arrays[written].shape)
                        corpus.check(call, f"{call.name} {written} over {read}", {written: shared})
            for case, value in hostile_values():
                for name in {"head_dim", "num_kv_heads", "storage", "order", "max_context"} & call.arguments.keys():
                    corpus.check(call, f"{call.name} {name}: {case}", {name: value})
                if "route" in call.arguments:
                    corpus.check(call, f"{call.name} route: {case}", {"route": value})
                is_scale = case in ("none", "1.5", "-1", "2^31", "2^63", "2^64", "-2^31 - 1")
                if "q" in call.arguments and not is_scale:
                    corpus.check(call, f"{call.name} scale: {case}", {"scale": value})
            assert not corpus.raw, "\n".join(corpus.raw)
            for name, array in arrays.items():
                np.testing.assert_array_equal(before[name], array, err_msg=f"{call.name} {name}")
        corpus.cache.stream.synchronize()
        assert not corpus.raw, "\n".join(corpus.raw)
        for cache, expected in zip((corpus.cache, corpus.draft), planes, strict=True):
            assert_same_planes(expected, cache.host_planes())
        assert corpus.count >= CASES_MIN
        for call in op_calls(device, corpus.cache, corpus.draft):  # the legal arguments are legal
            corpus.check(call, call.name, {}, is_legal=True)
            for name, legal in call.arguments.items():
                if isinstance(legal, np.ndarray) and name not in call.writes:
                    frozen = legal.view()
                    frozen.flags.writeable = False
                    corpus.check(call, f"{call.name} {name}: {READ_ONLY}", {name: frozen}, is_legal=True)
        assert not corpus.raw, "\n".join(corpus.raw)
        device.close()
        other.close()
