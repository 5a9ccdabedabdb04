"""Check a latched store against the contract.  (C12.4)

    refused     every public call, with None for each argument: the store asks its latch first
    answered    memory_summary, host_summary, event_counts, evidence; close, also twice
    afterwards  closed: the same calls are misuse, the evidence stays

A store latches when a publication or a withdrawal breaks off (C11.2): the ledgers have changed, and no table has
followed.
"""

from __future__ import annotations

import inspect

import pagedkv as pk
from pagedkv.tools.fuzz.compare import require_same
from pagedkv.tools.fuzz.ledger_model import LedgerModel

ANSWERED = frozenset({"close", "memory_summary", "host_summary", "event_counts", "latch"})
"""Public methods of a store that answer when it is latched."""


def refused_calls() -> dict[str, dict[str, None]]:
    """Return every other public method with its required arguments, all None."""
    calls = {}
    for name, method in vars(pk.Store).items():
        if callable(method) and not name.startswith("_") and name not in ANSWERED:
            _, *parameters = inspect.signature(method).parameters.values()
            calls[name] = {parameter.name: None for parameter in parameters if parameter.default is parameter.empty}
    return calls


def require_latched(store: pk.Store, model: LedgerModel) -> None:
    """Require that a store is latched and answers as the model does, and close it."""
    if store.evidence is None:
        raise AssertionError("a change of tables broke off, and there is no evidence of it")
    _require_refused(store, "StoreLatched")
    for pool, summary in store.memory_summary().items():
        counts = tuple(summary[f"{what}_pages"] for what in ("allocated", "reserved", "available"))
        expected = (model.allocated(pool), model.reserved(pool), model.available(pool))
        require_same(f"pool {pool} when latched: (allocated, reserved, available)", expected, counts)
    require_same("pools whose events a latched store counts", model.pools.keys(), store.event_counts().keys())
    evidence = store.evidence
    store.close()
    store.close()
    if store.evidence is not evidence:
        raise AssertionError(f"the evidence was {evidence!r} and is {store.evidence!r} after close")
    _require_refused(store, "MisuseError")


def _require_refused(store: pk.Store, expected: str) -> None:
    for name, arguments in refused_calls().items():
        try:
            getattr(store, name)(**arguments)
        except pk.PagedKVError as error:
            if type(error).__name__ != expected:
                raise AssertionError(f"{name}: got {type(error).__name__} ({error}), model {expected}") from error
        else:
            raise AssertionError(f"{name}: nothing was raised, model {expected}")
