"""Every ledger that a test of this folder makes keeps every invariant of C16 until the end of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedkv.ledger.check import check_ledger
from tests.host.builders import BUILT


@pytest.fixture(autouse=True)
def ledgers_are_checked() -> Iterator[None]:
    """Check every ledger of `make_ledger` after the test; `leave_broken` takes one out."""
    BUILT.clear()
    yield
    for ledger in BUILT:
        check_ledger(ledger)
