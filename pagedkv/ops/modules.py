"""The compiled modules: which of them serves a (profile, head_dim), the set that ships, loading.  (C4.1, C4.5)

    module            sources                          constants                kernels
    bf16_d64, ...     append.cu, causal_attention.cu   PK_PROFILE, PK_HEAD_DIM  append_rows, append_prefix,
                                                                                encode_unrotated,
                                                                                causal_attention_{decode,merge,prefill}
    k8v4_d128_events, append.cu                        PK_PROFILE, PK_HEAD_DIM, append_rows, append_prefix,
    ...                                                PK_CODEC_EVENTS          encode_unrotated, which count
    context_d64, ...  context_attention.cu             PK_PROFILE, PK_HEAD_DIM  context_attention,
                                                                                context_attention_merge
    page_moves        page_moves.cu                    -                        fill_pages, pack_pages, unpack_pages,
                                                                                copy_columns, set_entries,
                                                                                bf16_from_f32, f32_from_bf16
    verify            verify.cu                        -                        accept_greedy
    linear            linear.cu                        -                        linear_rows (the model runner's)

Everything else (group size, page order, strides, counts) is a run-time argument, so that one module serves every
geometry of a profile.  A shape outside the shipped set compiles on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pagedkv.devices.protocol import Device, Kernel, ModuleSpec
from pagedkv.errors import ConfigError, shown
from pagedkv.values.profiles import (
    HEAD_DIMS_CONTEXT,
    HEAD_DIMS_QUANTIZED,
    PROFILES,
    Profile,
    check_head_dim,
    resolve_profile,
)

PROFILE_NUMBERS: dict[str, int] = {"bf16": 0, "int8-g64": 1, "fp8-e4m3-row": 2, "nvfp4-g16": 3, "k8v4": 4}
"""PK_PROFILE in `cuda_src/kernels/codec.cuh`."""

ENCODING_KERNELS = ("append_rows", "append_prefix", "encode_unrotated")
ATTENTION_KERNELS = (*ENCODING_KERNELS, "causal_attention_decode", "causal_attention_merge",
                     "causal_attention_prefill")
CONTEXT_KERNELS = ("context_attention", "context_attention_merge")
PAGE_MOVE_KERNELS = ("fill_pages", "pack_pages", "unpack_pages", "copy_columns", "set_entries", "bf16_from_f32",
                     "f32_from_bf16")

SHIPPED_HEAD_DIMS_BF16: tuple[int, ...] = (16, 64, 80, 96, 128, 192, 256)
SHIPPED_HEAD_DIMS_EVENTS: tuple[int, ...] = (128,)
"""Of the modules that count codec events: their code is that of the other modules, and three sums."""

assert PROFILE_NUMBERS.keys() == PROFILES.keys(), "every profile has kernels (C4.1)"


def attention_module(profile: str | Profile, head_dim: int) -> ModuleSpec:
    """Return the module with append and causal attention of one (profile, head_dim)."""
    resolved = resolve_profile(profile)
    check_head_dim(resolved, head_dim)
    return ModuleSpec(
        name=f"{resolved.name}_d{head_dim}",
        sources=("kernels/append.cu", "kernels/causal_attention.cu"),
        defines=(("PK_PROFILE", str(PROFILE_NUMBERS[resolved.name])), ("PK_HEAD_DIM", str(head_dim))),
    )


def events_module(profile: str | Profile, head_dim: int) -> ModuleSpec:
    """Return the module whose appends also count codec events; `attention_module` keeps its own.  (codecs 8)"""
    plain = attention_module(profile, head_dim)
    return ModuleSpec(name=f"{plain.name}_events", sources=plain.sources[:1],
                      defines=(*plain.defines, ("PK_CODEC_EVENTS", "1")))


def context_module(head_dim: int) -> ModuleSpec:
    """Return the module with context attention over a BF16 draft pool of one head_dim."""
    if type(head_dim) is not int or head_dim not in HEAD_DIMS_CONTEXT:
        raise ConfigError("head_dim of context attention", expected=" or ".join(map(str, HEAD_DIMS_CONTEXT)),
                          got=shown(head_dim), remedy="use a draft of a supported head_dim", clause="C14.4")
    return ModuleSpec(
        name=f"context_d{head_dim}",
        sources=("kernels/context_attention.cu",),
        defines=(("PK_PROFILE", str(PROFILE_NUMBERS["bf16"])), ("PK_HEAD_DIM", str(head_dim))),
    )


def page_moves_module() -> ModuleSpec:
    """Return the module of kernels that know no profile."""
    return ModuleSpec(name="page_moves", sources=("kernels/page_moves.cu",), defines=())


def verify_module() -> ModuleSpec:
    """Return the module that counts accepted columns."""
    return ModuleSpec(name="verify", sources=("kernels/verify.cu",), defines=())


def linear_module() -> ModuleSpec:
    """Return the module of the model runner's matrix product."""
    return ModuleSpec(name="linear", sources=("kernels/linear.cu",), defines=())


def shipped_modules() -> tuple[ModuleSpec, ...]:
    """Return the modules that are checked on every architecture: D 64, 128, 256 everywhere, more for bf16.

    Those that count codec events: D 128 only.
    """
    return (
        *(
            attention_module(profile, head_dim)
            for profile in PROFILES.values()
            for head_dim in (HEAD_DIMS_QUANTIZED if profile.is_quantized else SHIPPED_HEAD_DIMS_BF16)
        ),
        *(
            events_module(profile, head_dim)
            for profile in PROFILES.values() if profile.is_quantized
            for head_dim in SHIPPED_HEAD_DIMS_EVENTS
        ),
        *(context_module(head_dim) for head_dim in HEAD_DIMS_CONTEXT),
        page_moves_module(),
        verify_module(),
        linear_module(),
    )


class Kernels:
    """The kernels of one device by module; a module is compiled and loaded at its first use."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._loaded: dict[tuple[str, str, int], dict[str, Kernel]] = {}

    def attention(self, profile: Profile, head_dim: int) -> dict[str, Kernel]:
        """Return append and causal attention of one (profile, head_dim)."""
        return self._load(("attention", profile.name, head_dim), lambda: attention_module(profile, head_dim),
                          ATTENTION_KERNELS)

    def encoding(self, profile: Profile, head_dim: int, *, counts_events: bool) -> dict[str, Kernel]:
        """Return the kernels that encode rows; with `counts_events` each has the counters as its last parameter."""
        if not counts_events:
            return self.attention(profile, head_dim)
        return self._load(("events", profile.name, head_dim), lambda: events_module(profile, head_dim),
                          ENCODING_KERNELS)

    def context(self, head_dim: int) -> dict[str, Kernel]:
        """Return context attention of one head_dim."""
        return self._load(("context", "bf16", head_dim), lambda: context_module(head_dim), CONTEXT_KERNELS)

    def page_moves(self) -> dict[str, Kernel]:
        """Return the kernels that know no profile."""
        return self._load(("page moves", "", 0), page_moves_module, PAGE_MOVE_KERNELS)

    def verify(self) -> dict[str, Kernel]:
        """Return the kernel that counts accepted columns."""
        return self._load(("verify", "", 0), verify_module, ("accept_greedy",))

    def _load(
        self, key: tuple[str, str, int], spec: Callable[[], ModuleSpec], names: tuple[str, ...]
    ) -> dict[str, Kernel]:
        kernels = self._loaded.get(key)
        if kernels is None:
            module = self.device.load(spec())
            kernels = self._loaded[key] = {name: module.kernel(name) for name in names}
        return kernels


class HasKernels(Protocol):
    """The first parameter of every op: `Ops`, whose methods the ops are."""

    kernels: Kernels
