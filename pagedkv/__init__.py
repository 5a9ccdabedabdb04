"""pagedkv: the paged KV-cache runtime for decode loops that replay CUDA Graphs.

    Store           activate, begin_unit, commit, trim, finish; `open_store` opens one
    Ops             launches the kernels, which read pages through `PagedKVBatchLayerView`
    Device          `cpu` needs no GPU and no driver; `cuda` needs CuPy
    pagedkv.graphs  capture, replay and the decode loop

Callers use the names of this module and of `pagedkv.graphs`, and no others.  The import needs neither CuPy nor a
compiler.
"""

from __future__ import annotations

from pagedkv import codecs
from pagedkv.clauses import Clause, clause, clauses
from pagedkv.devices import open_device
from pagedkv.devices.cache_folder import CacheFolder
from pagedkv.devices.counting import CountingDevice
from pagedkv.devices.protocol import Device, Event, Graph, Kernel, ModuleSpec, Stream, cpu_only
from pagedkv.errors import (
    ActivationRefused,
    BrokenOff,
    CapacityError,
    CaptureRefused,
    ConfigError,
    Corruption,
    DeviceFault,
    EntitlementExceeded,
    JournalFailed,
    MissingRequirement,
    MisuseError,
    PagedKVError,
    SnapshotRefused,
    StaleHandle,
    StoreLatched,
    StreamHazard,
    TransferFailed,
    UnitInFlight,
)
from pagedkv.ledger.batch import Batch
from pagedkv.ledger.continuations import STATE_FOLLOWS, Continuation
from pagedkv.ledger.demotions import ReleasePlan
from pagedkv.ledger.events import PageEvent, PageObserver
from pagedkv.ledger.inspect import ContinuationInspection, PoolInspection, SpaceInspection, StoreInspection
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationPlan, ActivationTarget, PoolPlan, Refusal, Transaction
from pagedkv.ledger.units import Submission
from pagedkv.ops.modules import shipped_modules
from pagedkv.ops.ops import Ops
from pagedkv.ops.page_moves import PlaneTable
from pagedkv.ops.views import PagedKVBatchLayerView, PagedKVLayerView
from pagedkv.record.replay import JournalDifference, ReplayReport, replay_journal
from pagedkv.store.opening import open_store
from pagedkv.store.store import Store
from pagedkv.values import checks
from pagedkv.values.attention_shape import AttentionShape, Route, workspace_bytes
from pagedkv.values.config import (
    AutoCapacity,
    DraftFullBackend,
    ExplicitCapacity,
    KVGeometry,
    MTPBackend,
    PoolConfig,
    StoreConfig,
)
from pagedkv.values.layout import control_words
from pagedkv.values.planner import CapacityPlan, plan
from pagedkv.values.profiles import PROFILES, Profile
from pagedkv.values.quantities import PAGE_TOKENS

__all__ = [
    "PAGE_TOKENS",
    "PROFILES",
    "STATE_FOLLOWS",
    "ActivationPlan",
    "ActivationRefused",
    "ActivationTarget",
    "AttentionShape",
    "AutoCapacity",
    "Batch",
    "BrokenOff",
    "CacheFolder",
    "CapacityError",
    "CapacityPlan",
    "CaptureRefused",
    "Clause",
    "ConfigError",
    "Continuation",
    "ContinuationInspection",
    "Corruption",
    "CountingDevice",
    "Device",
    "DeviceFault",
    "DraftFullBackend",
    "EntitlementExceeded",
    "Event",
    "ExplicitCapacity",
    "Graph",
    "JournalDifference",
    "JournalFailed",
    "KVGeometry",
    "Kernel",
    "Ledger",
    "MTPBackend",
    "MissingRequirement",
    "MisuseError",
    "ModuleSpec",
    "Ops",
    "PageEvent",
    "PageObserver",
    "PagedKVBatchLayerView",
    "PagedKVError",
    "PagedKVLayerView",
    "PlaneTable",
    "PoolConfig",
    "PoolInspection",
    "PoolPlan",
    "Profile",
    "Refusal",
    "ReleasePlan",
    "ReplayReport",
    "Route",
    "Sequence",
    "SnapshotRefused",
    "SpaceInspection",
    "StaleHandle",
    "Store",
    "StoreConfig",
    "StoreInspection",
    "StoreLatched",
    "Stream",
    "StreamHazard",
    "Submission",
    "Transaction",
    "TransferFailed",
    "UnitInFlight",
    "checks",
    "clause",
    "clauses",
    "codecs",
    "control_words",
    "cpu_only",
    "open_device",
    "open_store",
    "plan",
    "replay_journal",
    "shipped_modules",
    "workspace_bytes",
]
