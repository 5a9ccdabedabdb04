"""The tests of `tests/test_tour.py` on the cuda device, on a CuPy that has no GPU."""

from tests.test_tour import *  # noqa: F403 - every test of that file
