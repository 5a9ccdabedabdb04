"""Hostile journals: lines that no store wrote, made from journals that stores did write.

    python -m tests.hostile.journals        how many there are of each kind

Each is what `replay_journal` takes: text, or bytes for a file.  Every one is the same in every run.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from tests.host.walking import walk_events

SEEDS = (1, 2, 3)
EVENTS = 60
LINES = 14
"""Operations of a journal that are changed: enough for one of each kind of argument and answer."""

VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 63, 64, 65, 1 << 31, -(1 << 31), 1 << 63, -(1 << 63), 1 << 64, 10**300, 0.5, -0.0,
    1e308, float("nan"), float("inf"), float("-inf"), "", "main", "draft", "\x00", "\ud800", "x" * 5000, [], [0],
    [-1], [[]], [1, 2, 3, 4], [1 << 70], [None], [[0, 1], [2]], {}, {"": 0}, {"opaque": "x"}, {"opaque": 7},
    {"state": 1}, {"sequence": [0, 1]}, {"sequence": []}, {"sequence": [-1, -1]}, {"sequence": [1 << 62, 1 << 62]},
    {"continuation": [1]}, {"continuation": [-5]}, {"continuation": "x"}, {"batch": [[0, 1], [0, 1]]}, {"batch": []},
    {"batch": [[1 << 62, 1]]}, {"batch": 1}, {"batch": 3}, {"batch": -1}, {"batch": {}},
    {"unit": 1}, {"unit": None}, {"unit": []}, {"transaction": 1}, {"transaction": None},
    {"transaction": []}, {"transaction": {}}, {"target": {}}, {"target": {"source": {"target": {}}}}, {"target": 1},
    {"counts": 1}, {"counts": [[[1]]]}, {"counts": 1 << 62}, {"counts": -1}, {"counts": {"array": [1], "dtype": "<i4"}},
    {"counts": {"array": [1], "dtype": "V2000000000"}}, {"counts": {"array": 0, "dtype": "U500000000"}},
    {"counts": {"array": [1], "dtype": "O"}}, {"counts": {"array": [1e9], "dtype": "M8[s]"}},
    {"counts": {"array": [1], "dtype": "(1000000000,)i8"}}, {"counts": {"array": [1], "dtype": 5}},
    {"counts": {"array": [1]}}, {"columns": {"main": 1}}, {"columns": {"main": {"opaque": []}}}, {"columns": []},
    {"columns": {"x": 1}}, {"a": 1, "b": 2},
)
"""Put in the place of every value, one after the other."""


@cache
def valid(seed: int) -> tuple[str, ...]:
    """Return the journal of a random walk over a store, as lines."""
    file = io.StringIO()
    for _ in walk_events(seed, EVENTS, file):
        pass
    return tuple(file.getvalue().splitlines(keepends=True))


def hostile(seed: int) -> Iterator[tuple[str, str | bytes]]:
    """Yield the kind and the content of every hostile journal that comes from one valid one."""
    lines = valid(seed)[: LINES + 1]
    for kind, of_lines in (("dropped line", _dropped), ("doubled line", _doubled), ("swapped lines", _swapped),
                           ("line of elsewhere", _foreign)):
        for some_lines in of_lines(lines):
            yield kind, "".join(some_lines)
    text = "".join(lines)
    for length in range(0, len(text), max(1, len(text) // 400)):
        yield "truncated", text[:length]
        yield "truncated, then a line", text[:length] + "\n" + lines[-1]
    for number, line in enumerate(lines):
        for path in _paths(json.loads(line)):
            for kind, changed in _changed_values(line, path, number + len(path) + seed):
                yield kind, "".join((*lines[:number], changed, *lines[number + 1 :]))
    for kind, content in _spoiled(lines, seed):
        yield kind, content


def _dropped(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for at in range(len(lines)):
        yield lines[:at] + lines[at + 1 :]
        yield lines[:at] + tuple(_numbered(lines[at + 1 :], at))


def _doubled(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for at in range(len(lines)):
        yield lines[: at + 1] + lines[at:]
        yield lines[: at + 1] + tuple(_numbered(lines[at:], at + 1))


def _swapped(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for at in range(len(lines) - 1):
        pair = lines[at + 1], lines[at]
        yield lines[:at] + pair + lines[at + 2 :]
        yield lines[:at] + tuple(_numbered((*pair, *lines[at + 2 :]), at))


def _foreign(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for seed in SEEDS:
        other = valid(seed)[: LINES + 1]
        yield (lines[0], *other[1:])
        yield (other[0], *lines[1:])
        for at in range(1, len(lines)):
            yield lines[:at] + tuple(_numbered(other[at:], at))


def _numbered(lines: tuple[str, ...], first: int) -> Iterator[str]:
    """Yield lines with revisions from `first` on, so that only their order is wrong."""
    for number, line in enumerate(lines, start=first):
        yield json.dumps(json.loads(line) | {"revision": number}) + "\n"


def _paths(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a value, with the first two of a list only."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, (*path, key))
    elif isinstance(value, list):
        for place, part in enumerate(value[:2]):
            yield from _paths(part, (*path, place))


def _changed_values(line: str, path: tuple[Any, ...], seed: int) -> Iterator[tuple[str, str]]:
    """Yield the line with one value deleted, named twice, and replaced by some of `VALUES`."""
    picks = random.Random(f"{seed} {path}").sample(VALUES, 12)

    def with_change(change: Callable[[Any, Any], object]) -> str:
        whole = json.loads(line)
        parent = whole
        for key in path[:-1]:
            parent = parent[key]
        change(parent, path[-1])
        return json.dumps(whole) + "\n"

    yield "missing value", with_change(lambda parent, key: parent.pop(key))
    if isinstance(path[-1], str):
        name = json.dumps(path[-1])
        yield "key twice", line.replace(f"{name}:", f"{name}:null,{name}:", 1)
        yield "unknown key", line.replace(f"{name}:", f'{name[:-1]}s":', 1)
    for value in picks:
        yield "other value", with_change(partial(_put, value))


def _put(value: object, parent: Any, key: Any) -> None:
    parent[key] = value


def _spoiled(lines: tuple[str, ...], seed: int) -> Iterator[tuple[str, str | bytes]]:
    """Yield text that is no JSON, no journal, or too much of it."""
    head, rest = json.loads(lines[0]), "".join(lines[1:])
    for depth in (10, 300, 450, 900, 200_000):
        for opening, closing in (("[", "]"), ('{"counts":', "}"), ('{"array":[', "]}")):
            nested = opening * depth + "1" + closing * depth
            yield "deep nesting", nested + "\n" + rest
            yield "deep nesting", "".join(lines) + nested + "\n"
            yield "deep nesting", lines[0] + lines[1].replace('"answer":', f'"answer":{nested},"x":', 1)
            for name in ("begin_unit", "trim"):
                yield "deep nesting", lines[0] + (
                    f'{{"revision":1,"operation":"{name}","arguments":{{"columns":{{"counts":{nested}}}}},'
                    '"answer":1,"state":{}}\n')
    for schema in (0, 1, 2, 3, 5, "3", 3.0, None, [2], 10**400):
        yield "other schema", json.dumps(head | {"schema": schema}, default=str) + "\n" + rest
    for operation in ("", "__init__", "record_in", "batch", "unsettled", "begin_unit ", "\x00", "exec", "é"):
        for arguments in ({}, {"self": 1}, {"operation": {"opaque": "x"}}):
            yield "unknown operation", lines[0] + json.dumps(
                {"revision": 1, "operation": operation, "arguments": arguments, "answer": None, "state": {}}) + "\n"
    for key, values in {
        "max_context": (0, -1, 63, 1 << 20, 1 << 30, 1 << 62), "max_concurrency": (0, -1, 1 << 16, 1 << 31, 1 << 62),
        "prefill_columns_max": (1 << 16, 1 << 62), "lease_window_tokens": (0, 1 << 62), "profile": ("fp2", 7),
    }.items():
        for value in values:
            for tokens in (64, 1 << 20, 1 << 30, 1 << 36, 1 << 62):
                config = head["config"] | {key: value, "kv_capacity": {"type": "ExplicitCapacity", "tokens": tokens}}
                yield "other configuration", json.dumps(head | {"config": config}) + "\n" + rest
                config = head["config"] | {"max_context": tokens, "max_concurrency": 1 << 10, key: value}
                yield "other configuration", json.dumps(head | {"config": config}) + "\n" + rest
    for text in ("", "\n", "\n\n\n", " ", "\x00", "null", "[]", "{}", "NaN", "1e999", '"x"', "\ufeff" + lines[0]):
        yield "no journal", text
        yield "no journal", text + rest
        yield "no journal", "".join(lines) + text + "\n"
    yield "gigantic line", "[" + "1," * (1 << 21) + "1]\n" + rest
    yield "gigantic line", lines[0] + '{"revision":' + "1" * (1 << 21) + "}\n"
    yield "gigantic line", lines[0] + " " * (1 << 22)
    whole = "".join(lines).encode()
    choice = random.Random(seed)
    for _ in range(300):
        at = choice.randrange(len(whole))
        yield "other bytes", whole[:at] + choice.randbytes(choice.choice((1, 2, 40))) + whole[at + 1 :]
    for sequence in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xfe\xff", b"\x1f\x8b\x08"):
        for at in (0, len(lines[0]), len(whole) - 3, len(whole)):
            yield "invalid UTF-8", whole[:at] + sequence + whole[at:]


if __name__ == "__main__":
    counts = Counter(kind for seed in SEEDS for kind, _ in hostile(seed))
    for kind, count in counts.most_common():
        print(f"{count:8,}  {kind}")
    print(f"{counts.total():8,}  in all")
