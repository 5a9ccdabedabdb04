"""Edges of the combining ledgers that no other file owns."""

from __future__ import annotations

import pytest

import pagedkv as pk
from tests.host.builders import activate, make_ledgers, refused


def test_a_ragged_list_of_columns_is_refused() -> None:
    """C14.4: counts that form no array are misuse, not a NumPy error."""
    ledgers = make_ledgers()
    batch = ledgers.batch([activate(ledgers, 100), activate(ledgers, 100)])

    with refused(pk.MisuseError, "C14.4", ledgers, match="columns of a unit"):
        ledgers.begin_unit("unit", batch, {"main": [[1, 2], 3]})  # type: ignore[list-item]


def test_asking_about_a_pool_that_is_not_there_is_refused() -> None:
    """C3.3: an unknown pool is named, with the enabled ones."""
    with pytest.raises(pk.MisuseError, match="main"):
        make_ledgers().pool_spaces("side")


def test_prefill_widths_are_not_kept_by_a_batch() -> None:
    """A batch keeps prebuilt counts of decode widths only, so it does not grow with prompts."""
    ledgers = make_ledgers()
    batch = ledgers.batch([activate(ledgers, 120)])
    for columns in (1, 16, 17, 40):
        unit, _ = ledgers.begin_unit("unit", batch, {"main": columns})
        ledgers.commit_unit(unit)

    assert sorted(batch.uniform) == [1, 16]
