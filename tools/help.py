"""`pagedkv help`: clauses of the contract, sections of the codecs, and the list of all commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

import pagedkv as pk

CODECS_WORDS = ("codecs", "codecs.md")


@click.command()
@click.argument("clause", nargs=-1)
@click.pass_context
def command(ctx: click.Context, clause: tuple[str, ...]) -> None:
    """Print clauses of the contract or sections of the codecs.

    CLAUSE is a name as errors cite it: C12.2, C12 or codecs 3; several are printed in the order given. Without a name,
    the commands and the titles of all sections are listed.
    """
    if clause:
        click.echo("\n\n".join([pk.clause(name) for name in clause_names(clause)]))
        return
    click.echo("Commands (pagedkv COMMAND --help):\n")
    root = ctx.find_root().command
    assert isinstance(root, click.Group), root
    commands = list(all_commands(root, ctx))
    width = max(len(name) for name, _ in commands)
    for name, summary in commands:
        click.echo(f"  {name:<{width}}  {summary}")
    click.echo("\nSections (pagedkv help C12, pagedkv help C12.2, pagedkv help codecs 3):\n")
    for section in pk.clauses().values():
        if section.is_section:
            click.echo(f"  {section.name:<10}{section.title}")


def clause_names(words: Sequence[str]) -> list[str]:
    """Return the names on a command line: `codecs` and the word after it are one name."""
    names: list[str] = []
    is_open = False
    for word in words:
        if is_open:
            names[-1] += f" {word}"
        else:
            names.append(word)
        is_open = not is_open and word.strip().lower() in CODECS_WORDS
    return names


def all_commands(group: click.Group, ctx: click.Context, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield full name and summary of every command, also of those in nested groups."""
    for name in group.list_commands(ctx):
        subcommand = group.get_command(ctx, name)
        assert subcommand is not None, f"click lists {name} and does not know it"
        if isinstance(subcommand, click.Group):
            yield from all_commands(subcommand, ctx, f"{prefix}{name} ")
        else:
            yield prefix + name, subcommand.get_short_help_str(limit=90)
