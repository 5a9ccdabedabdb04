"""The tests of `tests/graphs/test_draft_units.py` on the cuda device, on a CuPy that has no GPU."""

from tests.graphs.test_draft_units import *  # noqa: F403 - every test of that file
