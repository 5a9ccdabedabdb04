"""`pagedkv run --conversation FILE`: conversations take turns on few rows, and lie on the Host between their turns.

    line 1 of FILE    {"turns": ["What is a page?", "And a page table?"], "max_new_tokens": 40}
    line 2            ...

A conversation whose turn has ended is retained and demoted, beside the decoding of others.  Its next turn begins with
its pages coming back, beside decoding too.  It says what it would say if it had never moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import Any

import click

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.tools.console import say
from pagedkv.tools.llama.model import LlamaModel, linear_for
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import MODEL_NAME, load_model


@dataclass
class Turn:
    """A prompt, the tokens of its answer, and the copies of its conversation before and after it.

    Attributes:
        ids: the prompt, without what came before.
        restored_pages, restore_seconds: came from the Host before it; from the call to the publication.
        steps_beside: decode steps of other conversations meanwhile.
        demoted_pages, demote_seconds: went to the Host after it; from the call to the publication.
    """

    ids: list[int]
    tokens: list[int] = field(default_factory=list)
    restored_pages: int = 0
    restore_seconds: float = 0.0
    steps_beside: int = 0
    demoted_pages: int = 0
    demote_seconds: float = 0.0


@dataclass
class Conversation:
    """Turns that follow each other.

    Attributes:
        max_new_tokens: of each answer.
        done: turns that have begun.
        saved, last_token: between turns its continuation, and the token that was sampled last and never written.
        since: `time.perf_counter` when its copies began; None when nothing is on its way.
    """

    turns: list[Turn]
    max_new_tokens: int
    done: int = 0
    saved: pk.Continuation | None = None
    last_token: int | None = None
    since: float | None = None

    @property
    def tokens(self) -> int:
        """Positions that it needs when every answer is as long as it may be, and each is then ended by one token."""
        return sum(len(turn.ids) + self.max_new_tokens + 1 for turn in self.turns)


class Talk:
    """Lets conversations have their turns, as many at a time as there are rows and pages.

    Over a store without a Host arena conversations stay on the Device between their turns.
    """

    def __init__(
        self, loop: DecodeLoop, conversations: list[Conversation], *, end_id: int, stop_ids: frozenset[int],
        heard: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            end_id: is put behind an answer that ended otherwise.
            stop_ids: end an answer; one of them is `end_id`.
            heard: called with the number of a conversation after each turn.
        """
        self._loop, self._store = loop, loop.store
        self._conversations, self._end_id, self._stop_ids, self._heard = conversations, end_id, stop_ids, heard
        self._waiting = list(range(len(conversations)))
        self._coming: dict[pk.Sequence, int] = {}
        self._running: dict[pk.Sequence, int] = {}

    def run(self) -> None:
        """Run until every turn has ended.

        Raises:
            ActivationRefused: there is no room for a turn, and nothing runs that could make some.
        """
        while self._waiting or self._coming or self._running:
            is_copying = self._store.poll_copies()
            self._note_demotions()
            refusal = self._activate_next()
            if refusal is not None and not (is_copying or self._coming or self._running):
                raise pk.ActivationRefused("the next turn of a conversation", expected="room for it", refusal=refusal,
                                           got=f"{refusal}", remedy="raise the capacity of the pool or of the arena",
                                           clause="C10.9")
            for sequence in [one for one in self._coming if not self._store.is_restoring(one)]:
                self._begin(sequence, self._coming.pop(sequence))
            if self._running:
                self._step()
        while self._store.poll_copies():
            time.sleep(0)
        self._note_demotions()

    def _activate_next(self) -> pk.Refusal | None:
        """Activate turns in order of arrival, from nothing or by a Move; return why the first that waits cannot."""
        while self._waiting:
            one = self._conversations[self._waiting[0]]
            turn, saved = one.turns[one.done], one.saved
            missing = 0 if saved is None else self._store.explain_release(saved)["main"].host_only_pages
            now = time.perf_counter()
            answer = self._store.try_activate(
                prompt_tokens=len(self._prompt(one)) + (one.last_token is not None),
                output_tokens=one.max_new_tokens, source=saved, keep_source=saved is None, wait=False,
            )
            if isinstance(answer, pk.Refusal):
                return answer
            turn.restored_pages, one.since, one.saved = missing, now, None
            self._coming[answer] = self._waiting.pop(0)
        return None

    def _prompt(self, one: Conversation) -> list[int]:
        lacks_end = one.last_token is not None and one.last_token != self._end_id
        return [self._end_id] * lacks_end + one.turns[one.done].ids

    def _begin(self, sequence: pk.Sequence, number: int) -> None:
        """Prefill a turn whose pages are there."""
        one = self._conversations[number]
        turn = one.turns[one.done]
        if turn.restored_pages and one.since is not None:
            turn.restore_seconds = time.perf_counter() - one.since
        one.since = None
        self._loop.prefill(sequence, self._prompt(one), last_token=one.last_token, stop_tokens=self._stop_ids)
        one.done += 1
        self._running[sequence] = number

    def _step(self) -> None:
        """Decode one token in every row that runs, and end the turns that have ended."""
        for number in self._coming.values():
            one = self._conversations[number]
            one.turns[one.done].steps_beside += 1
        for sequence, tokens in self._loop.step(list(self._running)).items():
            one = self._conversations[self._running[sequence]]
            one.turns[one.done - 1].tokens += tokens
        for sequence in [one for one in self._running if self._loop.finish_reason(one) is not None]:
            self._end(sequence, self._running.pop(sequence))

    def _end(self, sequence: pk.Sequence, number: int) -> None:
        """End a turn; with another one to come the conversation is retained, and sent to the Host."""
        one = self._conversations[number]
        one.last_token = self._loop.last_token(sequence)
        self._loop.forget(sequence)
        has_more = one.done < len(one.turns)
        one.saved = self._store.finish(sequence, retain=has_more, state=one.last_token if has_more else None)
        if one.saved is not None:
            self._waiting.append(number)
            if self._store.config.host_arena_bytes:
                now = time.perf_counter()
                pages = self._store.demote(one.saved, wait=False)
                if isinstance(pages, int):
                    one.turns[one.done - 1].demoted_pages, one.since = pages, now
        self._heard(number)

    def _note_demotions(self) -> None:
        for one in self._conversations:
            if one.saved and one.since and all(page < 0 for page in self._store.page_ids(one.saved)):
                one.turns[one.done - 1].demote_seconds, one.since = time.perf_counter() - one.since, None


def run_conversations(
    file: Path, *, device: str = "auto", profile: str = "bf16", max_new_tokens: int = 32, max_concurrency: int = 8,
    max_context: int = 2048, json: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Let the conversations of a file talk to SmolLM2-135M-Instruct, and print what was said and the copies' times.

    The pool has room for the largest `max_concurrency` conversations; the Host arena for all.

    Args:
        file: JSON lines: `turns`, a list of texts, and perhaps `max_new_tokens`.
        device, profile: as in `run_prompts`.
        max_new_tokens: most tokens of an answer where the line says nothing.
        max_concurrency: conversations that run at a time.
        max_context: positions of a conversation, in tokens.
        json: print one JSON object on stdout and the texts on stderr.

    Returns:
        The JSON object: schema, conversations (a list of turns each: prompt, text, ids, tokens and the other attributes
        of `Turn`), profile, device, pages, host, seconds.

    Raises:
        MissingRequirement: as in `run_prompts`.
        MisuseError: a line that is no conversation, or one that does not fit the model or max_context.
    """
    texts = read_conversations(file, max_new_tokens=max_new_tokens)
    weights, vocabulary = load_model()
    tokenizer = Tokenizer(vocabulary)
    conversations = [Conversation([Turn((tokenizer.encode_turn if index else tokenizer.encode_chat)(text))
                                   for index, text in enumerate(turns)], limit) for _, turns, limit in texts]
    pk.checks.checked_integer("max_context", max_context, 1, weights.config.context_tokens, clause="C5.1",
                              remedy=f"lower it to what {MODEL_NAME} knows")
    for (name, _, _), one in zip(texts, conversations, strict=True):
        if one.tokens > max_context:
            raise pk.MisuseError(name, expected=f"turns and answers within max_context = {max_context} tokens",
                                 got=f"{one.tokens} with answers of {one.max_new_tokens}", clause="C9.2",
                                 remedy="raise max_context, lower max_new_tokens or drop turns")
    config = conversation_config(weights.config.geometry, conversations, profile=profile, rows=max_concurrency)
    with pk.open_store(config, device=device) as store:
        say(f"device: {store.device.description}")
        loop = DecodeLoop(store, LlamaModel(weights, store.device, max_context=config.max_context,
                                            linear=linear_for(store.device)))  # fmt: skip

        def heard(number: int) -> None:
            done = conversations[number].done - 1
            answer = tokenizer.decode(conversations[number].turns[done].tokens)
            for mark, text in ((">", texts[number][1][done]), ("<", answer)):
                for line in text.split("\n"):
                    click.echo(f"[{number + 1}] {mark} {line}", err=json)

        begin = time.perf_counter()
        Talk(loop, conversations, end_id=tokenizer.end_id, stop_ids=tokenizer.stop_ids, heard=heard).run()
        memory, host = store.memory_summary()["main"], store.host_summary()
        report = {
            "schema": 1,
            "conversations": [
                [{"prompt": text, "text": tokenizer.decode(turn.tokens), **asdict(turn)}
                 for text, turn in zip(turns, one.turns, strict=True)]
                for (_, turns, _), one in zip(texts, conversations, strict=True)
            ],
            "profile": config.resolved_profile.name,
            "device": store.device.name,
            "pages": {"capacity": memory["capacity_pages"], "page_bytes": memory["page_bytes"]},
            "host": host,
            "seconds": time.perf_counter() - begin,
        }  # fmt: skip
    for line in [dumps(report)] if json else _table(report):
        click.echo(line)
    return report


def conversation_config(
    geometry: pk.KVGeometry, conversations: list[Conversation], *, profile: str, rows: int, has_host: bool = True,
) -> pk.StoreConfig:
    """Return a store for conversations: pages for the largest `rows`, or without a Host arena for all."""
    pages = sorted((-(-one.tokens // pk.PAGE_TOKENS) for one in conversations), reverse=True)
    rows = min(rows, len(pages))
    config = pk.StoreConfig(
        geometry, profile=profile, max_context=pages[0] * pk.PAGE_TOKENS, max_concurrency=rows,
        kv_capacity=pk.ExplicitCapacity(sum(pages[:rows] if has_host else pages) * pk.PAGE_TOKENS),
        retained_tokens=sum(pages) * pk.PAGE_TOKENS,
    )
    return replace(config, host_arena_bytes=sum(pages) * config.pools[0].record_bytes) if has_host else config


def read_conversations(path: Path, *, max_new_tokens: int) -> list[tuple[str, list[str], int]]:
    """Return the name in messages, the turns and max_new_tokens of each line of a file.

    Raises:
        MisuseError: a line that is no conversation, by its number; or a file without any.
    """
    found: list[tuple[str, list[str], int]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        name = f"line {number} of {path.name}"
        try:
            line: Any = loads(text)
        except JSONDecodeError as error:
            raise _refused(name, f"{error.msg} at column {error.colno}") from error
        if type(line) is not dict or not line.keys() <= {"turns", "max_new_tokens"}:
            raise _refused(name, pk.checks.shown(line))
        turns = line.get("turns")
        if type(turns) is not list or not turns or not all(type(turn) is str and turn for turn in turns):
            raise _refused(name, pk.checks.shown(line))
        limit = pk.checks.checked_integer(f"max_new_tokens of {name}", line.get("max_new_tokens", max_new_tokens),
                                          1, 1 << 20, clause="C9.2", remedy="pass a count of at least 1")
        found.append((name, turns, limit))
    if not found:
        raise _refused(path.name, "no line")
    return found


def _refused(what: str, got: str) -> pk.MisuseError:
    return pk.MisuseError(
        what, expected='a JSON object with "turns", a list of texts that are not empty, and perhaps "max_new_tokens"',
        got=got, remedy="write one conversation a line", clause="C1.2",
    )


def _table(report: dict[str, Any]) -> list[str]:
    """Return the figures as lines: one a turn, then the totals."""
    lines = ["", (f"{'turn':>6}  {'new tokens':>10}  {'restored':>8}  {'ms':>7}  {'steps beside':>12}  {'demoted':>7}  "
                  f"{'ms':>7}")]  # fmt: skip
    for number, turns in enumerate(report["conversations"], 1):
        lines += [
            f"{f'{number}.{index}':>6}  {len(turn['tokens']):>10}  {turn['restored_pages']:>8}  "
            f"{turn['restore_seconds'] * 1e3:>7.2f}  {turn['steps_beside']:>12}  {turn['demoted_pages']:>7}  "
            f"{turn['demote_seconds'] * 1e3:>7.2f}"
            for index, turn in enumerate(turns, 1)
        ]
    host, pages = report["host"], report["pages"]
    return [
        *lines,
        "",
        f"pages             {pages['capacity']} of {pages['page_bytes']} bytes",
        f"Host arena        {host['capacity_bytes']} bytes",
        (f"copied            {host['copied_pages']} pages, {host['copied_bytes']} bytes, "
         f"{host['copy_operations']} copies and launches"),
        f"seconds           {report['seconds']:.2f}",
        f"profile, device   {report['profile']}, {report['device']}",
    ]
