"""Conversations that lie on the Host between their turns say what they say on the Device.  (C10.8, C10.10, C14.6)"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.tools.command import main
from pagedkv.tools.llama.conversation import Conversation, Talk, Turn, conversation_config, read_conversations
from pagedkv.tools.llama.conversation import run_conversations as run
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model.generation import contract_ids

END = 2


def conversations(count: int, ids: list[int]) -> list[Conversation]:
    """Return conversations of three turns; their prompts are pieces of `ids` of different lengths."""
    def turn(number: int, index: int) -> Turn:
        start = 37 * (3 * number + index)
        return Turn(ids[start : start + 30 + 11 * index + 3 * number])

    return [Conversation([turn(number, index) for index in range(3)], max_new_tokens=12) for number in range(count)]


def said(
    weights: LlamaWeights, texts: list[Conversation], device: pk.Device, *, has_host: bool, profile: str = "k8v4",
    rows: int = 3, sanitizer: bool = False,
) -> list[list[list[int]]]:
    """Return the tokens of every turn; nothing may be left in the store."""
    config = conversation_config(weights.config.geometry, texts, profile=profile, rows=rows, has_host=has_host)
    with pk.open_store(replace(config, sanitizer=sanitizer), device=device) as store:
        loop = DecodeLoop(store, LlamaModel(weights, device, max_context=config.max_context))
        Talk(loop, texts, end_id=END, stop_ids=frozenset({END})).run()
        store.check()
        summary, host = store.memory_summary()["main"], store.host_summary()
        assert summary["available_pages"] == summary["capacity_pages"]
        assert host["used_bytes"] == 0
    return [[turn.tokens for turn in one.turns] for one in texts]


def tiny_ids() -> list[int]:
    return [int(one) for one in np.random.default_rng(4).integers(3, 320, 1200)]


@pytest.mark.parametrize("sanitizer", [False, True])
def test_conversations_beyond_the_pool_say_the_same(
    tiny_weights: LlamaWeights, opened_device: pk.Device, *, sanitizer: bool
) -> None:
    """Eight conversations on the pages of three, against a pool for all; pages come back beside decode."""
    texts = conversations(8, tiny_ids())
    moved = said(tiny_weights, texts, opened_device, has_host=True, sanitizer=sanitizer)

    assert moved == said(tiny_weights, conversations(8, tiny_ids()), opened_device, has_host=False)
    later = [turn for one in texts for turn in one.turns[1:]]
    assert all(turn.restored_pages for turn in later)
    assert all(turn.demoted_pages and turn.demote_seconds for one in texts for turn in one.turns[:-1])
    assert any(turn.steps_beside for turn in later)
    assert all(len(turn.tokens) == 12 or turn.tokens[-1] == END for one in texts for turn in one.turns)


def test_a_conversation_without_room_ends_with_the_reason(tiny_weights: LlamaWeights, opened_device: pk.Device) -> None:
    """Two conversations, pages for one and no arena: the first stays between its turns, and nothing can ever go."""
    texts = conversations(2, tiny_ids())
    config = conversation_config(tiny_weights.config.geometry, texts[1:], profile="bf16", rows=1, has_host=False)
    with pk.open_store(config, device=opened_device) as store:
        loop = DecodeLoop(store, LlamaModel(tiny_weights, opened_device, max_context=config.max_context))
        with pytest.raises(pk.ActivationRefused, match="the next turn of a conversation"):
            Talk(loop, texts, end_id=END, stop_ids=frozenset({END})).run()


@pytest.mark.model
@pytest.mark.parametrize("profile", [pytest.param("bf16", marks=pytest.mark.long), "k8v4"])
def test_the_real_model_goes_on_exactly_after_a_restore(
    weights: LlamaWeights, tokenizer: Any, opened_device: pk.Device, profile: str
) -> None:
    """One conversation demoted, restored and continued on one row; never moved, it says the same."""
    ids = contract_ids(tokenizer)
    moved, stayed = conversations(1, ids), conversations(1, ids)

    assert said(weights, moved, opened_device, has_host=True, profile=profile, rows=1) == said(
        weights, stayed, opened_device, has_host=False, profile=profile, rows=1)
    assert all(turn.restored_pages for one in moved for turn in one.turns[1:])


@pytest.mark.model
@pytest.mark.long
def test_eight_real_conversations_on_the_pages_of_three(
    weights: LlamaWeights, tokenizer: Any, opened_device: pk.Device
) -> None:
    """C10.10: pages come back beside decode, and no text changes."""
    ids = contract_ids(tokenizer)
    moved = conversations(8, ids)

    assert said(weights, moved, opened_device, has_host=True) == said(
        weights, conversations(8, ids), opened_device, has_host=False)
    assert any(turn.steps_beside for one in moved for turn in one.turns)


@pytest.mark.model
def test_the_command_shows_texts_and_times(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text('{"turns": ["What is the capital of France?", "And of Italy?"], "max_new_tokens": 8}\n'
                    '{"turns": ["Who wrote Hamlet?"]}\n', encoding="utf-8")
    result = CliRunner().invoke(main, ["run", "--conversation", str(path), "--device", "cpu", "--max-new-tokens", "2",
                                       "--max-concurrency", "1", "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)

    assert result.exit_code == 0
    first, second = report["conversations"][0]
    assert "Paris" in first["text"]
    assert "Rome" in second["text"]
    assert second["restored_pages"] == first["demoted_pages"] == report["host"]["copied_pages"] / 2
    assert len(report["conversations"][1][0]["tokens"]) == 2
    assert "[1] > And of Italy?" in result.stderr


@pytest.mark.model
def test_turns_are_the_chat_template(tokenizer: Any) -> None:
    """A chat told turn by turn has the ids of the same chat told at once."""
    told = [*tokenizer.encode_chat("Hi"), *tokenizer.encode("Hello"), END, *tokenizer.encode_turn("Bye")]

    assert told == tokenizer.encode_chat([("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")])


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 2 of c.jsonl was refused: expected a JSON object"), ("[]", "line 2 of c.jsonl"),
    ('{"turns": "a"}', "a list of texts"), ('{"turns": []}', "line 2"), ('{"turns": ["a", ""]}', "not empty"),
    ('{"turns": [1]}', "line 2"), ('{"turns": ["a"], "seed": 1}', "line 2"), ('{"max_new_tokens": 1}', "line 2"),
    ('{"turns": ["a"], "max_new_tokens": 0}', "max_new_tokens of line 2"),
    ('{"turns": ["a"], "max_new_tokens": true}', "max_new_tokens of line 2"),
])
def test_a_line_that_is_no_conversation_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"turns": ["ok"]}\n' + line, encoding="utf-8")
    with pytest.raises(pk.MisuseError, match=message):
        read_conversations(path, max_new_tokens=8)


def test_a_file_without_a_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(pk.MisuseError, match=r"c\.jsonl was refused"):
        read_conversations(path, max_new_tokens=8)


@pytest.mark.model
def test_a_conversation_beyond_max_context_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"turns": ["word"]}\n{"turns": ["word", "' + "word " * 60 + '"]}', encoding="utf-8")
    with pytest.raises(pk.MisuseError, match=r"line 2 of c\.jsonl was refused: expected turns and answers within"):
        run(path, device="cpu", max_context=100, max_new_tokens=8)


def test_options_of_prompts_do_not_go_with_conversations(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"turns": ["ok"]}', encoding="utf-8")
    for option in (["--temperature", "0"], ["--prompt", "x"], ["--top-p", "1"], ["--chat"]):
        result = CliRunner().invoke(main, ["run", "--conversation", str(path), *option], catch_exceptions=False)
        assert result.exit_code == 2
        assert f"{option[0]} does not go with --conversation" in result.stderr
