"""The ledgers against the model, at random; and bugs planted in the ledgers, each of which the walk must find.

A walk that finds nothing is evidence only if it would find something.  (C5-C13, C16; S30, S31)
"""

from __future__ import annotations

import pytest

from pagedkv.errors import PagedKVError
from tests.host.ledger_fuzz import LedgerFuzz, fuzz
from tests.host.planted import PLANTED, Planted

EVENTS = 10_000
EVENTS_LONG = 300_000
SEEDS_LONG = 10


def test_a_random_walk_agrees_with_the_model(seed: int) -> None:
    """10,000 events: every observable after every event, and every refusal without a trace.  (C5-C13, S30)"""
    counts = fuzz(seed, EVENTS)
    print(f"seed {seed}: {dict(counts.most_common())}")

    wanted = {
        "units", "crossings", "commit", "fail", "trim", "trimmed pages", "truncate", "ensure", "finish", "abort",
        "aborts in flight", "refusals", "stale leases", "StaleHandle", "UnitInFlight", "MisuseError",
        "EntitlementExceeded",
    }  # fmt: skip
    assert {name for name in wanted if counts[name] == 0} == set(), "a kind of event never happened"


@pytest.mark.long
@pytest.mark.parametrize("number", range(SEEDS_LONG))
def test_a_long_random_walk_agrees_with_the_model(seed: int, number: int) -> None:
    """300,000 events in all, over many seeds.  (C5-C13, S30, S31)"""
    print(f"seed {seed + 1 + number}")
    fuzz(seed + 1 + number, EVENTS_LONG // SEEDS_LONG)


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.what for planted in PLANTED])
def test_a_planted_bug_is_found(planted: Planted, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 10,000 events, by whatever it breaks first."""
    planted.plant(monkeypatch)

    with pytest.raises((AssertionError, PagedKVError, IndexError, ValueError)) as found:
        fuzz(seed, EVENTS)
    print(f"{planted.what}: {str(found.value).splitlines()[0]}")


def test_a_walk_is_repeated_by_its_seed(seed: int) -> None:
    """The same seed gives the same events, so a failure can be run again."""
    first, second = LedgerFuzz(seed), LedgerFuzz(seed)

    assert (first.run(200), list(first.history)) == (second.run(200), list(second.history))
