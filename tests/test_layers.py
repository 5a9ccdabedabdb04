"""Imports go one way, folder by folder.

    values <- ledger <- record <- store        values <- devices <- ops <- transfer <- store
    graphs, tools: public names of `pagedkv`, and their own package

A folder of `pagedkv/` is a layer.  A new folder fails the first test until `MAY_IMPORT` says what it may import.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pagedkv as pk
from tests.checkout import KERNEL_SUFFIXES, ROOT, name_of, source_files

MAY_IMPORT: dict[str, set[str]] = {
    "values": set(), "codecs": {"values"}, "ledger": {"values"}, "record": {"values", "ledger"}, "devices": {"values"},
    "ops": {"values", "devices"}, "transfer": {"values", "ledger", "devices", "ops"},
    "store": {"values", "ledger", "record", "devices", "ops", "transfer"},
}
"""What each folder may import beside itself and the modules of BESIDE."""

BESIDE = ("errors", "clauses")
"""Modules beside the folders: they import no folder, and every folder may import them."""

CALLERS = ("graphs", "tools")
# Standard library, and these: what each layer may use of the world outside.
THIRD_PARTY: dict[str, set[str]] = {
    **{layer: {"numpy"} for layer in ("values", "codecs", "ledger", "record", "ops", "transfer", "store")},
    "devices": {"numpy", "cupy", "cupy_backends", "nvtx"},
    "graphs": {"numpy", "nvtx"},
    "tools": {"numpy", "click", "gguf", "tokenizers", "cupy_backends"},
}


@dataclass(frozen=True)
class Import:
    """One imported module of ours or of the world, and the names taken from it (empty for `import x`)."""

    module: str
    names: tuple[str, ...]
    line: int
    is_for_types: bool  # under `if TYPE_CHECKING:`, so that nothing is imported at run time


@dataclass(frozen=True)
class Source:
    """One module of the package, parsed."""

    path: Path
    module: str  # dotted, as imported: pagedkv.devices.cpu
    tree: ast.Module

    @property
    def layer(self) -> str:
        """The first name below `pagedkv`: a folder or a module; empty for the package itself."""
        return [*self.module.split("."), ""][1]

    def imports(self) -> Iterator[Import]:
        """Yield every import, those inside functions and under TYPE_CHECKING too."""
        package = self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]
        guarded = {id(inner) for node in ast.walk(self.tree) if isinstance(node, ast.If)
                   and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
                   for statement in node.body for inner in ast.walk(statement)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, (), node.lineno, id(node) in guarded)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                yield Import(base, tuple(alias.name for alias in node.names), node.lineno, id(node) in guarded)


def all_sources() -> list[Source]:
    found = []
    for path in source_files(".py", folders=("pagedkv", "graphs", "tools", "cuda_src")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[0] != "pagedkv":
            parts.insert(0, "pagedkv")
        if parts[-1] == "__init__":
            parts.pop()
        found.append(Source(path, ".".join(parts), ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


SOURCES = all_sources()
MODULES = {source.module for source in SOURCES}


def imported_modules(imported: Import) -> list[str]:
    """Return the modules of ours that an import reaches: `from pagedkv.ledger import pool` reaches the module."""
    if imported.module.partition(".")[0] != "pagedkv":
        return []
    below = [f"{imported.module}.{name}" for name in imported.names if f"{imported.module}.{name}" in MODULES]
    return below or [imported.module]


def test_every_folder_is_a_layer() -> None:
    """A new folder says what it may import before it imports anything."""
    assert {*MAY_IMPORT, *BESIDE, *CALLERS, "cuda_src", ""} == {source.layer for source in SOURCES}


def test_imports_go_one_way() -> None:
    """Nothing imports a layer above it, or the package that gathers the public names."""
    broken = []
    for source in SOURCES:
        if source.layer in CALLERS or not source.layer:
            continue
        allowed = {source.layer, *BESIDE, *MAY_IMPORT.get(source.layer, set())}
        for imported in source.imports():
            for module in imported_modules(imported):
                target = [*module.split("."), ""][1]
                if target not in allowed:
                    broken.append(f"{name_of(source.path)}:{imported.line}: {source.layer} imports {module}")

    assert broken == []


def test_no_import_cycles() -> None:
    """A cycle means that a noun is missing; an import inside a function does not cure it.

    Imports for annotations do not count: an object may name the type of its owner.
    """
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for source in SOURCES:
        for imported in source.imports():
            if not imported.is_for_types:
                graph[source.module].update(set(imported_modules(imported)) & MODULES - {source.module})

    assert near_cycles(graph) == []


def near_cycles(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes that lie on a cycle or lead to one: what is left when all leaves are removed, repeatedly."""
    rest = {node: set(targets) for node, targets in graph.items()}
    while leaves := [node for node, targets in rest.items() if not targets]:
        for leaf in leaves:
            del rest[leaf]
        for targets in rest.values():
            targets.difference_update(leaves)
    return sorted(rest)


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
CUDA_INCLUDES: dict[str, set[str]] = {
    path.relative_to(ROOT / "cuda_src").as_posix(): set(_INCLUDE.findall(path.read_text(encoding="utf-8")))
    for path in source_files(*KERNEL_SUFFIXES, folders=("cuda_src",))
}
"""What each file of `cuda_src` includes in quotation marks; every such name is one of these files."""


def test_cuda_includes_have_no_cycle() -> None:
    """C++ headers too: `#pragma once` would hide a cycle and leave its order to chance."""
    included = {name for names in CUDA_INCLUDES.values() for name in names}

    assert included <= set(CUDA_INCLUDES)
    assert near_cycles(CUDA_INCLUDES) == []


def test_kernels_reach_the_cpu_device_through_one_header() -> None:
    """`kernels/runtime.cuh` joins the two folders, and `cpu_device/` knows no kernel."""
    crossings = {(file, name) for file, names in CUDA_INCLUDES.items() for name in names
                 if Path(file).parent != Path(name).parent}

    assert {file for file, _ in crossings} == {"kernels/runtime.cuh"}
    assert {Path(name).parent.name for _, name in crossings} == {"cpu_device"}


def test_graphs_and_tools_use_public_names_only() -> None:
    """They are callers like any other (C1.2): `pagedkv.__all__`, and their own package."""
    import pagedkv.graphs

    public = {"pagedkv": {*pk.__all__, "graphs"}, "pagedkv.graphs": set(pagedkv.graphs.__all__)}
    broken = []
    for source in SOURCES:
        if source.layer not in CALLERS:
            continue
        own = f"pagedkv.{source.layer}"
        aliases: dict[str, str] = {}
        for imported in source.imports():
            where = f"{name_of(source.path)}:{imported.line}"
            if imported.module == own or imported.module.startswith(own + "."):
                continue
            if imported.module in public:
                broken += [f"{where}: {n} is not public" for n in imported.names if n not in public[imported.module]]
            elif imported.module.partition(".")[0] == "pagedkv":
                broken.append(f"{where}: imports {imported.module} instead of a public name")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                aliases.update({a.asname or a.name: a.name for a in node.names if a.name in public})
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            package = aliases.get(node.value.id)
            if package and node.attr not in public[package]:
                broken.append(f"{name_of(source.path)}:{node.lineno}: {node.value.id}.{node.attr} is not public")

    assert broken == []


def test_third_party_imports_stay_where_they_belong() -> None:
    """Ledgers and values know NumPy and the standard library; only the device side knows CuPy."""
    broken = []
    for source in SOURCES:
        for imported in source.imports():
            top = imported.module.partition(".")[0]
            if top not in sys.stdlib_module_names | {"pagedkv"} | THIRD_PARTY.get(source.layer, set()):
                broken.append(f"{name_of(source.path)}:{imported.line}: {source.layer} imports {top}")

    assert broken == []


def test_bootstrap_needs_the_standard_library_only() -> None:
    """It runs before anything is installed."""
    (bootstrap,) = (s for s in SOURCES if s.module == "pagedkv.tools.bootstrap")
    foreign = [i.module for i in bootstrap.imports() if i.module.partition(".")[0] not in sys.stdlib_module_names]

    assert foreign == []


IMPORT_ALONE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cupy", "cupy_backends", "ziglang", "cuda", "nvidia", "torch"}:
            raise ImportError(f"{name} is blocked in this test")

def no_processes(event, arguments):
    if event in {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.fork", "os.forkpty"}:
        raise RuntimeError(f"{event} during import: {arguments}")

sys.meta_path.insert(0, Blocker())
sys.addaudithook(no_processes)
for module in sys.argv[1:]:
    __import__(module)
"""


@pytest.mark.parametrize("modules", [("pagedkv",), ("pagedkv", "pagedkv.graphs"), ("pagedkv.tools.command",)])
def test_import_needs_neither_cupy_nor_a_compiler(modules: tuple[str, ...]) -> None:
    """`import pagedkv` works with CuPy absent, starts no process, and is quiet."""
    result = subprocess.run([sys.executable, "-c", IMPORT_ALONE, *modules], cwd=ROOT,
                            env={"PATH": "", "HOME": "/nonexistent"}, capture_output=True, text=True, timeout=60,
                            check=False)

    assert (0, "", "") == (result.returncode, result.stdout, result.stderr)
