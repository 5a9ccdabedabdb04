"""Unit: the arrays and calls of one shape that a model sees, and the Model protocol.  (C12, C14)

A model's `enqueue` is called once to warm up and once under capture; replays call no model code.  It may only enqueue
work: `attend`, `call`, `launch`.  It reads the batch from device arrays of the unit at fixed addresses.  Lengths and
rows change between replays, shapes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

import pagedkv as pk
from pagedkv.graphs.control_buffers import ControlBuffers
from pagedkv.graphs.key import GraphKey


class Model(Protocol):
    """The caller's model."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue the work of one unit on `unit.stream`; may enqueue only."""
        ...


class Unit:
    """The arrays and calls of one shape.

    Attributes:
        key: the shape; `route`, `batch` (B) and `width` (W) are fields of it.
        tokens, next_tokens: (B, W) int32; first_positions, valid_columns, table_rows, accepted: (B,) int32; words:
            (B, K) int32 of the caller, K = `caller_words` of the StoreConfig; all on the device, at fixed addresses
            (`ControlBuffers`).
        views: `views[pool][layer]`.
        stream, device: of the store.

    Raises:
        MisuseError: no key, or not a shape of this store (C15.2).
        ConfigError: the shape is wider than the store was planned for (C5.4).
    """

    def __init__(self, store: pk.Store, key: GraphKey) -> None:
        if not isinstance(key, GraphKey):
            raise pk.MisuseError("a unit", expected="a GraphKey", got=pk.checks.shown(key), remedy="name the shape",
                                 clause="C15.2")
        self.key = key
        self.route = key.route
        self.batch = key.batch
        self.width = key.width
        self.stream = store.stream
        self.device = store.device
        self.views = store.views
        _require_planned(store.config, key)
        self.control = ControlBuffers(store, batch=key.batch, width=key.width)
        self.tokens = self.control.tokens
        self.first_positions = self.control.first_positions
        self.valid_columns = self.control.valid_columns
        self.table_rows = self.control.table_rows
        self.words = self.control.words
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

        Raises:
            MisuseError: an unknown pool or layer, a pool of other heads than the key's (C15.2), or arrays that the op
                refuses (C14.2).
        """
        self._ops.causal_attention(
            self._attended_view("attention", layer, pool), q, k, v, out, self.first_positions, self.table_rows,
            route=self.route, valid_columns=self.valid_columns, scale=self.key.scale, workspace=self._workspace,
            stream=self.stream,
        )

    def append_context(self, layer: int, k: Any, v: Any, counts: Any, pool: str = "draft") -> None:
        """Write the first counts[b] columns of each row at the unit's first positions, and no other byte.  (C14.4)

        The device decides the counts, so a verify unit's accepted columns need no round trip.  `first_positions` of
        the unit must be those that `begin_unit` returned for this pool.

        Args:
            layer: layer of the pool.
            k, v: (B, W, Hkv, D) BF16 bits, W of any width; counts: (B,) int32, 0 to W; all on the device.

        Raises:
            MisuseError: an unknown pool or layer, or arrays that the op refuses (C14.2).
        """
        self._ops.append_prefix(self._view("an append", layer, pool), k, v, self.first_positions, counts,
                                self.table_rows, stream=self.stream)

    def attend_context(self, layer: int, q: Any, k: Any, v: Any, out: Any, pool: str = "draft") -> None:
        """Attend every live column to the paged context before first_positions and to all live rows of k, v.  (C14.4)

        Non-causal; writes nothing to the cache.  Arguments and errors as for `attend`.
        """
        self._ops.context_attention(
            self._attended_view("context attention", layer, pool), q, k, v, out, self.first_positions, self.table_rows,
            valid_columns=self.valid_columns, scale=self.key.scale, workspace=self._workspace, stream=self.stream,
        )

    def accept_greedy(self) -> None:
        """Count into `accepted` the columns of each entry that greedy decoding would have written.  (C13.1)

        Enqueue it behind the work that writes next_tokens: accepted[b] is 0 for an entry without live columns, else 1
        and the drafted tokens (columns 1 and on) before the first that the model did not choose.
        """
        self._ops.accept_greedy(self.tokens, self.next_tokens, self.valid_columns, self.accepted, stream=self.stream)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Enqueue an array function of the caller: a module-level function of arrays and scalars."""
        self.device.call(self.stream, function, *arguments)

    def launch(
        self, kernel: pk.Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any]
    ) -> None:
        """Enqueue a kernel of the caller."""
        if not pk.checks.has_method(kernel, "launch"):
            raise pk.MisuseError("a launch", expected="a kernel that device.load returned", got=pk.checks.shown(kernel),
                                 remedy="load its module before the first unit", clause="C15.1")
        kernel.launch(grid, block, arguments, self.stream)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a device buffer of this shape; warm-up allocates it, capture gets the same one.

        Raises:
            MisuseError: capture asks for other buffers than warm-up did, or for a shape or dtype that no array has.
        """
        shape, dtype = pk.checks.array_form(shape, dtype)
        index = self._buffer_next
        self._buffer_next += 1
        if not self.stream.is_capturing and index == len(self._buffers):
            self._buffers.append(self._graph_buffer(shape, dtype))
        if index >= len(self._buffers) or (self._buffers[index].shape, self._buffers[index].dtype) != (shape, dtype):
            raise pk.MisuseError(
                f"buffer {index} of {self.key}", expected="the same buffers in the same order at every enqueue",
                got=f"{pk.checks.shown(shape)} {dtype}", remedy="enqueue the same work for one shape", clause="C15.1",
            )
        return self._buffers[index]

    def enqueue(self, model: Model) -> None:
        """Enqueue the whole unit: copy the selectors in, the model's work, copy the results out."""
        self._buffer_next = 0
        self.device.copy(self.control.ingress_device, self.control.ingress_host, self.stream)
        model.enqueue(self)
        self.device.copy(self.control.egress_host, self.control.egress_device, self.stream)

    def _view(self, what: str, layer: int, pool: str) -> pk.PagedKVBatchLayerView:
        """Return the view of a layer; refuse an unknown one.  (C14.1)"""
        layers = len(self.views.get(pool, ())) if isinstance(pool, str) else 0
        if type(layer) is not int or not 0 <= layer < layers:
            counts = {name: len(views) for name, views in self.views.items()}
            got = f"layer {pk.checks.shown(layer)} of pool {pk.checks.shown(pool)}"
            raise pk.MisuseError(what, expected=f"a layer of {counts}", got=got,
                                 remedy="count layers from 0 in each pool", clause="C14.1")
        return self.views[pool][layer]

    def _attended_view(self, what: str, layer: int, pool: str) -> pk.PagedKVBatchLayerView:
        """Return the view of a layer; refuse another pool than the key's, whose scale the unit has.  (C15.2)"""
        view = self._view(what, layer, pool)
        if pool != self.key.pool:
            raise pk.MisuseError(
                f"{what} in pool {pool} by unit {self.key}", expected=f"pool {self.key.pool}, as the key says",
                got=f"pool {pool}", remedy=f"build the key with key_for(pool={pool!r})", clause="C15.2",
            )
        return view


def _require_planned(config: pk.StoreConfig, key: GraphKey) -> None:
    """Refuse a key that is no shape of this store, or wider than the store was planned for.  (C5.4, C15.2)"""
    pools = {pool.name: (pool.profile.name, pool.geometry) for pool in config.pools}
    has_pool = pools.get(key.pool) == (key.profile, key.geometry)
    geometry = key.geometry if has_pool else config.geometry
    pk.AttentionShape(key.route, key.batch, key.width, geometry.query_heads, geometry.kv_heads, geometry.head_dim,
                      config.max_context)  # refuses an unknown route, and B or W that the route does not have
    if not has_pool or key.max_context != config.max_context:
        own = " or ".join(f"{pool}, {profile}, {geometry}" for pool, (profile, geometry) in pools.items())
        raise pk.MisuseError(
            f"unit {key}", expected=f"the store's own {own}, max_context {config.max_context}",
            got=f"{key.pool}, {key.profile}, {key.geometry}, max_context {key.max_context}",
            remedy="build the key with key_for of the store's configuration", clause="C15.2",
        )
    option = "decode_columns_max" if key.route == "decode" else "prefill_columns_max"
    width_max = config.decode_columns if key.route == "decode" else config.prefill_columns_max
    if key.width > width_max or key.batch > config.max_concurrency:
        raise pk.ConfigError(
            f"unit {key}", expected=f"B to {config.max_concurrency} and W to {width_max}",
            got=f"B={key.batch} and W={key.width}", remedy=f"raise {option} or max_concurrency of StoreConfig",
            clause="C5.4",
        )
