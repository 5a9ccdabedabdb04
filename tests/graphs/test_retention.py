"""A scheduler that keeps ended texts: the same tokens, less prefill, and pages only as long as nobody needs them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import LeastRecent, RetainedText, Sampling, Scheduler
from pagedkv.tools.fuzz.scheduler_walk import GEOMETRY as SMALL
from tests.host.test_bulk_cost import calls_of
from tests.toy_model import ToyModel, opened_store, prompt, retained, run_unit

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)


@contextmanager
def served(*, rows: int = 4, tokens: int = 4 * 512, kept: bool = True, **options: Any) -> Iterator[Scheduler]:
    """Open a scheduler over a small store; at its end everything can be released."""
    with opened_store(GEOMETRY, max_context=512, concurrency=rows, tokens=tokens, placement_seed=3, **options) as store:
        retention = LeastRecent() if kept else None
        scheduler = Scheduler(store, ToyModel(store), retention=retention)
        yield scheduler
        assert scheduler.is_idle
        store.check()
        if retention is not None:
            assert len(retention.index) == len(store.continuations())
            retention.release_all(store)
        assert store.memory_summary()["main"]["available_pages"] == store.config.main_pages
        assert store.host_summary()["used_bytes"] == 0


def policy(scheduler: Scheduler) -> LeastRecent:
    assert isinstance(scheduler.retention, LeastRecent)
    return scheduler.retention


def finish(scheduler: Scheduler) -> None:
    """Step until every request has ended."""
    while not scheduler.is_idle:
        scheduler.step()


def conversations(seed: int, requests: int) -> list[tuple[list[int], int]]:
    """Return prompts of which many begin like an earlier one, and the tokens to generate."""
    rng = random.Random(seed)
    prompts: list[tuple[list[int], int]] = []
    for number in range(requests):
        base = rng.choice(prompts)[0] if prompts and rng.random() < 0.75 else []
        base = base[: rng.choice((len(base), len(base), rng.randint(0, len(base))))]
        ids = [*base, *prompt(rng.randint(1, 90), number)][:440]
        prompts.append((ids, rng.randint(1, 20)))
    return prompts


def texts(scheduler: Scheduler, prompts: list[tuple[list[int], int]], *, turns: int = 6) -> list[list[int]]:
    """Serve prompts, some of them together, and return their outputs."""
    outputs = []
    for first in range(0, len(prompts), turns):
        requests = [scheduler.submit(ids, count, n=1 + (len(ids) % 5 == 0)) for ids, count in prompts[first:][:turns]]
        finish(scheduler)
        outputs += [output.tokens for request in requests for output in request.outputs]
    return outputs


@pytest.mark.deferred
@pytest.mark.parametrize("host", [0, 1 << 20], ids=["no host", "host"])
@pytest.mark.parametrize("pages", [32, 12])
def test_outputs_are_what_they_are_without_retention(host: int, pages: int) -> None:
    """C14.6: forks inside pages, moves, demoted and restored texts, evictions; and prompts that share with n = 2."""
    prompts = conversations(pages, 48)
    with served(kept=False) as plain:
        expected = texts(plain, prompts)
    with served(tokens=pages * 64, host_arena_bytes=host) as scheduler:
        assert texts(scheduler, prompts) == expected
        counters = policy(scheduler).counters
        assert counters.hits == counters.forks + counters.moves > 15
        if pages == 12:
            assert counters.demotions if host else counters.evictions
        events = scheduler.store.event_counts()["main"]
        assert counters.demoted_pages == events["demote"]["pages"]


def test_a_turn_reuses_all_that_was_written() -> None:
    """The prompt of the second turn begins with the first one and its answer; the last token was never written."""
    with served() as scheduler:
        ids = prompt(100, 1)
        first = scheduler.submit(ids, 30)
        finish(scheduler)
        text = [*ids, *first.outputs[0].tokens]
        (kept,) = scheduler.store.continuations()
        state = scheduler.store.state_of(kept)
        assert isinstance(state, RetainedText)
        assert state.tokens.tolist() == text[:-1]
        scheduler.submit([*text, 5, 6], 10)
        finish(scheduler)
        counters = policy(scheduler).counters
        assert (counters.hits, counters.reused_tokens, counters.covered) == (1, 129, 1)
        assert len(scheduler.store.continuations()) == 1


def test_another_salt_shares_nothing() -> None:
    """S40: the same tokens behind another image."""
    with served() as scheduler:
        for salt in ("digest 1", "digest 2", "digest 1"):
            scheduler.submit(prompt(130, 2), 5, salt=salt)
            finish(scheduler)
        assert policy(scheduler).counters.hits == 1
        with pytest.raises(pk.MisuseError, match="hashed"):
            scheduler.submit([1], 1, salt=[])  # type: ignore[arg-type]


def test_requests_without_a_salt_share_texts_of_equal_words() -> None:
    """S40, C15.1: the model may read words, such as the number of an adapter; those of a sampling only choose."""
    with served(caller_words=4) as scheduler:
        for options in ({"words": [0, 0, 0, 7]}, {"words": [0, 0, 0, 8]}, {"sampling": Sampling(seed=1), "words": [9]},
                        {"salt": "x"}, {"words": [0, 0, 0, 7], "salt": "y"}):
            scheduler.submit(prompt(100, 2), 2, **options)
            finish(scheduler)
        assert policy(scheduler).counters.hits == 0
        scheduler.submit(prompt(100, 2), 2, sampling=Sampling(seed=2), words=[7])
        scheduler.submit(prompt(100, 2), 2, words=[1, 2, 3, 4], salt="x")
        finish(scheduler)

        assert policy(scheduler).counters.reused_tokens == 2 * 99


def test_no_more_is_given_up_than_is_needed() -> None:
    """S60: 20 kept texts of one page, and a prompt that needs three more pages than are free."""
    with served(rows=2, tokens=24 * 64, retained_tokens=8 * 64) as scheduler:
        for number in range(20):
            scheduler.submit(prompt(40, number), 5)
            finish(scheduler)
        store = scheduler.store
        free = store.memory_summary()["main"]["available_pages"]
        assert (free, len(store.continuations())) == (4, 20)
        scheduler.submit(prompt(7 * 64 - 10, 99), 5)
        finish(scheduler)
        counters = policy(scheduler).counters
        assert (counters.evictions, counters.evicted_pages) == (3, 3)


def test_the_source_of_a_prompt_is_not_given_up_for_it() -> None:
    """S59: it is the least recent, and pages are missing; then it is moved, because a Fork does not fit."""
    with served(rows=2, tokens=8 * 64) as scheduler:
        ids = prompt(6 * 64 + 10, 1)
        scheduler.submit(ids, 2)
        finish(scheduler)
        text = scheduler.submit([*ids, 7], 80)
        finish(scheduler)
        counters = policy(scheduler).counters
        assert (counters.moves, counters.evictions) == (1, 0)
        assert counters.reused_tokens == len(ids)
        assert len(text.outputs[0].tokens) == 80


def test_the_oldest_on_the_host_end_last() -> None:
    """Demoted under pressure; where the arena is full too, the least recent there is released."""
    record = 2 * 64 * 64 * 2
    with served(rows=2, tokens=8 * 64, host_arena_bytes=6 * record) as scheduler:
        for number in range(12):
            scheduler.submit(prompt(120, number), 5)
            finish(scheduler)
        counters = policy(scheduler).counters
        assert counters.demotions > 5
        assert 0 < counters.evictions < counters.demotions
        assert counters.evicted_pages == 0
        scheduler.submit(prompt(120, 11), 5)  # the last one is still there
        finish(scheduler)
        assert policy(scheduler).counters.reused_tokens == 119


def test_a_text_that_the_arena_cannot_hold_costs_nobody_on_the_host() -> None:
    """C8.2: texts of one page are there; one of six pages leaves the Device, and an arena of four is too small."""
    record = 2 * 64 * 64 * 2
    with served(rows=2, tokens=8 * 64, host_arena_bytes=4 * record) as scheduler:
        for ids in [prompt(60, number) for number in range(4)] + [prompt(380, 9), prompt(380, 10)]:
            scheduler.submit(ids, 4)
            finish(scheduler)
        counters = policy(scheduler).counters

        assert (counters.demotions, counters.evictions, counters.evicted_pages) == (4, 1, 6)


def test_pages_that_stayed_behind_a_demoted_text_are_given_up_too() -> None:
    """C7.7: an active sequence kept them on the Device; when it has ended, only the text on the Host holds them."""
    with served(tokens=8 * 64, host_arena_bytes=1 << 20) as scheduler:
        ids = prompt(129, 1)
        scheduler.submit([*ids, 3], 1)
        finish(scheduler)
        fork = scheduler.submit([*ids, 4], 100)
        scheduler.step()
        other = scheduler.submit(prompt(60, 5), 190)  # the text goes to the Host, but for the pages of the fork
        scheduler.step()
        assert (scheduler.statistics.running, policy(scheduler).counters.demotions) == (2, 1)
        scheduler.cancel(fork)
        scheduler.cancel(other)
        whole = scheduler.submit(prompt(400, 6), 100)
        finish(scheduler)

        assert len(whole.outputs[0].tokens) == 100


def test_a_text_that_left_the_host_for_another_victim_is_no_victim_again() -> None:
    """C8.2: an arena of one page; the text there still has a page on the Device, and both texts have to go."""
    record = 2 * 64 * 16 * 2
    with opened_store(SMALL, max_context=256, concurrency=2, tokens=4 * 64, host_arena_bytes=record) as store:
        retention = LeastRecent()
        demoted = kept_text(store, retention, 0, 2)
        forked = store.activate(prompt_tokens=1, output_tokens=0, source=demoted, frontier=64)
        assert retention.make_room(store, pk.Refusal("main", 2, 1, forever=False), None)
        store.finish(forked)
        last = kept_text(store, retention, 1, 1)
        assert retention.make_room(store, pk.Refusal("main", 4, 2, forever=False), None)

        assert store.memory_summary()["main"]["available_pages"] == 4
        assert list(retention.index) == store.continuations() == [last]


def test_who_cannot_be_helped_costs_nobody_his_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """S59: another one runs, and all texts together have too few pages; nobody is asked again before that changes."""
    with served(rows=2, tokens=10 * 64) as scheduler:
        for number in range(2):
            scheduler.submit(prompt(100, number), 20)
            finish(scheduler)
        store = scheduler.store
        running, waiting = scheduler.submit(prompt(10, 7), 5 * 64), scheduler.submit(prompt(20, 8), 7 * 64)
        scheduler.step()
        asked = asked_of(store, monkeypatch)
        for _ in range(3):
            scheduler.step()
        assert (len(store.continuations()), policy(scheduler).counters.evictions, asked) == (2, 0, [])
        scheduler.cancel(running)
        scheduler.step()

        assert (scheduler.statistics.running, policy(scheduler).counters.evictions) == (1, 1)
        scheduler.cancel(waiting)


def asked_of(store: pk.Store, monkeypatch: pytest.MonkeyPatch) -> list[pk.Continuation]:
    """Return the list of continuations about which the store is asked from now on."""
    asked: list[pk.Continuation] = []
    explain = store.explain_release

    def note(one: pk.Continuation) -> dict[str, pk.ReleasePlan]:
        asked.append(one)
        return explain(one)

    monkeypatch.setattr(store, "explain_release", note)
    return asked


def kept_text(store: pk.Store, retention: LeastRecent, number: int, pages: int,
              source: pk.Continuation | None = None) -> pk.Continuation:
    """Keep so many more pages of tokens that nobody wrote, under a salt of its own."""
    sequence = store.activate(prompt_tokens=64 * pages, output_tokens=0, source=source)
    for _ in range(pages):
        run_unit(store, sequence, 64)
    continuation = retained(store, sequence, RetainedText(np.array([1], np.int32), number))
    retention.keep(store, continuation)
    return continuation


def test_work_grows_with_what_goes_and_not_with_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """S83: 1,000 texts of a page, and 100 pages are missing: 100 texts are asked, to plan and to go."""
    with opened_store(SMALL, max_context=64, concurrency=1, tokens=1000 * 64, retained_tokens=1000 * 64) as store:
        retention = LeastRecent()
        for number in range(1000):
            kept_text(store, retention, number, 1)
        asked = asked_of(store, monkeypatch)
        available = store.memory_summary()["main"]["available_pages"]
        assert retention.make_room(store, pk.Refusal("main", available + 100, available, forever=False), None)

        assert len(asked) == 2 * 100
        assert len(store.continuations()) == 900


def test_shared_pages_come_when_everybody_who_shares_them_goes() -> None:
    """C7.3: texts without a page of their own go too, if their pages are needed and nobody runs on them."""
    with opened_store(SMALL, max_context=640, concurrency=2, tokens=20 * 64) as store:
        retention = LeastRecent()
        first = kept_text(store, retention, 0, 10)
        kept_text(store, retention, 1, 0, first)
        assert not retention.make_room(store, pk.Refusal("main", 20, 10, forever=False), first)
        assert not retention.make_room(store, pk.Refusal("main", 21, 10, forever=False), None)
        for pages in (10, 5):
            forked = store.activate(prompt_tokens=0, output_tokens=0, source=first, frontier=pages * 64)
            assert not retention.make_room(store, pk.Refusal("main", 21 - pages, 10, forever=False), None)
            store.finish(forked)
        assert len(store.continuations()) == 2
        retention.recover(store)
        assert retention.make_room(store, pk.Refusal("main", 20, 10, forever=False), None)

        assert store.memory_summary()["main"]["available_pages"] == 20


def test_a_snapshot_of_a_prefix_finds_room_beside_kept_texts() -> None:
    """C10.6: a full pool, and a text goes for the page of the tail: the prompt of two outputs is written once."""
    with served(tokens=8 * 64) as scheduler:
        for number in range(2):
            scheduler.submit(prompt(200, number), 20)
            finish(scheduler)
        assert scheduler.store.memory_summary()["main"]["available_pages"] == 0
        scheduler.submit(prompt(70, 9), 150, n=2)
        finish(scheduler)

        assert scheduler.loop.statistics.prefilled_tokens == 2 * 200 + 70 + 1


def test_growing_rows_take_pages_of_kept_texts() -> None:
    """C9.2: a lease is extended over a kept text, and the output is complete."""
    with served(rows=2, tokens=8 * 64, kv_lease_growth=True, lease_window_tokens=64) as scheduler:
        for number in range(4):
            scheduler.submit(prompt(60, number), 2)
            finish(scheduler)
        request = scheduler.submit(prompt(10, 50), 450)
        finish(scheduler)
        assert (len(request.outputs[0].tokens), request.outputs[0].reason) == (450, "length")
        assert policy(scheduler).counters.evictions >= 3


def test_no_output_ends_early_for_a_kept_text() -> None:
    """C9.2: budgets that fill the pool, and two outputs of every other request."""
    with served(tokens=12 * 64, kv_lease_growth=True, lease_window_tokens=64) as scheduler:
        requests = []
        for number in range(12):
            ids = prompt(40 + 20 * (number % 5), 0)[: 40 + 10 * (number % 3)] + prompt(number + 1, number)
            requests.append(scheduler.submit(ids, 250 + 10 * number, n=1 + number % 2))
            scheduler.step()
        finish(scheduler)

        assert policy(scheduler).counters.hits
        assert policy(scheduler).counters.evictions
        assert [(len(output.tokens), output.reason) for request in requests for output in request.outputs] == [
            (request.max_new_tokens, "length") for request in requests for _ in request.outputs]


def test_texts_are_found_again_after_an_interrupt_between_store_and_policy() -> None:
    """The store has the continuation, and its state is the text; what is gone is forgotten."""
    with served() as scheduler:
        store, retention = scheduler.store, policy(scheduler)
        scheduler.submit(prompt(70, 1), 3)
        finish(scheduler)
        (kept,) = store.continuations()
        retention._forget(kept)
        other = store.activate(prompt_tokens=1, output_tokens=0)
        unit = store.begin_unit(store.batch([other]), 1)
        store.wait(unit)
        store.commit(unit)
        foreign = store.finish(other, retain=True, state="of somebody else")
        assert foreign is not None
        retention.recover(store)
        assert list(retention.index) == [kept]
        store.release(kept)
        retention.recover(store)
        assert list(retention.index) == []
        store.release(foreign)


def test_kept_tokens_are_those_of_the_pages() -> None:
    """A cancelled output keeps nothing; the tokens of a stopped one end with the token before the last."""
    with served() as scheduler:
        cancelled = scheduler.submit(prompt(100, 1), 100)
        scheduler.step()
        scheduler.step()
        scheduler.cancel(cancelled)
        assert scheduler.store.continuations() == []
        alone = scheduler.submit(prompt(64, 2), 30)
        finish(scheduler)
        stop = alone.outputs[0].tokens[7]
        scheduler.submit(np.array(prompt(64, 2)), 30, stop_tokens=[stop])
        finish(scheduler)
        assert len(scheduler.store.continuations()) <= 2


# ---- many kept texts -------------------------------------------------------------------------------------


def kept_texts(store: pk.Store, retention: LeastRecent, texts: int, pages: int, *, shared_pages: int = 0) -> None:
    """Keep texts of whole pages, each the next after the one before; all begin with the same shared pages."""
    first: pk.Continuation | None = None
    for number in range(texts):
        ids = np.full(pages * 64, number, np.int32)
        ids[: shared_pages * 64] = 0
        if first is None or not shared_pages:
            sequence = store.activate(prompt_tokens=ids.size, output_tokens=0)
        else:
            left = ids.size - shared_pages * 64
            sequence = store.activate(prompt_tokens=left, output_tokens=0, source=first, frontier=shared_pages * 64)
        unit = store.begin_unit(store.batch([sequence]), ids.size - store.committed_tokens(sequence))
        store.wait(unit)
        store.commit(unit)
        continuation = store.finish(sequence, retain=True, state=RetainedText(ids, None))
        assert continuation is not None
        retention.keep(store, continuation)
        first = first or continuation


@contextmanager
def without_device(pages: int, *, max_context: int, **options: Any) -> Iterator[pk.Store]:
    """Open a store of two rows and so many pages, without a device."""
    config = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=max_context, max_concurrency=2,
                            kv_capacity=pk.ExplicitCapacity(pages * 64), retained_tokens=pages * 64, **options)
    with pk.open_store(config, device="none") as store:
        yield store
        store.check()


@pytest.mark.parametrize("host", [0, 1 << 30], ids=["no host", "host"])
@pytest.mark.parametrize("shared_pages", [0, 5])
def test_one_admission_takes_what_it_needs_and_at_most_one_text_more(shared_pages: int, host: int) -> None:
    """S60: 35 kept texts of 11 pages, and one admission of 130 pages; shared pages go with their last text."""
    pages = 35 * (11 - shared_pages) + shared_pages + 3
    with without_device(pages, max_context=130 * 64, host_arena_bytes=host) as store:
        retention = LeastRecent()
        kept_texts(store, retention, 35, 11, shared_pages=shared_pages)
        refusal = store.try_activate(prompt_tokens=130 * 64, output_tokens=0)
        assert isinstance(refusal, pk.Refusal)
        missing = refusal.needed - refusal.available
        assert missing == 127

        assert retention.make_room(store, refusal, None)
        counters = retention.counters
        assert missing <= counters.evicted_pages + counters.demoted_pages < missing + 11 - shared_pages
        store.activate(prompt_tokens=130 * 64, output_tokens=0)


class Touched(np.ndarray[Any, Any]):
    """A column that counts its elements that are read, written or computed with."""

    elements = 0

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(self)[key]
        Touched.elements += found.size
        return found

    def __setitem__(self, key: Any, values: Any) -> None:
        column = np.asarray(self)
        Touched.elements += column[key].size
        column[key] = values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        Touched.elements += self.size
        plain = [np.asarray(each) if isinstance(each, Touched) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **named)


def work(monkeypatch: pytest.MonkeyPatch, texts: int, admitted: int) -> tuple[int, int]:
    """Return the calls, and the elements of page columns, that making room for an admission takes."""
    with without_device(texts, max_context=admitted * 64) as store, monkeypatch.context() as patch:
        retention = LeastRecent()
        kept_texts(store, retention, texts, 1)
        refusal = store.try_activate(prompt_tokens=admitted * 64, output_tokens=0)
        assert isinstance(refusal, pk.Refusal)
        pages = store._ledger.active["main"].pages
        for name in ("references", "active", "writer", "device", "host", "pins", "committed", "protected"):
            patch.setattr(pages, name, getattr(pages, name).view(Touched))
        Touched.elements = 0
        calls = calls_of(lambda: retention.make_room(store, refusal, None))
        elements = Touched.elements
        assert retention.counters.evicted_pages == admitted
        store.activate(prompt_tokens=admitted * 64, output_tokens=0)
    return calls, elements


def test_making_room_costs_as_much_as_the_room_and_not_as_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """S83: a tenth of the kept pages is admitted; neither calls nor elements grow faster than the admission."""
    few, beside_many, many = (work(monkeypatch, *sizes) for sizes in ((100, 10), (400, 10), (400, 40)))

    assert beside_many == few
    assert many[0] <= 4 * few[0]
    assert 0 < many[1] <= 4 * few[1]
