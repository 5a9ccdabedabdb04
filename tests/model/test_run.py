"""The whole slice with the real model on the `cpu` device: exact equalities, the reference, and `run`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.graphs.key import key_for
from pagedkv.graphs.shapes import prefill_width
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.run import run_prompts
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model.fake_unit import PASSAGE, assert_same_choices
from tests.model.generation import generate
from tests.oracle.reference_llama import greedy, mean_divergence, teacher_forced
from tests.toy_model import opened_store, prefilled

pytestmark = pytest.mark.model

PROMPTS = ["The capital of France is", "1, 2, 3,", "Water boils at a temperature of"]
FIELDS = [
    "schema", "prompts", "texts", "tokens", "profile", "device", "pages", "graphs", "driver_calls_per_step",
    "tokens_per_second",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(weights: LlamaWeights, opened_device: pk.Device) -> LlamaModel:
    return LlamaModel(weights, opened_device, max_context=256, keep_logits=True)


def test_a_batch_says_what_prompts_say_alone(model: LlamaModel, opened_device: pk.Device, tokenizer: Tokenizer) -> None:
    """C14.6 in a quantized profile: alone on other pages, or eagerly, nothing changes (bf16: test_exact.py)."""
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    decode = partial(generate, model, opened_device, new_tokens=4, profile="k8v4")
    together = decode(prompts, placement_seed=1)

    assert together[:1] == decode(prompts[:1], placement_seed=2)
    assert together[1:] == decode(prompts[1:], placement_seed=1, use_graphs=False)


def test_the_text_is_the_references_while_its_choices_are_clear(
    model: LlamaModel, opened_device: pk.Device, weights: LlamaWeights, tokenizer: Tokenizer
) -> None:
    """The first tokens, up to the first choice that another rounding may turn (margin below 0.2)."""
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    texts = [list(said.tokens) for said in generate(model, opened_device, prompts, 6, placement_seed=1)]

    for ids, tokens in zip(prompts, texts, strict=True):
        expected, gaps = greedy(weights, ids, 6)
        clear = next((index for index, gap in enumerate(gaps) if gap < 0.2), len(gaps))
        assert expected[:clear] == tokens[:clear]
    assert tokenizer.decode(texts[0]).startswith(" Paris.")


# Five prompts of 64 tokens for the bf16 comparison: prose, a list, code, dialogue, and a text in another language.
TEXTS = [
    PASSAGE + " When the sun came out again, they put tables in the road and ate together.",
    (
        "Shopping list for the week: 12 eggs, 2 litres of milk, 500 g of flour, salt, pepper, 3 onions, a bag of "
        "rice, olive oil, 6 apples, 4 lemons, tea, coffee, sugar, a loaf of rye bread, butter, and one bar of dark "
        "chocolate, two if they are cheap."
    ),
    (
        "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n"
        "            result.append(left.pop(0))\n        else:\n            result.append(right.pop(0))\n"
        "    return result + left + right\n\n\nprint(merge([1, 4, 7], [2, 3, 9]))\n"
    ),
    (
        "- Where were you last night? - At home. I read a book about the moon. - All night? - Until two. Then I "
        "could not sleep, so I counted the ticks of the clock in the kitchen, and after a while I forgot the number, "
        "and the clock. In the morning I made coffee and began the book again."
    ),
    (
        "Il etait une fois une petite maison au bord de la mer. Chaque matin, une vieille femme ouvrait la fenetre et "
        "regardait les bateaux. Elle attendait son fils, parti depuis dix ans vers les iles lointaines."
    ),
]


def logits_through_pages(model: LlamaModel, device: pk.Device, ids: list[int], profile: str) -> npt.NDArray[np.float32]:
    """Prefill ids in one unit and return the logits after every position, (tokens, V)."""
    with opened_store(model.geometry, profile=profile, max_context=128, concurrency=1, device=device) as store:
        loop = DecodeLoop(store, model)
        sequence = prefilled(loop, ids, 1)
        key = key_for(store.config, unit="prefill", route="prefill", batch=1, width=prefill_width(len(ids), chunk=128))
        logits: npt.NDArray[np.float32] = model.logits(loop.graphs.unit(key).unit)[0, : len(ids)].copy()
        store.finish(sequence)
    return logits


def test_five_teacher_forced_prompts_stay_within_a_thousandth_of_the_reference(
    model: LlamaModel, opened_device: pk.Device, weights: LlamaWeights, tokenizer: Tokenizer
) -> None:
    """bf16, 5 x 64 tokens: mean KL at most 1e-3, and the same choice wherever the reference's is clear (0.2)."""
    divergences = []
    for text in TEXTS:
        ids = tokenizer.encode(text)[:64]
        expected = teacher_forced(weights, ids)
        logits = logits_through_pages(model, opened_device, ids, "bf16")
        divergences.append(mean_divergence(expected, logits))
        assert_same_choices(expected, logits, margin_min=0.2)

        assert len(ids) == 64
    print(f"mean KL of each prompt: {divergences}")
    assert float(np.mean(divergences)) <= 1e-3


@pytest.fixture(scope="module")
def passage(weights: LlamaWeights, tokenizer: Tokenizer) -> tuple[list[int], npt.NDArray[np.float32]]:
    """A text of more than one page, and the reference's logits after every position."""
    ids = tokenizer.encode(TEXTS[0])
    return ids, teacher_forced(weights, ids)


@pytest.mark.parametrize(("profile", "divergence_max", "margin_min"), [
    # The reference knows BF16 only: what follows bounds what a codec does to the text. Measured: 7.5e-4, 3.1e-3,
    # 9.2e-3 and 4.7e-2, and the widest margin at which a choice changed 0.09, 0.05, 0.09 and 0.34.
    ("int8-g64", 3e-3, 0.3),
    ("fp8-e4m3-row", 1e-2, 0.3),
    ("k8v4", 3e-2, 0.5),
    ("nvfp4-g16", 1.5e-1, 1.0),
])
def test_teacher_forcing_through_pages_stays_near_the_reference(
    model: LlamaModel, opened_device: pk.Device, passage: tuple[list[int], npt.NDArray[np.float32]], profile: str,
    divergence_max: float, margin_min: float,
) -> None:  # fmt: skip
    """Logits after every position of a passage, read back from the captured prefill unit."""
    ids, expected = passage
    logits = logits_through_pages(model, opened_device, ids, profile)

    assert len(ids) > 64
    assert mean_divergence(expected, logits) <= divergence_max
    assert_same_choices(expected, logits, margin_min=margin_min)


def run(*, max_context: int = 128, **options: Any) -> dict[str, Any]:
    return run_prompts(device="cpu", max_context=max_context, **options)


def test_run_prints_text_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(prompts=PROMPTS[:2], max_new_tokens=3)
    out, err = capsys.readouterr()

    assert FIELDS == list(report)
    assert report["texts"][0].startswith(" Paris.")
    assert [3, 3] == [len(tokens) for tokens in report["tokens"]]
    assert "[1] The capital of France is Paris." in out
    assert "[2] 1, 2, 3," in out
    assert "driver calls per step" in out
    assert "device: " in err
    assert report["pages"]["in_use_at_end"] == 0
    assert report["pages"]["most_in_use"] == 2


def test_run_as_json_keeps_stdout_for_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(prompts=PROMPTS[:1], max_new_tokens=2, json=True)
    out, err = capsys.readouterr()

    assert report == json.loads(out)
    assert "The capital of France is Paris" in err
    assert (1, "bf16", "cpu") == (report["schema"], report["profile"], report["device"])
    assert 1 == sum(graph["replays"] for graph in report["graphs"] if graph["key"].startswith("decode"))


def test_more_prompts_than_rows_wait_their_turn_and_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are handed on while others decode; the texts do not change."""
    together = run(prompts=PROMPTS, max_new_tokens=2)
    queued = run(prompts=PROMPTS, max_new_tokens=2, max_concurrency=2)
    capsys.readouterr()

    assert together["tokens"] == queued["tokens"]
    assert queued["pages"]["in_use_at_end"] == 0


def test_run_in_chat_form_answers_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(prompts=["What is the capital of France? Answer with one word."], max_new_tokens=24, chat=True)
    out, _ = capsys.readouterr()

    assert "Paris" in report["texts"][0]
    assert report["tokens"][0][-1] == 2, "the end of the turn is delivered, and ends the row"
    assert "<|im_end|>" not in out


@pytest.mark.parametrize(("options", "message"), [
    ({"prompts": []}, "at least one prompt"),
    ({"prompts": [""]}, "prompt 1 was refused: expected 1 to 96 tokens"),
    ({"prompts": ["ok", "word " * 200]}, "prompt 2 was refused"),
    ({"prompts": ["ok"], "profile": "int3"}, "int3"),
    ({"prompts": ["ok"], "max_new_tokens": 128}, "max_new_tokens was refused: expected at most 127"),
    ({"prompts": ["a\udcffb"]}, "characters that UTF-8 can write"),
    ({"prompts": ["ok"], "max_context": 10_000}, "at most 8192 tokens"),
])
def test_run_refuses_what_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pk.MisuseError, match=message):
        run(**options)
