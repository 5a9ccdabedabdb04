"""Functions of the model for `unit.call`: each computes every row by itself, on NumPy or CuPy arrays.  (C14.6)

They are element by element in correctly rounded operations (+ - * / sqrt), except the sum of a norm (NumPy's pairwise
order depends on the row length only) and `exp`; the start-up check covers both.  They take all they use as arguments,
make arrays `like=` an argument, and read nothing back.

    row buffers, B = 3, W = 5:  | 15 columns, row-major (b, j) | 1 zero row |     16 rows, R
    q, k, v, out             :  (3, 5, heads, D) BF16 as uint16, exactly the columns
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.graphs import NO_TOKEN, SAMPLING_WORDS
from pagedkv.tools.llama.weights import LlamaConfig

Bits = npt.NDArray[np.uint16]
Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

BLOCK_ROWS = 16  # rows of every matrix product


def padded_rows(rows: int) -> int:
    """Return `rows` rounded up to whole blocks of 16."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def rotation_tables(config: LlamaConfig, max_context: int) -> tuple[Float32Array, Float32Array]:
    """Return the two factors of every rotation, each (max_context, head_dim) float32.

    Pair i of position p turns by a = p * base**(-2i / D): (e, o) becomes (e cos a - o sin a, o cos a + e sin a).
    With the pair's halves exchanged that is x * c + exchanged * s; the factors are c = (cos a, cos a) and
    s = (-sin a, sin a).  Angles are float64: at position 8191 float32 would lose four decimal digits of them.
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
    """Refuse a live column with a negative token id."""
    ids = np.where(live_columns(valid_columns, tokens.shape[1]), tokens, 0)
    if ids.min() < 0:
        raise pk.MisuseError(
            "a forward pass", expected=f"token ids in [0, {vocabulary})", got=int(ids.min()),
            remedy="mark columns without a token as inert through valid_columns", clause="C14.4",
        )  # fmt: skip


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
    first_positions: Int32Array, valid_columns: Int32Array, cosines: Float32Array, sines: Float32Array,
    column_cosines: Float32Array, column_sines: Float32Array,
) -> None:  # fmt: skip
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


def place_sampling(
    words: Int32Array, first_positions: Int32Array, valid_columns: Int32Array, width: np.int32, row_words: Int32Array,
    row_positions: Int32Array,
) -> None:  # fmt: skip
    """Write the sampling words of each column and the position of the token after it; 0 for inert columns and padding.

    Args:
        words: (B, K) int32, K >= 3; first_positions, valid_columns: (B,) int32.
        row_words: (R, 3) int32, written; row_positions: (R,) int32, written.
    """
    columns = np.arange(int(width), dtype=np.int32, like=valid_columns)
    live, rows = live_columns(valid_columns, columns.size), valid_columns.size * columns.size
    row_words[:rows] = np.where(live[:, :, None], words[:, None, :SAMPLING_WORDS], 0).reshape(rows, SAMPLING_WORDS)
    row_positions[:rows] = np.where(live, first_positions[:, None] + columns[None, :] + 1, 0).reshape(rows)
    row_words[rows:], row_positions[rows:] = 0, 0


def place_last_sampling(
    words: Int32Array, first_positions: Int32Array, valid_columns: Int32Array, row_words: Int32Array,
    row_positions: Int32Array,
) -> None:  # fmt: skip
    """Write the same for the last live column of each entry: row b is entry b."""
    batch = valid_columns.size
    row_words[:batch], row_words[batch:] = words[:, :SAMPLING_WORDS], 0
    row_positions[:batch], row_positions[batch:] = first_positions + valid_columns, 0


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
