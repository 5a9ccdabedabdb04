"""`pagedkv run`: prompts in, text out, decoded together by a small real model.

A caller like any other (C1.2): it opens a store, submits a request for each prompt, and steps the scheduler until it is
idle.  Prompts beyond the concurrency wait in its queue.

Text is printed while it is made; the texts of a file of requests are in the JSON object alone.  Figures follow at the
end, as a table or as one JSON object.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import Any

import click

import pagedkv as pk
from pagedkv.graphs import SAMPLING_WORDS, Output, Sampling, Scheduler
from pagedkv.tools.console import device_choice, positive, say
from pagedkv.tools.llama.conversation import run_conversations
from pagedkv.tools.llama.model import LlamaModel, linear_for
from pagedkv.tools.llama.tokenizer import TextStream, Tokenizer
from pagedkv.tools.llama.weights import MODEL_NAME, LlamaConfig, load_model

LINE_FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,), "max_new_tokens": (int,), "n": (int,), "seed": (int,), "temperature": (int, float),
    "top_p": (int, float), "stop": (list,),
}
"""Fields of a line of a file of requests, and their types; all but the prompt may be left out."""


@dataclass
class _Request:
    """One prompt, and how it is decoded.

    Attributes:
        name: in messages.
        stops: token ids that end an output, with those of the model.
    """

    name: str
    prompt: str
    ids: list[int]
    max_new_tokens: int
    n: int
    sampling: Sampling
    stops: frozenset[int]


@dataclass
class _Text:
    """The text of one output; `output` is set when its request is submitted."""

    index: int
    request: _Request
    stream: TextStream
    output: Output | None = None
    text: str = ""


@click.command()
@click.option("--prompt", "prompts", multiple=True, help="A prompt; repeat it for a batch.")
@click.option("--requests", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A file of JSON lines: prompt, and if you like max_new_tokens, n, seed, temperature, top_p, stop.")
@click.option("--conversation", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A file of JSON lines: turns, a list of texts, and if you like max_new_tokens.")
@click.option("--device", type=device_choice, default="auto", show_default=True)
@click.option("--profile", default="bf16", show_default=True, help="Storage profile of the KV cache (C4).")
@click.option("--max-new-tokens", type=positive, default=32, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Share of the likeliest tokens.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of each prompt's random numbers.")
@click.option("--max-concurrency", type=positive, default=8, show_default=True, help="Rows at a time.")
@click.option("--max-context", type=positive, default=2048, show_default=True, help="Tokens of a row.")
@click.option("--chat", is_flag=True, help="Put each prompt into the model's chat template.")
@click.option("--json", is_flag=True, help="Print one JSON object; the text then goes to stderr.")
@click.pass_context
def command(context: click.Context, /, *, conversation: Path | None, **options: Any) -> None:
    """Decode prompts together with a small real model.

    --requests reads prompts with options of their own, one JSON object a line; the other options are their defaults.

    --conversation reads conversations, one JSON object a line. They take turns on the rows, and lie on the Host
    between their turns. They are in chat form, and take the likeliest token.
    """
    if conversation is None:
        run_prompts(**options)
        return
    shared = {"device", "profile", "max_new_tokens", "max_concurrency", "max_context", "json"}
    for name in sorted(options.keys() - shared):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = "--prompt" if name == "prompts" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} does not go with --conversation")
    run_conversations(conversation, **{name: options[name] for name in shared})


def run_prompts(
    *, prompts: Sequence[str] = (), requests: Path | None = None, device: str = "auto", profile: str = "bf16",
    max_new_tokens: int = 32, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, max_concurrency: int = 8,
    max_context: int = 2048, chat: bool = False, json: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Decode prompts with SmolLM2-135M-Instruct and print text and figures.

    Args:
        prompts: at least one, or else a file.
        requests: a file of JSON lines in place of prompts; LINE_FIELDS are its fields, and `stop` holds token ids, or
            texts of one token.
        device: "auto", "cpu" or "cuda".
        profile: storage profile of the cache, a name or an alias (C4).
        max_new_tokens: most tokens made for each output; at least 1.
        temperature, top_p, seed: of the sampling; a temperature of 0 is greedy.
        max_concurrency: rows that run at a time.
        max_context: positions of a row, in tokens; at most the positions that the model knows.
        chat: put each prompt into the model's chat form, with its default system prompt.
        json: print one JSON object on stdout and the text on stderr; otherwise text and a table on stdout.

    Returns:
        The JSON object: schema, prompts, texts, tokens, reasons, profile, device, pages, scheduler, graphs,
        driver_calls_per_step, tokens_per_second.  Lists have one item for each output.

    Raises:
        MissingRequirement: the model package, the `model` extra, or a need of the device.
        MisuseError: a prompt without a token or beyond max_context, a line of the file that is no request, or a
            configuration that the store refuses.
    """
    start = time.perf_counter()
    if bool(prompts) == (requests is not None):
        raise pk.MisuseError("a run", expected="at least one prompt, or a file of requests",
                             got="both" if prompts else "none", remedy="pass --prompt or --requests", clause="C1.2")
    weights, vocabulary = load_model()
    tokenizer = Tokenizer(vocabulary)
    defaults = {"max_new_tokens": max_new_tokens, "n": 1, "seed": seed, "temperature": temperature, "top_p": top_p,
                "stop": []}
    lines = [(f"prompt {index + 1}", {"prompt": prompt}) for index, prompt in enumerate(prompts)]
    if requests is not None:
        lines = [(f"line {number} of {requests.name}", _read_line(f"line {number} of {requests.name}", line))
                 for number, line in enumerate(requests.read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    parsed = [_request(name, defaults | line, tokenizer, is_chat=chat) for name, line in lines]
    _check_limits(weights.config, parsed, max_context=max_context)
    config = pk.StoreConfig(
        weights.config.geometry, profile=profile, max_context=max_context, max_concurrency=max_concurrency,
        kv_capacity=pk.ExplicitCapacity(_pages(parsed, max_concurrency, max_context) * pk.PAGE_TOKENS),
        caller_words=SAMPLING_WORDS if any(one.sampling.temperature for one in parsed) else 0,
    )  # fmt: skip
    with pk.open_store(config, device=device) as store:
        say(f"device: {store.device.description}")
        model = LlamaModel(weights, store.device, max_context=max_context, linear=linear_for(store.device))
        say(f"{MODEL_NAME}: loaded and checked in {time.perf_counter() - start:.1f} s")
        texts = [_Text(0, request, tokenizer.stream()) for request in parsed for _ in range(request.n)]
        for index, text in enumerate(texts):
            text.index = index
        writer = None if requests is not None else _Writer(texts, to_stderr=json, with_prompts=not chat)
        runner = _Runner(store, Scheduler(store, model), texts, writer)
        runner.run(parsed)
        report = runner.report(profile=config.resolved_profile.name)
    for line in [dumps(report)] if json else _table(report, texts):
        click.echo(line)
    return report


def _read_line(name: str, line: str) -> dict[str, Any]:
    """Return the fields of one line; refuse what is no request, with the line and the field."""
    try:
        fields = loads(line)
    except JSONDecodeError as error:
        raise pk.MisuseError(name, expected="a JSON object", got=f"{error.msg} at column {error.colno}",
                             remedy="write one JSON object a line", clause="C1.2") from error
    if type(fields) is not dict or "prompt" not in fields or not fields.keys() <= LINE_FIELDS.keys():
        raise pk.MisuseError(name, expected=f"a JSON object with a prompt and no field but {', '.join(LINE_FIELDS)}",
                             got=pk.checks.shown(fields), remedy="mend the line", clause="C1.2")
    for field_name, value in fields.items():
        if type(value) not in LINE_FIELDS[field_name]:
            raise pk.MisuseError(f"{field_name} of {name}", got=pk.checks.shown(value), remedy="mend the line",
                                 expected=f"a JSON value of type {LINE_FIELDS[field_name][-1].__name__}", clause="C1.2")
    return fields


def _request(name: str, fields: dict[str, Any], tokenizer: Tokenizer, *, is_chat: bool) -> _Request:
    """Return the request of a line or of a prompt."""
    ids = (tokenizer.encode_chat if is_chat else tokenizer.encode)(fields["prompt"])
    stops = set(tokenizer.stop_ids)
    for stop in fields["stop"]:
        stop_ids = tokenizer.encode(stop) if type(stop) is str else [stop]
        if len(stop_ids) != 1 or type(stop_ids[0]) is not int or stop_ids[0] < 0:
            raise pk.MisuseError(f"stop of {name}", expected="token ids, or texts of one token",
                                 got=pk.checks.shown(stop), remedy="pass such a text or id", clause="C14.4")
        stops.update(stop_ids)
    for field_name in ("max_new_tokens", "n"):
        pk.checks.checked_integer(f"{field_name} of {name}", fields[field_name], 1, 1 << 20, clause="C9.2",
                                  remedy="pass a count of at least 1")
    try:
        sampling = Sampling(fields["temperature"], fields["top_p"], fields["seed"])
        Sampling(seed=fields["seed"] + fields["n"] - 1)  # of the last output
    except pk.MisuseError as error:
        raise pk.MisuseError(f"{error.refused} of {name}", expected=error.expected, got=error.got,
                             remedy=error.remedy, clause=error.clause) from error
    return _Request(name, fields["prompt"], ids, fields["max_new_tokens"], fields["n"], sampling, frozenset(stops))


def _pages(requests: list[_Request], max_concurrency: int, max_context: int) -> int:
    """Return pages for the largest outputs that can run together, and for one of max_context."""
    budgets = [-(-(len(request.ids) + request.max_new_tokens) // pk.PAGE_TOKENS)
               for request in requests for _ in range(request.n)]
    blocks = -(-max_context // pk.PAGE_TOKENS)
    largest = sum(sorted(budgets, reverse=True)[:max_concurrency])
    return min(max(blocks, max_concurrency, largest), max_concurrency * blocks)


class _Writer:
    """Prints pieces of text: at once for one prompt, in whole lines `[2] ...` for several."""

    def __init__(self, texts: list[_Text], *, to_stderr: bool, with_prompts: bool) -> None:
        self._to_stderr = to_stderr
        self._is_single = len(texts) == 1
        self._pending = [text.request.prompt if with_prompts else "" for text in texts]

    def write(self, index: int, piece: str) -> None:
        """Add a piece to a text, and print what can be printed."""
        text = self._pending[index] + piece
        if self._is_single:
            click.echo(text, nl=False, err=self._to_stderr)
            self._pending[index] = ""
            return
        *lines, self._pending[index] = text.split("\n")
        for line in lines:
            click.echo(f"[{index + 1}] {line}", err=self._to_stderr)


@dataclass
class _Runner:
    """Drives the requests through a scheduler; `run` once, then `report`."""

    store: pk.Store
    scheduler: Scheduler
    texts: list[_Text]
    writer: _Writer | None
    timed_tokens: int = 0
    timed_seconds: float = 0.0
    by_output: dict[Output, _Text] = field(default_factory=dict)

    def run(self, requests: list[_Request]) -> None:
        """Run until every request has ended; a terminal shows the progress of a file."""
        texts = iter(self.texts)
        for request in requests:
            has_words = self.store.config.caller_words > 0
            submitted = self.scheduler.submit(request.ids, request.max_new_tokens, stop_tokens=request.stops,
                                              n=request.n, sampling=request.sampling if has_words else None)
            for output, text in zip(submitted.outputs, texts, strict=False):
                text.output, self.by_output[output] = output, text
        is_hidden = self.writer is not None or not sys.stderr.isatty()
        with click.progressbar(length=len(self.texts), label="outputs", file=sys.stderr, hidden=is_hidden) as bar:
            while not self.scheduler.is_idle:
                bar.update(self._step())

    def _step(self) -> int:
        """Step, write new text, and return how many outputs ended; time it unless a new shape was captured."""
        loop = self.scheduler.loop
        shapes, prefilled = len(loop.graphs.replays()), loop.statistics.prefilled_tokens
        begin = time.perf_counter()
        answer = self.scheduler.step()
        if shapes == len(loop.graphs.replays()) and prefilled == loop.statistics.prefilled_tokens:
            self.timed_seconds += time.perf_counter() - begin
            self.timed_tokens += answer.token_count
        for output, tokens in answer.items():
            text = self.by_output[output]
            self._write(text, text.stream.push(tokens))
        for output in answer.ended:
            text = self.by_output[output]
            self._write(text, text.stream.close() + "\n")
            text.text = text.text.removesuffix("\n")
        return len(answer.ended)

    def _write(self, text: _Text, piece: str) -> None:
        text.text += piece
        if self.writer is not None:
            self.writer.write(text.index, piece)

    def report(self, *, profile: str) -> dict[str, Any]:
        """Return the figures; see `run_prompts`."""
        memory, loop, statistics = self.store.memory_summary()["main"], self.scheduler.loop, self.scheduler.statistics
        outputs = list(self.by_output)
        return {
            "schema": 1,
            "prompts": [text.request.prompt for text in self.texts],
            "texts": [text.text for text in self.texts],
            "tokens": [output.tokens for output in outputs],
            "reasons": [output.reason for output in outputs],
            "profile": profile,
            "device": self.store.device.name,
            "pages": {
                "capacity": memory["capacity_pages"],
                "most_in_use": statistics.pages_most,
                "in_use_at_end": statistics.pages,
                "page_bytes": memory["page_bytes"],
            },
            "scheduler": asdict(statistics),
            "graphs": [{"key": key, "replays": replays} for key, replays in loop.graphs.replays().items()],
            "driver_calls_per_step": loop.statistics.driver_calls_per_step,
            "tokens_per_second": self.timed_tokens / self.timed_seconds if self.timed_seconds else 0.0,
        }


def _check_limits(model: LlamaConfig, requests: list[_Request], *, max_context: int) -> None:
    """Refuse prompts and limits that do not fit the model or each other."""

    def require(is_met: bool, refused: str, *, expected: str, got: object, remedy: str, clause: str) -> None:
        if not is_met:
            raise pk.MisuseError(refused, expected=expected, got=got, remedy=remedy, clause=clause)

    require(
        max_context <= model.context_tokens, "max_context",
        expected=f"at most {model.context_tokens} tokens, the positions {MODEL_NAME} knows", got=max_context,
        remedy="lower max_context", clause="C5.1",
    )  # fmt: skip
    for request in requests:
        limit = max_context - 1
        require(
            request.max_new_tokens <= limit, f"max_new_tokens of {request.name}",
            expected=f"at most {limit}, which leaves max_context = {max_context} room for a prompt",
            got=request.max_new_tokens, remedy="lower max_new_tokens or raise max_context", clause="C9.2",
        )  # fmt: skip
        most = max_context - request.max_new_tokens
        require(
            1 <= len(request.ids) <= most, request.name,
            expected=f"1 to {most} tokens (max_context {max_context}, {request.max_new_tokens} of them new)",
            got=len(request.ids), remedy="change the prompt, raise max_context or lower max_new_tokens", clause="C9.2",
        )  # fmt: skip


def _table(report: dict[str, Any], texts: list[_Text]) -> list[str]:
    """Return the figures as lines: one an output, one a graph, then the totals; steps count from 1."""
    lines = ["", (f"{'output':>6}  {'prompt tokens':>13}  {'new tokens':>10}  {'ended by':>9}  {'admitted':>8}  "
                 f"{'first token':>11}  {'last token':>10}")]
    for text in texts:
        output = text.output
        assert output is not None, "it was submitted"
        lines.append(f"{text.index + 1:>6}  {len(text.request.ids):>13}  {len(output.tokens):>10}  {output.reason!s:>9}"
                     f"  {output.admitted_step!s:>8}  {output.first_token_step!s:>11}  {output.ended_step!s:>10}")
    lines += ["", f"{'replays':>7}  graph"]
    lines += [f"{graph['replays']:>7}  {graph['key']}" for graph in report["graphs"]]
    pages, scheduler = report["pages"], report["scheduler"]
    return [
        *lines,
        "",
        f"steps                  {scheduler['steps']}, at most {scheduler['rows_most']} rows at a time",
        (f"first token            after {scheduler['first_token_steps_mean']:.1f} steps on average, "
        f"{scheduler['first_token_steps_max']} at most"),
        f"pages                  {pages['most_in_use']} of {pages['capacity']} in use at most",
        f"driver calls per step  {report['driver_calls_per_step']:.2f}",
        f"tokens per second      {report['tokens_per_second']:.1f}  (steps that only decode, all rows together)",
        f"profile, device        {report['profile']}, {report['device']}",
    ]
