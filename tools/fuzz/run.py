"""`pagedkv fuzz`: rounds of random walks, each with its own store.  (C5 to C13, C16)

    seed -> rounds -> WalkShape -> EventDrawer --event--> Walk -> the store and its model, compared

The message of a finding has the seed, the event, and the shortest list of events that still shows a difference: the
walk runs again with events left out, until every event is needed or the time is over.
"""

from __future__ import annotations

import io
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from json import dumps
from typing import TextIO

import click

import pagedkv as pk
from pagedkv.tools.console import EXIT_FINDING, device_choice, json_option, positive, progress_line, say
from pagedkv.tools.fuzz.events import Event, EventDrawer, WalkShape, draw_shape
from pagedkv.tools.fuzz.faulty_device import FaultyDevice, InjectedFault
from pagedkv.tools.fuzz.finding import Finding, FuzzFound, shortest
from pagedkv.tools.fuzz.scheduler_walk import fuzz_scheduler
from pagedkv.tools.fuzz.walk import Walk

EVENTS_A_ROUND = 250
LAST_EVENTS = 12
SHORTEN_SECONDS = 20.0

FINDINGS = (AssertionError, pk.PagedKVError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError, InjectedFault)  # fmt: skip
"""What a broken store raises: a failed comparison, a wrong error, or an accident inside."""


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all random choices.")
@click.option("--events", type=positive, default=50_000, show_default=True, help="Number of events, in all rounds.")
@click.option("--device", type=device_choice, default="cpu", show_default=True)
@click.option("--scheduler", "is_scheduler", is_flag=True, help="Walk a scheduler and its requests, not the store.")
@json_option
def command(seed: int, events: int, device: str, is_scheduler: bool, as_json: bool) -> None:
    """Walk a store at random beside a model of the contract.

    After every event everything that the store shows is compared. A difference is a finding: exit code 1, with seed,
    event and the shortest history that shows it. With --scheduler requests come, end and are cancelled at random; each
    text is compared with that of its request alone, and a finding names the seed of its round.
    """
    start = time.perf_counter()

    def progress(done: int) -> None:
        progress_line(f"{done} of {events} events")

    try:
        counts = (fuzz_scheduler if is_scheduler else fuzz)(seed, events, device=device, progress=progress)
    except FuzzFound as error:
        progress_line("")
        click.echo(dumps(error.finding.as_json()) if as_json else str(error.finding))
        sys.exit(EXIT_FINDING)
    except FINDINGS as error:
        if not is_scheduler:
            raise
        progress_line("")
        text = "; ".join([_message(error), *getattr(error, "__notes__", ())])
        click.echo(dumps({"schema": 1, "seed": seed, "finding": text}) if as_json else text)
        sys.exit(EXIT_FINDING)
    progress_line("")
    if as_json:
        click.echo(dumps({"schema": 1, "seed": seed, "events": events, "finding": None, "counts": dict(counts)}))
    else:
        click.echo("    count  what happened")
        for name, count in counts.most_common():
            click.echo(f"{count:>9}  {name}")
    say(f"{events} events in {time.perf_counter() - start:.1f} s, no difference")


def fuzz(
    seed: int, events: int, *, device: str = "cpu", shorten_seconds: float = SHORTEN_SECONDS,
    progress: Callable[[int], None] | None = None,
) -> Counter[str]:  # fmt: skip
    """Walk `events` events in rounds, each with its own store and a seed that derives from `seed`.

    Args:
        seed: of all random choices.
        events: in all rounds.
        device: device of the stores.
        shorten_seconds: time limit of the search for the shortest history of a finding.
        progress: called after each round with the number of events so far.

    Returns:
        How often each kind of event, error and refusal happened.

    Raises:
        FuzzFound: store and model differ.
    """
    counts: Counter[str] = Counter()
    shared = FaultyDevice(pk.open_device(device))
    done = 0
    while done < events:
        part = min(EVENTS_A_ROUND, events - done)
        round_counts, walked = walk_once(seed, seed * 1_000_003 + done, part, shared, shorten_seconds=shorten_seconds)
        counts += round_counts
        done += walked
        if progress is not None:
            progress(done)
    return counts


def walk_once(
    seed: int, round_seed: int, events: int, device: FaultyDevice, *, shorten_seconds: float
) -> tuple[Counter[str], int]:
    """Walk one round of at most so many events; return what happened how often, and the number of events."""
    rng = random.Random(round_seed)
    shape = draw_shape(rng)
    walk = Walk(shape, device)
    drawer = EventDrawer(rng, walk.model, shape.sanitizer)
    history: list[Event] = []
    try:
        for number in range(1, events + 1):
            history.append(drawer.draw(number))
            walk.perform(history[-1])
            if walk.is_over:
                break
            if number in walk.batches:
                drawer.add_batch(number, walk.batches[number][0])
        walk.end_everything()
    except FINDINGS as error:
        message = _message(error)
        short, short_message = shortest(
            history, lambda events: replay(shape, device, events), message=message, seconds=shorten_seconds
        )
        journal = io.StringIO()
        replay(shape, device, short, journal)
        finding = Finding(
            seed, round_seed, history[-1].number, shape, message, tuple(history[-LAST_EVENTS:]), tuple(short),
            short_message, tuple(journal.getvalue().splitlines(keepends=True)),
        )  # fmt: skip
        raise FuzzFound(finding) from error
    return walk.counts, len(history)


def replay(
    shape: WalkShape, device: FaultyDevice, events: list[Event], journal: TextIO | None = None
) -> tuple[int, str] | None:
    """Run events again; return how many ran until a difference, and its message, or None."""
    walk = Walk(shape, device, journal)
    count = 0
    try:
        for event in events:
            count += 1
            walk.perform(event)
        walk.end_everything()
    except FINDINGS as error:
        return count, _message(error)
    return None


def _message(error: BaseException) -> str:
    first = str(error).splitlines()[0] if str(error) else ""
    return first if isinstance(error, AssertionError) else f"{type(error).__name__}: {first}"
