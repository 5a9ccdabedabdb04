"""A Llama model as a caller of the cache: one `enqueue`, written once, captured per shape.  (C14, C15)

The model knows no page, no table and no frontier.  It turns tokens into q, k and v, calls `unit.attend`, and turns the
result into next tokens; everything else is `unit.call` of the functions in `functions.py` on arrays with fixed
addresses.

**Same bits at every batch size.**  Attention is invariant by contract (C14.6); the rest must be too, or "batched
equals alone" would fail one layer up.  The matrix product of a library is not: NumPy's OpenBLAS gives a row other bits
among 1 to 15 rows than among 16.  So every product here has *exactly* `BLOCK_ROWS` = 16 rows of the same shape and
strides, in prefill, decode and verify alike; a unit of B * W columns is padded with zero rows to a multiple of 16.

The product is transposed, `weight (N, K) @ block.T (K, 16)`, so that the 16 rows are the vector lanes of the library's
inner kernel, which are 4, 8 or 16: every row takes the same path.  In `block (16, K) @ weight.T` the rows are a loop of
12 + 4 when the library has one thread, and the same row had other bits at place 6 than at place 0.  Tried with 1 to 16
threads and eight processor types: the transposed form never differed, and costs 8 ms of 57 a decode step (two cores).
`check_row_independence` proves it at start-up, on this machine.  Different thread counts may still give different
bits: one process has one thread count.

On `cuda` the same functions run on CuPy arrays.  Only the product differs, because CuPy's products cannot be captured:
`KernelLinear` is a kernel of ours with independent rows.  It runs on `cpu` too, slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.graphs import SAMPLING_WORDS, Unit, choose_largest, choose_tokens
from pagedkv.tools.llama import functions
from pagedkv.tools.llama.functions import BLOCK_ROWS, Float32Array
from pagedkv.tools.llama.self_check import check_row_independence
from pagedkv.tools.llama.weights import LlamaWeights, map_tensors

Array = Any  # numpy on cpu, cupy on cuda
Linear = Callable[[Unit, Array, Array, Array], None]


def numpy_linear(unit: Unit, x: Array, weight: Array, out: Array) -> None:
    """Enqueue out = x @ weight.T by NumPy, in blocks of 16 rows.

    Args:
        x: (R, K) float32, C-contiguous, R a multiple of 16.
        weight: (N, K) float32, C-contiguous.
        out: (R, N) float32, C-contiguous.
    """
    unit.call(functions.multiply_blocks, x, weight, out)


class KernelLinear:
    """Enqueues out = x @ weight.T by a kernel of ours: any row count, on any device, each row by itself.  (C14.6)"""

    SPEC = pk.ModuleSpec("linear", sources=("kernels/linear.cu",))
    ROWS = 16  # rows and columns of a block, in cuda_src/kernels/linear.cu; a test compares them
    COLUMNS = 4

    def __init__(self, device: pk.Device) -> None:
        self._kernel = device.load(self.SPEC).kernel("linear_rows")

    def __call__(self, unit: Unit, x: Array, weight: Array, out: Array) -> None:
        """Enqueue one product: x (R, K), weight (N, K), out (R, N), all float32 and C-contiguous.

        Raises:
            MisuseError: another dtype, layout or shape.
        """
        rows, depth = x.shape
        columns = weight.shape[0]
        if weight.shape != (columns, depth) or out.shape != (rows, columns) or not rows * columns * depth:
            raise pk.MisuseError(
                "a product of the model", expected="x (R, K), weight (N, K) and out (R, N), none empty",
                got=f"{x.shape}, {weight.shape} and {out.shape}",
                remedy="pass the weight as it is stored, one row per output", clause="C14.4",
            )  # fmt: skip
        for name, array in (("x", x), ("weight", weight), ("out", out)):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise pk.MisuseError(
                    f"{name} of a product of the model", expected="C-contiguous float32",
                    got=f"{array.dtype} with strides {array.strides}", remedy="pass whole rows of float32",
                    clause="C14.4",
                )  # fmt: skip
        grid = (-(-columns // self.COLUMNS), -(-rows // self.ROWS), 1)
        sizes = (np.int32(rows), np.int32(columns), np.int32(depth))
        unit.launch(self._kernel, grid, (32 * self.COLUMNS, 1, 1), (x, weight, out, *sizes))


def linear_for(device: pk.Device) -> Linear:
    """Return the linear function of a device: NumPy's on `cpu`, our kernel where library products are refused."""
    return numpy_linear if device.name == "cpu" else KernelLinear(device)


class LlamaModel:
    """Llama on one device: implements the `Model` protocol of `pagedkv.graphs`.

    Greedy; in a store of three `caller_words` or more the first three of a row are those of a `Sampling`.

    Immutable after construction, except the logits.  One model may serve several stores of its device.

    Args:
        weights: from `load_model`; they are copied to the device.
        device: where the units will run.
        max_context: positions of the rotation tables, in tokens; at least the store's.
        linear: enqueues a product of 16-row blocks; NumPy's by default, which runs on `cpu` only (`linear_for`).
        keep_logits: compute the logits of every column of every unit and keep them readable through `logits`;
            for quality measurements, 3 MB a block.

    Raises:
        MisuseError: this machine's matrix products depend on the row count even in blocks of 16.
    """

    def __init__(
        self, weights: LlamaWeights, device: pk.Device, *, max_context: int, linear: Linear = numpy_linear,
        keep_logits: bool = False,
    ) -> None:  # fmt: skip
        self.config = weights.config
        self.geometry = self.config.geometry
        self.max_context = max_context
        stream = device.stream()

        def place(values: Float32Array) -> Array:
            placed = device.empty(values.shape, values.dtype)
            device.copy(placed, values, stream)
            return placed

        self._weights = map_tensors(weights, place)
        self._linear = linear
        self._checks_tokens = device.name == "cpu"  # a captured function cannot look at a value and raise
        self._cosines, self._sines = (place(table) for table in functions.rotation_tables(self.config, max_context))
        stream.synchronize()
        self._logits: dict[tuple[str, int, int], Array] | None = {} if keep_logits else None
        if linear is numpy_linear:
            check_row_independence(self._weights)

    def logits(self, unit: Unit) -> Array:
        """Return the logits of a unit's columns: (B, W, vocabulary) float32, rewritten by every replay.

        Raises:
            MisuseError: the model was built without keep_logits, or has not seen this shape.
        """
        B, W = unit.tokens.shape
        logits = None if self._logits is None else self._logits.get((unit.route, B, W))
        if logits is None:
            raise pk.MisuseError(
                f"logits of a {unit.route} unit, B = {B}, W = {W}",
                expected="a model with keep_logits=True that has run this shape", got="no such buffer",
                remedy="build the model with keep_logits=True and run the unit first", clause="C1.2",
            )  # fmt: skip
        return logits[: B * W].reshape(B, W, -1)

    def enqueue(self, unit: Unit) -> None:
        """Enqueue one forward pass of the unit's live columns and the choice of a token after them."""
        config, weights, linear = self.config, self._weights, self._linear
        B, W = unit.tokens.shape
        E, F, D = config.hidden, config.intermediate, config.head_dim
        R = functions.padded_rows(B * W)
        residual, normed, projected = (unit.empty((R, E), np.float32) for _ in range(3))
        qkv = unit.empty((R, config.query_columns + 2 * config.kv_columns), np.float32)
        q, out = (unit.empty((B, W, config.query_heads, D), np.uint16) for _ in range(2))
        k, v = (unit.empty((B, W, config.kv_heads, D), np.uint16) for _ in range(2))
        column_cosines, column_sines = (unit.empty((B, W, D), np.float32) for _ in range(2))
        attended = unit.empty((R, config.query_columns), np.float32)
        gate_up = unit.empty((R, 2 * F), np.float32)
        gated = unit.empty((R, F), np.float32)
        epsilon = np.float32(config.rms_epsilon)

        positions = (unit.first_positions, unit.valid_columns)
        unit.call(functions.gather_rotations, *positions, self._cosines, self._sines, column_cosines, column_sines)
        if self._checks_tokens:
            unit.call(functions.check_tokens, unit.tokens, unit.valid_columns, np.int32(config.vocabulary))
        unit.call(functions.embed_tokens, unit.tokens, unit.valid_columns, weights.embedding, residual)
        for index, layer in enumerate(weights.layers):
            unit.call(functions.rms_norm, residual, layer.attention_norm, epsilon, normed)
            linear(unit, normed, layer.qkv, qkv)
            unit.call(functions.rotate_and_round, qkv, column_cosines, column_sines, q, k, v)
            unit.attend(index, q, k, v, out)
            unit.call(functions.widen_rows, out, attended)
            linear(unit, attended, layer.attention_output, projected)
            unit.call(functions.add_rows, residual, projected)
            unit.call(functions.rms_norm, residual, layer.feed_forward_norm, epsilon, normed)
            linear(unit, normed, layer.gate_up, gate_up)
            unit.call(functions.gate_rows, gate_up, gated)
            linear(unit, gated, layer.down, projected)
            unit.call(functions.add_rows, residual, projected)
        self._enqueue_head(unit, residual)

    def _enqueue_head(self, unit: Unit, residual: Array) -> None:
        """Enqueue final norm, logits and choice, for every column or (prefill) the last live one of each row."""
        B, W = unit.tokens.shape
        V, E = self.config.vocabulary, self.config.hidden
        last_only = unit.route == "prefill" and self._logits is None
        rows = B if last_only else B * W
        R = functions.padded_rows(rows)
        chosen_rows = residual
        if last_only:
            chosen_rows = unit.empty((R, E), np.float32)
            unit.call(functions.gather_last_rows, residual, unit.valid_columns, np.int32(W), chosen_rows)
        normed, epsilon = unit.empty((R, E), np.float32), np.float32(self.config.rms_epsilon)
        unit.call(functions.rms_norm, chosen_rows, self._weights.final_norm, epsilon, normed)
        choice = unit.empty((R,), np.int32)
        samples = unit.words.shape[1] >= SAMPLING_WORDS
        if samples:
            row_words, row_positions = unit.empty((R, SAMPLING_WORDS), np.int32), unit.empty((R,), np.int32)
            selectors = (unit.words, unit.first_positions, unit.valid_columns)
            if last_only:
                unit.call(functions.place_last_sampling, *selectors, row_words, row_positions)
            else:
                unit.call(functions.place_sampling, *selectors, np.int32(W), row_words, row_positions)
        logits = unit.empty((R if self._logits is not None else BLOCK_ROWS, V), np.float32)
        if self._logits is not None:
            self._logits[unit.route, B, W] = logits
        for begin in range(0, R, BLOCK_ROWS):
            block = slice(begin, begin + BLOCK_ROWS)
            block_logits = logits[block] if self._logits is not None else logits
            self._linear(unit, normed[block], self._weights.embedding, block_logits)
            if samples:
                unit.call(choose_tokens, block_logits, row_words[block], row_positions[block], choice[block])
            else:
                unit.call(choose_largest, block_logits, choice[block])
        store = functions.store_last_choices if last_only else functions.store_choices
        unit.call(store, choice, unit.valid_columns, unit.next_tokens)
