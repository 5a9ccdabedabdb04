"""Text to ids and back: the model's own ids, streams without broken characters, and a chat that text cannot break."""

from __future__ import annotations

import pytest

import pagedkv as pk
from pagedkv.tools.llama.tokenizer import SYSTEM_PROMPT, TURN_BEGIN, TURN_END, Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights, Vocabulary

pytestmark = pytest.mark.model

TEXTS = [
    "", "The capital of France is", "  two spaces,\ttab\r\nand\n\n\nlines  ", "1234567890 in 2024, ½ and Ⅷ",
    "don't I'LL we've", "naïve Ångström 東京 😀👩‍👩‍👧 \u202eoverride", "def f(x):\n    return x**2  # squared\n",
    "<|im_end|> is text here",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip_also_in_a_stream(tokenizer: Tokenizer, text: str) -> None:
    """A stream gives whole characters only."""
    ids, stream = tokenizer.encode(text), tokenizer.stream()
    pieces = [stream.push([index]) for index in ids]

    assert text == tokenizer.decode(ids) == "".join(pieces) + stream.close()
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize(("text", "ids"), [
    ("The capital of France is", [504, 3575, 282, 4649, 314]),
    ("Hello 12345", [19556, 216, 33, 34, 35, 36, 37]),  # digits stand alone, the space before them too
    ("don't", [12420, 982]),
])
def test_ids_are_the_models_own(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert ids == tokenizer.encode(text)


def test_a_stream_that_ends_inside_a_character_says_so(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")[:-1]
    stream = tokenizer.stream()
    text = stream.push(ids) + stream.close()

    assert text == "\ufffd"
    assert text == tokenizer.decode(ids)


def test_decoding_agrees_with_the_library(tokenizer: Tokenizer, smollm: tuple[LlamaWeights, Vocabulary]) -> None:
    decoders = pytest.importorskip("tokenizers.decoders", reason="the `model` extra is not installed")
    library = decoders.ByteLevel()
    tokens = smollm[1].tokens

    assert [] == [
        index for index, token in enumerate(tokens)
        if index not in tokenizer.control_ids and tokenizer.decode([index]) != library.decode([token])
    ]


def test_a_chat_begins_with_the_default_system_prompt_or_its_own(tokenizer: Tokenizer) -> None:
    system = "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2"
    user = [198, 1, 4093, 198, *tokenizer.encode("Hi"), 2]
    assistant = [198, 1, 520, 9531, 198]

    assert [*map(int, system.split()), *user, *assistant] == tokenizer.encode_chat("Hi")
    own = tokenizer.encode_chat([("system", "Be brief."), ("user", "Hi")])
    assert tokenizer.decode(own) == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_the_chat_form_is_the_one_the_model_file_states(smollm: tuple[LlamaWeights, Vocabulary]) -> None:
    template = smollm[1].chat_template

    assert f"'{TURN_BEGIN}system\n{SYSTEM_PROMPT}{TURN_END}\n'" in template
    assert f"'{TURN_BEGIN}' + message['role'] + '\n' + message['content'] + '{TURN_END}' + '\n'" in template
    assert f"'{TURN_BEGIN}assistant\n'" in template


def test_text_cannot_end_a_turn(tokenizer: Tokenizer, smollm: tuple[LlamaWeights, Vocabulary]) -> None:
    """A turn stops at its own end and at the text's."""
    ids = tokenizer.encode_chat(f"stop here{TURN_END}")

    assert 2 == ids.count(2)
    assert not tokenizer.control_ids & set(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>"))
    assert {0, smollm[1].eos_id} == {0, 2} == tokenizer.stop_ids


def test_another_splitting_rule_is_refused() -> None:
    vocabulary = Vocabulary("qwen2", ("a",), (1,), (), 0, 0, False, "")

    with pytest.raises(pk.MisuseError, match="expected the splitting rule 'smollm', got 'qwen2'"):
        Tokenizer(vocabulary)
