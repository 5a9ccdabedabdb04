"""The tests of `tests/graphs/test_decode_loop.py` on the cuda device, on a CuPy that has no GPU."""

from tests.graphs.test_decode_loop import *  # noqa: F403 - every test of that file
