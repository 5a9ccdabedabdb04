"""`pagedkv trace FILE`: a real request trace through scheduler, retention policy and Host tier.

    pagedkv trace conversation.jsonl --concurrency 64 --device-pages 60000 --host-bytes 2GiB --svg pool.svg

Exit code 1: something was not free at the end, or an output differs from the same request alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from pagedkv.tools.byte_count import byte_count
from pagedkv.tools.console import EXIT_FINDING, json_option, positive, progress_line, say
from pagedkv.tools.trace.picture import picture
from pagedkv.tools.trace.replay import ReplayOptions, replay
from pagedkv.tools.trace.trace_file import read_trace

HIDDEN = ("host_capacity_bytes", "host_free_bytes", "host_copy_operations")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--limit", type=positive, help="Only the first requests.")
@click.option("--concurrency", type=positive, default=64, show_default=True, help="Requests at a time.")
@click.option("--retained-tokens", type=click.IntRange(min=0),
              help="Room beside the rows.  [default: every text of the trace]")  # fmt: skip
@click.option("--device-pages", type=positive, help="Pages of the pool.  [default: for rows and retained tokens]")
@click.option("--host-bytes", type=byte_count, default=0, help="Pinned host memory for pages that nobody uses.")
@click.option("--kv-lease-growth", is_flag=True,
              help="Reserve output page by page; where pages run out, outputs end early.")  # fmt: skip
@click.option("--kernels", type=click.Choice(["off", "on"]), default="off", show_default=True,
              help="Append and attend, and compare some outputs with the same request alone.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="cpu", show_default=True,
              help="Where kernels run.")  # fmt: skip
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw pages, Host bytes and the queue.")
@json_option
def command(
    file: Path, limit: int | None, concurrency: int, retained_tokens: int | None, device_pages: int | None,
    host_bytes: int, kv_lease_growth: bool, kernels: str, device: str, svg: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay a request trace, and say what was reused.

    FILE has prefix hashes of 512 or 64 tokens (JSON lines), or lengths alone (CSV). Requests come in the order of the
    file, as soon as an earlier one ends. Ended texts are kept, and prompts start from the longest kept prefix.
    """
    if svg is not None:
        try:
            svg.open("ab").close()
        except OSError as error:
            raise click.BadParameter(f"{svg}: {error.strerror}", param_hint="--svg") from error
    trace = read_trace(file, limit=limit)
    options = ReplayOptions(concurrency, device_pages, retained_tokens, host_bytes, kv_lease_growth,
                            device if kernels == "on" else "none")
    total = len(trace.requests)
    result = replay(trace, options, progress=lambda done: progress_line(f"{done} of {total} requests"))
    progress_line("")
    figures = result.figures
    if svg is not None:
        title = f"{file.name}: {figures['requests']:,} requests, {figures['reused_share']:.1%} of prompt tokens reused"
        svg.write_text(picture(result.samples, pages=figures["pages"], host_bytes=host_bytes, title=title),
                       encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"schema": 1, **figures, "lost": result.lost}))
    else:
        width = max(map(len, figures))
        for name, value in figures.items():
            if name not in HIDDEN:
                click.echo(f"{name.replace('_', ' '):<{width}}  {value:>16,}")
    if result.lost:
        say(f"not free at the end: {result.lost}")
        raise click.exceptions.Exit(EXIT_FINDING)
    if figures.get("different_outputs"):
        say(f"{figures['different_outputs']} of {figures['checked_outputs']} outputs differ from the request alone")
        raise click.exceptions.Exit(EXIT_FINDING)
