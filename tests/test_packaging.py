"""The project file names every package and every kind of data, so that a wheel misses nothing."""

from __future__ import annotations

import fnmatch
import tomllib
from typing import Any

import pytest

from pagedkv.tools.console import version
from tests.checkout import KERNEL_SUFFIXES, ROOT, source_files

FOLDERS = ("pagedkv", "graphs", "tools", "cuda_src")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The parsed project file."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    """A folder with modules that setuptools does not know would be missing from a wheel only."""
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT).as_posix() for path in source_files(".py", folders=FOLDERS)}
    packages = {folder.replace("/", ".") for folder in folders}

    assert {name if name.startswith("pagedkv") else f"pagedkv.{name}" for name in packages} == listed


def test_every_package_is_found_where_it_is_mapped(project: dict[str, Any]) -> None:
    """The mapping and the links lead to the same folders."""
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), package
        assert (ROOT / package.replace(".", "/")).resolve() == ROOT / folder


@pytest.mark.parametrize(("package", "folder", "suffixes"), [
    ("pagedkv.cuda_src", "cuda_src", (*KERNEL_SUFFIXES, ".inc")), ("pagedkv", "pagedkv", (".md",)),
])
def test_kernel_sources_and_clauses_are_package_data(
    project: dict[str, Any], package: str, folder: str, suffixes: tuple[str, ...]
) -> None:
    """The cpu device compiles from the installed files, and an installed library prints its clauses."""
    patterns = project["tool"]["setuptools"]["package-data"][package]
    files = [path.relative_to(ROOT / folder).as_posix() for path in source_files(*suffixes, folders=(folder,))]

    assert len(files) > 1
    assert [] == [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def test_the_command_prints_the_version_of_the_project(project: dict[str, Any]) -> None:
    """One number, written once."""
    assert version() == project["project"]["version"]


def test_every_ignored_lint_rule_has_a_reason() -> None:
    """A comment stands on the line."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    start = lines.index("ignore = [")
    ignored = lines[start + 1 : lines.index("]", start)]

    assert [] == [line for line in ignored if "#" not in line]
