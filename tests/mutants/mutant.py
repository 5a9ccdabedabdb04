"""A mutant: one small mistake in a copy of the checkout, and who must notice it."""

from __future__ import annotations

import ast
import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FUZZ_SEED = 20_480
FUZZ_EVENTS = 15_000
BODY = "the body of the function"
"""As `old`: all statements of the function that `place` names."""

GONE = "nothing"
"""As `new`: the mutant leaves out the whole Python statement that contains `old`."""


@dataclass(frozen=True)
class Catcher:
    """A command that must end with exit code 1, and whose output each of the regular expressions `says` must match.

    The arguments are Python's, from the root of the copy.  With `needs_control` no other test runs this command without
    a mutant, so the control always does.
    """

    arguments: tuple[str, ...]
    says: tuple[str, ...] = ()
    needs_control: bool = False

    def __str__(self) -> str:
        hidden = {"-m", "pytest", "tests.mutants.walks", *PYTEST_OPTIONS}
        return " ".join(word for word in self.arguments if word not in hidden)


PYTEST_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short")


def tests(arguments: str) -> Catcher:
    """Return the catcher that runs pytest; `arguments` begin with a file below `tests/`."""
    first, *rest = shlex.split(arguments)
    return Catcher(("-m", "pytest", *PYTEST_OPTIONS, f"tests/{first}", *rest))


def emulated(arguments: str, *says: str) -> Catcher:
    """Return the catcher that runs a kernel test under the emulator and its sanitizer."""
    return Catcher((*tests(arguments).arguments, "--emulated"), says, needs_control=True)


def scene(name: str, operation: str, buffer: str, error: str = "StreamHazard") -> Catcher:
    """Return the catcher that runs a scene: its error must name the operation and the buffer."""
    return Catcher(("-m", "tests.mutants.walks", "scene", name, f"^{error}:", operation, buffer), (r"seed \d+: ",))


def interrupted(call: str, every: int = 1) -> str:
    """Return the test that interrupts every n-th line of a call of the store; see `hostile/test_interrupts.py`."""
    name = "test_an_interrupt_at_any_line_leaves_before_after_or_a_latched_store"
    return f"'hostile/test_interrupts.py::{name}[{call}-KeyboardInterrupt-{every}]'"


FUZZ = Catcher(("-m", "tests.mutants.walks", "fuzz", str(FUZZ_SEED), str(FUZZ_EVENTS)), (r"event \d+ of",))
"""The random walk beside the model: it must find the mutant within `FUZZ_EVENTS` events."""

By = str | Catcher


@dataclass(frozen=True)
class Mutant:
    """One planted mistake, which breaks a clause of the contract; `what` says it in words.

    `place` is a file below `pagedkv/`, and after a colon a function or `Class.method` where the file alone does not do.
    `old` occurs once there, or is `BODY`; `new` replaces it, or is `GONE`; `also` holds more such edits.  All of
    `caught_by` must notice the mistake; a string is an argument of pytest, below `tests/`.
    """

    clause: str
    what: str
    place: str
    old: str
    new: str
    caught_by: By | tuple[By, ...]
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def catchers(self) -> tuple[Catcher, ...]:
        """Who must notice it."""
        given = self.caught_by if isinstance(self.caught_by, tuple) else (self.caught_by,)
        return tuple(tests(each) if isinstance(each, str) else each for each in given)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that change, below `pagedkv/`."""
        return tuple(dict.fromkeys(place.partition(":")[0] for place, _, _ in self.edits))

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        """Every edit as (place, old, new)."""
        return ((self.place, self.old, self.new), *self.also)

    def texts(self, root: Path) -> dict[Path, str]:
        """Return the changed text of every file; raise `Misplaced` unless each old text occurs once."""
        texts: dict[Path, str] = {}
        for place, old, new in self.edits:
            name, _, function = place.partition(":")
            path = (root / "pagedkv" / name).resolve()
            if not path.is_file():
                raise Misplaced(self, place, "there is no such file")
            text = texts[path] if path in texts else path.read_text(encoding="utf-8")
            try:
                start, end = _find(text, function, old, is_statement=new == GONE)
            except LookupError as error:
                raise Misplaced(self, place, str(error)) from error
            texts[path] = text[:start] + ("pass" if new == GONE else new) + text[end:]
        return texts


class Misplaced(Exception):
    """The place of a mutant changed: it must be planted anew."""

    def __init__(self, mutant: Mutant, place: str, why: str) -> None:
        super().__init__(f"{mutant.clause} {mutant.what}: {place}: {why}: plant the mutant anew")


def _find(text: str, function: str, old: str, *, is_statement: bool) -> tuple[int, int]:
    """Return start and end of what is replaced, as offsets."""
    spans = list(_functions(text, function)) if function else [(0, 0, len(text))]
    if len(spans) != 1:
        raise LookupError(f"{len(spans)} functions have this name")
    start, body, end = spans[0]
    if old == BODY:
        return body, end
    count = text.count(old, start, end)
    if count != 1:
        raise LookupError(f"{old!r} occurs {count} times")
    found = text.index(old, start)
    return _statement(text, found) if is_statement else (found, found + len(old))


def _functions(text: str, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield start, start of the body, and end of every function with this name or qualified name, as offsets."""
    scopes: list[tuple[str, ast.AST]] = [("", _parsed(text))]
    for prefix, scope in scopes:
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{node.name}.", node))
            elif isinstance(node, ast.FunctionDef) and name in {node.name, prefix + node.name}:
                start, end = _span(text, node)
                yield start, _span(text, node.body[0])[0], end


def _statement(text: str, offset: int) -> tuple[int, int]:
    """Return start and end of the innermost statement that an offset lies in."""
    spans = [_span(text, node) for node in ast.walk(_parsed(text)) if isinstance(node, ast.stmt)]
    return min((span for span in spans if span[0] <= offset < span[1]), key=lambda span: span[1] - span[0])


def _span(text: str, node: ast.stmt) -> tuple[int, int]:
    """Return start and end of a statement as offsets; Python counts columns in bytes."""
    lines, offsets = _lines(text)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    return (offsets[first] + len(lines[first].encode()[: node.col_offset].decode()),
            offsets[last] + len(lines[last].encode()[: node.end_col_offset].decode()))  # fmt: skip


@lru_cache(maxsize=4)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@lru_cache(maxsize=4)
def _lines(text: str) -> tuple[list[str], list[int]]:
    lines = text.splitlines(keepends=True)
    return lines, [0, *itertools.accumulate(map(len, lines))]
