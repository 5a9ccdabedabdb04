"""Selectors: the device arrays that say which rows, positions and columns of a batch an op serves.  (C14.2, C14.4)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.devices.protocol import Array
from pagedkv.errors import MisuseError
from pagedkv.ops.checks import check_array
from pagedkv.ops.views import PagedKVBatchLayerView


@dataclass(frozen=True, slots=True)
class Selectors:
    """Positions, table rows and live columns of a call, each (B,) int32; `live` None means that all columns are live.

    The two names are those of the op's parameters: first_positions or context_lengths, valid_columns or counts.
    """

    positions: Array
    table_rows: Array
    live: Array | None
    positions_name: str = "first_positions"
    live_name: str = "valid_columns"

    @property
    def named_arrays(self) -> tuple[tuple[str, Array], ...]:
        """The arrays of the call by name; without `live` where that is None."""
        always = ((self.positions_name, self.positions), ("table_rows", self.table_rows))
        return always if self.live is None else (*always, (self.live_name, self.live))

    def arguments(self, view: PagedKVBatchLayerView) -> tuple[object, ...]:
        """Return the kernel arguments that select: the table and its width, then the three arrays."""
        tables = view.block_tables
        return (tables, np.int32(tables.shape[1]), self.positions, self.table_rows, self.live)

    def check(self, batch: int) -> None:
        """Refuse an array that is not (B,) int32."""
        for name, array in self.named_arrays:
            check_array(name, array, np.int32, (batch,), "C14.4")

    def check_width(self, width: int, max_context: int) -> None:
        """Refuse a call whose columns are all live and more than a context holds."""
        if self.live is None and width > max_context:
            raise MisuseError("a dense call", expected=f"at most max_context = {max_context} columns",
                              got=f"{width} columns", remedy="pass valid_columns, or fewer columns", clause="C14.2")
