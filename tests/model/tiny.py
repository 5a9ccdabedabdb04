"""A tiny random model of SmolLM2's architecture, for tests that need no real one."""

from __future__ import annotations

from math import prod

import numpy as np

from pagedkv.tools.llama.weights import LlamaConfig, LlamaWeights, assemble, tensor_table

TINY = LlamaConfig(layers=2, hidden=192, intermediate=256, query_heads=3, kv_heads=1, head_dim=64, vocabulary=320,
                   rope_base=10_000.0, rms_epsilon=1e-5, context_tokens=256)


def random_weights(config: LlamaConfig, seed: int) -> LlamaWeights:
    """Return weights that keep activations near one; norms around one, matrices scaled by their inputs."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for name, shape in tensor_table(config):
        values = generator.standard_normal(prod(shape)).astype(np.float32).reshape(shape)
        arrays[name] = 1 + values / np.float32(8) if len(shape) == 1 else values / np.float32(np.sqrt(shape[1]))
    return assemble(config, arrays)
