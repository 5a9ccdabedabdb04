"""What every subcommand shares: exit codes, the option --json, the progress line and the version."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import click

EXIT_FINDING = 1
EXIT_USAGE = 2
EXIT_MISSING = 3

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
device_choice = click.Choice(["auto", "cpu", "cuda"])
positive = click.IntRange(min=1)


def version() -> str:
    """Return the version of the installed distribution, or of the checkout that runs uninstalled."""
    try:
        return importlib.metadata.version("pagedkv")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


def say(line: str) -> None:
    """Print a line of talk on stderr."""
    click.echo(line, err=True)


def progress_line(text: str) -> None:
    """Overwrite one line of a terminal; print nothing into a pipe or a log file."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}\r", nl=False, err=True)
