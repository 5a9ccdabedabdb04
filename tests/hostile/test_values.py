"""Every hostile value in every call that takes one: a refusal of ours, or a result that changes no ledger.  (C12.4)"""

from __future__ import annotations

import re
import warnings

import pagedkv as pk
from pagedkv.errors import Caught
from tests.hostile.values import hostile_calls, hostile_values

CONFIG = pk.StoreConfig(pk.KVGeometry(layers=2, query_heads=2, kv_heads=1, head_dim=64), profile="bf16",
                        max_context=256, max_concurrency=2, kv_capacity=pk.ExplicitCapacity(512))
CASES_MIN = 5782
CLAUSE = re.compile(r"C\d+(\.\d+)?|codecs \d+")


def test_a_hostile_value_is_refused_or_changes_nothing() -> None:
    """Each refusal is one of ours with a clause, and can be printed; no ledger moves and nothing latches."""
    raw: list[str] = []
    count = 0
    with warnings.catch_warnings(), pk.open_store(CONFIG, device="cpu") as store:
        warnings.simplefilter("ignore")
        calls = list(hostile_calls(store))
        before = store.inspect()
        for call_name, call in calls:
            for value_name, value in hostile_values():
                count += 1
                with Caught() as caught:
                    call(value)
                error = caught.error
                is_ours = isinstance(error, pk.PagedKVError) and CLAUSE.fullmatch(error.clause) and str(error)
                if error is not None and not is_ours:
                    raw.append(f"{call_name} of {value_name}: {type(error).__name__} {error}")
            assert store.evidence is None, call_name
            if changes := store.inspect().differences(before):
                raw.append(f"{call_name}: {changes}")
                before = store.inspect()
        assert not raw, "\n".join(raw)
        assert count >= CASES_MIN
        store.fail(store.units()[0])
        store.check()
