"""Check a latched store against the contract.  (C12.4)

    refused     every public call in CALLS, with any arguments
    answered    memory_summary, event_counts, evidence; close, also twice
    afterwards  closed: the same calls are misuse, the evidence stays

A store latches when a publication or a withdrawal breaks off (C11.2): the ledgers have changed, and no table has
followed.
"""

from __future__ import annotations

from typing import Any

import pagedkv as pk
from pagedkv.tools.fuzz.compare import require_same
from pagedkv.tools.fuzz.ledger_model import LedgerModel

_SEQUENCE = pk.Sequence(0, 0, 1)
_CONTINUATION = pk.Continuation(0, 1)
_PROMPT = {"prompt_tokens": 1, "output_tokens": 0}

ANSWERED = frozenset({"close", "memory_summary", "event_counts", "latch"})
"""Public methods of a store that answer when it is latched."""

CALLS: dict[str, tuple[Any, ...] | dict[str, Any]] = {
    "try_activate": _PROMPT, "activate": _PROMPT, "can_honour": (pk.ActivationTarget(1, 0),),
    "explain": (pk.ActivationTarget(1, 0),), "finish": (_SEQUENCE,), "abort": (_SEQUENCE,),
    "try_snapshot": (_SEQUENCE,), "snapshot": (_SEQUENCE,), "release": (_CONTINUATION,),
    "protect": (_CONTINUATION, 0), "attach_state": (_CONTINUATION, None), "state_of": (_CONTINUATION,),
    "continuations": (), "protected_tokens": (_CONTINUATION,), "batch": ([_SEQUENCE],), "begin_unit": (None,),
    "submit": (None,), "poll": (), "wait": (None,), "commit": (None,), "fail": (None,), "launch_graph": (None,),
    "graph_buffer": ((1,), "int32"), "begin_round": (None,), "covered_columns": (None,),
    "ensure_mapped_to_tokens": (_SEQUENCE, 0), "trim": (None,), "truncate": (_SEQUENCE, 0),
    "committed_tokens": (_SEQUENCE,), "budget_tokens": (_SEQUENCE,), "page_ids": (_SEQUENCE,), "check": (),
    "inspect": (), "observe": (print,),
}  # fmt: skip
"""Every other public method and its arguments, which are wrong too: the store asks its latch first."""


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
    for name, arguments in CALLS.items():
        call = getattr(store, name)
        try:
            call(**arguments) if isinstance(arguments, dict) else call(*arguments)
        except pk.PagedKVError as error:
            if type(error).__name__ != expected:
                raise AssertionError(f"{name}: got {type(error).__name__} ({error}), model {expected}") from error
        else:
            raise AssertionError(f"{name}: nothing was raised, model {expected}")
