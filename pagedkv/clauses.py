"""The clauses that errors, docstrings and tests cite, read from the package's own text.

`contract.md` holds sections `## C5 Capacity plan` with clauses `- C5.1 ...`; `codecs.md` holds sections
`## 3 ...`, cited as `codecs 3`.  A clause reaches to the next clause or section; a section contains its
clauses.  Both files are package data, so an error message can be looked up wherever the library runs.

Values only: no third-party import, no device, no ledger.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import re
from dataclasses import dataclass

from pagedkv.errors import MisuseError, shown

_SECTION = re.compile(r"^## (C?\d+) (.+)$")
_CLAUSE = re.compile(r"^- (C\d+\.\d+) ")
_PLAIN_MARKS = re.compile(r"[`*]")


@dataclass(frozen=True)
class Clause:
    """One section or one numbered clause.

    Attributes:
        name: as it is cited: ``"C5"``, ``"C5.1"`` or ``"codecs 3"``.
        title: of a section its heading, of a clause its first line; both without Markdown marks.
        text: the Markdown of the whole clause, first line included, without trailing blank lines.
    """

    name: str
    title: str
    text: str

    @property
    def is_section(self) -> bool:
        """True for ``C5`` and ``codecs 3``, False for ``C5.1``."""
        return "." not in self.name


def parse_clauses(text: str, prefix: str) -> dict[str, Clause]:
    """Return the sections and clauses of one Markdown text, in order.

    Args:
        text: a text in the form that the head of this module describes.
        prefix: put before a section's number: ``""`` for the contract, ``"codecs "`` for the codecs.
    Raises:
        ValueError: a name occurs twice, or a clause is outside the section of its number.
    """
    lines_of: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    section = ""
    clause = ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        item = _CLAUSE.match(line)
        if heading:
            section, clause = prefix + heading[1], ""
            _open(lines_of, section)
            titles[section] = _PLAIN_MARKS.sub("", heading[2])
        elif line.startswith("## "):
            raise ValueError(f"{line!r} is no numbered section")
        elif item:
            clause = item[1]
            if clause.partition(".")[0] != section:
                raise ValueError(f"clause {clause} is in section {section or 'none'}")
            _open(lines_of, clause)
            titles[clause] = _PLAIN_MARKS.sub("", line[item.end() :])
        for name in (section, clause):
            if name:
                lines_of[name].append(line)
    return {name: Clause(name, titles[name], "\n".join(lines).rstrip()) for name, lines in lines_of.items()}


def _open(lines_of: dict[str, list[str]], name: str) -> None:
    if name in lines_of:
        raise ValueError(f"clause {name} occurs twice")
    lines_of[name] = []


@functools.cache
def _all_clauses() -> dict[str, Clause]:
    package = importlib.resources.files("pagedkv")
    contract = package.joinpath("contract.md").read_text(encoding="utf-8")
    codecs = package.joinpath("codecs.md").read_text(encoding="utf-8")
    return parse_clauses(contract, "") | parse_clauses(codecs, "codecs ")


def clauses() -> dict[str, Clause]:
    """Return every section and clause by name, in the order of the texts: C0..C16, then codecs 1..8."""
    return dict(_all_clauses())


def clause(name: str) -> str:
    """Return the text of one clause or section.

    Args:
        name: ``"C12.2"``, ``"C12"``, ``"codecs 3"`` or ``"codecs.md 3"``; case and parentheses do not matter.
    Raises:
        MisuseError: there is no such clause; the message lists the nearest names.
    """
    known = _all_clauses()
    canonical = _canonical(name) if isinstance(name, str) else ""
    if canonical in known:
        return known[canonical].text
    nearest = difflib.get_close_matches(canonical, known, n=4, cutoff=0.5)
    raise MisuseError(
        f"clause {shown(name)}",
        expected="a clause such as C12.2, a section such as C12, or a codec section such as codecs 3",
        got=f"{shown(name)}, which no text contains",
        remedy=f"look at {', '.join(nearest)}" if nearest else "list them with `pagedkv help`",
        clause="C0", nearest=tuple(nearest),
    )


def _canonical(name: str) -> str:
    words = name.strip().strip("()").replace(".md", "").split()
    if len(words) == 2 and words[0].lower() == "codecs":
        return f"codecs {words[1]}"
    joined = " ".join(words)
    return joined[:1].upper() + joined[1:]
