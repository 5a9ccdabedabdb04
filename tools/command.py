"""The `pagedkv` command: a group that imports each subcommand when it is used.

Figures go to stdout, talk to stderr.  Every command that prints figures takes `--json` and then prints one
object with `"schema": 1`.  Exit codes: 0 ok, 1 a finding, 2 usage, 3 something is missing (and how to get it).

A subcommand lives in the module of what it runs and is called `command` there.  `pagedkv help C12.2` imports one such
module, so it answers at once.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

import pagedkv as pk
from pagedkv.tools.console import EXIT_FINDING, EXIT_MISSING, EXIT_USAGE, say, version

COMMANDS = {
    "bench ledger": "bench_ledger",
    "bench peers": "compare_peers",
    "bench step": "bench_step",
    "doctor": "doctor",
    "fuzz": "fuzz.run",
    "help": "help",
    "journal replay": "journal",
    "kernels report": "kernels.report",
    "plan": "plan",
    "run": "llama.run",
    "trace": "trace.run",
}
"""Every command by its full name, and its module below `pagedkv.tools`."""

GROUPS = {
    "bench": "Time the parts of the library.",
    "journal": "Look at the decisions of a store in its journal.\n\nopen_store(journal=...) writes one.",
    "kernels": "Look at the shipped kernels.",
}
"""The first words of commands with two words, and their help."""


class CommandGroup(click.Group):
    """The commands whose names begin with `prefix`; an error of the library becomes a message and an exit code."""

    def __init__(self, name: str | None = None, *, prefix: str = "", **options: Any) -> None:
        super().__init__(name, **options)
        self._prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        """Return the next words after the prefix."""
        names = (name.removeprefix(self._prefix) for name in COMMANDS if name.startswith(self._prefix))
        return sorted({name.partition(" ")[0] for name in names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Import a command; make the group of a first word."""
        name = self._prefix + cmd_name
        if name in GROUPS:
            return CommandGroup(name, prefix=f"{name} ", help=GROUPS[name])
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"pagedkv.tools.{COMMANDS[name]}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except pk.PagedKVError as error:
            say(f"pagedkv: {error}")
            if isinstance(error, pk.MissingRequirement):
                ctx.exit(EXIT_MISSING)
            ctx.exit(EXIT_USAGE if isinstance(error, pk.MisuseError) else EXIT_FINDING)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version=version(), prog_name="pagedkv")
def main() -> None:
    """A growing, paged KV cache for LLM inference.

    Exit codes: 0 ok, 1 a finding, 2 usage, 3 something is missing.
    """


if __name__ == "__main__":
    main(prog_name="pagedkv")
