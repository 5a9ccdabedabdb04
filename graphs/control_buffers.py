"""ControlBuffers: the fixed-address words that change between replays.  (C11.3, C15.1)

    ingress (pinned, device)   [ table_rows B | first_positions B | valid_columns B | tokens B*W ]   int32
    egress  (device, pinned)   [ accepted B | next_tokens B*W ]                                      int32

The first node of a unit copies the whole ingress to the device, the last one copies the egress back,
so publishing selectors costs no call of its own.  The host writes `ingress` only between units and
reads `egress` only after the unit completed.  The pinned words are each shape's own; the device words are the
store's, shared by every shape: units run one after the other on one stream, and each begins by overwriting its
ingress.  What stands in the egress is the last unit's until the model writes it, so the first run of a shape finds it
blank (`cache.py`): a model that enqueues no write there is found out, one that writes only at times is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Int32 = npt.NDArray[np.int32]


class ControlBuffers:
    """Pinned and device words of one shape (B, W).

    Raises:
        ConfigError: the shape takes more words than the store planned for its widest unit (C5.4).
    """

    def __init__(self, store: pk.Store, *, batch: int, width: int) -> None:
        ingress, egress = pk.control_words(batch=batch, width=width)
        if ingress > store.control_ingress.size or egress > store.control_egress.size:
            raise pk.ConfigError(
                f"a unit of B={batch} and W={width}",
                expected=f"at most {store.control_ingress.size} words in and {store.control_egress.size} words out",
                got=f"{ingress} and {egress}", remedy="raise decode_columns_max or prefill_columns_max of StoreConfig",
                clause="C5.4",
            )
        self.batch = batch
        self.width = width
        self._device = store.device
        self._stream = store.stream
        shape = f"B={batch} W={width}"
        self.ingress_host: Int32 = store.device.pinned((ingress,), np.int32, name=f"ingress host {shape}")
        self.egress_host: Int32 = store.device.pinned((egress,), np.int32, name=f"egress host {shape}")
        self.ingress_device: Any = store.control_ingress[:ingress]
        self.egress_device: Any = store.control_egress[:egress]
        self.make_inert()

    @property
    def table_rows(self) -> Any:
        """(B,) int32 on the device: the execution row of each entry, -1 where inert."""
        return self.ingress_device[: self.batch]

    @property
    def first_positions(self) -> Any:
        """(B,) int32 on the device: position of column 0."""
        return self.ingress_device[self.batch : 2 * self.batch]

    @property
    def valid_columns(self) -> Any:
        """(B,) int32 on the device: live columns, a prefix."""
        return self.ingress_device[2 * self.batch : 3 * self.batch]

    @property
    def tokens(self) -> Any:
        """(B, W) int32 on the device: token ids of the live columns, 0 elsewhere."""
        return self.ingress_device[3 * self.batch :].reshape(self.batch, self.width)

    @property
    def accepted(self) -> Any:
        """(B,) int32 on the device: columns a verify unit accepts; others leave it."""
        return self.egress_device[: self.batch]

    @property
    def next_tokens(self) -> Any:
        """(B, W) int32 on the device: the token sampled after each live column."""
        return self.egress_device[self.batch :].reshape(self.batch, self.width)

    def make_inert(self) -> None:
        """Select no row: what warm-up and capture run on."""
        self.ingress_host[:] = 0
        self.ingress_host[: self.batch] = -1

    def blank(self) -> None:
        """Set every egress word on the device to -1, so that what a model leaves unwritten is found out."""
        self._device.copy(self.egress_device, np.full(self.egress_device.shape, -1, np.int32), self._stream)

    def write(self, rows: npt.NDArray[np.int64], first_positions: Int32, columns: Int32, tokens: Int32) -> None:
        """Select rows for the next run; entries beyond them become inert.

        Args:
            rows: (b,) execution rows, b <= B.
            first_positions, columns: (b,) int32.
            tokens: (b, W) int32, 0 in dead columns.
        """
        count, batch = len(rows), self.batch
        self.make_inert()
        self.ingress_host[:count] = rows
        self.ingress_host[batch : batch + count] = first_positions
        self.ingress_host[2 * batch : 2 * batch + count] = columns
        self.ingress_host[3 * batch :].reshape(batch, self.width)[:count] = tokens

    def read_next_tokens(self, count: int) -> Int32:
        """Return a copy of next_tokens (count, W) of the first entries; the unit must have completed."""
        egress = self._device.readable(self.egress_host)
        return egress[self.batch :].reshape(self.batch, self.width)[:count].copy()
