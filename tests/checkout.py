"""The files of the checkout as the hygiene tests see them: no links, no caches, no environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("pagedkv", "graphs", "tools", "cuda_src", "tests")
KERNEL_SUFFIXES = (".cu", ".cuh", ".h", ".cpp")


def source_files(*suffixes: str, folders: tuple[str, ...] = SOURCE_FOLDERS) -> Iterator[Path]:
    """Yield files with one of the suffixes, sorted; a link is skipped, since its target is listed elsewhere."""
    for folder in folders:
        for parent, names, files in os.walk(ROOT / folder):
            names[:] = sorted(n for n in names if not n.startswith((".", "__pycache__")))
            for file in sorted(files):
                if file.endswith(suffixes):
                    yield Path(parent) / file


def top_files(*suffixes: str) -> Iterator[Path]:
    """Yield files of the top folder, and `.ci/run`, with one of the suffixes."""
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.name.endswith(suffixes):
            yield path


def name_of(path: Path) -> str:
    """Return a path as a reader of a message knows it."""
    return path.relative_to(ROOT).as_posix()
