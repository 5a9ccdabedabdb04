"""Kernel sources as one text each, so that a test can change a line of them without touching a file."""

from __future__ import annotations

import re
from collections.abc import Mapping

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*\n', re.MULTILINE)


def flat_text(text: str, headers: Mapping[str, str], name: str = "module.cu") -> str:
    """Put every included file in the place of its first #include; a name that is in no header stays.

    Equal flat texts mean equal programs, whatever happens to the files; lines keep their file and number in messages.
    """
    return _flat_text(text, headers, name, set())


def _flat_text(text: str, headers: Mapping[str, str], name: str, included: set[str]) -> str:
    def content(match: re.Match[str]) -> str:
        found = match[1]
        if found not in headers:
            return match[0]
        next_line = match.string.count("\n", 0, match.end()) + 1
        back = f'#line {next_line} "{name}"\n'
        if found in included:
            return back
        included.add(found)
        body = headers[found].replace("#pragma once\n", "\n")
        return f'#line 1 "{found}"\n{_flat_text(body, headers, found, included)}\n{back}'

    return _INCLUDE.sub(content, text)
