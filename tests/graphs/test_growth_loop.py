"""The loop with lease growth: same tokens, bounded completion, no exception in a round.  (C9.2, C16.17)"""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, prompt

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)


def opened(
    *, growth: bool, max_context: int = 20_480, concurrency: int = 2, window: int = 64, forced: int = 0
) -> AbstractContextManager[pk.Store]:
    """Open a store whose pool holds one whole sequence, and check it at the end."""
    return opened_store(GEOMETRY, max_context=max_context, concurrency=concurrency, tokens=max_context,
                        kv_lease_growth=growth, lease_window_tokens=window, forced_span_tokens=forced)


def unbounded(ids: list[int], new_tokens: int) -> list[int]:
    """Return the tokens of the sequence alone in a store without growth."""
    with opened(growth=False) as store:
        loop = DecodeLoop(store, ToyModel(store))
        return decode_all(loop, [prefilled(loop, ids, new_tokens)])[0]


def available(store: pk.Store) -> int:
    """Return pages that are free."""
    return store.memory_summary()["main"]["available_pages"]


@pytest.mark.parametrize(("pages", "held", "prompts", "output_tokens", "needed"), [
    (320, 313, [prompt(60, 1)], 20_000, 314), (16, 1, [prompt(100, 1), prompt(30, 2)], 900, 16),
], ids=["59", "60"])
def test_59_60_long_outputs_in_a_tight_pool_end_with_length_and_the_right_tokens(
    pages: int, held: int, prompts: list[list[int]], output_tokens: int, needed: int
) -> None:
    """59, 60: admitted with growth only.  One lane takes all that another sequence leaves; two extend in turn.

    Each ends with "length", its tokens as if it were alone; the token that was sampled last is never written.
    """
    with opened(growth=False, max_context=pages * 64) as store:
        store.activate(prompt_tokens=held * 64, output_tokens=0)
        refusal = store.try_activate(prompt_tokens=len(prompts[0]), output_tokens=output_tokens)
        assert refusal == pk.Refusal("main", needed, pages - held, forever=False)
    with opened(growth=True, max_context=pages * 64, concurrency=3) as store:
        store.activate(prompt_tokens=held * 64, output_tokens=0)
        loop = DecodeLoop(store, ToyModel(store))
        lanes = [prefilled(loop, ids, output_tokens) for ids in prompts]
        texts = decode_all(loop, lanes, after_step=store.check)

        committed = [store.committed_tokens(lane) for lane in lanes]
        assert {loop.finish_reason(lane) for lane in lanes} == {"length"}
        assert (sum(committed), available(store), len(loop.step(lanes))) == ((pages - held) * 64, 0, 0)
        assert [len(ids) + len(text) - 1 for ids, text in zip(prompts, texts, strict=True)] == committed
        for lane in lanes:
            store.finish(lane)
        assert available(store) == pages - held
    assert texts == [unbounded(ids, len(text)) for ids, text in zip(prompts, texts, strict=True)]


@pytest.mark.parametrize("forced", [1, 64, 100])
def test_a_row_that_ends_with_length_has_room_for_its_forced_span(forced: int) -> None:
    """C9.2: the last step leaves the room, whatever the pool gave before; the caller appends the span itself."""
    with opened(growth=True, max_context=1024, forced=forced) as store:
        loop = DecodeLoop(store, ToyModel(store))
        store.activate(prompt_tokens=9 * 64, output_tokens=0)
        lane = prefilled(loop, prompt(30, 1), 900)
        text = decode_all(loop, [lane], after_step=store.check)[0]
        assert loop.finish_reason(lane) == "length"
        assert store.committed_tokens(lane) == 29 + len(text) == 7 * 64 - forced

        batch = store.batch([lane])
        assert (store.covered_columns(batch)[0], store.covered_columns(batch, forced=True)[0]) == (0, forced)
        unit = store.begin_unit(batch, forced)
        store.wait(unit)
        store.commit(unit)
        store.check()


@pytest.mark.parametrize("forced", [1, 64, 100])
def test_a_loop_prefills_the_forced_span_behind_its_output(forced: int) -> None:
    """C9.2: while the row runs, and after it ended with "length"; one token more is refused."""
    with opened(growth=True, max_context=1024, forced=forced) as store:
        loop = DecodeLoop(store, ToyModel(store))
        store.activate(prompt_tokens=9 * 64, output_tokens=0)
        lane = prefilled(loop, prompt(30, 1), 900)
        loop.prefill(lane, prompt(forced, 2), last_token=None)
        decode_all(loop, [lane])
        assert loop.finish_reason(lane) == "length"
        assert store.covered_columns(store.batch([lane]))[0] == 0

        last = loop.last_token(lane)
        with pytest.raises(pk.MisuseError, match=f"at most {forced} tokens"):
            loop.prefill(lane, prompt(forced, 2), last_token=last)
        loop.prefill(lane, prompt(forced, 2), last_token=None)
        assert len(decode_all(loop, [lane])[0]) == 1, "the token that the span sampled"
        assert loop.finish_reason(lane) == "length"
        store.check()


def test_an_own_loop_ends_by_one_comparison_and_has_room_for_its_forced_span() -> None:
    """C9.2: the loop of the README, with growth: 4 columns a launch, 3 accepted."""
    with opened(growth=True, max_context=1024, forced=64) as store:
        store.activate(prompt_tokens=9 * 64, output_tokens=0)
        batch = store.batch([store.activate(prompt_tokens=100, output_tokens=900)])
        columns, accepted = 100, 100
        short: list[pk.Sequence] = []
        while store.covered_columns(batch)[0] >= columns:
            unit = store.begin_unit(batch, columns)
            store.wait(unit)
            store.commit(unit, accepted)
            store.trim(batch)
            store.check()
            columns, accepted = 4, 3
            short = store.begin_round(batch)

        assert short == list(batch.sequences)
        unit = store.begin_unit(batch, 64)
        store.wait(unit)
        store.commit(unit)
        assert store.committed_tokens(short[0]) > 7 * 64 - 4


def test_the_end_of_a_budget_and_a_prompt_use_every_token_that_was_activated() -> None:
    """C9.2: a forced span is part of the budget; only a row that was not extended ends before its budget does."""
    for growth in (False, True):
        with opened(growth=growth, max_context=1024, forced=100) as store:
            loop = DecodeLoop(store, ToyModel(store))
            lane = prefilled(loop, prompt(64, 1), 64)
            assert (len(decode_all(loop, [lane])[0]), store.committed_tokens(lane)) == (64, 127)


def test_a_lane_that_ends_gives_the_other_what_it_needs() -> None:
    """C9.2, C16.10: the end of a sequence returns its entitlement, and a short row grows by it."""
    with opened(growth=True, max_context=1024) as store:
        loop = DecodeLoop(store, ToyModel(store))
        blocker = store.activate(prompt_tokens=12 * 64, output_tokens=0)
        lane = prefilled(loop, prompt(16, 3), 600)
        texts: list[int] = []
        for tokens in loop.decode([lane]):
            texts += tokens[lane]
            if len(texts) == 200:  # 215 tokens in the cache, 4 pages: the row is short
                batch = store.batch([lane])
                assert store.begin_round(batch) == [lane]
                assert store.covered_columns(batch).tolist() == [256 - 215]
                store.finish(blocker)

        assert (len(texts), loop.finish_reason(lane)) == (600, "length")
        assert store.committed_tokens(lane) == 615


@pytest.mark.deferred
def test_growth_changes_no_token_and_costs_no_call_where_pages_suffice() -> None:
    """C9.2, C9.4: a window of 64 tokens or the whole budget: the same text, and the same pages in the end.

    A round is host work; a step that crosses no page is the graph launch and the wait.
    """
    ids = prompt(65, 4)
    with opened(growth=True) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=len(ids), output_tokens=300)
        assert available(store) == 320 - (3 + 2)
        loop.prefill(sequence, ids)
        [text] = decode_all(loop, [sequence], after_step=store.check)
        assert available(store) == 320 - 6
        loop = DecodeLoop(store, ToyModel(store))
        decode_all(loop, [prefilled(loop, prompt(16, 1), 30)], after_step=store.check)
        assert loop.statistics.driver_calls_per_step == 2.0
    assert text == unbounded(ids, 300)


def test_a_prompt_beyond_what_is_reserved_is_refused() -> None:
    """C9.2: the budget would hold it, the lease does not; nothing changed, and the activated prompt runs."""
    with opened(growth=True, max_context=1024) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=16, output_tokens=900)
        with pytest.raises(pk.MisuseError, match="at most 256 tokens, which are reserved"):
            loop.prefill(sequence, prompt(257, 1))

        assert store.committed_tokens(sequence) == 0
        loop.prefill(sequence, prompt(256, 1))
        assert store.committed_tokens(sequence) == 256
    for forced, most in ((10, 246), (400, 240)):
        with opened(growth=True, max_context=1024, forced=forced) as store:
            loop = DecodeLoop(store, ToyModel(store))
            sequence = store.activate(prompt_tokens=16, output_tokens=900)
            with pytest.raises(pk.MisuseError, match=f"at most {most} tokens, which are reserved"):
                loop.prefill(sequence, prompt(most + 1, 1))
