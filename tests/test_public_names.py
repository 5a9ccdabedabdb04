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
def test_public_names_are_sorted_and_are_what_the_package_imports(package: types.ModuleType) -> None:
    """Constants, then classes, then functions and modules, each group in alphabetical order; all of them exist."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    folder = ROOT / ("pagedkv" if package is pagedkv else "graphs")
    nodes = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    imported = {alias.asname or alias.name for node in nodes
                if isinstance(node, ast.ImportFrom) and node.module != "__future__" for alias in node.names}

    public = {name for name in imported if not name.startswith("_")}
    assert list(package.__all__) == sorted(public, key=rank)
    assert [] == [name for name in public if not hasattr(package, name)]


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
