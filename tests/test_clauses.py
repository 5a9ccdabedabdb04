"""The clauses are all there, and whatever is cited exists.  (C0)"""

from __future__ import annotations

import re

import pytest

import pagedkv as pk
from pagedkv.clauses import clause, clauses, parse_clauses
from tests.checkout import KERNEL_SUFFIXES, name_of, source_files, top_files

# Clauses of each section: a number that is cited today must not move tomorrow.
CLAUSES_OF = {
    "C0": 0, "C1": 3, "C2": 3, "C3": 11, "C4": 5, "C5": 7, "C6": 5, "C7": 8, "C8": 3,
    "C9": 10, "C10": 10, "C11": 3, "C12": 4, "C13": 3, "C14": 6, "C15": 3, "C16": 17,
}  # fmt: skip
CODEC_SECTIONS = 8
CITATION = re.compile(r"(?<![\w.+-])C(\d{1,2})(?:\.(\d{1,2}))?(?![\w(=])")
CODEC_CITATION = re.compile(r"\bcodecs(?:\.md)?`?,? (?:section )?(\d+)\b")


def test_sections_and_clauses_are_numbered_without_gaps() -> None:
    """C0..C16 and codecs 1..8 in order, each section with exactly its clauses."""
    expected = []
    for section, count in CLAUSES_OF.items():
        expected += [section, *(f"{section}.{number}" for number in range(1, count + 1))]
    expected += [f"codecs {number}" for number in range(1, CODEC_SECTIONS + 1)]

    assert expected == list(clauses())


def test_a_section_contains_its_clauses() -> None:
    """`help C12` shows what `help C12.2` shows, and no clause is an empty heading."""
    known = clauses()
    for name, found in known.items():
        assert len(found.text) >= len(name) + 20, name
        assert found.is_section or found.text in known[name.partition(".")[0]].text, name


@pytest.mark.parametrize(("names", "start"), [
    (("C12.2", "c12.2", "(C12.2)", " C12.2 "), "- C12.2 "), (("codecs 3", "codecs.md 3", "Codecs 3"), "## 3 "),
])
def test_a_clause_is_found_however_it_is_written(names: tuple[str, ...], start: str) -> None:
    """Case, parentheses, blanks and the file's full name are the reader's."""
    assert [name for name in names if not clause(name).startswith(start)] == []


@pytest.mark.parametrize(("name", "near"), [("C12.9", "C12.2"), ("C17", "C1"), ("codecs 9", "codecs 8"),
                                            ("C9.33", "C9.3")])
def test_an_unknown_clause_is_refused_with_its_neighbours(name: str, near: str) -> None:
    """The message names what was probably meant."""
    with pytest.raises(pk.MisuseError, match=re.escape(near)):
        clause(name)


def test_a_text_with_a_clause_in_the_wrong_section_is_refused() -> None:
    """The parser does not guess."""
    with pytest.raises(ValueError, match="is in section C1"):
        parse_clauses("## C1 One\n\n- C2.1 text", "")
    with pytest.raises(ValueError, match="occurs twice"):
        parse_clauses("## C1 One\n\n- C1.1 text\n- C1.1 again", "")


def test_numbers_that_decide_bytes_are_in_the_clauses() -> None:
    """A rewrite of a clause must not lose its numbers."""
    for name, numbers in {
        "C2": ("P = 64",), "C3.7": ("base + x*nb0 + o*nb1 + h*nb2 + g*nb3",),
        "C3.8": ("base + x*nb0 + o*nb1 + g*nb2 + h*nb3",), "C3.9": ("p >> 6", "p & 63", "table[row, b]"),
        "C3.10": ("256", "16", "2^31"), "C4": ("1024", "528", "516", "288", "402"),
        "C5.3": ("M = min(M_max, M_min + floor((F - R - B_min) / B_step))",), "C5.4": ("255",),
        "C5.6": ("M + C * ceil((K-1)/P)",), "C6.2": ("allocated + reserved + available == capacity",),
        "C9.2": ("4096", "pages(W_max + forced_span_tokens) + 1"), "C9.6": ("ceil(max(committed, provisional) / P)",),
        "C10.5": ("1000", "15", "40"), "codecs 1": ("0.125", "0x3DB504F3", "0.0625"),
        "codecs 3": ("A / 127", "[-127, 127]"),
        "codecs 4": ("A / 448", "2^-24", "65504", "0x7E", "0xFE", "0.0013885498046875"),
        "codecs 5": ("A / 6", "[2^-9, 448]", "{0, .5, 1, 1.5, 2, 3, 4, 6}"),
        "codecs 7": ("2.8e-3", "3.2e-3", "3.0e-3", "3.0e-4", "2^-7"),
        "codecs 8": ("0x7E00", "0x7F", "0x7C00", "0x7BFF", "2688"),
    }.items():
        text = " ".join(clause(name).split())
        missing = [number for number in numbers if number not in text]
        assert missing == [], name


def test_every_cited_clause_exists() -> None:
    """A docstring, a comment, a message or a page of prose that cites a clause can be looked up."""
    known = clauses()
    paths = [*source_files(".py", ".md", *KERNEL_SUFFIXES), *top_files(".md", ".toml")]
    unknown = []
    for path in paths:
        if path.name == "test_clauses.py":
            continue  # cites what must be refused
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            cited = [f"C{s}.{c}" if c else f"C{s}" for s, c in CITATION.findall(line)]
            cited += [f"codecs {s}" for s in CODEC_CITATION.findall(line)]
            unknown += [f"{name_of(path)}:{number}: {name}" for name in cited if name not in known]

    assert unknown == []
