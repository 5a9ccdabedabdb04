"""The `pagedkv` command.

Figures go to stdout, talk to stderr.  Every command that prints figures takes `--json` and then prints one
object with `"schema": 1`.  Exit codes: 0 ok, 1 a finding, 2 usage, 3 something is missing (and how to get it).

A subcommand is a thin shell: it parses, calls one module of `tools/`, prints.  Modules with heavy imports are
imported by the subcommand that needs them, so that `pagedkv help C12.2` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import pagedkv as pk
from pagedkv.tools.byte_count import byte_count

EXIT_FINDING = 1
EXIT_USAGE = 2
EXIT_MISSING = 3
CODECS_WORDS = ("codecs", "codecs.md")
ARCHITECTURE_COLUMNS = ("name", "arch", "registers", "spill_load", "spill_store", "local", "shared", "occupancy")


class PagedKVGroup(click.Group):
    """A group that turns the library's refusals into messages and exit codes instead of tracebacks."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except pk.MissingRequirement as missing:
            click.echo(f"pagedkv: {missing}", err=True)
            ctx.exit(EXIT_MISSING)
        except pk.MisuseError as misuse:
            click.echo(f"pagedkv: {misuse}", err=True)
            ctx.exit(EXIT_USAGE)
        except pk.PagedKVError as error:
            click.echo(f"pagedkv: {error}", err=True)
            ctx.exit(EXIT_FINDING)


def version() -> str:
    """Return the library's version: of the installed distribution, or of the checkout that runs uninstalled."""
    try:
        return importlib.metadata.version("pagedkv")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


@click.group(cls=PagedKVGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version=version(), prog_name="pagedkv")
def main() -> None:
    """A growing, paged KV cache for LLM inference.

    Exit codes: 0 ok, 1 a finding, 2 usage, 3 something is missing.
    """


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Say what this machine can run, and how to get what is missing."""
    from pagedkv.tools.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps({**diagnosis.as_json(), "version": version()}))
    else:
        width = max(len(check.name) for check in diagnosis.checks)
        for check in diagnosis.checks:
            click.echo(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
            if check.remedy:
                click.echo(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    if not diagnosis.can_run:
        click.echo("pagedkv: no device can run on this machine; see the lines marked missing", err=True)
        sys.exit(EXIT_MISSING)
    usable = ", ".join(name for name, is_usable in diagnosis.devices.items() if is_usable)
    click.echo(f"pagedkv: usable here: {usable}; what is missing above is for other devices and tools", err=True)


@main.command(name="help")
@click.argument("clause", nargs=-1)
@click.pass_context
def help_command(ctx: click.Context, clause: tuple[str, ...]) -> None:
    """Print clauses of the contract or sections of the codecs.

    CLAUSE is a name as errors cite it: C12.2, C12 or codecs 3; several are printed in the order given. Without one, the
    commands and the titles of all sections are listed.
    """
    if clause:
        click.echo("\n\n".join([pk.clause(name) for name in clause_names(clause)]))
        return
    click.echo("Commands (pagedkv COMMAND --help):\n")
    commands = list(all_commands(main, ctx))
    width = max(len(name) for name, _ in commands)
    for name, summary in commands:
        click.echo(f"  {name:<{width}}  {summary}")
    click.echo("\nSections (pagedkv help C12, pagedkv help C12.2, pagedkv help codecs 3):\n")
    for section in pk.clauses().values():
        if section.is_section:
            click.echo(f"  {section.name:<10}{section.title}")


def clause_names(words: Sequence[str]) -> list[str]:
    """Return the names that the words of a command line make: `codecs` and what follows it are one name."""
    names: list[str] = []
    is_open = False
    for word in words:
        if is_open:
            names[-1] += f" {word}"
        else:
            names.append(word)
        is_open = not is_open and word.strip().lower() in CODECS_WORDS
    return names


def all_commands(group: click.Group, ctx: click.Context, prefix: str = "") -> Sequence[tuple[str, str]]:
    """Return (name, summary) of every command, those of nested groups under their full name."""
    found: list[tuple[str, str]] = []
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None, f"click lists {name} and does not know it"
        if isinstance(command, click.Group):
            found += all_commands(command, ctx, f"{prefix}{name} ")
        else:
            found.append((prefix + name, command.get_short_help_str(limit=90)))
    return found


@main.command()
@click.option("--prompt", "prompts", multiple=True, required=True, help="A prompt; repeat it for a batch.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--profile", default="bf16", show_default=True, help="Storage profile of the KV cache (C4).")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--max-concurrency", type=click.IntRange(min=1), default=8, show_default=True, help="Rows at a time.")
@click.option("--max-context", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of a row.")
@click.option("--chat", is_flag=True, help="Put each prompt into the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the text then goes to stderr.")
def run(
    prompts: tuple[str, ...],
    device: str,
    profile: str,
    max_new_tokens: int,
    max_concurrency: int,
    max_context: int,
    chat: bool,
    as_json: bool,
) -> None:
    """Decode prompts together with a small real model."""
    from pagedkv.tools.run import run_prompts

    run_prompts(
        prompts=prompts,
        device=device,
        profile=profile,
        max_new_tokens=max_new_tokens,
        max_concurrency=max_concurrency,
        max_context=max_context,
        chat=chat,
        json=as_json,
    )


@main.command()
@click.option("--model", type=click.Choice(["smollm2"]), help="A known model, instead of the four numbers below.")
@click.option("--layers", type=click.IntRange(min=1), help="Layers with a growing cache.")
@click.option("--query-heads", type=click.IntRange(min=1))
@click.option("--kv-heads", type=click.IntRange(min=1))
@click.option("--head-dim", type=click.IntRange(min=1))
@click.option("--profile", default="bf16", show_default=True, help="Storage profile of the KV cache (C4).")
@click.option("--max-context", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of a row.")
@click.option("--max-concurrency", type=click.IntRange(min=1), default=8, show_default=True, help="Rows at a time.")
@click.option("--capacity", default="auto", show_default=True, help="Tokens of the Main pool, or auto.")
@click.option("--headroom", type=byte_count, help="Leave so much free, with auto.  [default: 1GiB]")
@click.option("--min-tokens", type=click.IntRange(min=1), help="Refuse less capacity, with auto.")
@click.option("--free-bytes", type=byte_count, help="Free memory of another machine, such as 80GiB.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--backend", help="mtp:K, mtp:K:LAYERS, or draft:LAYERSxQUERY_HEADSxKV_HEADSxHEAD_DIM.")
@click.option("--host-arena", type=byte_count, default=0, help="Pinned host memory for replicas.")
@click.option("--state-per-lane", type=byte_count, default=0, help="Your own device memory for each lane.")
@click.option("--state-fixed", type=byte_count, default=0, help="Your own device memory, once.")
@click.option("--graph-allowance", type=byte_count, help="For captured graphs and buffers.  [default: 12MiB a lane]")
@click.option("--decode-columns", type=click.IntRange(min=1), help="Widest decode unit.  [default: from the backend]")
@click.option("--prefill-columns", type=click.IntRange(min=1), default=1024, show_default=True, help="Widest prefill.")
@click.option("--sanitizer", is_flag=True, help="With the guard pages of sanitizer mode.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    model: str | None,
    layers: int | None,
    query_heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    profile: str,
    max_context: int,
    max_concurrency: int,
    capacity: str,
    headroom: int | None,
    min_tokens: int | None,
    free_bytes: int | None,
    device: str,
    backend: str | None,
    host_arena: int,
    state_per_lane: int,
    state_fixed: int,
    graph_allowance: int | None,
    decode_columns: int | None,
    prefill_columns: int,
    sanitizer: bool,
    as_json: bool,
) -> None:
    """Say how many pages fit, and where every byte goes.

    Counts of bytes are written 1073741824, 1GiB or 800MB. Too little memory is a finding: exit code 1, with what would
    fit.
    """
    from pagedkv.tools import plan as planning

    numbers = (layers, query_heads, kv_heads, head_dim)
    if model is not None and any(number is not None for number in numbers):
        raise click.UsageError("give --model, or --layers, --query-heads, --kv-heads and --head-dim; not both")
    if model is not None:
        geometry = planning.MODELS[model]
    elif layers is None or query_heads is None or kv_heads is None or head_dim is None:
        raise click.UsageError("give --model, or --layers, --query-heads, --kv-heads and --head-dim together")
    else:
        geometry = pk.KVGeometry(layers=layers, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
    config = pk.StoreConfig(
        geometry,
        profile=profile,
        max_context=max_context,
        max_concurrency=max_concurrency,
        kv_capacity=planning.parse_capacity(capacity, headroom_bytes=headroom, min_tokens=min_tokens),
        backend=planning.parse_backend(backend),
        decode_columns_max=decode_columns,
        prefill_columns_max=prefill_columns,
        state_bytes_per_lane=state_per_lane,
        state_bytes_fixed=state_fixed,
        graph_allowance_bytes=graph_allowance,
        sanitizer=sanitizer,
        host_arena_bytes=host_arena,
    )
    planning.plan_capacity(config, free_bytes=free_bytes, device=device, json=as_json)


@main.command()
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--events", type=click.IntRange(min=1), default=50_000, show_default=True, help="How many, in all.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fuzz(seed: int, events: int, device: str, as_json: bool) -> None:
    """Walk a store at random beside a model of the contract.

    After every event all there is to see is compared. A difference is a finding: exit code 1, with seed, event and the
    shortest history that shows it.
    """
    from pagedkv.tools import fuzz as fuzzing
    from pagedkv.tools.finding import FuzzFound

    begin = time.perf_counter()
    try:
        counts = fuzzing.fuzz(
            seed, events, device=device, progress=lambda done, total: progress_line(f"{done} of {total} events")
        )
    except FuzzFound as found:
        progress_line("")
        if as_json:
            click.echo(json.dumps(found.finding.as_json()))
        else:
            click.echo(str(found.finding))
        sys.exit(EXIT_FINDING)
    progress_line("")
    if as_json:
        click.echo(json.dumps({"schema": 1, "seed": seed, "events": events, "finding": None, "counts": dict(counts)}))
    else:
        for name, count in counts.most_common():
            click.echo(f"{count:>9}  {name}")
    click.echo(f"{events} events in {time.perf_counter() - begin:.1f} s, nothing found", err=True)


@main.group()
def journal() -> None:
    """Look at what a store decided, as its journal says.

    open_store(journal=...) writes one.
    """


@journal.command(name="replay")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check-every", type=click.IntRange(min=1), default=1, show_default=True, help="Operations per check.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def journal_replay(file: Path, check_every: int, as_json: bool) -> None:
    """Repeat a journal on ledgers alone, up to the first difference.

    Needs no device. The same answers, states and invariants are exit code 0; a difference is a finding, exit code 1.
    """
    with file.open(encoding="utf-8", errors="replace") as lines:
        report = pk.replay_journal(lines, name=str(file), check_every=check_every)
    difference = report.difference
    if as_json:
        click.echo(json.dumps(report.as_json()))
    elif difference is None:
        click.echo(f"{report.operations} operations, no difference")
    else:
        click.echo(f"revision {difference.revision}, {difference.operation}: {difference.what} differs")
        click.echo(f"  expected  {json.dumps(difference.expected)}")
        click.echo(f"  got       {json.dumps(difference.got)}")
    if report.is_truncated:
        click.echo("pagedkv: the last line was cut off in the middle and not repeated", err=True)
    if difference is not None:
        sys.exit(EXIT_FINDING)


@main.group()
def kernels() -> None:
    """Look at the shipped kernels."""


@kernels.command(name="report")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--arch", "architectures", multiple=True, help="Only this architecture, such as sm_90; repeatable.")
@click.option("--module", "modules", multiple=True, help="Only modules whose name contains this; repeatable.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilations at a time; the number of cores by default.")
def kernels_report(as_json: bool, architectures: tuple[str, ...], modules: tuple[str, ...], jobs: int | None) -> None:
    """Say what registers and memory every shipped kernel takes.

    Compiles the set with NVRTC for every architecture, and prints registers, spills, local and shared bytes; needs no
    GPU. A spill or local memory is a finding: exit code 1.
    """
    from pagedkv.tools import kernel_set

    wrong = sorted(set(architectures) - set(kernel_set.ARCHITECTURES))
    if wrong:
        raise click.BadParameter(f"{', '.join(wrong)} is not of {', '.join(kernel_set.ARCHITECTURES)}")
    known = [spec.name for spec in pk.shipped_modules()]
    if unknown := [part for part in modules if not any(part in name for name in known)]:
        raise click.BadParameter(f"{', '.join(unknown)} is in no name of {', '.join(known)}")
    try:
        figures = kernel_set.compile_set(
            architectures=architectures or kernel_set.ARCHITECTURES,
            names=modules,
            jobs=jobs,
            progress=progress_line,
        )
    except kernel_set.KernelCompileError as error:
        click.echo(f"pagedkv: {error}", err=True)
        sys.exit(EXIT_FINDING)
    if as_json:
        click.echo(json.dumps(kernel_set.report(figures)))
    else:
        print_figures(figures)
    findings = [f for f in figures if f.has_finding]
    for finding in findings:
        click.echo(
            f"pagedkv: {finding.name} on {finding.arch}: expected no spill and no local memory, got "
            f"{finding.spill_store_bytes} bytes of spill stores, {finding.spill_load_bytes} of spill loads, "
            f"{finding.local_bytes} of local memory",
            err=True,
        )
    compiled = len({(f.name.partition("/")[0], f.arch) for f in figures})
    click.echo(f"{len(figures)} kernels in {compiled} modules, {len(findings)} with spills or local memory", err=True)
    if findings:
        sys.exit(EXIT_FINDING)


def print_figures(figures: Sequence[Any]) -> None:
    """Print kernel figures as a table."""
    name_width = max((len(f.name) for f in figures), default=0)
    head = "  ".join(f"{column:>11}" for column in ARCHITECTURE_COLUMNS[1:])
    click.echo(f"{ARCHITECTURE_COLUMNS[0]:<{name_width}}  {head}")
    for f in figures:
        occupancy = "-" if f.occupancy is None else f"{f.occupancy:.3f}"
        cells = (f.arch, f.registers, f.spill_load_bytes, f.spill_store_bytes, f.local_bytes, f.shared_bytes, occupancy)
        click.echo(f"{f.name:<{name_width}}  " + "  ".join(f"{cell!s:>11}" for cell in cells))


@main.group()
def bench() -> None:
    """Time the parts of the library."""


@bench.command(name="ledger")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--pages", "sizes", type=click.IntRange(1, 1 << 20), multiple=True, help="Pages; repeatable.")
@click.option("--samples", type=click.IntRange(min=1), default=200, show_default=True, help="Calls per figure.")
@click.option("--shredded", is_flag=True, help="Let no two free pages adjoin.")
def bench_ledger(as_json: bool, sizes: tuple[int, ...], samples: int, shredded: bool) -> None:
    """Time the bulk operations of the ledgers, by pages.

    Admission, fork, finish, snapshot, retain, release and move, in microseconds, without a device; and what the bare
    NumPy work costs beside them. With --json also the machine, and the versions of Python and NumPy.
    """
    from pagedkv.tools import bench_ledger as ledger

    figures = ledger.bench_ledger(
        sizes_pages=sizes or ledger.SIZES_PAGES, samples=samples, is_shredded=shredded, progress=progress_line
    )
    progress_line("")
    if as_json:
        click.echo(json.dumps(ledger.report(figures, is_shredded=shredded)))
    else:
        click.echo(f"{'operation':<20}{'pages':>7}{'us':>10}{'mean':>10}{'p95':>10}{'floor':>10}")
        for f in figures:
            floor = "-" if f.floor_us is None else f"{f.floor_us:.1f}"
            click.echo(f"{f.operation:<20}{f.pages:>7}{f.us:>10.1f}{f.us_mean:>10.1f}{f.us_p95:>10.1f}{floor:>10}")
    click.echo(f"median, mean and 95th percentile of {samples} calls each", err=True)


def progress_line(text: str) -> None:
    """Overwrite one line on a terminal; a pipe or a log file gets nothing."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}\r", nl=False, err=True)


if __name__ == "__main__":
    main(prog_name="pagedkv")
