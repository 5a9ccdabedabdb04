"""Graphs: units of work captured once per shape and replayed between scheduling decisions.  (C15)"""

from __future__ import annotations

from pagedkv.graphs.cache import GraphCache
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.control_buffers import ControlBuffers
from pagedkv.graphs.decode_loop import DecodeLoop, LoopStatistics, Prefill
from pagedkv.graphs.key import GraphKey
from pagedkv.graphs.outputs import StepTokens
from pagedkv.graphs.scheduler import Output, Request, Scheduler, SchedulerStatistics, SchedulerStep
from pagedkv.graphs.unit import Model, Unit

__all__ = ["ControlBuffers", "DecodeLoop", "GraphCache", "GraphKey", "LoopStatistics", "Model", "Output",
           "Prefill", "Request", "Scheduler", "SchedulerStatistics", "SchedulerStep", "StepTokens", "Unit", "UnitGraph"]
