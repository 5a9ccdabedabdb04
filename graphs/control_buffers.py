"""ControlBuffers: the fixed-address words that change between replays.  (C11.3, C15.1)

    ingress (pinned, device)   [ table_rows B | first_positions B | valid_columns B | words B*K | tokens B*W ]   int32
    egress  (device, pinned)   [ accepted B | next_tokens B*W ]                                                  int32

K is `caller_words` of the StoreConfig.

The first node of a unit copies the whole ingress to the device, the last one copies the egress back,
so publishing selectors costs no call of its own.  The host writes `ingress` only between units and
reads `egress` only after the unit completed.  Each shape has its own pinned words.  All shapes share the store's device
words: units run one after the other on one stream, and each unit first overwrites its ingress.  The egress keeps the
words of the last unit until the model writes it.  So `GraphCache` and `DecodeLoop` blank the egress before the first
run of a shape.  This reveals a model that never writes next_tokens, but not one that writes them only at times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Int32 = npt.NDArray[np.int32]
_ZERO = np.zeros((), np.int32)


class ControlBuffers:
    """Pinned and device words of one shape (B, W); made by `Unit`, which has checked the shape.

    Attributes, int32 on the device:
        table_rows: (B,) the execution row of each entry, -1 where inert.
        first_positions: (B,) position of column 0.
        valid_columns: (B,) live columns, a prefix.
        words: (B, K) the caller's words of each entry, 0 where inert.
        tokens: (B, W) token ids of the live columns, 0 elsewhere.
        accepted: (B,) columns that a verify unit accepts; other units do not write it.
        next_tokens: (B, W) the token sampled after each live column.

    `words_host` (B, K) is the pinned side of `words`; whoever writes it does so between `write` and the replay.
    """

    def __init__(self, store: pk.Store, *, batch: int, width: int) -> None:
        words = store.config.caller_words
        ingress, egress = pk.control_words(batch=batch, width=width, words=words)
        if ingress > store.control_ingress.size or egress > store.control_egress.size:
            raise pk.ConfigError(f"control buffers of B={batch} and W={width}",
                                 expected=f"at most {store.control_ingress.size} words in and "
                                          f"{store.control_egress.size} out, as planned",
                                 got=f"{ingress} and {egress}", remedy="raise max_concurrency or the widest unit",
                                 clause="C5.4")
        self.batch = batch
        self.width = width
        self._device = store.device
        self._stream = store.stream
        shape = f"B={batch} W={width}"
        self.ingress_host: Int32 = store.device.pinned((ingress,), np.int32, name=f"ingress host {shape}")
        self.egress_host: Int32 = store.device.pinned((egress,), np.int32, name=f"egress host {shape}")
        self.ingress_device: Any = store.control_ingress[:ingress]
        self.egress_device: Any = store.control_egress[:egress]
        self.table_rows = self.ingress_device[:batch]
        self.first_positions = self.ingress_device[batch : 2 * batch]
        self.valid_columns = self.ingress_device[2 * batch : 3 * batch]
        words_end = (3 + words) * batch
        self.words = self.ingress_device[3 * batch : words_end].reshape(batch, words)
        self.words_host: Int32 = self.ingress_host[3 * batch : words_end].reshape(batch, words)
        self.tokens = self.ingress_device[words_end:].reshape(batch, width)
        self.accepted = self.egress_device[:batch]
        self.next_tokens = self.egress_device[batch:].reshape(batch, width)
        # The words of the entries that are selected, as views of `ingress_host`.
        self._rows_host, self._positions_host, self._columns_host, self._tokens_host = self._host_views(0)
        self._rows: npt.NDArray[np.int64] | None = None
        self._columns = -1
        self._words: Int32 | None = None
        self.make_inert()

    def make_inert(self) -> None:
        """Select no row, as warm-up and capture need it."""
        self._rows = None  # first, in case of an interrupt; so below
        self.ingress_host[:] = 0
        self.ingress_host[: self.batch] = -1

    def blank(self) -> None:
        """Set every egress word on the device to -1, which is no token."""
        self._device.copy(self.egress_device, np.full(self.egress_device.shape, -1, np.int32), self._stream)

    def write(
        self, rows: npt.NDArray[np.int64], first_positions: Int32, columns: Int32 | int, tokens: Int32,
        words: Int32 | None = None,
    ) -> None:
        """Select rows for the next run; entries beyond them become inert.

        Args:
            rows: (b,) execution rows, b <= B.
            first_positions: (b,) int32.
            columns: (b,) int32, or one number for all entries.
            tokens: (b, W) int32, 0 in dead columns.
            words: (b, K) int32, or None for zeros.  The words of the last write stay if it had the same rows and this
                same array; so pass another array, not the same one with other content.

        Raises:
            MisuseError: arrays of another form; the words stay as they were.
        """
        is_same = rows is self._rows and columns is self._columns  # mostly: then rows and columns stay as they are
        count = len(rows) if is_same or (type(rows) is np.ndarray and rows.ndim == 1) else -1
        if not (
            type(first_positions) is np.ndarray and type(tokens) is np.ndarray
            and first_positions.dtype == tokens.dtype == np.int32
            and first_positions.shape == (count,) and tokens.shape == (count, self.width)
            and (is_same or self._selects(rows, count, columns))
            and (words is None or (is_same and words is self._words) or self._is_words(words, count))
        ):
            shown = pk.checks.shown
            raise pk.MisuseError(
                f"selectors of B={self.batch} and W={self.width}",
                expected=f"rows (b,) int64, first_positions (b,) int32, columns (b,) int32 or a count, tokens "
                         f"(b, {self.width}) int32, words (b, {self.words_host.shape[1]}) int32 or None, b to "
                         f"{self.batch}",
                got=f"{shown(rows)}, {shown(first_positions)}, {shown(columns)}, {shown(tokens)}, {shown(words)}",
                remedy="pass the arrays of a unit, and as many words as caller_words of the StoreConfig",
                clause="C15.1",
            )
        if not is_same:
            self._words = _ZERO  # no words of a caller, and not none: they are written again, whatever interrupts
            if self._rows is None or columns is not self._columns or count != self._rows.size:
                self.make_inert()
                self._rows_host, self._positions_host, self._columns_host, self._tokens_host = self._host_views(count)
                self._columns_host[:] = columns
            self._rows = None
            self._rows_host[:] = rows
            if type(columns) is int and not rows.flags.writeable:
                self._rows, self._columns = rows, columns
        self._positions_host[:] = first_positions
        self._tokens_host[:] = tokens
        if words is not self._words:
            self._words = _ZERO
            self.words_host[:count] = _ZERO if words is None else words
            self._words = words

    def _host_views(self, count: int) -> tuple[Int32, Int32, Int32, Int32]:
        """Return table rows, first positions, valid columns (count,) and tokens (count, W): views of the host words."""
        rows, positions, columns = self.ingress_host[: 3 * self.batch].reshape(3, self.batch)[:, :count]
        return rows, positions, columns, self.ingress_host[-self.batch * self.width :].reshape(-1, self.width)[:count]

    def _selects(self, rows: npt.NDArray[np.int64], count: int, columns: Int32 | int) -> bool:
        """Say whether rows and columns have the form of `write`."""
        is_count = type(columns) is int and 0 <= columns <= self.width
        return 0 <= count <= self.batch and rows.dtype == np.int64 and (
            is_count or (type(columns) is np.ndarray and columns.dtype == np.int32 and columns.shape == (count,))
        )

    def _is_words(self, words: Int32, count: int) -> bool:
        """Say whether words have the form of `write`."""
        form = (count, self.words_host.shape[1])
        return type(words) is np.ndarray and words.dtype == np.int32 and words.shape == form

    def read_next_tokens(self, count: int) -> Int32:
        """Return a copy of next_tokens (count, W) of the first entries; the unit must have completed."""
        return self._read(count)[self.batch :].reshape(self.batch, self.width)[:count].copy()

    def read_accepted(self, count: int) -> Int32:
        """Return a copy of accepted (count,) of the first entries; the unit must have completed."""
        return self._read(count)[:count].copy()

    def _read(self, count: int) -> Int32:
        """Return the words of the egress; refuse a count of entries that this shape has not."""
        if type(count) is not int or not 0 <= count <= self.batch:
            raise pk.MisuseError("a count of entries", expected=f"an integer from 0 to {self.batch}",
                                 got=pk.checks.shown(count), remedy="count the entries of the unit", clause="C15.1")
        egress: Int32 = self._device.readable(self.egress_host)
        return egress
