"""Every call of CuPy that this package makes, against CuPy's own signatures; importing CuPy needs no GPU.

The first line of a docstring holds Cython's signature.  The calls are those of the source: `invoke("path", ...)`.
The fake must have the same names in the same order, so that it cannot drift from CuPy.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.devices.cuda.compiler import compile_module, read_signatures
from pagedkv.devices.cuda.runtime import COUNTED, CudaRuntime
from tests.checkout import ROOT, name_of
from tests.cuda.fake_cupy import THREAD_LOCAL, FakeCupy
from tests.devices.test_launch import EVERY_KIND
from tests.kernels.cpu_helpers import cpu_device

cupy = pytest.importorskip("cupy", reason="CuPy, an external package that may be absent")

# Signatures that are not in the first line of a docstring, with their source.
WRITTEN_DOWN = {
    "ndarray": "ndarray(shape, dtype=float, memptr=None, strides=None, order='C')",  # its docstring, second line
    "cuda.using_allocator": "using_allocator(allocator=None)",  # its __init__, in CuPy's Python source
    "cuda.MemoryPool.malloc": "MemoryPool.malloc(self, size_t size)",
    "cuda.function.Module": "Module()",
    "get_default_memory_pool": "get_default_memory_pool()",  # a Python function
}


@dataclass(frozen=True)
class Call:
    """One call of the source."""

    path: str
    positional: int
    has_star: bool
    keywords: tuple[str, ...]
    where: str


def calls() -> Iterator[Call]:
    """Yield every `invoke("path", ...)`, and every path that is found and called by itself."""
    for file in sorted((ROOT / "pagedkv" / "devices" / "cuda").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in {"invoke", "is_done"} or not isinstance(node.args[0], ast.Constant):
                continue
            arguments = node.args[1:]
            yield Call(str(node.args[0].value), sum(not isinstance(a, ast.Starred) for a in arguments),
                       any(isinstance(a, ast.Starred) for a in arguments), tuple(str(k.arg) for k in node.keywords),
                       f"{name_of(file)}:{node.lineno}")


CALLS = list(calls())
PATHS = sorted({call.path for call in CALLS} | {"cuda.using_allocator"})


def found(root: Any, path: str) -> Any:
    """Give what lies at a path."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


def signature_line(path: str) -> str:
    """Give CuPy's signature of a path: of `__init__` for a class that has one."""
    if path in WRITTEN_DOWN:
        return WRITTEN_DOWN[path]
    target = found(cupy, path)
    constructor = (getattr(target, "__init__", None).__doc__ or "").splitlines() if inspect.isclass(target) else []
    if constructor and f"{target.__name__}.__init__(" in constructor[0]:
        return constructor[0]
    return (target.__doc__ or "").strip().splitlines()[0]


def parameters(line: str) -> list[tuple[str, bool]]:
    """Give (name, has a default) of each parameter, `self` left out: `memcpy(intptr_t dst, int kind=0)`."""
    inside = re.search(r"\((.*)\)", line)
    assert inside, line
    result = []
    for part in filter(None, (piece.strip() for piece in inside[1].split(","))):
        declared, has_default, _ = part.partition("=")
        name = declared.split()[-1]
        if name not in {"self", "*"}:
            result.append((name, bool(has_default)))
    return result


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.path}@{call.where.rpartition('/')[2]}")
def test_every_call_fits_cupys_signature(call: Call) -> None:
    known = parameters(signature_line(call.path))
    required = sum(not has_default for _, has_default in known)
    # An unbound method takes its object first.
    owner = found(cupy, call.path.rpartition(".")[0]) if "." in call.path else cupy
    positional = call.positional - (inspect.isclass(owner) and not inspect.isclass(found(cupy, call.path)))

    assert positional + len(call.keywords) <= len(known), call.where
    assert call.has_star or positional + len(call.keywords) >= required, call.where
    assert set(call.keywords) <= {name for name, _ in known}, call.where


@pytest.mark.parametrize("path", PATHS)
def test_cupy_has_what_is_called_and_the_fake_takes_the_same(path: str) -> None:
    """A name that CuPy drops or renames fails here, not on a customer's GPU.

    The fake has the same parameters in the same order, and the same ones are optional.
    """
    line = signature_line(path)
    with cpu_device() as below:
        target = found(FakeCupy(below), path)
        function = target.__new__ if path == "ndarray" else target.__init__ if inspect.isclass(target) else target
        has_own = not (inspect.isclass(target) and function is object.__init__)
        declared = inspect.signature(function).parameters.values() if has_own else ()
        fake = [(p.name, p.default is not p.empty) for p in declared if p.name not in {"self", "cls"}]

    assert callable(found(cupy, path))
    assert re.fullmatch(rf"(?:\w+\.)?{path.rpartition('.')[2]}(?:\.__init__)?\(.*\)(?: -> .+)?", line)
    assert parameters(line) == fake


def test_counted_paths_and_constants_are_cupys() -> None:
    """A misspelt path would count nothing; numbers that CuPy has a name for are the same as those written down."""
    kinds = [f"cuda.runtime.memcpy{way}" for way in ("HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice")]

    assert [path for path in sorted(COUNTED) if not callable(found(cupy, path))] == []
    assert set(PATHS) >= COUNTED
    assert [found(cupy, kind) for kind in kinds] == [0, 1, 2, 3]
    assert found(cupy, "cuda.runtime.streamCaptureModeThreadLocal") == THREAD_LOCAL


# ---- NVRTC, which needs no GPU either --------------------------------------------------------------------------------
NOTHING = 'extern "C" __global__ void nothing() {}'


@pytest.mark.parametrize("spec", [
    pk.ModuleSpec("test_kinds", text=EVERY_KIND + NOTHING, kernels=("every_kind", "nothing")),
    *(spec for spec in pk.shipped_modules()
      if spec.name in {"page_moves", "verify", "linear", "k8v4_d64", "context_d64"}),
], ids=lambda spec: str(spec.name))
def test_both_compilers_see_the_same_signatures(
    spec: pk.ModuleSpec, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C14.4: what a launch is checked against on cuda comes out of NVRTC's PTX, and is what the cpu device knows."""
    with cpu_device() as device:
        module = device.load(spec)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        compiled = compile_module(CudaRuntime(cupy), spec, "sm_90", options=(), announce=lambda line: None)

        assert compiled.cubin.startswith(b"\x7fELF")
        assert compiled.signatures
        for name, words in compiled.signatures.items():
            assert module.kernel(name).signature.words == words, name


def test_nvrtc_explains_an_error(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    spec = pk.ModuleSpec("test_wrong", text='extern "C" __global__ void f(int* p) { *p = nonsense; }', kernels=("f",))
    with pytest.raises(pk.MisuseError, match='identifier "nonsense" is undefined'):
        compile_module(CudaRuntime(cupy), spec, "sm_90", options=(), announce=lambda line: None)


def test_tables_of_signatures_are_read_with_their_trailing_zeros() -> None:
    """PTX leaves zero bytes out at the end, and the whole initializer when there is nothing else."""
    ptx = """
.global .align 4 .b8 pk_signature_add[12] = {2, 8, 0, 0, 1, 8};
.global .align 4 .b8 pk_signature_nothing[4];
"""

    assert read_signatures(ptx) == {"add": (0x802, 0x801), "nothing": ()}
