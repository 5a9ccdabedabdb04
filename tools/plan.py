"""What `pagedkv plan` does: how many page groups fit, and where every byte goes, before anything is allocated.  (C5)

A caller like any other (C1.2).  Free memory is what the device reports after the caches of this process were emptied,
or a number for another machine.  The last line is the same plan as an explicit capacity: given back to this command,
or as `ExplicitCapacity(tokens)` to a store, it takes the same bytes.
"""

from __future__ import annotations

import re
from json import dumps
from typing import Any

import click

import pagedkv as pk
from pagedkv.tools.byte_count import readable

MODELS = {"smollm2": pk.KVGeometry(layers=30, query_heads=9, kv_heads=3, head_dim=64)}
"""Attention of the models that the command knows by name; a test compares them with the models' own files."""

HEADROOM_BYTES = pk.AutoCapacity().headroom_bytes

_COUNT = r"(\d{1,15})"  # enough for every limit, and short enough for int()
_MTP = re.compile(rf"mtp:{_COUNT}(?::{_COUNT})?")
_DRAFT = re.compile(rf"draft:{_COUNT}x{_COUNT}x{_COUNT}x{_COUNT}")


def parse_backend(text: str | None) -> pk.MTPBackend | pk.DraftFullBackend | None:
    """Return the backend that a text names: mtp:K, mtp:K:LAYERS, or draft:LAYERSxQUERYxKVxDIM.  (C3.3)

    Raises:
        ConfigError: another form, or numbers that a backend refuses.
    """
    if text is None:
        return None
    if found := _MTP.fullmatch(text):
        return pk.MTPBackend(int(found[1]), layers=int(found[2] or 1))
    if found := _DRAFT.fullmatch(text):
        layers, query_heads, kv_heads, head_dim = (int(number) for number in found.groups())
        return pk.DraftFullBackend(pk.KVGeometry(layers, query_heads, kv_heads, head_dim))
    raise pk.ConfigError("--backend", expected="mtp:K, mtp:K:LAYERS or draft:LAYERSxQUERY_HEADSxKV_HEADSxHEAD_DIM",
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
                             remedy="an explicit capacity takes what it says: leave the other option out",
                             clause="C5.2")
    return pk.ExplicitCapacity(int(text))


def plan_capacity(config: pk.StoreConfig, *, free_bytes: int | None, device: str, json: bool) -> dict[str, Any]:
    """Plan, and print a table or one JSON object on stdout.

    Args:
        config: what is to be opened.
        free_bytes: free device memory of the machine in question; None asks `device`.
        device: "auto", "cpu" or "cuda"; opened only when `free_bytes` is None.
        json: print the object instead of the table.

    Returns:
        The JSON object: schema, pages, tokens, bytes, b_min, b_step, slack, owners (owner -> bytes, which sum to
        bytes); beside them pages_min, pages_max, bytes_max, free_bytes, total_bytes (null when not known),
        headroom_bytes, cache_bytes, whole_sequences, host_arena_bytes, host_pages, and same_plan, the option that
        gives this plan again.

    Raises:
        CapacityError: the memory does not hold the plan; says what would fit.
        MissingRequirement: the device is not there.
    """
    total_bytes: int | None = None
    cache_bytes = 0
    if free_bytes is None:
        opened = pk.open_device(device)
        click.echo(f"device: {opened.description}", err=True)
        try:
            cache_bytes = opened.empty_caches()
            free_bytes, total_bytes = opened.memory_bytes()
        finally:
            opened.close()
    made = pk.plan(config, free_bytes, total_bytes=total_bytes, cache_bytes=cache_bytes)
    report = {
        "schema": 1,
        "pages": made.pages,
        "tokens": made.tokens,
        "bytes": made.bytes,
        "b_min": made.b_min,
        "b_step": made.b_step,
        "slack": made.slack,
        "owners": made.owners,
        "pages_min": made.pages_min,
        "pages_max": made.pages_max,
        "bytes_max": made.bytes_max,
        "free_bytes": made.free_bytes,
        "total_bytes": made.total_bytes,
        "headroom_bytes": made.headroom_bytes,
        "cache_bytes": made.cache_bytes,
        "whole_sequences": made.whole_sequences,
        "host_arena_bytes": made.host_arena_bytes,
        "host_pages": made.host_pages,
        "same_plan": f"--capacity {made.tokens}",
    }
    if json:
        click.echo(dumps(report))
    else:
        for line in _table(made, report["same_plan"]):
            click.echo(line)
    return report


def _table(made: pk.CapacityPlan, same_plan: object) -> list[str]:
    """Return the plan as lines: what was got, bytes by owner, memory, the line, and the way to get it again."""
    config = made.config
    pools = ", ".join(f"{pool.pages} of {pool.name}" for pool in config.pools)
    at_ceiling = f"{made.whole_sequences} of {config.max_concurrency} sequences at max_context together"
    lines = [
        f"pages             {made.pages}  (M_min {made.pages_min}, M_max {made.pages_max}; {pools})",
        f"tokens            {made.tokens}  (max_context {config.max_context}; {at_ceiling})",
        "",
        *_rows("owner", made.owners),
        *_rows("", {"B(M), all of it": made.bytes}),
        "",
        *_rows("memory", {
            "free": made.free_bytes, "headroom asked for": made.headroom_bytes, "slack": made.slack,
            "held by this process's caches": made.cache_bytes,
        }),
        "",
        *_rows("B(M) = B_min + (M - M_min) * B_step", {
            "B_min": made.b_min, "B_step": made.b_step, "B(M_max)": made.bytes_max,
        }),
    ]  # fmt: skip
    if made.host_arena_bytes:
        held = ", ".join(f"{pages} pages of {pool}" for pool, pages in made.host_pages.items())
        lines += ["", *_rows("host", {"pinned arena": made.host_arena_bytes}), f"one extent holds at most {held}"]
    if made.is_clamped:
        lines += ["", f"memory decided: every lane at its ceiling takes {made.bytes_max - made.bytes} bytes more"]
    return [*lines, "", f"the same plan: {same_plan}"]


def _rows(title: str, counts: dict[str, int]) -> list[str]:
    head = [f"{title:<36}{'bytes':>20}"] if title else []
    return head + [f"  {name:<34}{count:>20}  {readable(count):>10}" for name, count in counts.items()]
