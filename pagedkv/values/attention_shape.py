"""AttentionShape: the numbers that size an attention launch and its workspace, without a device.  (C14.4, C14.6)

    route decode    any B, W 1 to 16     workspace: one partial result for every query row and key group
    route prefill   B = 1, any W         no workspace
    context         as route decode      the same workspace: the temporary rows leave no partial result there

A partial result is (m, l, O[D]) in FP32.  Key groups cover fixed absolute positions, so their number follows from
max_context alone: 1024 tokens are 2 groups, and a decode of 8 rows, 24 heads and D = 256 needs 8*24*2*258*4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagedkv.errors import MisuseError, shown
from pagedkv.values.checks import checked_integer
from pagedkv.values.profiles import HEAD_DIMS_BF16, KV_HEADS_MAX, QUERY_HEADS_MAX, check_heads
from pagedkv.values.quantities import CONTEXT_TOKENS_MAX, ceil_div

Route = Literal["decode", "prefill"]
ROUTES: tuple[Route, ...] = ("decode", "prefill")
DECODE_WIDTH_MAX = 16
GRID_AXIS_MAX = 65_535
QUERY_ROWS_MAX = 1 << 30
"""Query rows are int32 on the device, tiles included."""

# The fixed order of attention's partial results.  cuda_src/kernels/softmax.cuh and attention_tiles.cuh have the same
# numbers, and a test compares them.
SHORT_GROUP_TOKENS = 512
LONG_GROUP_TOKENS = 2048
SHORT_GROUPS_END_TOKENS = 4096
TILE_ROWS = 8


def key_groups(context_tokens: int) -> int:
    """Return how many key groups hold positions [0, context_tokens): 512 -> 1, 513 -> 2, 4097 -> 9.  (C14.6)"""
    short = ceil_div(min(context_tokens, SHORT_GROUPS_END_TOKENS), SHORT_GROUP_TOKENS)
    return short + ceil_div(max(context_tokens - SHORT_GROUPS_END_TOKENS, 0), LONG_GROUP_TOKENS)


@dataclass(frozen=True)
class AttentionShape:
    """The numbers that size an attention launch and its workspace.  (C14.4)

    Raises:
        MisuseError: a number out of range, W beyond 16 for decode, or B other than 1 for prefill.
        ConfigError: a group size that no kernel serves.
    """

    route: Route
    batch: int
    width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_context: int

    def __post_init__(self) -> None:
        if type(self.route) is not str or self.route not in ROUTES:
            raise MisuseError("the route", expected="'decode' or 'prefill'", got=shown(self.route),
                              remedy="name the unit's route; it is never chosen from W", clause="C14.6")
        width_max = DECODE_WIDTH_MAX if self.route == "decode" else CONTEXT_TOKENS_MAX
        batch_max = GRID_AXIS_MAX if self.route == "decode" else 1
        for what, value, high in (
            ("B", self.batch, batch_max), ("W", self.width, width_max), ("Hq", self.query_heads, QUERY_HEADS_MAX),
            ("Hkv", self.kv_heads, KV_HEADS_MAX), ("D", self.head_dim, HEAD_DIMS_BF16[-1]),
            ("max_context", self.max_context, CONTEXT_TOKENS_MAX),
        ):
            checked_integer(f"{what} of route {self.route}", value, 1, high,
                            remedy="split the call, or name the other route", clause="C14.4")
        check_heads(self.query_heads, self.kv_heads)
        if self.width * (self.query_heads // self.kv_heads) > QUERY_ROWS_MAX:
            raise MisuseError(
                "W of route prefill", expected=f"at most {QUERY_ROWS_MAX} query rows of one KV head",
                got=f"{self.width} columns of {self.query_heads // self.kv_heads} rows", remedy="prefill in chunks",
                clause="C14.4",
            )

    @property
    def groups(self) -> int:
        """Key groups of max_context: as many partial results a query row may have."""
        return key_groups(self.max_context)

    @property
    def tiles(self) -> int:
        """Tiles of query rows of one (batch entry, KV head)."""
        return ceil_div(self.width * (self.query_heads // self.kv_heads), TILE_ROWS)


def workspace_bytes(shape: AttentionShape) -> int:
    """Return the bytes of workspace that one attention call needs; monotone in every number of the shape.  (C14.4)

    decode: (m, l, O[D]) in FP32 for every query row and key group, and nothing while one key group covers
    max_context; prefill: nothing.  Context attention needs as much as a decode of its shape.
    """
    if shape.route == "prefill" or shape.groups == 1:
        return 0
    return shape.batch * shape.width * shape.query_heads * shape.groups * (shape.head_dim + 2) * 4
