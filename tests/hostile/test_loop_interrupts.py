"""Every line of every call of a decode loop is interrupted once.  (C9.5, C12.4)

The store is latched then, or the caller repeats the call and gets every token that it would have had, each once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, Prefill, StepTokens
from tests.hostile.interrupt import ERRORS, Interrupt
from tests.toy_model import ToyModel, prompt

CONFIG = pk.StoreConfig(
    pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="bf16", max_context=256, max_concurrency=3,
    kv_capacity=pk.ExplicitCapacity(3 * 256), kv_lease_growth=True, lease_window_tokens=64,
)


class Stage:
    """Two sequences whose next step crosses a page, a third one to prefill, and a loop with every graph captured."""

    def __init__(self, device: pk.Device) -> None:
        self.store = pk.open_store(CONFIG, device)
        self.loop = DecodeLoop(self.store, ToyModel(self.store), prefill_chunk=16)
        self.running = [self.store.activate(prompt_tokens=62, output_tokens=100) for _ in range(2)]
        for seed, sequence in enumerate(self.running):
            self.loop.prefill(sequence, prompt(62, seed))
        for _ in range(2):
            self.loop.step(self.running)
        self.fresh = self.store.activate(prompt_tokens=40, output_tokens=20)
        self.pieces: Prefill | None = None
        self.delivered: StepTokens | None = None
        self.texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in [*self.running, self.fresh]}

    def prefill(self) -> None:
        """Prefill the third sequence in three chunks, unless an interrupt came after its end."""
        if not self.store.committed_tokens(self.fresh):
            self.loop.prefill(self.fresh, prompt(40, 9))

    def prefill_in_pieces(self) -> None:
        """Prefill the third sequence piece by piece, and go on with the prompt that has begun."""
        if self.pieces is None:
            self.pieces = self.loop.begin_prefill(self.fresh, prompt(40, 9))
        while self.pieces.advance():
            pass

    def step(self) -> None:
        """Advance the two sequences, and note their tokens, of an interrupted call those that it was to note."""
        if self.delivered is None:
            self.delivered = self.loop.step(self.running)
        self.note(self.delivered)
        self.delivered = None

    def note(self, delivered: StepTokens) -> None:
        """Append delivered tokens to the texts."""
        for sequence, tokens in list(delivered.items()):  # after that no line of the product runs
            self.texts[sequence] += tokens

    def go_on(self) -> list[list[int]]:
        """Prefill what is not prefilled, step until every text has seven tokens, and return these."""
        self.prefill()
        while min(map(len, self.texts.values())) < 7:
            self.note(self.loop.step(list(self.texts)))
        self.store.check()
        return [tokens[:7] for tokens in self.texts.values()]


CALLS: dict[str, Callable[[Stage], object]] = {
    "step": Stage.step, "prefill": Stage.prefill, "prefill in pieces": Stage.prefill_in_pieces,
}


@pytest.mark.parametrize(("error", "every"), ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_a_loop_that_goes_on_gives_the_tokens_it_would_have_given(
    name: str, error: type[BaseException], every: int, opened_device: pk.Device
) -> None:
    """C9.5: one line of the call after the other, each on a stage of its own."""
    call = CALLS[name]
    stage = Stage(opened_device)
    with stage.store, Interrupt(0, error) as count:
        call(stage)
    stage = Stage(opened_device)
    with stage.store:
        call(stage)
        expected = stage.go_on()

    latched = 0
    for at in range(1, count.lines + 1, every):
        stage = Stage(opened_device)
        with stage.store as store:
            with pytest.raises(error, match=f"at line {at}:") as raised, Interrupt(at, error):
                call(stage)
            if store.evidence is not None:
                latched += 1
                with pytest.raises(pk.StoreLatched):
                    stage.step()
            else:
                call(stage)
                assert expected == stage.go_on(), str(raised.value)
    print(f"{name}: {count.lines} lines, latched at {latched}")
