"""A Llama model as a caller of the cache: one `enqueue`, written once, captured per shape.

The runner knows no page, no table and no frontier.  It turns tokens into q, k and v, hands them to `unit.attend`,
and turns the answer into next tokens; all else is `unit.call` on arrays whose addresses do not change.  (C14, C15)

**Same bits at every batch size.**  Attention is invariant by contract (C14.6); the rest must be too, or "batched
equals alone" would fail one layer up.  A library's matrix product is not: NumPy's OpenBLAS gives a row other bits
among 1 to 15 rows than among 16.  So every product here has *exactly* `BLOCK_ROWS` = 16 rows of the same shape and
strides, in prefill, decode and verify alike; a unit of B * W columns is padded with zero rows to a multiple of 16.

The product is taken transposed, `weight (N, K) @ block.T (K, 16)`, so that the 16 rows are the vector lanes of the
library's inner kernel, which are 4, 8 or 16: every row takes the same path.  The other way round,
`block (16, K) @ weight.T`, the rows are a loop of 12 + 4 when the library has one thread, and the same row had other
bits at place 6 than at place 0.  Tried with 1 to 16 threads and eight processor types: the transposed form never
differed, and costs 8 ms of 57 a decode step (two cores).  `check_row_independence` proves it at start-up, on this
machine.  Different thread counts may still give different bits: one process has one thread count.

All other functions are element by element in correctly rounded operations (+ - * / sqrt), except two that the same
check covers: the sum of a norm (NumPy's pairwise order depends on the row length only) and `exp`.

    row buffers, B = 3, W = 5:  | 15 columns, row-major (b, j) | 1 zero row |     16 rows, R
    q, k, v, out             :  (3, 5, heads, D) BF16 as uint16, exactly the columns

Functions passed to `unit.call` are module-level and take all they use as arguments.  On `cuda` the same functions
run on CuPy arrays (so what they make from a shape is made `like=` an argument, and nothing is read back), and only the
linear function differs, because CuPy's products cannot be captured: `KernelLinear` is a kernel of ours whose rows are
independent by construction.  It runs on `cpu` too, slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.tools.model_weights import LayerWeights, LlamaConfig, LlamaWeights, map_tensors

Array = Any  # numpy on cpu, cupy on cuda
Bits = npt.NDArray[np.uint16]
Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

BLOCK_ROWS = 16  # rows of every matrix product
NO_TOKEN = -1  # next_tokens where no live column asks for one


class RunnerUnit(Protocol):
    """What the runner uses of a unit: `pagedkv.graphs.Unit` has it, and so has a stand-in of a test."""

    @property
    def route(self) -> str:
        """``"decode"`` or ``"prefill"``."""

    @property
    def tokens(self) -> Array:
        """(B, W) int32, read; only live columns hold a token."""

    @property
    def first_positions(self) -> Array:
        """(B,) int32, read; column j of row b is at first + j."""

    @property
    def valid_columns(self) -> Array:
        """(B,) int32, read; live columns of each row, a prefix."""

    @property
    def next_tokens(self) -> Array:
        """(B, W) int32, written."""

    def attend(self, layer: int, q: Array, k: Array, v: Array, out: Array) -> None:
        """Append k and v, then write causal attention of q to out."""

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run `function(*arguments)` in stream order, at every replay."""

    def launch(
        self, kernel: pk.Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any]
    ) -> None:
        """Launch a kernel in stream order, at every replay."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a buffer of this unit's shape; the same one at the same place of every enqueue."""


class RunnerDevice(Protocol):
    """What the runner uses of a device, to place its weights; `pk.Device` has it."""

    @property
    def name(self) -> str:
        """``"cpu"`` or ``"cuda"``."""

    def stream(self) -> Any:
        """Make a stream."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Allocate device memory."""

    def copy(self, destination: Array, source: Array, stream: Any) -> None:
        """Submit a copy."""


Linear = Callable[[RunnerUnit, Array, Array, Array], None]


def numpy_linear(unit: RunnerUnit, x: Array, weight: Array, out: Array) -> None:
    """Enqueue out = x @ weight.T by NumPy, in blocks of 16 rows.

    Args:
        unit: the unit under capture.
        x: (R, K) float32, C-contiguous, R a multiple of 16.
        weight: (N, K) float32, C-contiguous.
        out: (R, N) float32, C-contiguous.
    """
    unit.call(multiply_blocks, x, weight, out)


class KernelLinear:
    """Enqueues out = x @ weight.T by a kernel of ours: any row count, on any device, each row by itself.  (C14.6)

    Args:
        device: where the units will run; compiles the kernel.
    """

    SPEC = pk.ModuleSpec("linear", sources=("kernels/linear.cu",))
    ROWS = 16  # rows and columns of a block, in cuda_src/kernels/linear.cu; a test compares them
    COLUMNS = 4

    def __init__(self, device: pk.Device) -> None:
        self._kernel = device.load(self.SPEC).kernel("linear_rows")

    def __call__(self, unit: RunnerUnit, x: Array, weight: Array, out: Array) -> None:
        """Enqueue one product: x (R, K), weight (N, K), out (R, N), all float32 and C-contiguous.

        Raises:
            MisuseError: another dtype, layout or shape.
        """
        rows, depth = x.shape
        columns = weight.shape[0]
        if weight.shape != (columns, depth) or out.shape != (rows, columns) or not rows * columns * depth:
            raise pk.MisuseError(
                "a product of the model",
                expected="x (R, K), weight (N, K) and out (R, N), none empty",
                got=f"{x.shape}, {weight.shape} and {out.shape}",
                remedy="pass the weight as it is stored, one row per output",
                clause="C14.4",
            )
        for name, array in (("x", x), ("weight", weight), ("out", out)):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise pk.MisuseError(
                    f"{name} of a product of the model",
                    expected="C-contiguous float32",
                    got=f"{array.dtype} with strides {array.strides}",
                    remedy="pass whole rows of float32",
                    clause="C14.4",
                )
        grid = (-(-columns // self.COLUMNS), -(-rows // self.ROWS), 1)
        sizes = (np.int32(rows), np.int32(columns), np.int32(depth))
        unit.launch(self._kernel, grid, (32 * self.COLUMNS, 1, 1), (x, weight, out, *sizes))


def linear_for(device: pk.Device) -> Linear:
    """Return the linear function of a device: NumPy's on `cpu`, our kernel where library products are refused."""
    return numpy_linear if device.name == "cpu" else KernelLinear(device)


class LlamaModel:
    """Greedy Llama on one device: implements the `Model` protocol of `pagedkv.graphs`.

    Immutable after construction, apart from `logits` when they are kept.  One model may serve several stores of its
    device.

    Attributes:
        config: the model's shape.
        geometry: the same, as a store wants it.
        max_context: positions the rotation tables cover, in tokens; at least the store's.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        device: RunnerDevice,
        *,
        max_context: int,
        linear: Linear = numpy_linear,
        keep_logits: bool = False,
    ) -> None:
        """Copy weights and tables to the device and check the machine.

        Args:
            weights: from `load_model`.
            device: where the units will run; what `unit.call` takes lies in its memory.
            max_context: positions to prepare, in tokens; at least 1.
            linear: enqueues a product of 16-row blocks; NumPy's by default, which runs on `cpu` only (`linear_for`).
            keep_logits: compute the logits of every column of every unit and keep them readable through `logits`;
                for quality measurements, 3 MB a block.
        Raises:
            MisuseError: this machine's matrix products depend on the row count even in blocks of 16.
        """
        self.config = weights.config
        self.geometry = pk.KVGeometry(
            layers=self.config.layers,
            query_heads=self.config.query_heads,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
        )
        self.max_context = max_context
        stream = device.stream()

        def place(values: Float32Array) -> Array:
            placed = device.empty(values.shape, values.dtype)
            device.copy(placed, values, stream)
            return placed

        self._weights = map_tensors(weights, place)
        self._linear = linear
        self._checks_tokens = device.name == "cpu"  # a captured function cannot look at a value and raise
        self._cosines, self._sines = (place(table) for table in rotation_tables(self.config, max_context))
        stream.synchronize()
        self._logits: dict[tuple[str, int, int], Array] | None = {} if keep_logits else None
        if linear is numpy_linear:
            check_row_independence(self._weights)

    def logits(self, unit: RunnerUnit) -> Array:
        """Return the logits of a unit's columns: (B, W, vocabulary) float32, rewritten by every replay.

        Raises:
            MisuseError: the model was built without keep_logits, or has not seen this shape.
        """
        B, W = unit.tokens.shape
        kept = None if self._logits is None else self._logits.get((unit.route, B, W))
        if kept is None:
            raise pk.MisuseError(
                f"logits of a {unit.route} unit, B = {B}, W = {W}",
                expected="a model with keep_logits=True that has run this shape",
                got="no such buffer",
                remedy="build the model with keep_logits=True and run the unit first",
                clause="C1.2",
            )
        return kept[: B * W].reshape(B, W, -1)

    def enqueue(self, unit: RunnerUnit) -> None:
        """Enqueue one forward pass of the unit's live columns and the greedy choice after them."""
        config, weights, linear = self.config, self._weights, self._linear
        B, W = unit.tokens.shape
        E, F, D = config.hidden, config.intermediate, config.head_dim
        R = padded_rows(B * W)
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
        unit.call(gather_rotations, *positions, self._cosines, self._sines, column_cosines, column_sines)
        if self._checks_tokens:
            unit.call(check_tokens, unit.tokens, unit.valid_columns, np.int32(config.vocabulary))
        unit.call(embed_tokens, unit.tokens, unit.valid_columns, weights.embedding, residual)
        for index, layer in enumerate(weights.layers):
            unit.call(rms_norm, residual, layer.attention_norm, epsilon, normed)
            linear(unit, normed, layer.qkv, qkv)
            unit.call(rotate_and_round, qkv, column_cosines, column_sines, q, k, v)
            unit.attend(index, q, k, v, out)
            unit.call(widen_rows, out, attended)
            linear(unit, attended, layer.attention_output, projected)
            unit.call(add_rows, residual, projected)
            unit.call(rms_norm, residual, layer.feed_forward_norm, epsilon, normed)
            linear(unit, normed, layer.gate_up, gate_up)
            unit.call(gate_rows, gate_up, gated)
            linear(unit, gated, layer.down, projected)
            unit.call(add_rows, residual, projected)
        self._enqueue_head(unit, residual)

    def _enqueue_head(self, unit: RunnerUnit, residual: Array) -> None:
        """Enqueue final norm, logits and argmax, for every column or (prefill) the last live one of each row."""
        B, W = unit.tokens.shape
        V, E = self.config.vocabulary, self.config.hidden
        last_only = unit.route == "prefill" and self._logits is None
        rows = B if last_only else B * W
        R = padded_rows(rows)
        chosen_rows = residual
        if last_only:
            chosen_rows = unit.empty((R, E), np.float32)
            unit.call(gather_last_rows, residual, unit.valid_columns, np.int32(W), chosen_rows)
        normed = unit.empty((R, E), np.float32)
        unit.call(rms_norm, chosen_rows, self._weights.final_norm, np.float32(self.config.rms_epsilon), normed)
        choice = unit.empty((R,), np.int32)
        logits = unit.empty((R if self._logits is not None else BLOCK_ROWS, V), np.float32)
        if self._logits is not None:
            self._logits[unit.route, B, W] = logits
        for begin in range(0, R, BLOCK_ROWS):
            block = slice(begin, begin + BLOCK_ROWS)
            block_logits = logits[block] if self._logits is not None else logits
            self._linear(unit, normed[block], self._weights.embedding, block_logits)
            unit.call(choose_largest, block_logits, choice[block])
        store = store_last_choices if last_only else store_choices
        unit.call(store, choice, unit.valid_columns, unit.next_tokens)


# --- sizes and tables ------------------------------------------------------------------------------------------------


def padded_rows(rows: int) -> int:
    """Return `rows` rounded up to whole blocks of 16."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def rotation_tables(config: LlamaConfig, max_context: int) -> tuple[Float32Array, Float32Array]:
    """Return the two factors of every rotation, each (max_context, head_dim) float32.

    Pair i of position p turns by a = p * base**(-2i / D): (e, o) becomes (e cos a - o sin a, o cos a + e sin a).
    With the pair's halves exchanged that is x * c + exchanged * s, where c = (cos a, cos a) and s = (-sin a, sin a)
    are what is returned.
    Angles are taken in float64: at position 8191 float32 would lose four decimal digits of them.
    """
    pairs = np.arange(config.head_dim // 2, dtype=np.float64)
    angles = np.arange(max_context, dtype=np.float64)[:, None] * config.rope_base ** (-2.0 * pairs / config.head_dim)
    sines = np.stack([-np.sin(angles), np.sin(angles)], axis=-1).reshape(max_context, config.head_dim)
    return np.repeat(np.cos(angles), 2, axis=-1).astype(np.float32), sines.astype(np.float32)


def bf16_bits(values: Float32Array) -> Bits:
    """Return float32 values rounded to BF16 (nearest, ties to even) as uint16; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    np.copyto(rounded, np.uint32(0x7FC0), where=np.isnan(values))  # the sum may have carried a NaN over to 0
    return rounded.astype(np.uint16)


# --- functions for unit.call: every row by itself --------------------------------------------------------------------


@pk.cpu_only
def multiply_blocks(x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
    """Write x @ weight.T to out, 16 rows at a time."""
    product = np.empty((weight.shape[0], BLOCK_ROWS), np.float32)
    for begin in range(0, x.shape[0], BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        np.matmul(weight, x[block].T, out=product)
        out[block] = product.T


def live_columns(valid_columns: Int32Array, width: int) -> npt.NDArray[np.bool_]:
    """Return which columns are live: (B, W), a prefix of each row."""
    columns = np.arange(width, dtype=np.int32, like=valid_columns)
    return np.less(columns[None, :], valid_columns[:, None])


def check_tokens(tokens: Int32Array, valid_columns: Int32Array, vocabulary: np.int32) -> None:
    """Refuse a live column whose token is none.

    Raises:
        MisuseError: a negative id.
    """
    ids = np.where(live_columns(valid_columns, tokens.shape[1]), tokens, 0)
    if ids.min() < 0:
        raise pk.MisuseError(
            "a forward pass",
            expected=f"token ids in [0, {vocabulary})",
            got=int(ids.min()),
            remedy="mark columns without a token as inert through valid_columns",
            clause="C14.4",
        )


def embed_tokens(
    tokens: Int32Array, valid_columns: Int32Array, embedding: Float32Array, residual: Float32Array
) -> None:
    """Write the embedding of each live column; inert columns and padding become zero rows."""
    live = live_columns(valid_columns, tokens.shape[1])
    ids = np.where(live, tokens, 0).reshape(-1)
    residual[: ids.size] = np.where(live.reshape(-1, 1), embedding[ids], np.float32(0.0))
    residual[ids.size :] = 0.0


def rms_norm(x: Float32Array, weight: Float32Array, epsilon: np.float32, out: Float32Array) -> None:
    """Write x / sqrt(mean(x * x) + epsilon) * weight, row by row."""
    mean = np.add.reduce(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    np.divide(x, np.sqrt(mean + epsilon), out=out)
    np.multiply(out, weight, out=out)


def gather_rotations(
    first_positions: Int32Array,
    valid_columns: Int32Array,
    cosines: Float32Array,
    sines: Float32Array,
    column_cosines: Float32Array,
    column_sines: Float32Array,
) -> None:
    """Write the rotation of every column; column j of row b is at position first + j.

    Args:
        first_positions, valid_columns: (B,) int32; an inert column may lie beyond max_context, and gets position 0.
        cosines, sines: (max_context, D) float32, from `rotation_tables`.
        column_cosines, column_sines: (B, W, D) float32, written.
    """
    columns = np.arange(column_cosines.shape[1], dtype=np.int32, like=first_positions)
    live = live_columns(valid_columns, columns.size)
    positions = np.where(live, first_positions[:, None] + columns[None, :], 0)
    column_cosines[...] = cosines[positions]
    column_sines[...] = sines[positions]


def rotate_and_round(
    qkv: Float32Array, column_cosines: Float32Array, column_sines: Float32Array, q: Bits, k: Bits, v: Bits
) -> None:
    """Rotate query and key heads by their position and round all three to BF16.

    Args:
        qkv: (R, (Hq + 2 Hkv) * D) float32: query, key, value of each column.
        column_cosines, column_sines: (B, W, D) float32.
        q: (B, W, Hq, D) BF16 bits, written.
        k, v: (B, W, Hkv, D) BF16 bits, written.
    """
    B, W, query_heads, D = q.shape
    rotating = query_heads + k.shape[2]
    heads = qkv[: B * W].reshape(B, W, rotating + v.shape[2], D)
    plain = heads[:, :, :rotating]
    exchanged = np.empty_like(plain)
    exchanged[..., 0::2] = plain[..., 1::2]
    exchanged[..., 1::2] = plain[..., 0::2]
    exchanged *= column_sines[:, :, None, :]
    rotated = plain * column_cosines[:, :, None, :]
    rotated += exchanged
    bits = bf16_bits(rotated)
    q[...] = bits[:, :, :query_heads]
    k[...] = bits[:, :, query_heads:]
    v[...] = bf16_bits(heads[:, :, rotating:])


def widen_rows(bits: Bits, out: Float32Array) -> None:
    """Write (B, W, heads, D) BF16 bits as (R, heads * D) float32; padding rows become zero."""
    rows = bits.shape[0] * bits.shape[1]
    out.view(np.uint32)[:rows] = np.left_shift(bits.reshape(rows, -1), np.uint32(16), dtype=np.uint32)
    out[rows:] = 0.0


def add_rows(residual: Float32Array, update: Float32Array) -> None:
    """Add an update to the residual stream."""
    np.add(residual, update, out=residual)


def gate_rows(gate_up: Float32Array, out: Float32Array) -> None:
    """Write silu(gate) * up, silu(g) = g / (1 + exp(-g)); gate is the left half of each row."""
    F = out.shape[1]
    gate, up = gate_up[:, :F], gate_up[:, F:]
    with np.errstate(over="ignore"):  # exp(-g) of a very negative g is infinite, and g / inf the right limit, -0
        np.exp(-gate, out=out)
    np.add(out, np.float32(1.0), out=out)
    np.divide(gate, out, out=out)
    np.multiply(out, up, out=out)


def gather_last_rows(rows: Float32Array, valid_columns: Int32Array, width: np.int32, out: Float32Array) -> None:
    """Write the row of each batch entry's last live column; entries without one, and padding, become zero rows."""
    batch = valid_columns.shape[0]
    last = np.arange(batch, like=valid_columns) * int(width) + np.maximum(valid_columns, 1) - 1
    out[:batch] = np.where(valid_columns[:, None] == 0, np.float32(0.0), rows[last])
    out[batch:] = 0.0


def choose_largest(logits: Float32Array, choice: Int32Array) -> None:
    """Write the id of each row's largest logit; the lowest id where several are equal."""
    choice[...] = np.argmax(logits, axis=1)


def store_choices(choice: Int32Array, valid_columns: Int32Array, next_tokens: Int32Array) -> None:
    """Write the choice of every live column to next_tokens, NO_TOKEN elsewhere."""
    B, W = next_tokens.shape
    next_tokens[...] = np.where(live_columns(valid_columns, W), choice[: B * W].reshape(B, W), NO_TOKEN)


def store_last_choices(choice: Int32Array, valid_columns: Int32Array, next_tokens: Int32Array) -> None:
    """Write the one choice of each row to its last live column, NO_TOKEN elsewhere."""
    B, W = next_tokens.shape
    columns = np.arange(W, dtype=np.int32, like=valid_columns)
    is_last = np.equal(columns[None, :], valid_columns[:, None] - 1)
    next_tokens[...] = np.where(is_last, choice[:B, None], NO_TOKEN)


# --- the start-up check ----------------------------------------------------------------------------------------------

CHECKED_ROWS = (1, 16, 17, 128)


def check_row_independence(weights: LlamaWeights, *, multiply: Callable[..., None] = multiply_blocks) -> None:
    """Prove on this machine that a row's bits depend on neither the other rows nor the row count.

    Runs the four matrices of a layer and the output head on 128 random rows at once.  Rows alone (at place 0 of
    their block, zeros behind them), and the first 16 and 17 rows in reverse order, must give the same bits.  The two
    functions of the runner that are not correctly rounded, the norm's sum and `exp`, are run the same way.
    About 0.3 s.

    Args:
        weights: the model to be run; matrices of layer 0 and the embedding are used.
        multiply: the product under test, as `multiply_blocks`.
    Raises:
        MisuseError: some row differs.
    """
    layer: LayerWeights = weights.layers[0]
    generator = np.random.default_rng(0)
    matrices = [
        ("qkv", layer.qkv),
        ("attention_output", layer.attention_output),
        ("gate_up", layer.gate_up),
        ("down", layer.down),
        ("output head", weights.embedding),
    ]
    for name, matrix in matrices:
        rows = generator.standard_normal((max(CHECKED_ROWS), matrix.shape[1])).astype(np.float32)
        # The output head takes 14 ms a block, a matrix of a layer 0.1 to 0.7 ms.
        alone = range(17) if matrix is not weights.embedding else (0, 15)
        _check_function(f"the product with {name}", rows, alone, partial(_product, multiply, matrix))
    E, F = weights.config.hidden, weights.config.intermediate
    wide = 4.0 * generator.standard_normal((max(CHECKED_ROWS), 2 * F)).astype(np.float32)
    _check_function("the gate's exp", wide, range(17), partial(_gate, F))
    _check_function("the norm's sum", wide[:, :E].copy(), range(17), partial(_norm, weights))


def _product(multiply: Callable[..., None], matrix: Float32Array, x: Float32Array) -> Float32Array:
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    multiply(x, matrix, out)
    return out


def _gate(intermediate: int, x: Float32Array) -> Float32Array:
    out = np.empty((len(x), intermediate), np.float32)
    gate_rows(x, out)
    return out


def _norm(weights: LlamaWeights, x: Float32Array) -> Float32Array:
    out = np.empty_like(x)
    rms_norm(x, weights.final_norm, np.float32(weights.config.rms_epsilon), out)
    return out


def _check_function(
    name: str, rows: Float32Array, alone: Iterable[int], function: Callable[[Float32Array], Float32Array]
) -> None:
    def run(x: Float32Array) -> npt.NDArray[np.uint32]:
        padded = np.zeros((padded_rows(len(x)), rows.shape[1]), np.float32)
        padded[: len(x)] = x
        return function(padded)[: len(x)].view(np.uint32)

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
            remedy="use a NumPy build with OpenBLAS",
            clause="C14.6",
            row=index,
            rows=count,
        )
