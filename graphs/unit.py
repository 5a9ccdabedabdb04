"""Unit: what a model sees of one shape, and the Model protocol.  (C12, C14)

A model's `enqueue` is called once to warm up and once under capture; replays call no model code.  It
may only enqueue: `attend`, `call`, `launch`.  Everything it reads of the batch is a fixed-address
device array of the unit; lengths and rows change between replays, shapes do not.

Read next: `capture.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.graphs.control_buffers import ControlBuffers
from pagedkv.graphs.key import GraphKey


class Model(Protocol):
    """What a decode loop drives."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue the work of one unit on `unit.stream`; may enqueue only."""
        ...


class Unit:
    """One shape's arrays and verbs.

    Attributes:
        key: the shape. `route`, `batch` (B) and `width` (W) are its short names.
        tokens, next_tokens: (B, W) int32; first_positions, valid_columns, table_rows, accepted: (B,) int32;
            all on the device, at fixed addresses.
        views: `views[pool][layer]`.
        stream, device: where the unit runs.

    Raises:
        ConfigError: the shape is wider than the store was planned for (C5.4).
    """

    def __init__(self, store: pk.Store, key: GraphKey) -> None:
        self.key = key
        self.route = key.route
        self.batch = key.batch
        self.width = key.width
        self.stream = store.stream
        self.device = store.device
        self.views = store.views
        self._require_planned(store.config, key)
        self.control = ControlBuffers(store, batch=key.batch, width=key.width)
        self.tokens = self.control.tokens
        self.first_positions = self.control.first_positions
        self.valid_columns = self.control.valid_columns
        self.table_rows = self.control.table_rows
        self.next_tokens = self.control.next_tokens
        self.accepted = self.control.accepted
        self._ops = store.ops
        self._workspace = store.workspace
        self._graph_buffer = store.graph_buffer
        self._buffers: list[Any] = []
        self._buffer_next = 0

    def attend(self, layer: int, q: Any, k: Any, v: Any, out: Any, pool: str = "main") -> None:
        """Append k and v of the live columns, then attend causally, in the unit's own route.  (C14.4)

        Args:
            layer: layer of the pool.
            q, out: (B, W, Hq, D) BF16 bits; k, v: (B, W, Hkv, D) BF16 bits; all on the device.
        """
        self._ops.causal_attention(
            self.views[pool][layer], q, k, v, out, self.first_positions, self.table_rows, route=self.route,
            valid_columns=self.valid_columns, scale=self.key.scale, workspace=self._workspace,
            stream=self.stream,
        )

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Enqueue an array function of the embedder: a module-level function of arrays and scalars."""
        self.device.call(self.stream, function, *arguments)

    def launch(
        self, kernel: pk.Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any]
    ) -> None:
        """Enqueue a kernel of the embedder."""
        kernel.launch(grid, block, arguments, self.stream)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a device buffer of this shape; allocated at warm-up, the same one at capture.

        Raises:
            MisuseError: capture asks for other buffers than warm-up did.
        """
        index = self._buffer_next
        self._buffer_next += 1
        if not self.stream.is_capturing and index == len(self._buffers):
            self._buffers.append(self._graph_buffer(shape, dtype))
        if index >= len(self._buffers) or self._buffers[index].shape != tuple(shape) or (
            self._buffers[index].dtype != np.dtype(dtype)
        ):
            raise pk.MisuseError(
                f"buffer {index} of {self.key}", expected="the same buffers in the same order at every enqueue",
                got=f"{tuple(shape)} {np.dtype(dtype)}", remedy="enqueue the same work for one shape", clause="C15.1",
            )
        return self._buffers[index]

    def enqueue(self, model: Model) -> None:
        """Enqueue the whole unit: selectors in, the model's work, results out."""
        self._buffer_next = 0
        self.device.copy(self.control.ingress_device, self.control.ingress_host, self.stream)
        model.enqueue(self)
        self.device.copy(self.control.egress_host, self.control.egress_device, self.stream)

    def _require_planned(self, config: pk.StoreConfig, key: GraphKey) -> None:
        """Refuse a unit wider than what workspace and control buffers were planned for.  (C5.4)

        Raises:
            ConfigError: names the option to raise.
        """
        option = "decode_columns_max" if key.route == "decode" else "prefill_columns_max"
        planned = config.decode_columns if key.route == "decode" else config.prefill_columns_max
        if key.width > planned or key.batch > config.max_concurrency:
            raise pk.ConfigError(
                f"unit {key}", expected=f"B to {config.max_concurrency} and W to {planned}",
                got=f"B={key.batch} and W={key.width}", remedy=f"raise {option} or max_concurrency of StoreConfig",
                clause="C5.4",
            )
