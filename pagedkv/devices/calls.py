"""The functions that `Device.call` accepts, so that both devices replay the same work.

A captured call runs at every replay, and must see then what it saw at the capture.  So the function is plain and
module-level; its arguments are arrays (each replay reads their memory anew) and scalars (frozen); and the other values
that it names cannot change: modules, functions, classes, numbers, strings, and tuples of those.  The rule also holds
for the functions that it calls within the same project; the search ends at C functions and third-party code.

A capture copies the function with a snapshot of the globals that it names, so a later assignment changes nothing.  The
byte code shows library matrix products; under capture they are refused unless the function is `cpu_only`, because
cuBLAS refuses a capturing stream.
"""

from __future__ import annotations

import builtins
import dis
import enum
import numbers
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.devices.protocol import CPU_ONLY_ATTRIBUTE
from pagedkv.errors import CaptureRefused, Caught, MisuseError, shown

MATRIX_PRODUCTS = frozenset(
    ("matmul", "dot", "einsum", "tensordot", "inner", "vdot", "linalg", "vecdot", "matvec", "vecmat")
)

_GLOBAL_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_GLOBAL_WRITES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL"))
_ATTRIBUTE_READS = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_IMMUTABLE = (
    type(None), type(Ellipsis), type(NotImplemented), numbers.Number, str, bytes, enum.Enum, np.generic, np.dtype,
    types.ModuleType, type, types.BuiltinFunctionType, types.MethodDescriptorType, types.GenericAlias, np.ufunc,
)
_LIBRARY_FOLDERS = tuple(
    Path(folder).resolve()
    for key in ("stdlib", "platstdlib", "purelib", "platlib")
    if (folder := sysconfig.get_paths().get(key))
)
_checked: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def check_call(fn: Callable[..., Any]) -> None:
    """Refuse a function that may change between replays; the walk costs a millisecond, so once per function."""
    if not isinstance(fn, types.FunctionType) or fn not in _checked:
        _checked.add(_Search(fn).run())


def freeze_call(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Check `fn` for a capture too, and copy it with every function that it names."""
    search = _Search(fn)
    plain = search.run()
    if search.product and not getattr(fn, CPU_ONLY_ATTRIBUTE, False):
        raise CaptureRefused(
            f"call of {name_of(fn)}",
            expected="no library matrix product under capture, because cuBLAS refuses a capturing stream",
            got=search.product, remedy="use a kernel, or mark the function with cpu_only", clause="C15.1",
        )
    return _freeze(plain, {})


class _Search:
    """One walk over a function and the functions that it names."""

    def __init__(self, root: Callable[..., Any]) -> None:
        self._root = root
        module = root.__module__ if isinstance(root, types.FunctionType) else ""
        self._package = str(module or "").partition(".")[0]
        self._seen: set[int] = set()
        self.product = ""

    def run(self) -> types.FunctionType:
        if not isinstance(self._root, types.FunctionType):
            raise self._refusal("a plain module-level function", f"{type(self._root).__name__} {name_of(self._root)}")
        self.visit(self._root)
        return self._root

    def visit(self, fn: types.FunctionType) -> None:
        if id(fn) in self._seen:
            return
        self._seen.add(id(fn))
        if fn.__closure__:
            raise self._refusal("no closure", f"{name_of(fn)} closing over {', '.join(fn.__code__.co_freevars)}")
        if "<locals>" in fn.__qualname__:
            raise self._refusal("a function defined at the top of a module", f"{name_of(fn)}, defined in a function")
        for default in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._check_value(default, "defaults that cannot change", f"{name_of(fn)} with default {shown(default)}")
        for code in _codes(fn.__code__):
            self._visit_code(fn, code)

    def _visit_code(self, fn: types.FunctionType, code: types.CodeType) -> None:
        value: object = None  # a global, or an attribute of a module, that the last instruction read
        for instruction in dis.get_instructions(code):
            name = str(instruction.argval) if isinstance(instruction.argval, str) else ""
            if instruction.opname in _GLOBAL_WRITES:
                raise self._refusal("no assignment to a global", f"{name_of(fn)} assigning {name}")
            if _is_matrix_operator(instruction):
                self.product = self.product or f"`@` in {name_of(fn)}"
            is_name = instruction.opname in _GLOBAL_READS | _ATTRIBUTE_READS or instruction.opname == "IMPORT_FROM"
            if is_name and name in MATRIX_PRODUCTS:
                self.product = self.product or f"`{name}` in {name_of(fn)}"
            if instruction.opname in _GLOBAL_READS:
                value = self._look_up(fn, name)
                self._check_global(fn, name, value)
            elif instruction.opname in _ATTRIBUTE_READS and isinstance(value, types.ModuleType):
                value = getattr(value, name, None) if self._is_ours(value) else None
                self._check_global(fn, name, value)
            elif instruction.opname not in {"CACHE", "EXTENDED_ARG", "PUSH_NULL"}:
                value = None

    def _look_up(self, fn: types.FunctionType, name: str) -> object:
        if name in fn.__globals__:
            return fn.__globals__[name]
        return getattr(builtins, name, None)

    def _check_global(self, fn: types.FunctionType, name: str, value: object) -> None:
        got = f"{name_of(fn)} reading {name}, a {type(value).__name__}"
        self._check_value(value, "globals that cannot change", got)

    def _check_value(self, value: object, expected: str, got: str) -> None:
        if isinstance(value, types.FunctionType):
            module = sys.modules.get(value.__module__ or "")
            if module is None or self._is_ours(module):
                self.visit(value)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self._check_value(item, expected, got)
        elif not isinstance(value, _IMMUTABLE):
            raise self._refusal(expected, got)

    def _is_ours(self, module: types.ModuleType) -> bool:
        """Is the module part of the caller's project?"""
        if module.__name__.partition(".")[0] == self._package:
            return True
        file = getattr(module, "__file__", None)
        if file is None:
            return module.__name__ == "__main__"
        path = Path(file).resolve()
        return not any(path.is_relative_to(folder) for folder in _LIBRARY_FOLDERS)

    def _refusal(self, expected: str, got: str) -> MisuseError:
        return MisuseError(
            f"call of {name_of(self._root)}", expected=expected, got=got, clause="C15.1",
            remedy="pass what changes as an array argument, and constants as scalars",
        )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_matrix_operator(instruction: dis.Instruction) -> bool:
    if instruction.opname == "BINARY_OP":
        return instruction.argrepr in {"@", "@="}
    return instruction.opname in {"BINARY_MATRIX_MULTIPLY", "INPLACE_MATRIX_MULTIPLY"}


def _freeze(fn: types.FunctionType, done: dict[int, types.FunctionType]) -> types.FunctionType:
    if id(fn) in done:
        return done[id(fn)]
    namespace: dict[str, Any] = {"__builtins__": builtins.__dict__}
    copy = types.FunctionType(fn.__code__, namespace, fn.__name__, fn.__defaults__)
    copy.__kwdefaults__ = dict(fn.__kwdefaults__) if fn.__kwdefaults__ else None
    copy.__qualname__, copy.__module__ = fn.__qualname__, fn.__module__
    done[id(fn)] = copy
    names = {"__name__", "__package__", "__spec__", "__file__"}
    for code in _codes(fn.__code__):
        names.update(code.co_names)
    for name in names & fn.__globals__.keys():
        value = fn.__globals__[name]
        if isinstance(value, types.FunctionType) and not value.__closure__:
            value = _freeze(value, done)
        namespace[name] = value
    return copy


def name_of(fn: object) -> str:
    """Return the name of a function for a message, or how any other value prints."""
    name: object = None
    with Caught(but=MemoryError):
        name = getattr(fn, "__qualname__", None)
    return name if type(name) is str and name else shown(fn)
