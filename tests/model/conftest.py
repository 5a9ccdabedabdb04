"""The real model for tests marked `model`, and the tiny one for all others."""

from __future__ import annotations

import pytest

import pagedkv as pk
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights, Vocabulary, load_model
from tests.model.tiny import TINY, random_weights


@pytest.fixture(scope="session")
def tiny_weights() -> LlamaWeights:
    return random_weights(TINY, seed=1)


@pytest.fixture(scope="session")
def smollm() -> tuple[LlamaWeights, Vocabulary]:
    try:
        return load_model()
    except pk.MissingRequirement as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def weights(smollm: tuple[LlamaWeights, Vocabulary]) -> LlamaWeights:
    return smollm[0]


@pytest.fixture(scope="session")
def tokenizer(smollm: tuple[LlamaWeights, Vocabulary]) -> Tokenizer:
    return Tokenizer(smollm[1])
