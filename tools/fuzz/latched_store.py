"""Whether a store that latched is such as the contract says: everything is refused, and the evidence answers.  (C12.4)

    refused     every public call that is in CALLS, whatever it is given
    answered    memory_summary, event_counts, evidence; close, also twice
    afterwards  closed: the same calls are misuse, the evidence stays

A store latches when a publication or a withdrawal breaks off (C11.2): the ledgers have moved on by then, and no table
has followed.
"""

from __future__ import annotations

from collections.abc import Callable

import pagedkv as pk
from pagedkv.tools.fuzz.ledger_model import LedgerModel

_SEQUENCE = pk.Sequence(0, 0, 1)
_CONTINUATION = pk.Continuation(0, 1)

ANSWERED = frozenset({"close", "memory_summary", "event_counts", "latch"})
"""Public methods of a store that answer when it is latched."""

CALLS: dict[str, Callable[[pk.Store], object]] = {
    "try_activate": lambda store: store.try_activate(prompt_tokens=1, output_tokens=0),
    "activate": lambda store: store.activate(prompt_tokens=1, output_tokens=0),
    "can_honour": lambda store: store.can_honour(pk.ActivationTarget(1, 0)),
    "explain": lambda store: store.explain(pk.ActivationTarget(1, 0)),
    "finish": lambda store: store.finish(_SEQUENCE),
    "abort": lambda store: store.abort(_SEQUENCE),
    "try_snapshot": lambda store: store.try_snapshot(_SEQUENCE),
    "snapshot": lambda store: store.snapshot(_SEQUENCE),
    "release": lambda store: store.release(_CONTINUATION),
    "protect": lambda store: store.protect(_CONTINUATION, 0),
    "attach_state": lambda store: store.attach_state(_CONTINUATION, None),
    "state_of": lambda store: store.state_of(_CONTINUATION),
    "continuations": lambda store: store.continuations(),
    "protected_tokens": lambda store: store.protected_tokens(_CONTINUATION),
    "batch": lambda store: store.batch([_SEQUENCE]),
    "begin_unit": lambda store: store.begin_unit(None),  # type: ignore[arg-type]
    "submit": lambda store: store.submit(None),  # type: ignore[arg-type]
    "poll": lambda store: store.poll(),
    "wait": lambda store: store.wait(None),  # type: ignore[arg-type]
    "commit": lambda store: store.commit(None),  # type: ignore[arg-type]
    "fail": lambda store: store.fail(None),  # type: ignore[arg-type]
    "launch_graph": lambda store: store.launch_graph(None),  # type: ignore[arg-type]
    "graph_buffer": lambda store: store.graph_buffer((1,), "int32"),
    "begin_round": lambda store: store.begin_round(None),  # type: ignore[arg-type]
    "covered_columns": lambda store: store.covered_columns(None),  # type: ignore[arg-type]
    "ensure_mapped_to_tokens": lambda store: store.ensure_mapped_to_tokens(_SEQUENCE, 0),
    "trim": lambda store: store.trim(None),  # type: ignore[arg-type]
    "truncate": lambda store: store.truncate(_SEQUENCE, 0),
    "committed_tokens": lambda store: store.committed_tokens(_SEQUENCE),
    "budget_tokens": lambda store: store.budget_tokens(_SEQUENCE),
    "page_ids": lambda store: store.page_ids(_SEQUENCE),
    "check": lambda store: store.check(),
    "inspect": lambda store: store.inspect(),
    "observe": lambda store: store.observe(print),
}
"""Every other public method, by name.  What they are given is wrong too: the latch is asked first."""


def require_latched(store: pk.Store, model: LedgerModel) -> None:
    """Demand that a store is latched and tells what the model says, and close it; AssertionError says what differs."""
    if store.evidence is None:
        raise AssertionError("a change of tables broke off, and there is no evidence of it")
    _require_refused(store, "StoreLatched")
    for pool, told in store.memory_summary().items():
        counts = tuple(told[f"{what}_pages"] for what in ("allocated", "reserved", "available"))
        right = (model.allocated(pool), model.reserved(pool), model.available(pool))
        if counts != right:
            raise AssertionError(f"pool {pool} when latched: (allocated, reserved, available) {counts}, model {right}")
    if store.event_counts().keys() != model.pools.keys():
        raise AssertionError(f"a latched store counts events of {list(store.event_counts())}")
    evidence = store.evidence
    store.close()
    store.close()
    if store.evidence is not evidence:
        raise AssertionError(f"the evidence was {evidence!r} and is {store.evidence!r} after close")
    _require_refused(store, "MisuseError")


def _require_refused(store: pk.Store, expected: str) -> None:
    for name, call in CALLS.items():
        try:
            call(store)
        except pk.PagedKVError as error:
            if type(error).__name__ != expected:
                raise AssertionError(f"{name}: got {type(error).__name__} ({error}), model {expected}") from error
        else:
            raise AssertionError(f"{name}: nothing was raised, model {expected}")
