"""Habits that a linter does not know: what is banned, what to write instead, and who may still do it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkout import KERNEL_SUFFIXES, ROOT, name_of, source_files, top_files

# The one module that may touch the CUDA runtime, where every call is counted.
CUDA_RUNTIME_MODULE = "pagedkv/devices/cuda/runtime.py"


@dataclass(frozen=True)
class Banned:
    """A pattern of text, what to do instead, and the files that are exempt, each with its reason."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    exempt: tuple[tuple[str, str], ...] = ()

    def allows(self, file: str) -> bool:
        """True for a file that is exempt."""
        return any(file == exempt for exempt, _ in self.exempt)


# Patterns are put together from halves, so that this file does not contain what it bans.
TEXT = (
    Banned(
        "a path of one machine", re.compile(r"(?<![\w.$})~])/" + r"(?:work|root|tmp|home)" + r"/"),
        "a path relative to the checkout, tmp_path in tests, or XDG_CACHE_HOME",
    ),
    Banned(
        "work left undone", re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b"),
        "do it, or file it where work is planned", exempt=(("pyproject.toml", "names lint rules"),),
    ),
    Banned(
        "the host of a package registry",
        re.compile(r"(?:pypi\.o" + r"rg|pythonhosted\.o" + r"rg|npmjs\.o" + r"rg|deb\.debi" + r"an\.org)"),
        "the package's name; where it comes from is the reader's configuration",
    ),
    Banned(
        "an expected failure", re.compile(r"pytest\.(?:mark\.)?x" + r"fail"), "mend it, or assert what happens today"
    ),
)


def all_texts() -> Iterator[Path]:
    """Yield every file with text that people wrote."""
    yield from source_files(".py", ".md", *KERNEL_SUFFIXES)
    yield from top_files(".md", ".toml", ".gitignore")
    yield ROOT / ".ci" / "run"


def python_trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the parsed tree of every Python file."""
    for path in source_files(".py", folders=folders):
        yield name_of(path), ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("banned", TEXT, ids=lambda b: str(b.name))
def test_banned_text_is_absent(banned: Banned) -> None:
    """Each message says what to write instead."""
    found = []
    for path in all_texts():
        if banned.allows(name_of(path)):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if banned.pattern.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()}")

    assert found == [], f"{banned.name}: write {banned.instead}"


def places(is_offence: Callable[[ast.AST], bool], *folders: str) -> list[str]:
    """Return file and line of every node that a rule names."""
    return [f"{name}:{getattr(node, 'lineno', 0)}" for name, tree in python_trees(*folders)
            for node in ast.walk(tree) if is_offence(node)]


def test_the_cuda_runtime_is_touched_in_one_module_only() -> None:
    """Launches are counted, so nobody calls the runtime beside the counter (design: one launch helper)."""

    def touches(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return ast.unparse(node.value).rpartition(".")[2] == "runtime"
        return isinstance(node, ast.ImportFrom) and (
            node.module in {"cupy.cuda.runtime", "cupy_backends.cuda.api.runtime"}
            or (node.module == "cupy.cuda" and any(alias.name == "runtime" for alias in node.names)))

    found = [place for place in places(touches, "pagedkv", "graphs", "tools", "tests")
             if not place.startswith(f"{CUDA_RUNTIME_MODULE}:")]

    assert found == [], f"call {CUDA_RUNTIME_MODULE} instead, which counts"


def is_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def is_sleep(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep"


def is_broad_except(node: ast.AST) -> bool:
    """Tell a bare or too wide handler; `except BaseException` that raises again at its end may clean up."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {""}
    last = node.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    return bool({"", "Exception"} & caught) or ("BaseException" in caught and not raises_again)


@pytest.mark.parametrize(("is_offence", "folders", "instead"), [
    (is_print, ("pagedkv", "graphs", "cuda_src"), "use the logging module, or return the figure"),
    (is_sleep, ("tests",), "wait for the event itself, or control the order: time passing proves nothing"),
    (is_broad_except, ("pagedkv", "graphs", "tools", "tests"), "catch the exceptions that are expected, by name"),
])
def test_bad_habits_are_absent(is_offence: Callable[[ast.AST], bool], folders: tuple[str, ...], instead: str) -> None:
    """A library is quiet, tests do not sleep, and nothing catches more than it expects."""
    assert places(is_offence, *folders) == [], instead


def test_every_module_says_what_it_is() -> None:
    """The first paragraph says what and why; the README gives the one order of reading."""
    silent = []
    for name, tree in python_trees("pagedkv", "graphs", "tools"):
        head = ast.get_docstring(tree) or ""
        if len(head) < 40 or "Read next" in head:
            silent.append(name)

    assert silent == [], "start the file with a docstring that says what and why, and names no file to read next"


def test_the_links_of_the_checkout_are_relative() -> None:
    """`pagedkv.graphs` is `graphs/` in a checkout that nobody installed."""
    for folder in ("graphs", "tools", "cuda_src"):
        link = ROOT / "pagedkv" / folder
        assert link.is_symlink(), f"{name_of(link)} is a link to ../{folder}"
        assert str(link.readlink()) == f"../{folder}"
