"""How a count of bytes is written on the command line: 1073741824, 1GiB, 1.5 GiB, 800MB.

A bare number is bytes.  KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB powers of 1000; case does not
matter.  A fraction is rounded down to whole bytes.
"""

from __future__ import annotations

import re
from fractions import Fraction

import click

_FORM = re.compile(r"(\d{1,24}(?:\.\d{1,24})?)\s*([a-z]*)", re.IGNORECASE)
_POWERS = {letter: power for power, letter in enumerate("kmgt", start=1)}
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for letter, power in _POWERS.items()}
_UNITS |= {f"{letter}ib": 1024**power for letter, power in _POWERS.items()}


def byte_count(text: str) -> int:
    """Return the bytes that a text names; a click option takes this function as its type.

    Raises:
        BadParameter: another form.
    """
    found = _FORM.fullmatch(str(text).strip())
    if found is None or found[2].lower() not in _UNITS:
        raise click.BadParameter(f"{text!r} is no count of bytes such as 1073741824, 1GiB or 800MB")
    return int(Fraction(found[1]) * _UNITS[found[2].lower()])


def readable(count: int) -> str:
    """Return a count of bytes for people: 1536 -> "1.5 KiB", 1000 -> "1000 B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _UNITS[unit.lower()]
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
