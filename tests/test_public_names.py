"""`__all__` lists the public names, and each of them is documented."""

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
    """Constants, then classes, then functions and modules, each group in alphabetical order."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert list(package.__all__) == sorted(set(package.__all__), key=rank)


@package_param
def test_nothing_is_imported_without_being_public(package: types.ModuleType) -> None:
    """`__all__` names what `__init__` imports from the library, and nothing else."""
    folder = ROOT / ("pagedkv" if package is pagedkv else "graphs")
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }

    assert set(package.__all__) == {name for name in imported if not name.startswith("_")}


@package_param
def test_every_public_name_is_documented(package: types.ModuleType) -> None:
    """Each class and function, and each method and property of a class, has a docstring of its own.

    A class does not inherit it, and a dataclass or an enum does not make it up.
    """
    bare = []
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value) and not value.__doc__:
            bare.append(name)
        if not inspect.isclass(value):
            continue
        text = vars(value).get("__doc__") or ""
        if not text or text.startswith(f"{value.__name__}("):
            bare.append(name)
        for attribute, member in vars(value).items() if value.__module__.startswith("pagedkv") else ():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not attribute.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                bare.append(f"{name}.{attribute}")

    assert bare == []
