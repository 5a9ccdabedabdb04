"""Graphs: units of work captured once per shape and replayed between scheduling decisions.  (C15)"""

from __future__ import annotations

from pagedkv.graphs.cache import GraphCache
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.control_buffers import ControlBuffers
from pagedkv.graphs.decode_loop import DecodeLoop, LoopStatistics, Prefill
from pagedkv.graphs.draft import Draft, PromptLookup
from pagedkv.graphs.key import GraphKey
from pagedkv.graphs.outputs import StepTokens
from pagedkv.graphs.prefix_index import PrefixIndex, PrefixMatch
from pagedkv.graphs.retention import LeastRecent, RetainedPrefix, RetainedText, Retention, RetentionCounters
from pagedkv.graphs.sampling import NO_TOKEN, SAMPLING_WORDS, Sampling, choose_largest, choose_tokens
from pagedkv.graphs.scheduler import Output, Request, Scheduler, SchedulerStatistics, SchedulerStep
from pagedkv.graphs.unit import Model, Unit

__all__ = ["NO_TOKEN", "SAMPLING_WORDS", "ControlBuffers", "DecodeLoop", "Draft", "GraphCache", "GraphKey",
           "LeastRecent", "LoopStatistics", "Model", "Output", "Prefill", "PrefixIndex", "PrefixMatch", "PromptLookup",
           "Request", "RetainedPrefix", "RetainedText", "Retention", "RetentionCounters", "Sampling", "Scheduler",
           "SchedulerStatistics", "SchedulerStep", "StepTokens", "Unit", "UnitGraph", "choose_largest", "choose_tokens"]
