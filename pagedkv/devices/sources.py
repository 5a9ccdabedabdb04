"""The text of a module: files of `cuda_src`, or an embedder's text, after `runtime.cuh`; the same for both devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pagedkv.devices.protocol import ModuleSpec
from pagedkv.errors import MisuseError, shown

SOURCE_FOLDER = Path(__file__).resolve().parent.parent / "cuda_src"

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_EXPORT = re.compile(r"\bPK_EXPORT\s*\(\s*(\w+)\s*\)")
_STATIC_SHARED = re.compile(r"\b__shared__\b")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DEFINES_SHARED = frozenset(("kernels/runtime.cuh", "cpu_device/language.h"))


def module_text(spec: ModuleSpec) -> str:
    """Put together the translation unit of a module, and refuse a spec that names no source or an unknown one."""
    if not _NAME.fullmatch(spec.name) or (spec.text is None and not spec.sources):
        expected = "a name of letters, digits, _ and -, and sources or text"
        raise _refusal(spec, expected, f"{spec.sources}, text {spec.text}")
    for source in spec.sources:
        if not (SOURCE_FOLDER / source).is_file():
            raise _refusal(spec, "file names in cuda_src", source)
    lines = ['#include "kernels/runtime.cuh"']
    lines += [f'#include "{source}"' for source in spec.sources]
    if spec.text is not None:
        lines += [f'#line 1 "{spec.name}.cu"', spec.text, f'#line 1 "{spec.name}.exports"']
        exported = set(_EXPORT.findall(_COMMENT.sub("", spec.text)))
        lines += [f"PK_EXPORT({kernel})" for kernel in spec.kernels if kernel not in exported]
    return "\n".join(lines) + "\n"


def has_static_shared(spec: ModuleSpec) -> bool:
    """Does the module declare `__shared__` arrays, which are static on the cpu device?"""
    texts = [spec.text or ""]
    texts += [
        path.read_text(encoding="utf-8")
        for source in spec.sources
        for name, path in reached_files(f'#include "{source}"')
        if name not in _DEFINES_SHARED
    ]
    return any(_STATIC_SHARED.search(_COMMENT.sub("", text)) for text in texts)


def reached_files(text: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file of `cuda_src` that the text includes, directly or not, each once."""
    seen: set[str] = set()
    pending = [text]
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            path = SOURCE_FOLDER / name
            if name in seen or not path.is_file():
                continue
            seen.add(name)
            yield name, path
            pending.append(path.read_text(encoding="utf-8"))


def _refusal(spec: ModuleSpec, expected: str, got: str) -> MisuseError:
    return MisuseError(
        f"module {shown(spec.name)}", expected=expected, got=got, remedy="correct the ModuleSpec", clause="C14.4"
    )
