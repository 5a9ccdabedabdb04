"""The whole slice with the real model on the `cpu` device: exact equalities, the reference's text, and `run`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.run import run_prompts
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model.generation import generate
from tests.oracle.reference_llama import greedy

pytestmark = pytest.mark.model

PROMPTS = ["The capital of France is", "1, 2, 3,", "Water boils at a temperature of"]
FIELDS = [
    "schema", "prompts", "texts", "tokens", "reasons", "profile", "device", "pages", "scheduler", "graphs",
    "driver_calls_per_step", "tokens_per_second",
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
    ({"prompts": ["ok"], "max_new_tokens": 128}, "max_new_tokens of prompt 1 was refused: expected at most 127"),
    ({"prompts": ["a\udcffb"]}, "characters that UTF-8 can write"),
    ({"prompts": ["ok"], "max_context": 10_000}, "at most 8192 tokens"),
])
def test_run_refuses_what_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pk.MisuseError, match=message):
        run(**options)


def test_a_file_of_requests_is_served_and_sampled_from_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C14.6: an output with seed 8 says the same as the second of two with seed 7; each has its own stop."""
    common = {"prompt": PROMPTS[0], "max_new_tokens": 4, "temperature": 1.5}
    lines = [{**common, "seed": 7, "n": 2}, {**common, "seed": 8}, {"prompt": PROMPTS[0], "stop": [" Paris"]}]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    report = run(requests=path, max_new_tokens=6, max_concurrency=2)
    out, _ = capsys.readouterr()

    assert report["tokens"][1] == report["tokens"][2]
    assert report["tokens"][0] != report["tokens"][1]
    assert report["texts"][3] == " Paris"
    assert report["reasons"] == ["length", "length", "length", "stop"]
    assert report["pages"]["in_use_at_end"] == 0
    assert "ended by" in out


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 2 of r.jsonl was refused: expected a JSON object"), ("[]", "line 2 of r.jsonl"),
    ('{"n": 2}', "a JSON object with a prompt"), ('{"prompt": "a", "N": 2}', "no field but"),
    ('{"prompt": 1}', "prompt of line 2"), ('{"prompt": "a", "n": 0}', "n of line 2"),
    ('{"prompt": "a", "temperature": -1}', "temperature of line 2"),
    ('{"prompt": "a", "stop": ["a b"]}', "stop of line"),
    ('{"prompt": "a", "max_new_tokens": 128}', "max_new_tokens of line 2"), ('{"prompt": ""}', "line 2 of r.jsonl"),
])
def test_a_line_that_is_no_request_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "ok"}\n' + line, encoding="utf-8")
    with pytest.raises(pk.MisuseError, match=message):
        run(requests=path)
