"""The public names are what `__all__` says, and every one of them is documented."""

from __future__ import annotations

import ast
import inspect
import types

import pytest

import pagedkv
import pagedkv.graphs
from tests.checkout import ROOT

PACKAGES = [pagedkv, pagedkv.graphs]
package_param = pytest.mark.parametrize("package", PACKAGES, ids=lambda p: str(p.__name__))


@package_param
def test_every_public_name_exists(package: types.ModuleType) -> None:
    """`from pagedkv import *` works."""
    assert [] == [name for name in package.__all__ if not hasattr(package, name)]


@package_param
def test_public_names_are_sorted_and_distinct(package: types.ModuleType) -> None:
    """Constants, then classes, then functions and modules, each in order: the order that the linter keeps."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert list(package.__all__) == sorted(set(package.__all__), key=rank)


@package_param
def test_nothing_is_imported_without_being_public(package: types.ModuleType) -> None:
    """What `__init__` brings in from the library is in `__all__`, and the other way round."""
    assert package.__file__ is not None
    folder = ROOT / ("pagedkv" if package is pagedkv else "graphs")
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    brought_in = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    defined = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id != "__all__"
    }
    defined |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}

    assert set(package.__all__) == {name for name in brought_in | defined if not name.startswith("_")}


@package_param
def test_every_public_class_and_function_is_documented(package: types.ModuleType) -> None:
    """A docstring of its own: not inherited, and not the one that a dataclass or an enum makes up."""
    bare = []
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value):
            text = value.__dict__.get("__doc__") or ""
            if not text or text.startswith(f"{value.__name__}("):
                bare.append(name)
        elif inspect.isfunction(value) and not value.__doc__:
            bare.append(name)

    assert bare == []


@package_param
def test_every_public_method_is_documented(package: types.ModuleType) -> None:
    """Methods and properties that a caller sees say what they do."""
    bare = []
    for name in package.__all__:
        value = getattr(package, name)
        if not inspect.isclass(value) or not value.__module__.startswith("pagedkv"):
            continue
        for attribute, member in vars(value).items():
            if attribute.startswith("_"):
                continue
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and not function.__doc__:
                bare.append(f"{name}.{attribute}")

    assert bare == []
