"""`pagedkv journal replay`: repeat the journal of a store on ledgers alone and report the first difference."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path

import click

import pagedkv as pk
from pagedkv.tools.console import EXIT_FINDING, json_option, positive, say


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check-every", type=positive, help="Operations per check; by default the more, the more pages.")
@json_option
def command(file: Path, check_every: int | None, as_json: bool) -> None:
    """Repeat a journal on ledgers alone, up to the first difference.

    Needs no device. Exit code 0 means the same answers and states, and no broken invariant; a difference is a finding,
    exit code 1.
    """
    report = pk.replay_journal(file, check_every=check_every)
    difference = report.difference
    if as_json:
        click.echo(dumps(report.as_json()))
    elif difference is None:
        click.echo(f"{report.operations} operations, no difference")
    else:
        click.echo(f"revision {difference.revision}, {difference.operation}: {difference.what} differs")
        click.echo(f"  expected  {dumps(difference.expected)}")
        click.echo(f"  got       {dumps(difference.got)}")
    if report.is_truncated:
        say("pagedkv: the last line was cut off in the middle and not repeated")
    if difference is not None:
        sys.exit(EXIT_FINDING)
