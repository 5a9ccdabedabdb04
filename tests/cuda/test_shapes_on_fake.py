"""The tests of `tests/graphs/test_shapes.py` on the cuda device, on a CuPy that has no GPU."""

from tests.graphs.test_shapes import *  # noqa: F403 - every test of that file
