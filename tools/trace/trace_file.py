"""Request traces as files: what a line says, and the tokens that stand for its hashes.

    *.jsonl    {"input_length": 1502, "output_length": 126, "hash_ids": [2874, 2875, ...]}       one request a line
    *.csv      TIMESTAMP,ContextTokens,GeneratedTokens                                            lengths alone

A line may name a "session".  Equal ids are equal prefix blocks of a prompt, of 512 or of 64 tokens: one id for every
full block, or with 512 also one for a last block in part.  Id h becomes the tokens from h * block + 1 on, so equal ids
give equal tokens and others give others.  Tokens behind the last block are of this request alone; token 0 is in no
prompt.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk

BLOCK_SIZES = (512, 64)
TOKENS_MAX = 1 << 22
"""Most tokens of one request."""

TOKENS_END = (1 << 31) - 4096
"""Token ids of prompts are smaller; those from here on are left for outputs."""

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TraceRequest:
    """One line: its number, tokens of the prompt and the output, ids of the prompt's blocks, and its session or ""."""

    line: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True)
class Trace:
    """The requests of a file, in its order.

    Attributes:
        block_tokens: of one id; 0 where there are lengths alone.
        skipped: requests without a prompt.
    """

    requests: tuple[TraceRequest, ...]
    block_tokens: int
    skipped: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def tokens_most(self) -> int:
        """Tokens of the longest request."""
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)

    @property
    def text_tokens(self) -> int:
        """Tokens of all texts, each block once: what a pool that gives nothing up must hold, but for partial pages."""
        blocks = {one for request in self.requests for one in request.hash_ids}
        alone = sum(max(request.prompt_tokens - len(request.hash_ids) * self.block_tokens, 0) + request.output_tokens
                    for request in self.requests)
        return len(blocks) * self.block_tokens + alone

    def turns_before(self) -> list[int]:
        """Return for each request the number of the turn that it answers, from 0, or -1: it came when that had ended.

        That is the one before in its session.  Without sessions it is the last earlier request all of whose full blocks
        it begins with, and has more.
        """
        before: list[int] = []
        last: dict[object, int] = {}  # by session, or by the id of the last full block
        for number, request in enumerate(self.requests):
            full = request.prompt_tokens // self.block_tokens if self.block_tokens else 0
            if request.session:
                before.append(last.get(request.session, -1))
                last[request.session] = number
                continue
            ids = request.hash_ids[:full]
            before.append(next((last[one] for one in reversed(ids[:-1]) if one in last), -1))
            if ids:
                last[ids[-1]] = number
        return before

    def prompts(self) -> Iterator[Int32]:
        """Yield the token ids of each prompt, (n,) int32, from 1 to `TOKENS_END` - 1."""
        block = self.block_tokens
        own = 1 + block * (1 + max((max(request.hash_ids, default=-1) for request in self.requests), default=-1))
        inside = np.arange(1, block + 1)
        for request in self.requests:
            shared = (np.array(request.hash_ids, np.int64)[:, None] * block + inside).reshape(-1)
            ids = shared[: request.prompt_tokens]
            alone = request.prompt_tokens - ids.size
            yield np.concatenate((ids, np.arange(own, own + alone))).astype(np.int32)
            own += alone


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace, or its first `limit` requests.

    Raises:
        MisuseError: a file that cannot be read, or a line that no trace has; the message names it.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = _csv_lines(file, path) if path.suffix == ".csv" else _json_lines(file, path)
            requests = [request for _, request in zip(range(limit or 1 << 40), lines, strict=False)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _refused(str(path), "a text file that can be read", str(error)) from error
    kept = tuple(request for request in requests if request.prompt_tokens)
    if not kept:
        raise _refused(str(path), "at least one request with a prompt", f"{len(requests)} requests")
    block = next((size for size in BLOCK_SIZES if all(_has_blocks(request, size) for request in kept)), None)
    if block is None:
        odd = max((next(request for request in kept if not _has_blocks(request, size)) for size in BLOCK_SIZES),
                  key=lambda request: request.line)
        raise _refused(f"line {odd.line} of {path}",
                       f"an id for every block of {' or '.join(map(str, BLOCK_SIZES))} tokens, the same in all lines",
                       f"{len(odd.hash_ids)} ids of {odd.prompt_tokens} tokens")
    _check_token_ids(kept, block, path)
    has_ids = any(request.hash_ids for request in kept)
    return Trace(kept, block if has_ids else 0, len(requests) - len(kept))


def _check_token_ids(requests: tuple[TraceRequest, ...], block: int, path: Path) -> None:
    """Refuse the first line with which ids and tokens are more than there are token ids."""
    shared, alone = 1, 0
    for request in requests:
        shared = max(shared, 1 + block * (1 + max(request.hash_ids, default=-1)))
        alone += max(request.prompt_tokens - block * len(request.hash_ids), 0)
        if shared + alone > TOKENS_END:
            raise _refused(f"line {request.line} of {path}", f"at most {TOKENS_END} token ids up to here",
                           f"{shared + alone}, with {block} for each id from 0 on")


def _has_blocks(request: TraceRequest, block: int) -> bool:
    full, part = divmod(request.prompt_tokens, block)
    return not request.hash_ids or len(request.hash_ids) in (full, full + (part > 0 and block == BLOCK_SIZES[0]))


def _json_lines(file: Any, path: Path) -> Iterator[TraceRequest]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        where = f"line {number} of {path}"
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refused(where, "one JSON object", text[:80].rstrip()) from error
        if not isinstance(line, dict):
            raise _refused(where, "one JSON object", text[:80].rstrip())
        ids = line.get("hash_ids", [])
        if not isinstance(ids, list):
            raise _refused(where, "hash_ids as a list", repr(ids)[:80])
        numbers = [_count(where, one, (1 << 31) - 1) for one in ids]
        prompt, output = (_count(where, line.get(name), TOKENS_MAX) for name in ("input_length", "output_length"))
        session = line.get("session", "")
        if not isinstance(session, str):
            raise _refused(where, "a session as text", repr(session)[:80])
        yield TraceRequest(number, prompt, output, tuple(numbers), session)


def _csv_lines(file: Any, path: Path) -> Iterator[TraceRequest]:
    reader = csv.DictReader(file)
    for row in reader:
        where = f"line {reader.line_num} of {path}"
        values = [row.get(name) for name in ("ContextTokens", "GeneratedTokens")]
        prompt, output = (_count(where, int(one) if one is not None and one.isdecimal() and len(one) < 12 else one,
                                 TOKENS_MAX) for one in values)
        yield TraceRequest(reader.line_num, prompt, output)


def _count(where: str, value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _refused(where, f"counts and ids from 0 to {most}", repr(value)[:80])
    return value


def _refused(what: str, expected: str, got: str) -> pk.MisuseError:
    return pk.MisuseError(what, expected=expected, got=got, clause="C1.2",
                          remedy="pass a trace with input_length, output_length and hash_ids, or a CSV file of lengths")
