"""What `pagedkv run` does: prompts in, text out, decoded together by a small real model.

A caller like any other (C1.2): it opens a store, activates a sequence per prompt, prefills, and steps the loop.
Prompts beyond the concurrency wait; whenever a sequence ends, its pages go back and the next prompt joins the running
batch.  Order of admission is the order given.

    waiting  --try_activate, prefill-->  running  --step until stop or length-->  finish

Text is talk and goes out while it is made; figures come at the end, as a table or as one JSON object.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any, NoReturn

import click

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.tools.llama import LlamaModel, linear_for
from pagedkv.tools.model_weights import MODEL_NAME, LlamaConfig, load_model
from pagedkv.tools.tokenizer import TextStream, Tokenizer

Say = Callable[[str], None]


@dataclass
class _Request:
    """One prompt on its way; written by `_Runner` alone.

    `tokens` grows a step at a time and ends with the stop token, if that is what ended it.  `page_ids` is taken
    just before the sequence is finished.
    """

    index: int
    prompt: str
    ids: list[int]
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    page_ids: list[int] = field(default_factory=list)
    reason: str = ""


def run_prompts(
    *,
    prompts: Sequence[str],
    device: str = "auto",
    profile: str = "bf16",
    max_new_tokens: int = 32,
    max_concurrency: int = 8,
    max_context: int = 2048,
    chat: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Decode prompts with SmolLM2-135M-Instruct and print text and figures.

    Args:
        prompts: at least one.
        device: "auto", "cpu" or "cuda".
        profile: storage profile of the cache, a name or an alias (C4).
        max_new_tokens: most tokens made for each prompt; at least 1.
        max_concurrency: rows that run at a time.
        max_context: positions of a row, in tokens; at most what the model was trained for.
        chat: put each prompt into the model's chat form, with its default system prompt.
        json: print one JSON object on stdout and the text on stderr; otherwise text and a table on stdout.

    Returns:
        The JSON object: schema, prompts, texts, tokens, profile, device, pages, graphs, driver_calls_per_step,
        tokens_per_second.

    Raises:
        MissingRequirement: the model package, the `model` extra, or what the device needs.
        MisuseError: a prompt without a token or beyond max_context, or a configuration the store refuses.
    """
    started = time.perf_counter()
    weights, vocabulary = load_model()
    tokenizer = Tokenizer(vocabulary)
    requests = [
        _Request(index, prompt, tokenizer.encode_chat(prompt) if chat else tokenizer.encode(prompt), tokenizer.stream())
        for index, prompt in enumerate(prompts)
    ]
    config = _store_config(
        weights.config,
        requests,
        profile=profile,
        max_new_tokens=max_new_tokens,
        max_concurrency=max_concurrency,
        max_context=max_context,
    )
    with pk.open_store(config, device=device) as store:
        _note(f"device: {store.device.description}")
        model = LlamaModel(weights, store.device, max_context=max_context, linear=linear_for(store.device))
        _note(f"{MODEL_NAME}: loaded and checked in {time.perf_counter() - started:.1f} s")
        runner = _Runner(store, model, requests, tokenizer, max_new_tokens=max_new_tokens)
        talk = _note if json else click.echo
        runner.run(_line_writer(talk, is_single=len(requests) == 1, shows_prompt=not chat, requests=requests))
        report = runner.report(profile=config.resolved_profile.name)
        if json:
            click.echo(dumps(report))
        else:
            for line in _table(report, requests):
                click.echo(line)
    return report


class _Runner:
    """Drives the requests through one store; `run` once, then `report`."""

    def __init__(
        self, store: pk.Store, model: LlamaModel, requests: list[_Request], tokenizer: Tokenizer, *, max_new_tokens: int
    ) -> None:
        self._store = store
        self._loop = DecodeLoop(store, model)
        self._requests = requests
        self._waiting = deque(requests)
        self._running: dict[pk.Sequence, _Request] = {}
        self._stop_ids = tokenizer.stop_ids
        self._max_new_tokens = max_new_tokens
        self._pages_max = 0
        self._timed_tokens = 0
        self._timed_seconds = 0.0

    def run(self, show: Callable[[_Request, str], None]) -> None:
        """Run until every request has ended; `show` gets each piece of text as it is complete."""
        while self._waiting or self._running:
            self._admit()
            for sequence, tokens in self._step().items():
                request = self._running[sequence]
                request.tokens += tokens
                self._show(request, request.stream.push(tokens), show)
            self._pages_max = max(self._pages_max, self._store.memory_summary()["main"]["allocated_pages"])
            for sequence in [s for s in self._running if self._loop.finish_reason(s) is not None]:
                self._retire(sequence, show)

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

    def _step(self) -> dict[pk.Sequence, list[int]]:
        """Step the loop; time it unless a new shape was captured, which compiles and warms up."""
        shapes = len(self._loop.graphs.replays())
        began = time.perf_counter()
        delivered = self._loop.step(self._running, stop_tokens=self._stop_ids)
        if shapes == len(self._loop.graphs.replays()):
            self._timed_seconds += time.perf_counter() - began
            self._timed_tokens += sum(len(tokens) for tokens in delivered.values())
        return delivered

    def _retire(self, sequence: pk.Sequence, show: Callable[[_Request, str], None]) -> None:
        request = self._running.pop(sequence)
        request.reason = str(self._loop.finish_reason(sequence))
        request.page_ids = self._store.page_ids(sequence)
        self._loop.forget(sequence)
        self._store.finish(sequence)
        self._show(request, request.stream.close() + "\n", show)
        request.text = request.text.removesuffix("\n")

    def _show(self, request: _Request, piece: str, show: Callable[[_Request, str], None]) -> None:
        request.text += piece
        show(request, piece)


def _store_config(
    model: LlamaConfig,
    requests: list[_Request],
    *,
    profile: str,
    max_new_tokens: int,
    max_concurrency: int,
    max_context: int,
) -> pk.StoreConfig:
    """Return a configuration with room for the largest requests that can run together, within C5.1."""
    if not requests:
        _refuse("a run", expected="at least one prompt", got="none", remedy="pass a prompt", clause="C1.2")
    if max_context > model.context_tokens:
        _refuse(
            "max_context",
            expected=f"at most {model.context_tokens} tokens, the positions {MODEL_NAME} knows",
            got=f"{max_context}",
            remedy="lower max_context",
            clause="C5.1",
        )
    if max_new_tokens >= max_context:
        _refuse(
            "max_new_tokens",
            expected=f"at most {max_context - 1}, which leaves max_context = {max_context} room for a prompt",
            got=f"{max_new_tokens}",
            remedy="lower max_new_tokens or raise max_context",
            clause="C9.2",
        )
    for request in requests:
        tokens = len(request.ids)
        if not 1 <= tokens <= max_context - max_new_tokens:
            _refuse(
                f"prompt {request.index + 1}",
                expected=f"1 to {max_context - max_new_tokens} tokens (max_context {max_context}, "
                f"{max_new_tokens} of them new)",
                got=f"{tokens}",
                remedy="change the prompt, raise max_context or lower max_new_tokens",
                clause="C9.2",
            )
    blocks = -(-max_context // pk.PAGE_TOKENS)
    budgets = sorted((-(-(len(request.ids) + max_new_tokens) // pk.PAGE_TOKENS) for request in requests), reverse=True)
    pages = max(blocks, max_concurrency, sum(budgets[:max_concurrency]))
    return pk.StoreConfig(
        pk.KVGeometry(
            layers=model.layers, query_heads=model.query_heads, kv_heads=model.kv_heads, head_dim=model.head_dim
        ),
        profile=profile,
        max_context=max_context,
        max_concurrency=max_concurrency,
        kv_capacity=pk.ExplicitCapacity(pages * pk.PAGE_TOKENS),
    )


def _refuse(refused: str, *, expected: str, got: str, remedy: str, clause: str) -> NoReturn:
    raise pk.MisuseError(refused, expected=expected, got=got, remedy=remedy, clause=clause)


def _note(line: str) -> None:
    click.echo(line, err=True)


def _line_writer(
    talk: Say, *, is_single: bool, shows_prompt: bool, requests: list[_Request]
) -> Callable[[_Request, str], None]:
    """Return a function that shows pieces of text: at once for one prompt, in whole lines `[2] ...` for several."""
    pending = {request.index: request.prompt if shows_prompt else "" for request in requests}

    def show(request: _Request, piece: str) -> None:
        text = pending[request.index] + piece
        if is_single:
            click.echo(text, nl=False, err=talk is _note)
            pending[request.index] = ""
            return
        *lines, pending[request.index] = text.split("\n")
        for line in lines:
            talk(f"[{request.index + 1}] {line}")

    return show


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
