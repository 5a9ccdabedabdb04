"""The model runner's product: right, in one order, and each row by itself.  (C14.6)"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.ops.modules import linear_module
from pagedkv.tools.llama.model import KernelLinear
from tests.checkout import ROOT
from tests.kernels.arrays import Rng, to_device, to_host
from tests.kernels.cpu_helpers import cpu_device

Float32Array = npt.NDArray[np.float32]


class StreamUnit:
    """The one verb of a unit that a linear function uses."""

    def __init__(self, device: pk.Device) -> None:
        self.stream = device.stream()

    def launch(self, kernel: pk.Kernel, grid: object, block: object, arguments: object) -> None:
        kernel.launch(grid, block, arguments, self.stream)  # type: ignore[arg-type]


def product(device: pk.Device, x: Float32Array, weight: Float32Array) -> Float32Array:
    """Run the kernel on host arrays."""
    unit = StreamUnit(device)
    out = device.empty((len(x), len(weight)), np.float32)
    x_device, weight_device = (to_device(device, unit.stream, values) for values in (x, weight))
    KernelLinear(device)(unit, x_device, weight_device, out)  # type: ignore[arg-type]
    return to_host(device, unit.stream, out)


def reference(x: Float32Array, weight: Float32Array) -> Float32Array:
    """The order of cuda_src/kernels/linear.cu, written out: 32 running sums, then the tree 16, 8, 4, 2, 1.

    A fused multiply-add of float32 numbers is one rounding of a sum that long double holds exactly enough: the product
    has 48 bits of 64.
    """
    rows, depth = x.shape
    padded = -(-depth // 32) * 32
    wide_x, wide_w = (np.zeros((len(a), padded), np.longdouble) for a in (x, weight))
    wide_x[:, :depth], wide_w[:, :depth] = x, weight
    sums = np.zeros((rows, len(weight), 32), np.float32)
    for begin in range(0, padded, 32):
        count = min(32, depth - begin)
        terms = wide_x[:, None, begin : begin + count] * wide_w[None, :, begin : begin + count]
        sums[..., :count] = (sums[..., :count].astype(np.longdouble) + terms).astype(np.float32)
    for stride in (16, 8, 4, 2, 1):
        sums = sums + sums[..., np.arange(32) ^ stride]
    return np.ascontiguousarray(sums[..., 0])


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 1, 1), (1, 5, 31), (16, 4, 32), (17, 3, 33), (33, 9, 70), (2, 130, 192)]
)
def test_every_element_is_one_fixed_sum(rng: Rng, rows: int, columns: int, depth: int) -> None:
    """Bit for bit; rows, columns and depth on both sides of a block and a warp."""
    x, weight = (rng.standard_normal((n, depth)).astype(np.float32) for n in (rows, columns))
    with cpu_device() as device:
        assert np.array_equal(reference(x, weight), product(device, x, weight))


def test_subnormals_are_kept() -> None:
    """Neither device flushes them."""
    x = np.full((1, 32), 2.0**-75, np.float32)
    weight = np.full((1, 32), 2.0**-70, np.float32)
    with cpu_device() as device:
        assert product(device, x, weight)[0, 0] == np.float32(2.0**-140)


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(rng: Rng, order: str) -> None:
    """C14.6: whatever the row count and the place, in every order of threads."""
    x, weight = (rng.standard_normal((n, 100)).astype(np.float32) for n in (40, 7))
    with cpu_device(order, seed=3) as device:
        together = product(device, x, weight)
        for count in (1, 16, 17):
            assert np.array_equal(together[20 : 20 + count], product(device, x[20 : 20 + count], weight)), count


def test_a_product_that_does_not_fit_is_refused() -> None:
    """C14.4: shapes, dtype, layout, nothing to do."""
    with cpu_device() as device:
        unit, linear = StreamUnit(device), KernelLinear(device)
        good = [device.zeros(shape, np.float32) for shape in ((4, 32), (8, 32), (4, 8))]
        for place, wrong in (
            (0, device.zeros((4, 31), np.float32)), (1, device.zeros((32, 8), np.float32)),
            (2, device.zeros((8, 4), np.float32)), (0, device.zeros((4, 32), np.float64)),
            (0, device.zeros((4, 64), np.float32)[:, ::2]), (1, device.zeros((0, 32), np.float32)),
        ):
            arguments = [*good[:place], wrong, *good[place + 1 :]]
            with pytest.raises(pk.MisuseError, match="product of the model"):
                linear(unit, *arguments)  # type: ignore[arg-type]


def test_the_runner_and_the_kernel_agree_on_the_module_and_its_tiles() -> None:
    """Written twice, because tools use public names only."""
    text = (ROOT / "cuda_src" / "kernels/linear.cu").read_text(encoding="utf-8")
    sizes = {name: int(value) for name, value in re.findall(r"constexpr int (kLinear\w+) = (\d+);", text)}

    assert linear_module() == KernelLinear.SPEC
    assert linear_module() in pk.shipped_modules()
    assert sizes == {"kLinearRows": KernelLinear.ROWS, "kLinearColumns": KernelLinear.COLUMNS}
