"""Hostile GGUF files: each is refused by name, or read exactly as the package `gguf` reads it."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tools.llama.gguf_file import BLOCKS, GGUFFile
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import Vocabulary, read_gguf
from tests.hostile.gguf_files import SHAPE, Mutant, corpus, valid_model, write_file

gguf = pytest.importorskip("gguf", reason="the `model` extra is not installed")

MEMORY_BYTES_MAX = 200 << 20
SECONDS_MAX = 60  # of one file, on a loaded machine: these take milliseconds, a hang takes for ever
LAYER_TENSORS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
NUMBERS = {
    "layers": "block_count", "hidden": "embedding_length", "intermediate": "feed_forward_length",
    "query_heads": "attention.head_count", "kv_heads": "attention.head_count_kv", "head_dim": "rope.dimension_count",
    "vocabulary": "vocab_size", "rope_base": "rope.freq_base", "context_tokens": "context_length",
    "rms_epsilon": "attention.layer_norm_rms_epsilon",
}  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """Let the block map 200 MB more than now, so that a larger allocation fails, and end it when it hangs."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"more than {SECONDS_MAX} s"))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES_MAX, hard))
        signal.alarm(SECONDS_MAX)
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def assert_same_as_the_package_reads(path: Path) -> None:
    config, vocabulary, flat = read_gguf(path)
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: np.ravel(gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    names = ["token_embd", "output_norm", *(f"blk.{layer}.{name}" for layer in range(config.layers)
                                            for name in LAYER_TENSORS)]
    assert {name: fields[f"llama.{key}"] for name, key in NUMBERS.items()} == asdict(config)
    np.testing.assert_array_equal(np.concatenate([tensors.pop(f"{name}.weight") for name in names]), flat)
    assert {} == tensors
    assert tuple(fields["tokenizer.ggml.tokens"]) == vocabulary.tokens
    assert tuple(fields["tokenizer.ggml.token_type"]) == vocabulary.token_types
    assert [" ".join(pair) for pair in vocabulary.merges] == (fields["tokenizer.ggml.merges"] or [])
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (
        vocabulary.bos_id, vocabulary.eos_id)
    assert fields["tokenizer.ggml.add_bos_token"] == vocabulary.adds_bos
    assert np.isfinite(flat).all()


def outcome(path: Path) -> Vocabulary | pk.PagedKVError:
    try:
        with bounded():
            return read_gguf(path)[1]
    except pk.PagedKVError as refusal:
        return refusal


def check(mutant: Mutant, path: Path) -> bool:
    """Return whether the file of a mutant was read."""
    path.write_bytes(mutant.content)
    found = outcome(path)
    if isinstance(found, pk.PagedKVError):
        assert found.refused.startswith(f"the GGUF file {path}: ")
        assert len(str(found)) < 1500
        return False
    assert not mutant.must_be_refused
    assert_same_as_the_package_reads(path)
    with suppress(pk.MisuseError):  # a vocabulary may be whole and yet not that of a chat
        Tokenizer(found)
    return True


def check_all(mutants: Iterator[Mutant], path: Path) -> None:
    files = files_read = 0
    for mutant in mutants:
        try:
            files_read += check(mutant, path)
        except BaseException as error:
            error.add_note(mutant.name)
            raise
        files += 1
    print(f"{files} files: {files - files_read} refused, {files_read} read")
    assert 0 < files_read < files


def test_the_valid_file_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    path = write_file(tmp_path / "valid.gguf", valid_model())

    assert_same_as_the_package_reads(path)
    assert read_gguf(path)[0] == SHAPE


def test_every_twentieth_hostile_file_is_refused_or_read_as_it_is(tmp_path: Path) -> None:
    check_all(islice(corpus(), 7, None, 20), tmp_path / "hostile.gguf")


@pytest.mark.long
def test_every_hostile_file_is_refused_or_read_as_it_is(tmp_path: Path) -> None:
    check_all(corpus(), tmp_path / "hostile.gguf")


@pytest.mark.parametrize(("name", "words"), [
    # Each gave wrong text with exit code 0, or an error of another library.
    ("blk.0.attn_q.bias", "'blk.0.attn_q.bias'"),
    ("rope_freqs.weight", "'rope_freqs.weight'"),
    ("output.weight", "'output.weight'"),
    ("blk.0.attn_q_norm.weight", "'blk.0.attn_q_norm.weight'"),
    ("llama.rope.scaling.type added", "llama.rope.scaling.type was refused: expected 'none', got 'linear'"),
    ("llama.rope.scaling.factor added", "llama.rope.scaling.factor was refused: expected 1.0, got 2.0"),
    ("llama.attention.key_length added", "llama.attention.key_length was refused: expected 64, got 32"),
    ("llama.attention.sliding_window added", "sliding_window was refused: expected 0, got 64"),
    ("llama.expert_count added", "expert_count was refused: expected 0, got 8"),
    ("llama.residual_scale added", "'llama.residual_scale'"),
    ("llama.attention.layer_norm_rms_epsilon dropped", "layer_norm_rms_epsilon was refused: expected metadata of type"),
    ("llama.attention.layer_norm_rms_epsilon = nan", "got nan"),
    ("llama.attention.layer_norm_rms_epsilon = inf", "got inf"),
    ("blk.0.ffn_down.weight of shape (1, 32), with its data", "shape (64, 32), got (1, 32)"),
    ("blk.0.attn_norm.weight of shape (1,), with its data", "shape (64,), got (1,)"),
    ("output_norm.weight with nan in block 0", "expected finite numbers, got 1 of 64 that are not"),
    ("tokens with a token less", "expected one of each of 7 tokens, got 8 types"),
    ("tokenizer.ggml.eos_token_id = 63", "expected an id below 8, got 63"),
    ("general.name twice", "each key once"),
    ("u64 tensor count = 1099511627776", "by the file's size, got 1099511627776"),
    ("u64 count of tokenizer.ggml.tokens = 9223372036854775808", "by the file's size, got 9223372036854775808"),
    ("u64 length of key general.name = 18446744073709551615", "by the file's size, got 18446744073709551615"),
    ("llama.block_count = 4294967295", "got 4294967295"),
    ("cut to 700", "bytes left"),
])
def test_a_refusal_names_what_is_wrong(name: str, words: str, tmp_path: Path, files: dict[str, bytes]) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(files.get(name) or files[f"tensor {name} added"])

    with pytest.raises(pk.MisuseError) as caught:
        read_gguf(path)

    assert words in str(caught.value)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {mutant.name: mutant.content for mutant in corpus()}


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(pk.MisuseError, match="a file that can be read"):
            GGUFFile(path)


def test_sizes_of_blocks_are_those_of_the_package() -> None:
    assert BLOCKS == {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind])
                      for kind in map(gguf.GGMLQuantizationType, BLOCKS)}
