"""`pagedkv plan`: how many page groups fit and what takes every byte, before anything is allocated.  (C5)

Free memory is what the device reports after the caches of this process were emptied, or a number for another machine.
The last line is the same plan as an explicit capacity: this command, or `ExplicitCapacity(tokens)` of a store, takes
the same bytes with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from json import dumps
from typing import Any

import click

import pagedkv as pk
from pagedkv.tools.byte_count import byte_count, readable
from pagedkv.tools.console import device_choice, json_option, positive, say

MODELS = {"smollm2": pk.KVGeometry(layers=30, query_heads=9, kv_heads=3, head_dim=64)}
"""Attention of the models that the command knows by name; a test compares them with the models' own files."""

HEADROOM_BYTES = pk.AutoCapacity().headroom_bytes
FIGURES = (
    "pages", "tokens", "bytes", "b_min", "b_step", "slack", "owners", "pages_min", "pages_max", "bytes_max",
    "free_bytes", "total_bytes", "headroom_bytes", "cache_bytes", "whole_sequences", "host_arena_bytes", "host_pages",
)  # fmt: skip
"""Fields of `pk.CapacityPlan` in the JSON object; `owners` maps owner -> bytes, which sum to `bytes`."""

_COUNT = r"(\d{1,15})"  # enough for every limit, and short enough for int()
_MTP = re.compile(rf"mtp:{_COUNT}(?::{_COUNT})?")
_DRAFT = re.compile(rf"(?:draft|dflash full):{_COUNT}x{_COUNT}x{_COUNT}x{_COUNT}", re.IGNORECASE)


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), help="A known model, instead of the four numbers below.")
@click.option("--layers", type=positive, help="Layers with a growing cache.")
@click.option("--query-heads", type=positive)
@click.option("--kv-heads", type=positive)
@click.option("--head-dim", type=positive)
@click.option("--profile", default="bf16", show_default=True, help="Storage profile of the KV cache (C4).")
@click.option("--max-context", type=positive, default=2048, show_default=True, help="Tokens of a row.")
@click.option("--max-concurrency", type=positive, default=8, show_default=True, help="Rows at a time.")
@click.option("--capacity", default="auto", show_default=True, help="Tokens of the Main pool, or auto.")
@click.option("--headroom", type=byte_count, help="Leave so much free, with auto.  [default: 1GiB]")
@click.option("--min-tokens", type=positive, help="Refuse less capacity, with auto.")
@click.option("--free-bytes", type=byte_count, help="Free memory of another machine, such as 80GiB.")
@click.option("--device", type=device_choice, default="auto", show_default=True)
@click.option("--backend", help="ordinary, mtp:K, mtp:K:LAYERS, or draft:LAYERSxQUERY_HEADSxKV_HEADSxHEAD_DIM.")
@click.option("--host-arena", "host_arena_bytes", type=byte_count, default=0, help="Pinned host memory for replicas.")
@click.option("--retained-tokens", type=click.IntRange(min=0), default=0,
              help="Room for continuations beyond what all rows can use.")  # fmt: skip
@click.option("--state-per-lane", "state_bytes_per_lane", type=byte_count, default=0,
              help="Your own device memory for each lane.")  # fmt: skip
@click.option("--state-fixed", "state_bytes_fixed", type=byte_count, default=0, help="Your own device memory, once.")
@click.option("--graph-allowance", "graph_allowance_bytes", type=byte_count,
              help="For captured graphs and buffers.  [default: 12MiB a lane]")  # fmt: skip
@click.option("--decode-columns", "decode_columns_max", type=positive,
              help="Widest decode unit.  [default: from the backend]")  # fmt: skip
@click.option("--prefill-columns", "prefill_columns_max", type=positive, default=1024, show_default=True,
              help="Widest prefill.")  # fmt: skip
@click.option("--caller-words", type=click.IntRange(min=0), default=0, help="Your own words for each row of a unit.")
@click.option("--sanitizer", is_flag=True, help="With the guard pages of sanitizer mode.")
@click.option("--codec-events", is_flag=True, help="With the counters of codec events.")
@json_option
def command(
    model: str | None, layers: int | None, query_heads: int | None, kv_heads: int | None, head_dim: int | None,
    capacity: str, headroom: int | None, min_tokens: int | None, free_bytes: int | None, device: str,
    backend: str | None, as_json: bool, **fields: Any,
) -> None:  # fmt: skip
    """Say how many pages fit, and what takes every byte.

    Counts of bytes are written 1073741824, 1GiB or 800MB. Too little memory is a finding: exit code 1, and the message
    says what would fit.
    """
    numbers = (layers, query_heads, kv_heads, head_dim)
    if model is not None and any(number is not None for number in numbers):
        raise click.UsageError("give --model, or --layers, --query-heads, --kv-heads and --head-dim; not both")
    if model is not None:
        geometry = MODELS[model]
    elif layers is None or query_heads is None or kv_heads is None or head_dim is None:
        raise click.UsageError("give --model, or --layers, --query-heads, --kv-heads and --head-dim together")
    else:
        geometry = pk.KVGeometry(layers=layers, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
    config = pk.StoreConfig(
        geometry, backend=parse_backend(backend),
        kv_capacity=parse_capacity(capacity, headroom_bytes=headroom, min_tokens=min_tokens), **fields,
    )  # fmt: skip
    total_bytes: int | None = None
    cache_bytes = 0
    if free_bytes is None:
        opened = pk.open_device(device)
        say(f"device: {opened.description}")
        try:
            cache_bytes = opened.empty_caches()
            free_bytes, total_bytes = opened.memory_bytes()
        finally:
            opened.close()
    plan = pk.plan(config, free_bytes, total_bytes=total_bytes, cache_bytes=cache_bytes)
    same_plan = f"--capacity {plan.tokens}"
    if as_json:
        report = {"schema": 1, **{name: getattr(plan, name) for name in FIGURES}, "same_plan": same_plan}
        click.echo(dumps(report))
    else:
        for line in _table(plan, same_plan):
            click.echo(line)


def parse_backend(text: str | None) -> pk.MTPBackend | pk.DraftFullBackend | None:
    """Return the backend that a text names: ordinary, mtp:K, mtp:K:LAYERS, or draft:LAYERSxQUERYxKVxDIM.  (C3.3)

    Raises:
        ConfigError: another form, or numbers that a backend refuses.
    """
    if text is None or text.lower() == "ordinary":
        return None
    if match := _MTP.fullmatch(text):
        return pk.MTPBackend(int(match[1]), layers=int(match[2] or 1))
    if match := _DRAFT.fullmatch(text):
        return pk.DraftFullBackend(pk.KVGeometry(*(int(number) for number in match.groups())))
    expected = "ordinary, mtp:K, mtp:K:LAYERS or draft:LAYERSxQUERY_HEADSxKV_HEADSxHEAD_DIM"
    raise pk.ConfigError("--backend", expected=expected,
                         got=repr(text), remedy="for example mtp:3 or draft:2x8x4x128", clause="C3.3")


def parse_capacity(
    text: str, *, headroom_bytes: int | None, min_tokens: int | None
) -> pk.ExplicitCapacity | pk.AutoCapacity:
    """Return the capacity that a text names: "auto", or tokens.  (C5.2, C5.3)

    Raises:
        ConfigError: neither, or headroom or min_tokens beside an explicit capacity, which leaves nothing free.
    """
    if text == "auto":
        return pk.AutoCapacity(HEADROOM_BYTES if headroom_bytes is None else headroom_bytes, min_tokens)
    if not re.fullmatch(_COUNT, text):
        raise pk.ConfigError("--capacity", expected="auto, or a count of tokens", got=repr(text),
                             remedy="pass auto or a number", clause="C5.2")
    if headroom_bytes is not None or min_tokens is not None:
        raise pk.ConfigError("--capacity", expected="auto beside --headroom or --min-tokens", got=text,
                             remedy="leave the other option out: an explicit capacity takes its own bytes",
                             clause="C5.2")
    return pk.ExplicitCapacity(int(text))


def _table(plan: pk.CapacityPlan, same_plan: str) -> list[str]:
    """Return the plan as lines: pages, bytes by owner, memory, the formula, and the option for the same plan."""
    config = plan.config
    pools = ", ".join(f"{pool.pages} of {pool.name}" for pool in config.pools)
    at_ceiling = f"{plan.whole_sequences} of {config.max_concurrency} sequences at max_context together"
    lines = [
        f"pages             {plan.pages}  (M_min {plan.pages_min}, M_max {plan.pages_max}; {pools})",
        f"tokens            {plan.tokens}  (max_context {config.max_context}; {at_ceiling})",
        "",
        *_rows("owner", plan.owners),
        *_rows("", {"B(M), all of it": plan.bytes}),
        "",
        *_rows("memory", {
            "free": plan.free_bytes, "headroom asked for": plan.headroom_bytes, "slack": plan.slack,
            "held by this process's caches": plan.cache_bytes,
        }),
        "",
        *_rows("B(M) = B_min + (M - M_min) * B_step", {
            "B_min": plan.b_min, "B_step": plan.b_step, "B(M_max)": plan.bytes_max,
        }),
    ]  # fmt: skip
    if plan.host_arena_bytes:
        extent = ", ".join(f"{pages} pages of {pool}" for pool, pages in plan.host_pages.items())
        lines += ["", *_rows("host", {"pinned arena": plan.host_arena_bytes}), f"it holds at most {extent}"]
    if plan.is_clamped:
        lines += ["", f"memory is the limit: every lane at its ceiling takes {plan.bytes_max - plan.bytes} bytes more"]
    return [*lines, "", f"the same plan: {same_plan}"]


def _rows(title: str, counts: Mapping[str, int | None]) -> list[str]:
    head = [f"{title:<36}{'bytes':>20}"] if title else []
    return head + [f"  {name:<34}{count:>20}  {readable(count):>10}" for name, count in counts.items()
                   if count is not None]
