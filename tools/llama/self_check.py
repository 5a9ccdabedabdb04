"""The start-up check: on this machine, a row's bits do not depend on the rows beside it.  (C14.6)

Matrix products of a library may give a row other bits among 1 row than among 16; `model.py` says how the model avoids
that.  The check proves it for the matrices and functions of the model, before a token is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.tools.llama.functions import Float32Array, gate_rows, multiply_blocks, padded_rows, rms_norm
from pagedkv.tools.llama.weights import LayerWeights, LlamaWeights

CHECKED_ROWS = (1, 16, 17, 128)


def check_row_independence(weights: LlamaWeights, *, multiply: Callable[..., None] = multiply_blocks) -> None:
    """Prove on this machine that a row's bits depend on neither the other rows nor the row count.

    128 random rows run together through the four matrices of layer 0, the output head, the sum of the norm and the
    `exp` of the gate: the last two are the functions that are not correctly rounded.  Rows alone (at place 0 of their
    block, zeros behind them), and the first 16 and 17 rows in reverse order, must give the same bits.  About 0.3 s.

    Args:
        weights: of the model to be run.
        multiply: the product under test, as `multiply_blocks`.
    Raises:
        MisuseError: some row differs.
    """
    layer: LayerWeights = weights.layers[0]
    generator = np.random.default_rng(0)
    for name, matrix in (
        ("qkv", layer.qkv), ("attention_output", layer.attention_output), ("gate_up", layer.gate_up),
        ("down", layer.down), ("output head", weights.embedding),
    ):  # fmt: skip
        rows = generator.standard_normal((max(CHECKED_ROWS), matrix.shape[1])).astype(np.float32)
        # The output head takes 14 ms a block, a matrix of a layer 0.1 to 0.7 ms.
        alone = range(17) if matrix is not weights.embedding else (0, 15)
        product = partial(_product, multiply, matrix)
        _check_function(f"the product with {name}", rows, matrix.shape[0], product, alone=alone)
    E, F = weights.config.hidden, weights.config.intermediate
    wide = 4.0 * generator.standard_normal((max(CHECKED_ROWS), 2 * F)).astype(np.float32)
    _check_function("the gate's exp", wide, F, gate_rows)
    norm, epsilon = weights.final_norm, np.float32(weights.config.rms_epsilon)
    _check_function("the norm's sum", wide[:, :E].copy(), E, lambda x, out: rms_norm(x, norm, epsilon, out))


def _product(multiply: Callable[..., None], matrix: Float32Array, x: Float32Array, out: Float32Array) -> None:
    multiply(x, matrix, out)


def _check_function(
    name: str, rows: Float32Array, columns: int, function: Callable[[Float32Array, Float32Array], None],
    alone: Iterable[int] = range(17),
) -> None:  # fmt: skip
    """Compare rows of `function(x, out)`, which writes so many columns, alone and in other orders."""

    def run(x: Float32Array) -> npt.NDArray[np.uint32]:
        padded = np.zeros((padded_rows(len(x)), rows.shape[1]), np.float32)
        padded[: len(x)] = x
        out = np.empty((len(padded), columns), np.float32)
        function(padded, out)
        return out[: len(x)].view(np.uint32)

    together = run(rows)  # 128 rows
    for index in alone:
        _refuse_difference(name, 1, index, run(rows[index : index + 1])[0], together[index])
    for count in CHECKED_ROWS[1:-1]:
        backward = run(rows[:count][::-1].copy())[::-1]
        for index in range(count):
            _refuse_difference(name, count, index, backward[index], together[index])


def _refuse_difference(
    name: str, count: int, index: int, got: npt.NDArray[np.uint32], expected: npt.NDArray[np.uint32]
) -> None:
    if not np.array_equal(got, expected):
        raise pk.MisuseError(
            "running the model on this machine's NumPy",
            expected=f"{name} to give row {index} the same bits among {count} rows as among {max(CHECKED_ROWS)}",
            got=f"{int(np.count_nonzero(got != expected))} of {got.size} elements different",
            remedy="use a NumPy build with OpenBLAS", clause="C14.6", row=index, rows=count,
        )  # fmt: skip
