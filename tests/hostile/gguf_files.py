"""Hostile GGUF files: one valid tiny model, and every way to damage or to change it that we know.

`corpus` yields them as `Mutant`s.  A mutant says what must happen: `refused` files state what the model does not do, or
contradict themselves; the others may be read, and then hold exactly what the reader of the package `gguf` finds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.tools.llama.weights import LlamaConfig

SHAPE = LlamaConfig(layers=2, hidden=64, intermediate=32, query_heads=1, kv_heads=1, head_dim=64, vocabulary=8,
                    rope_base=10_000.0, rms_epsilon=float(np.float32(1e-5)), context_tokens=256)
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "c"]
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
F32_TENSOR, F16_TENSOR, Q4_1_TENSOR, Q8_0_TENSOR = 0, 1, 3, 8
BLOCKS = {F32_TENSOR: (1, 4), F16_TENSOR: (1, 2), Q4_1_TENSOR: (32, 20), Q8_0_TENSOR: (32, 34)}
HUGE = (2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Field:
    """One piece of metadata; an array holds a list of values of `element` type."""

    kind: int
    value: Any
    element: int = U32


@dataclass(frozen=True)
class Tensor:
    """One tensor: `shape` ends with the row length; `offset` None is where the format puts it."""

    shape: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass(frozen=True)
class Model:
    """Everything that a file says."""

    fields: tuple[tuple[str, Field], ...]
    tensors: tuple[tuple[str, Tensor], ...]

    def with_field(self, key: str, field: Field | None) -> Model:
        """Return the model with a field changed, added, or (None) dropped."""
        if key not in dict(self.fields):
            return replace(self, fields=(*self.fields, (key, field)) if field else self.fields)
        pairs = [(name, field if name == key else old) for name, old in self.fields]
        return replace(self, fields=tuple((name, new) for name, new in pairs if new is not None))

    def with_tensor(self, name: str, tensor: Tensor | None, *, new_name: str | None = None) -> Model:
        """Return the model with a tensor changed, renamed, added, or (None) dropped."""
        if name not in dict(self.tensors):
            return replace(self, tensors=(*self.tensors, (name, tensor)) if tensor else self.tensors)
        pairs = [(new_name or name, tensor) if old == name else (old, kept) for old, kept in self.tensors]
        return replace(self, tensors=tuple((old, new) for old, new in pairs if new is not None))


@dataclass(frozen=True)
class Mutant:
    """One file: its bytes, how it came to be, and whether it must be refused."""

    name: str
    content: bytes
    must_be_refused: bool


def valid_model(shape: LlamaConfig = SHAPE, tokens: list[str] = TOKENS) -> Model:
    """Return a model with random weights: Q4_1 matrices, a Q8_0 embedding and F32 norms, as SmolLM2 has them."""
    random = np.random.default_rng(2)

    def tensor(shape: tuple[int, ...], kind: int) -> Tensor:
        elements, block_bytes = BLOCKS[kind]
        if kind == F32_TENSOR:
            return Tensor(shape, kind, (1 + random.standard_normal(shape) / 8).astype("<f4").tobytes())
        blocks = random.integers(0, 256, (int(np.prod(shape)) // elements, block_bytes)).astype(np.uint8)
        scales = (2 if kind == Q4_1_TENSOR else 1) * 2
        blocks[:, :scales] = random.normal(0, 0.02, (len(blocks), scales // 2)).astype("<f2").view(np.uint8)
        return Tensor(shape, kind, blocks.tobytes())

    E, F = shape.hidden, shape.intermediate
    sizes = {"token_embd": ((shape.vocabulary, E), Q8_0_TENSOR), "output_norm": ((E,), F32_TENSOR)}
    for layer in range(shape.layers):
        sizes |= {f"blk.{layer}.{name}": ((rows, columns), Q4_1_TENSOR) for name, rows, columns in (
            ("attn_q", shape.query_columns, E), ("attn_k", shape.kv_columns, E), ("attn_v", shape.kv_columns, E),
            ("attn_output", E, shape.query_columns), ("ffn_gate", F, E), ("ffn_up", F, E), ("ffn_down", E, F))}
        sizes |= {f"blk.{layer}.{name}": ((E,), F32_TENSOR) for name in ("attn_norm", "ffn_norm")}
    numbers = {
        "block_count": shape.layers, "context_length": shape.context_tokens, "embedding_length": E,
        "feed_forward_length": F, "vocab_size": shape.vocabulary, "attention.head_count": shape.query_heads,
        "attention.head_count_kv": shape.kv_heads, "rope.dimension_count": shape.head_dim,
    }
    fields = {
        "general.architecture": Field(STRING, "llama"), "general.name": Field(STRING, "tiny"),
        "general.file_type": FILE_TYPE, "general.quantization_version": Field(U32, 2),
        **{f"llama.{key}": Field(U32, value) for key, value in numbers.items()},
        "llama.rope.freq_base": Field(F32, shape.rope_base),
        "llama.attention.layer_norm_rms_epsilon": Field(F32, shape.rms_epsilon),
        "tokenizer.ggml.model": Field(STRING, "gpt2"), "tokenizer.ggml.pre": Field(STRING, "smollm"),
        "tokenizer.ggml.tokens": Field(ARRAY, tokens, STRING),
        "tokenizer.ggml.token_type": Field(ARRAY, [3 if "<|" in token else 1 for token in tokens], I32),
        "tokenizer.ggml.merges": Field(ARRAY, ["a b"], STRING),
        "tokenizer.ggml.bos_token_id": Field(U32, 1), "tokenizer.ggml.eos_token_id": Field(U32, 2),
        "tokenizer.ggml.unknown_token_id": Field(U32, 0), "tokenizer.ggml.add_bos_token": Field(BOOL, False),
        "tokenizer.ggml.add_space_prefix": Field(BOOL, False),
        "tokenizer.chat_template": Field(STRING, "{{ messages }}"),
    }
    return Model(tuple(fields.items()),
                 tuple((f"{name}.weight", tensor(*size)) for name, size in sizes.items()))


def write(model: Model, *, marks: dict[str, int] | None = None) -> bytes:
    """Return the bytes of a file; `marks` gets the offset of every count, length and type in it, and of the data."""
    out = bytearray()
    places = {} if marks is None else marks

    def number(kind: int, value: Any, mark: str = "") -> None:
        if mark:
            places[mark] = len(out)
        out.extend(struct.pack(f"<{FORMATS[kind]}", value))

    def text(value: str | bytes, mark: str) -> None:
        raw = value if isinstance(value, bytes) else value.encode()
        number(U64, len(raw), f"u64 length of {mark}")
        out.extend(raw)

    def element(kind: int, value: Any, mark: str) -> None:
        text(value, mark) if kind == STRING else number(kind, value)

    out.extend(b"GGUF")
    number(U32, 3, "u32 version")
    number(U64, len(model.tensors), "u64 tensor count")
    number(U64, len(model.fields), "u64 field count")
    for key, field in model.fields:
        text(key, f"key {key}")
        number(U32, field.kind, f"u32 type of {key}")
        if field.kind == ARRAY:
            number(U32, field.element, f"u32 element type of {key}")
            number(U64, len(field.value), f"u64 count of {key}")
            for index, value in enumerate(field.value):
                element(field.element, value, f"element {index} of {key}")
        elif field.kind in FORMATS or field.kind == STRING:
            element(field.kind, field.value, key)
    offset = 0
    for name, tensor in model.tensors:
        text(name, f"name {name}")
        number(U32, len(tensor.shape), f"u32 dimensions of {name}")
        for axis, length in enumerate(reversed(tensor.shape)):
            number(U64, length, f"u64 dimension {axis} of {name}")
        number(U32, tensor.kind, f"u32 type of {name}")
        number(U64, offset if tensor.offset is None else tensor.offset, f"u64 offset of {name}")
        offset += -(-len(tensor.data) // 32) * 32
    out.extend(bytes(-len(out) % 32))
    places["data"] = len(out)
    for _, tensor in model.tensors:
        out.extend(tensor.data)
        out.extend(bytes(-len(out) % 32))
    return bytes(out)


def write_file(path: Path, model: Model) -> Path:
    """Write a model and return its path."""
    path.write_bytes(write(model))
    return path


def corpus() -> Iterator[Mutant]:
    """Yield every mutant in a fixed order; no two files are equal."""
    model = valid_model()
    marks: dict[str, int] = {}
    valid = write(model, marks=marks)
    seen = {valid}
    for mutant in chain(_changed_fields(model), _changed_tensors(model), _changed_numbers(valid, marks),
                        _cut_and_flipped(valid, marks["data"])):
        if mutant.content not in seen:
            seen.add(mutant.content)
            yield mutant


NEEDLESS = ("general.name", "general.file_type", "general.quantization_version", "tokenizer.ggml.unknown_token_id",
            "tokenizer.ggml.add_space_prefix")
"""Metadata that a file may lack."""
FREE = ("general.name", "general.file_type", "tokenizer.ggml.unknown_token_id", "tokenizer.chat_template",
        "llama.context_length", "tokenizer.ggml.pre")
"""Metadata that may say something else: nothing in the file contradicts it."""
FILE_TYPE = Field(U32, 3)
WRONG: dict[int, list[Any]] = {
    STRING: ["", "another", "llama2"], U32: [0, 3, 7, 63, 2**31, 2**32 - 1],
    F32: [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e30], BOOL: [True],
}
ADDED = {
    **{f"llama.{key}": field for key, field in {
        "rope.scaling.type": Field(STRING, "linear"), "rope.scaling.factor": Field(F32, 2.0),
        "rope.scaling.attn_factor": Field(F32, 2.0), "rope.scaling.original_context_length": Field(U32, 128),
        "rope.dimension_sections": Field(ARRAY, [16, 16], U32), "rope.freq_base_swa": Field(F32, 1e6),
        "attention.key_length": Field(U32, 32), "attention.value_length": Field(U32, 128),
        "attention.sliding_window": Field(U32, 64), "attention.causal": Field(BOOL, False),
        "attention.scale": Field(F32, 1.0), "attention.clamp_kqv": Field(F32, 8.0),
        "attention.max_alibi_bias": Field(F32, 8.0), "attention.layer_norm_epsilon": Field(F32, 1e-5),
        "attention.temperature_scale": Field(F32, 0.1), "expert_count": Field(U32, 8),
        "expert_used_count": Field(U32, 2), "logit_scale": Field(F32, 0.5), "residual_scale": Field(F32, 0.5),
        "embedding_scale": Field(F32, 12.0), "attn_logit_softcapping": Field(F32, 50.0),
        "final_logit_softcapping": Field(F32, 30.0), "use_parallel_residual": Field(BOOL, True),
        "swin_norm": Field(BOOL, True), "tensor_data_layout": Field(STRING, "Meta AI original pth"),
        "nextn_predict_layers": Field(U32, 1), "pooling_type": Field(U32, 1),
    }.items()},
    "general.type": Field(STRING, "adapter"), "adapter.type": Field(STRING, "lora"), "split.count": Field(U32, 2),
    "tokenizer.ggml.add_eos_token": Field(BOOL, True), "tokenizer.ggml.eot_token_id": Field(U32, 2),
    "tokenizer.ggml.precompiled_charsmap": Field(ARRAY, [1], U8), "tokenizer.huggingface.json": Field(STRING, "{}"),
    "gemma.attention.key_length": Field(U32, 32), "general.alignment": Field(U32, 48),
}  # fmt: skip
"""Metadata of models that this one is not."""
ADDED_TENSORS = (
    "output.weight", "output.bias", "rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.attn_k.bias", "blk.0.attn_v.bias",
    "blk.0.attn_output.bias", "blk.0.ffn_up.bias", "blk.1.ffn_gate.bias", "blk.0.ffn_down.bias", "output_norm.bias",
    "blk.0.attn_norm.bias", "blk.0.attn_q_norm.weight", "blk.1.attn_k_norm.weight", "blk.0.post_attention_norm.weight",
    "blk.0.post_ffw_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_sinks.weight",
    "blk.0.rope_freqs.weight", "blk.2.attn_norm.weight", "blk.-1.attn_norm.weight", "token_embd_norm.weight", "",
    "position_embd.weight", "blk.0.attn_q.scale", "blk.00.attn_q.weight", "v.blk.0.attn_q.weight",
)  # fmt: skip
"""Tensors of models that this one is not."""


def _changed_fields(model: Model) -> Iterator[Mutant]:
    def mutant(name: str, changed: Model, *, may_pass: bool = False) -> Mutant:
        return Mutant(name, write(changed), not may_pass)

    for key, field in model.fields:
        yield mutant(f"{key} dropped", model.with_field(key, None), may_pass=key in NEEDLESS)
        yield mutant(f"{key} twice", replace(model, fields=(*model.fields, (key, field))))
        yield mutant(f"{key} renamed", replace(model, fields=tuple(
            (f"{name}x" if name == key else name, old) for name, old in model.fields)), may_pass=key in NEEDLESS[:3])
        others = {U32: 1, F32: 1.0, F64: 1.0, I32: -1, U8: 1, U64: 2**63, STRING: "1", BOOL: True}
        for kind, value in others.items():
            if kind != field.kind:
                # A number of another width is the same number: only its value counts.
                is_free = key in NEEDLESS[:4] and key != "general.quantization_version"
                yield mutant(f"{key} as type {kind}", model.with_field(key, Field(kind, value)),
                             may_pass=is_free or (field.kind, kind) in {(U32, U8), (F32, F64)})
        yield mutant(f"{key} as an array", model.with_field(key, Field(ARRAY, [1, 2], U32)),
                     may_pass=key in ("general.name", "general.file_type", "tokenizer.ggml.unknown_token_id"))
        yield mutant(f"{key} as an empty array", model.with_field(key, Field(ARRAY, [], STRING)),
                     may_pass=key in (*FREE, "tokenizer.ggml.merges"))
        for value in WRONG.get(field.kind, ()):
            if value != field.value:
                yield mutant(f"{key} = {value!r}", model.with_field(key, replace(field, value=value)),
                             may_pass=key in FREE or key == "llama.rope.freq_base" or key.endswith("s_token_id")
                             or key == "tokenizer.ggml.add_bos_token")
    for key, field in ADDED.items():
        yield mutant(f"{key} added", model.with_field(key, field))
    yield mutant("a key of 9,000 letters", model.with_field("llama." + "x" * 9000, Field(U32, 1)))
    yield mutant("a key of 9,000 letters twice", replace(model, fields=(*model.fields, *[("x" * 9000, FILE_TYPE)] * 2)))
    tokens, kinds = dict(model.fields)["tokenizer.ggml.tokens"], dict(model.fields)["tokenizer.ggml.token_type"]
    for name, values in {
        "a token less": TOKENS[:-1], "a token more": [*TOKENS, "d"], "a token twice": [*TOKENS[:-1], "a"],
        "no UTF-8": [*TOKENS[:-1], b"\xff"], "a letter of no byte": [*TOKENS[:-1], "\u4e00"],
        "an empty token": [*TOKENS[:-1], ""], "a space": [*TOKENS[:-1], " "],
        "no result of a merge": [*TOKENS[:5], "x", "y"],
    }.items():
        yield mutant(f"tokens with {name}", model.with_field("tokenizer.ggml.tokens", replace(tokens, value=values)))
    for index in range(len(TOKENS)):
        for kind in (0, 2, 4, 5, 6, 7, -1):
            value = [kind if place == index else old for place, old in enumerate(kinds.value)]
            yield mutant(f"token {index} of type {kind}",
                         model.with_field("tokenizer.ggml.token_type", replace(kinds, value=value)))
    for merges in (["a"], ["a b c"], ["a x"], ["a  b"], [""], ["a b", "a b"], ["a c"], [" "], ["ab "]):
        yield mutant(f"merges {merges}", model.with_field("tokenizer.ggml.merges", Field(ARRAY, merges, STRING)))


def _changed_tensors(model: Model) -> Iterator[Mutant]:
    def mutant(name: str, changed: Model) -> Mutant:
        return Mutant(name, write(changed), must_be_refused=True)

    extra = dict(model.tensors)["output_norm.weight"]
    for name in ADDED_TENSORS:
        yield mutant(f"tensor {name} added", model.with_tensor(name, extra))
    for name, tensor in model.tensors:
        yield mutant(f"{name} dropped", model.with_tensor(name, None))
        yield mutant(f"{name} renamed", model.with_tensor(name, tensor, new_name=f"{name}s"))
        yield mutant(f"{name} twice", replace(model, tensors=(*model.tensors, (name, tensor))))
        rows, columns = (1, *tensor.shape)[-2:]
        for shape in {(columns, rows), (rows * columns,), (1, rows, columns), (rows, columns, 1), (rows // 2, columns),
                      (rows + 1, columns), (rows, 2 * columns), (1,), (1, 1), (0, columns), (rows, 0), (1, columns),
                      (1,) * 5, (), (2**33, 2**31), (2**63, 2)} - {tensor.shape}:
            yield mutant(f"{name} of shape {shape}", model.with_tensor(name, replace(tensor, shape=shape)))
            elements, block_bytes = BLOCKS[tensor.kind]
            data_bytes = int(np.prod([float(length) for length in shape])) // elements * block_bytes
            if shape and 0 < data_bytes < 100_000 and shape[-1] % elements == 0:
                data = (tensor.data * (data_bytes // len(tensor.data) + 1))[:data_bytes]
                yield mutant(f"{name} of shape {shape}, with its data",
                             model.with_tensor(name, replace(tensor, shape=shape, data=data)))
        for kind in (*(kind for kind in range(42) if kind not in BLOCKS), 99, 2**31, 2**32 - 1):
            yield mutant(f"{name} of type {kind}", model.with_tensor(name, replace(tensor, kind=kind)))
        for offset in (1, 31, 32 if tensor.offset == 0 else 96, 2**20, *HUGE):
            yield mutant(f"{name} at {offset}", model.with_tensor(name, replace(tensor, offset=offset)))
        number = {F32_TENSOR: ("<f", 4)}.get(tensor.kind, ("<e", 2))
        for value in (float("nan"), float("inf"), -float("inf")):
            for place in (0, len(tensor.data) // BLOCKS[tensor.kind][1] - 1):
                begin = place * BLOCKS[tensor.kind][1]
                data = tensor.data[:begin] + struct.pack(number[0], value) + tensor.data[begin + number[1]:]
                yield mutant(f"{name} with {value} in block {place}",
                             model.with_tensor(name, replace(tensor, data=data)))


def _changed_numbers(valid: bytes, marks: dict[str, int]) -> Iterator[Mutant]:
    """Counts, lengths, dimensions, offsets and types of the header, set to other values."""
    for mark, offset in marks.items():
        if mark == "data":
            continue
        kind = U64 if mark.startswith("u64") else U32
        width = struct.calcsize(FORMATS[kind])
        old = struct.unpack_from(f"<{FORMATS[kind]}", valid, offset)[0]
        for value in {0, 1, old - 1, old + 1, 2 * old, 255, len(valid), *HUGE} - {old}:
            if 0 <= value < 1 << 8 * width:
                content = valid[:offset] + struct.pack(f"<{FORMATS[kind]}", value) + valid[offset + width:]
                yield Mutant(f"{mark} = {value}", content, must_be_refused=False)


def _cut_and_flipped(valid: bytes, data: int) -> Iterator[Mutant]:
    for length in (*range(0, data, 7), *range(data, len(valid) - 32, 997)):
        yield Mutant(f"cut to {length}", valid[:length], must_be_refused=True)
    yield Mutant("an empty tail", valid + bytes(32), must_be_refused=True)
    yield Mutant("a long tail", valid + bytes(5000), must_be_refused=True)
    yield Mutant("all zero", bytes(len(valid)), must_be_refused=True)
    yield Mutant("big-endian version", valid[:4] + valid[7:3:-1] + valid[8:], must_be_refused=True)
    for offset in (*range(data), *range(data, len(valid), 499)):
        for bit in (0, 7) if offset < data else (6,):
            flipped = bytearray(valid)
            flipped[offset] ^= 1 << bit
            yield Mutant(f"bit {bit} of byte {offset} flipped", bytes(flipped), must_be_refused=False)
