"""The tests of `tests/test_store.py` on the cuda device, on a CuPy that has no GPU."""

from tests.test_store import *  # noqa: F403 - every test of that file
