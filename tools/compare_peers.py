"""`pagedkv bench peers`: time a decode step's KV bookkeeping of published engines, beside ours and the floor.

    vllm-kv         KVCacheManager.allocate_slots and the two counters, for each row
    vllm-scheduler  Scheduler.schedule and update_from_output: vLLM's whole host step, without its model runner
    sglang-kv       alloc_for_decode and the lengths: page allocator, table of token slots, prefix tree

They run beside the ledger, store and loop of `pagedkv bench step`: same chunks, same floor, W = 1, prompts of the same
lengths, pages of 64 tokens, no prefix hashing in vLLM.  vLLM writes no block table here, and SGLang's tensors are on
the CPU, where no kernel is launched; our ledger also writes its selectors.  An engine that touches much memory slows
the floor beside it, which lowers its ratio: compare microseconds too.

No engine is a dependency: each is imported when it is timed.  These adapters use inner names of the engines, which may
change.  They ran with the versions in ENGINES; with another version, a row may say what the adapter did not find.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click

import pagedkv as pk
from pagedkv.tools import bench_step
from pagedkv.tools.bench_step import BLOCKS, StepFigure, Steps
from pagedkv.tools.console import EXIT_FINDING, EXIT_MISSING, json_option, positive, progress_line, say

CONTEXT = BLOCKS * pk.PAGE_TOKENS
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 64,
    "max_position_embeddings": CONTEXT, "torch_dtype": "bfloat16",
}  # fmt: skip
"""The model that vLLM is told of; no weights exist."""


def prompt_lengths(rows: int) -> list[int]:
    """Return the tokens of each row's prompt: those of `bench step`."""
    return [1 + row * 7 % pk.PAGE_TOKENS for row in range(rows)]


def take(module: str, *names: str) -> Any:
    """Import a module of an engine and return one of its names, or a tuple of several."""
    imported = importlib.import_module(module)
    found = tuple(getattr(imported, name) for name in names)
    return found if len(found) > 1 else found[0]


@functools.cache
def vllm_model() -> Any:
    """Return vLLM's description of MODEL; it takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(dumps(MODEL), encoding="utf-8")
        return take("vllm.config", "ModelConfig")(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, max_model_len=CONTEXT, dtype="bfloat16"
        )


class VllmScheduler(Steps):
    """A Scheduler of vLLM, without a model runner: each step samples token 1 for each row."""

    def __init__(self, rows: int) -> None:
        super().__init__(1)
        scheduler, cache, device, whole = take(
            "vllm.config", "SchedulerConfig", "CacheConfig", "DeviceConfig", "VllmConfig"
        )
        self.prompts = prompt_lengths(rows)
        blocks = rows * BLOCKS + 1  # one more: vLLM keeps block 0 for itself
        limits = scheduler(
            max_num_seqs=rows, max_num_batched_tokens=max(CONTEXT, rows * pk.PAGE_TOKENS), max_model_len=CONTEXT,
            is_encoder_decoder=False,
        )
        pages = cache(block_size=pk.PAGE_TOKENS, enable_prefix_caching=False)
        pages.num_gpu_blocks = blocks
        self.config = whole(
            model_config=vllm_model(), scheduler_config=limits, cache_config=pages, device_config=device(device="cpu")
        )
        spec, kv_cache, group = take(
            "vllm.v1.kv_cache_interface", "FullAttentionSpec", "KVCacheConfig", "KVCacheGroupSpec"
        )
        attention = spec(block_size=pk.PAGE_TOKENS, num_kv_heads=1, head_size=16, dtype=take("torch", "bfloat16"))
        self.pages = kv_cache(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group(["layer"], attention)])
        self.output = take("vllm.v1.outputs", "ModelRunnerOutput")

    def restart(self) -> None:
        """Make a scheduler, add requests, and schedule until each prompt is computed."""
        self.scheduler = take("vllm.v1.core.sched.scheduler", "Scheduler")(
            vllm_config=self.config, kv_cache_config=self.pages, block_size=pk.PAGE_TOKENS,
            structured_output_manager=take("vllm.v1.structured_output", "StructuredOutputManager")(self.config),
        )
        request, sampling = take("vllm.v1.request", "Request"), take("vllm.sampling_params", "SamplingParams")
        for row, tokens in enumerate(self.prompts):
            self.scheduler.add_request(request(
                request_id=str(row), prompt_token_ids=[1] * tokens, pooling_params=None,
                sampling_params=sampling(max_tokens=CONTEXT, ignore_eos=True),
            ))
        for _ in self.prompts:
            self.schedule()
            if all(r.num_computed_tokens >= r.num_prompt_tokens for r in self.scheduler.requests.values()):
                break

    def schedule(self) -> None:
        """Schedule, and give the answer of a model."""
        decided = self.scheduler.schedule()
        ids = list(decided.num_scheduled_tokens)
        answer = self.output(
            req_ids=ids, req_id_to_index={name: row for row, name in enumerate(ids)}, sampled_token_ids=[[1]] * len(ids)
        )
        self.scheduler.update_from_output(decided, answer)

    step = schedule


class VllmKV(VllmScheduler):
    """The same requests, without the scheduler's other work."""

    def step(self) -> None:
        """Allocate and count one token of each request."""
        allocate = self.scheduler.kv_cache_manager.allocate_slots
        for request in self.scheduler.running:
            if allocate(request, 1) is None:
                raise RuntimeError("vLLM has no free block for a row")
            request.num_computed_tokens += 1
            request.append_output_token_ids(1)


class SglangKV(Steps):
    """SGLang's pools and prefix tree, under what its decode batch does with them."""

    def __init__(self, rows: int) -> None:
        super().__init__(1)
        self.prompts = prompt_lengths(rows)
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(1)  # thread CPU time sees one thread only
        self.allocate = take("sglang.srt.mem_cache.allocation", "alloc_for_decode")

    def restart(self) -> None:
        """Make pools and a tree, and allocate each prompt."""
        tensor, rows = functools.partial(self.torch.tensor, dtype=self.torch.int64), len(self.prompts)
        table = take("sglang.srt.mem_cache.memory_pool", "ReqToTokenPool")(rows, CONTEXT, "cpu", False)
        pages = take("sglang.srt.mem_cache.allocator.paged", "PagedTokenToKVPoolAllocator")(
            rows * CONTEXT, pk.PAGE_TOKENS, self.torch.bfloat16, "cpu", None, False
        )
        params = take("sglang.srt.mem_cache.cache_init_params", "CacheInitParams")
        tree = take("sglang.srt.mem_cache.radix_cache", "RadixCache")(params(False, table, pages, pk.PAGE_TOKENS))
        row_ids, lens, before = table.alloc_rows(rows), tensor(self.prompts), tensor([0] * rows)
        slots = pages.alloc_extend(before, before, lens, lens, before - 1, sum(self.prompts))
        for row, tokens, own in zip(row_ids, self.prompts, slots.split(self.prompts), strict=True):
            table.write((row, slice(0, tokens)), own.to(self.torch.int32))
        self.batch = SimpleNamespace(
            device="cpu", seq_lens=lens, seq_lens_cpu=lens.clone(), req_pool_indices=tensor(row_ids),
            req_pool_indices_cpu=tensor(row_ids), req_to_token_pool=table, tree_cache=tree,
            model_config=SimpleNamespace(is_encoder_decoder=False), maybe_evict_swa=lambda: None,
            reqs=[SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=n, kv_committed_len=n)) for n in self.prompts],
        )

    def step(self) -> None:
        """Allocate a slot of each row, and count it."""
        batch = self.batch
        batch.out_cache_loc = self.allocate(batch, token_per_req=1)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1


ENGINES: dict[str, tuple[str, dict[str, Callable[[int], Steps]]]] = {
    "vllm": ("0.33.0", {"vllm-kv": VllmKV, "vllm-scheduler": VllmScheduler}),
    "sglang": ("0.5.23", {"sglang-kv": SglangKV}),
}
"""Each engine: the version that its adapters ran with, and what they time."""

ENGINE_ERRORS = (
    ImportError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, AssertionError, OSError,
)  # fmt: skip
"""What an engine raises that misses a package, or that an adapter does not know; it must not stop the others."""


@dataclass(frozen=True)
class Engine:
    """What became of an engine; `remedy` says how to get it, or what to do.

    Attributes:
        version: the installed version, or "" where there is none.
        written_for: the version that the adapter ran with.
    """

    engine: str
    version: str
    written_for: str
    status: Literal["timed", "not installed", "failed"]
    reason: str = ""
    remedy: str = ""


def time_engine(
    name: str, rows: tuple[int, ...], chunks: int, progress: Callable[[str], None]
) -> tuple[Engine, list[StepFigure]]:
    """Time one engine; an error of ENGINE_ERRORS becomes the reason of the answer."""
    written_for, adapters = ENGINES[name]
    version, figures = "", []
    try:
        # An engine's log lines go to stdout, where figures go.
        with contextlib.redirect_stdout(sys.stderr):
            version = str(importlib.import_module(name).__version__)
            for (subject, make), count in itertools.product(adapters.items(), rows):
                progress(f"{subject}, {count} rows")
                figures.append(bench_step.time_subject(subject, count, chunks=chunks, subject=make(count)))
    except ENGINE_ERRORS as error:
        absent = str(error.name) if isinstance(error, ModuleNotFoundError) else name
        if absent == name and isinstance(error, ModuleNotFoundError):
            return Engine(name, "", written_for, "not installed", remedy=f"python -m pip install {name}"), []
        remedy = f"install {name} {written_for}, or mend its adapter in {Path(__file__).name}"
        if absent.partition(".")[0] != name:
            remedy = f"install the package with {absent}, which {name} imports"
        return Engine(name, version, written_for, "failed", f"{type(error).__name__}: {error}", remedy), figures
    return Engine(name, version, written_for, "timed"), figures


@click.command()
@json_option
@click.option("--rows", default="1,8,64,256", show_default=True, callback=bench_step.read_numbers,
              help="Rows of the batch.")
@click.option("--chunks", type=positive, default=100, show_default=True, help="Chunks of 32 steps per figure.")
def command(as_json: bool, rows: tuple[int, ...], chunks: int) -> None:
    """Time a decode step of published engines beside ours.

    KV bookkeeping of vLLM and SGLang, where they are installed, beside our ledger, store and loop: microseconds of
    thread CPU time, W = 1, one pool, and the ratio to the bare NumPy work.  Exit code 1: an installed engine failed;
    3: no engine is installed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    figures, engines = [], []
    for subject, count in itertools.product(bench_step.SUBJECTS, rows):
        progress_line(f"{subject}, {count} rows")
        figures.append(bench_step.time_subject(subject, count, chunks=chunks))
    for name in ENGINES:
        progress_line(f"{name} is imported; this takes seconds")
        engine, more = time_engine(name, rows, chunks, progress_line)
        engines.append(engine)
        figures += more
    progress_line("")
    if as_json:
        click.echo(dumps({**bench_step.report(figures), "engines": [asdict(engine) for engine in engines]}))
    else:
        bench_step.print_table(figures)
        for engine in engines:
            found = f"{engine.version or 'version unknown'} (adapter written for {engine.written_for})"
            click.echo(f"{engine.engine:<8}{engine.status}" + (f", {found}" if engine.status != "not installed" else "")
                       + (f": {engine.reason}" if engine.reason else ""))
            if engine.remedy:
                click.echo(f"{'':<8}-> {engine.remedy}")
    say(f"microseconds of a step: medians of {chunks} chunks of {bench_step.CHUNK_STEPS} steps")
    states = {engine.status for engine in engines}
    if "failed" in states:
        sys.exit(EXIT_FINDING)
    if states == {"not installed"}:
        sys.exit(EXIT_MISSING)
