"""`pagedkv run`: prompts in, text out, decoded together by a small real model.

A caller like any other (C1.2): it opens a store, activates a sequence per prompt, prefills, and steps the loop.
Prompts beyond the concurrency wait; whenever a sequence ends, its pages return to the pool and the next prompt joins
the running batch, in the order of the command line.

    waiting  --try_activate, prefill-->  running  --step until stop or length-->  finish

Text is printed while it is made; figures follow at the end, as a table or as one JSON object.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any

import click

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, StepTokens
from pagedkv.tools.console import device_choice, positive, say
from pagedkv.tools.llama.model import LlamaModel, linear_for
from pagedkv.tools.llama.tokenizer import TextStream, Tokenizer
from pagedkv.tools.llama.weights import MODEL_NAME, LlamaConfig, load_model


@dataclass
class _Request:
    """One prompt and what the model makes of it.

    Attributes:
        tokens: new tokens so far; a stop token is the last one.
        page_ids: taken just before the sequence is finished.
    """

    index: int
    prompt: str
    ids: list[int]
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    page_ids: list[int] = field(default_factory=list)
    reason: str = ""


@click.command()
@click.option("--prompt", "prompts", multiple=True, required=True, help="A prompt; repeat it for a batch.")
@click.option("--device", type=device_choice, default="auto", show_default=True)
@click.option("--profile", default="bf16", show_default=True, help="Storage profile of the KV cache (C4).")
@click.option("--max-new-tokens", type=positive, default=32, show_default=True)
@click.option("--max-concurrency", type=positive, default=8, show_default=True, help="Rows at a time.")
@click.option("--max-context", type=positive, default=2048, show_default=True, help="Tokens of a row.")
@click.option("--chat", is_flag=True, help="Put each prompt into the model's chat template.")
@click.option("--json", is_flag=True, help="Print one JSON object; the text then goes to stderr.")
def command(**options: Any) -> None:
    """Decode prompts together with a small real model."""
    run_prompts(**options)


def run_prompts(
    *, prompts: Sequence[str], device: str = "auto", profile: str = "bf16", max_new_tokens: int = 32,
    max_concurrency: int = 8, max_context: int = 2048, chat: bool = False, json: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Decode prompts with SmolLM2-135M-Instruct and print text and figures.

    Args:
        prompts: at least one.
        device: "auto", "cpu" or "cuda".
        profile: storage profile of the cache, a name or an alias (C4).
        max_new_tokens: most tokens made for each prompt; at least 1.
        max_concurrency: rows that run at a time.
        max_context: positions of a row, in tokens; at most the positions that the model knows.
        chat: put each prompt into the model's chat form, with its default system prompt.
        json: print one JSON object on stdout and the text on stderr; otherwise text and a table on stdout.

    Returns:
        The JSON object: schema, prompts, texts, tokens, profile, device, pages, graphs, driver_calls_per_step,
        tokens_per_second.

    Raises:
        MissingRequirement: the model package, the `model` extra, or a need of the device.
        MisuseError: a prompt without a token or beyond max_context, or a configuration that the store refuses.
    """
    start = time.perf_counter()
    weights, vocabulary = load_model()
    tokenizer = Tokenizer(vocabulary)
    encode = tokenizer.encode_chat if chat else tokenizer.encode
    requests = [
        _Request(index, prompt, encode(prompt), tokenizer.stream()) for index, prompt in enumerate(prompts)
    ]
    _check_limits(weights.config, requests, max_new_tokens=max_new_tokens, max_context=max_context)
    blocks = -(-max_context // pk.PAGE_TOKENS)
    budgets = sorted((-(-(len(request.ids) + max_new_tokens) // pk.PAGE_TOKENS) for request in requests), reverse=True)
    pages = max(blocks, max_concurrency, sum(budgets[:max_concurrency]))
    config = pk.StoreConfig(
        weights.config.geometry, profile=profile, max_context=max_context, max_concurrency=max_concurrency,
        kv_capacity=pk.ExplicitCapacity(pages * pk.PAGE_TOKENS),
    )  # fmt: skip
    with pk.open_store(config, device=device) as store:
        say(f"device: {store.device.description}")
        model = LlamaModel(weights, store.device, max_context=max_context, linear=linear_for(store.device))
        say(f"{MODEL_NAME}: loaded and checked in {time.perf_counter() - start:.1f} s")
        writer = _Writer(requests, to_stderr=json, with_prompts=not chat)
        runner = _Runner(store, model, requests, writer, stop_ids=tokenizer.stop_ids, max_new_tokens=max_new_tokens)
        runner.run()
        report = runner.report(profile=config.resolved_profile.name)
    for line in [dumps(report)] if json else _table(report, requests):
        click.echo(line)
    return report


class _Writer:
    """Prints pieces of text: at once for one prompt, in whole lines `[2] ...` for several."""

    def __init__(self, requests: list[_Request], *, to_stderr: bool, with_prompts: bool) -> None:
        self._to_stderr = to_stderr
        self._is_single = len(requests) == 1
        self._pending = [request.prompt if with_prompts else "" for request in requests]

    def write(self, request: _Request, piece: str) -> None:
        """Add a piece to the text of a request, and print what can be printed."""
        request.text += piece
        text = self._pending[request.index] + piece
        if self._is_single:
            click.echo(text, nl=False, err=self._to_stderr)
            self._pending[request.index] = ""
            return
        *lines, self._pending[request.index] = text.split("\n")
        for line in lines:
            click.echo(f"[{request.index + 1}] {line}", err=self._to_stderr)


class _Runner:
    """Drives the requests through one store; `run` once, then `report`."""

    def __init__(
        self, store: pk.Store, model: LlamaModel, requests: list[_Request], writer: _Writer, *,
        stop_ids: frozenset[int], max_new_tokens: int,
    ) -> None:  # fmt: skip
        self._store = store
        self._loop = DecodeLoop(store, model)
        self._requests = requests
        self._writer = writer
        self._waiting = deque(requests)
        self._running: dict[pk.Sequence, _Request] = {}
        self._stop_ids = stop_ids
        self._max_new_tokens = max_new_tokens
        self._pages_max = 0
        self._timed_tokens = 0
        self._timed_seconds = 0.0

    def run(self) -> None:
        """Run until every request has ended."""
        while self._waiting or self._running:
            self._admit()
            for sequence, tokens in self._step().items():
                request = self._running[sequence]
                request.tokens += tokens
                self._writer.write(request, request.stream.push(tokens))
            self._pages_max = max(self._pages_max, self._store.memory_summary()["main"]["allocated_pages"])
            for sequence in [s for s in self._running if self._loop.finish_reason(s) is not None]:
                self._retire(sequence)

    def report(self, *, profile: str) -> dict[str, Any]:
        """Return the figures; see `run_prompts`."""
        memory = self._store.memory_summary()["main"]
        return {
            "schema": 1,
            "prompts": [request.prompt for request in self._requests],
            "texts": [request.text for request in self._requests],
            "tokens": [request.tokens for request in self._requests],
            "profile": profile,
            "device": self._store.device.name,
            "pages": {
                "capacity": memory["capacity_pages"],
                "most_in_use": self._pages_max,
                "in_use_at_end": memory["allocated_pages"],
                "page_bytes": memory["page_bytes"],
            },
            "graphs": [{"key": key, "replays": replays} for key, replays in self._loop.graphs.replays().items()],
            "driver_calls_per_step": self._loop.statistics.driver_calls_per_step,
            "tokens_per_second": self._timed_tokens / self._timed_seconds if self._timed_seconds else 0.0,
        }

    def _admit(self) -> None:
        """Activate and prefill waiting requests, in order, while there is room."""
        while self._waiting:
            request = self._waiting[0]
            activate = self._store.try_activate if self._running else self._store.activate
            sequence = activate(prompt_tokens=len(request.ids), output_tokens=self._max_new_tokens)
            if isinstance(sequence, pk.Refusal):
                return  # a running sequence will end and make room
            self._waiting.popleft()
            self._running[sequence] = request
            self._loop.prefill(sequence, request.ids)

    def _step(self) -> StepTokens:
        """Step the loop; time it unless a new shape was captured, which compiles and warms up."""
        shapes = len(self._loop.graphs.replays())
        begin = time.perf_counter()
        delivered = self._loop.step(self._running, stop_tokens=self._stop_ids)
        if shapes == len(self._loop.graphs.replays()):
            self._timed_seconds += time.perf_counter() - begin
            self._timed_tokens += delivered.token_count
        return delivered

    def _retire(self, sequence: pk.Sequence) -> None:
        """Finish the sequence of a request that has ended."""
        request = self._running.pop(sequence)
        request.reason = str(self._loop.finish_reason(sequence))
        request.page_ids = self._store.page_ids(sequence)
        self._loop.forget(sequence)
        self._store.finish(sequence)
        self._writer.write(request, request.stream.close() + "\n")
        request.text = request.text.removesuffix("\n")


def _check_limits(model: LlamaConfig, requests: list[_Request], *, max_new_tokens: int, max_context: int) -> None:
    """Refuse prompts and limits that do not fit the model or each other."""

    def require(is_met: bool, refused: str, *, expected: str, got: object, remedy: str, clause: str) -> None:
        if not is_met:
            raise pk.MisuseError(refused, expected=expected, got=got, remedy=remedy, clause=clause)

    require(bool(requests), "a run", expected="at least one prompt", got="none", remedy="pass a prompt", clause="C1.2")
    require(
        max_context <= model.context_tokens, "max_context",
        expected=f"at most {model.context_tokens} tokens, the positions {MODEL_NAME} knows", got=max_context,
        remedy="lower max_context", clause="C5.1",
    )  # fmt: skip
    require(
        max_new_tokens < max_context, "max_new_tokens",
        expected=f"at most {max_context - 1}, which leaves max_context = {max_context} room for a prompt",
        got=max_new_tokens, remedy="lower max_new_tokens or raise max_context", clause="C9.2",
    )  # fmt: skip
    most = max_context - max_new_tokens
    for request in requests:
        require(
            1 <= len(request.ids) <= most, f"prompt {request.index + 1}",
            expected=f"1 to {most} tokens (max_context {max_context}, {max_new_tokens} of them new)",
            got=len(request.ids), remedy="change the prompt, raise max_context or lower max_new_tokens", clause="C9.2",
        )  # fmt: skip


def _table(report: dict[str, Any], requests: list[_Request]) -> list[str]:
    """Return the figures as lines: one a sequence, one a graph, then the totals."""
    lines = ["", f"{'prompt':>6}  {'prompt tokens':>13}  {'new tokens':>10}  {'ended by':>8}  table (page ids)"]
    lines += [
        f"{request.index + 1:>6}  {len(request.ids):>13}  {len(request.tokens):>10}  {request.reason:>8}  "
        + " ".join(str(page) for page in request.page_ids)
        for request in requests
    ]
    lines += ["", f"{'replays':>7}  graph"]
    lines += [f"{graph['replays']:>7}  {graph['key']}" for graph in report["graphs"]]
    pages = report["pages"]
    return [
        *lines,
        "",
        f"pages                  {pages['most_in_use']} of {pages['capacity']} in use at most",
        f"driver calls per step  {report['driver_calls_per_step']:.2f}",
        f"tokens per second      {report['tokens_per_second']:.1f}  (decode steps, all rows together)",
        f"profile, device        {report['profile']}, {report['device']}",
    ]
