"""A small decoder-only transformer as Llama has it: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

Weights are drawn from a seed, so that two processes have the same model without a file. Everything is float32 and one
sequence is computed at a time, so equal inputs give equal tokens in every process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (layer, q [tokens, query_heads, dim], k and v [tokens, kv_heads, dim]) to q's shape."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model; the defaults make 32 KiB of KV per token."""

    layers: int = 8
    hidden: int = 256
    query_heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 1024
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, each [inputs, outputs]; `qkv` and `gate_up` are several matrices side by side."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """The weights, and the forward pass around the caller's attention."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(config.seed)

        def matrix(inputs: int, outputs: int, scale: float = 1.0) -> Tensor:
            return torch.randn(inputs, outputs, generator=generator) * (scale / math.sqrt(inputs))

        heads, kv_heads, dim = config.query_heads, config.kv_heads, config.head_dim
        self._embedding = torch.randn(config.vocab, config.hidden, generator=generator)
        self._layers = [
            LayerWeights(
                # Sharp attention, so that a single wrong K or V changes the tokens.
                qkv=matrix(config.hidden, (heads + 2 * kv_heads) * dim, scale=2.0),
                output=matrix(heads * dim, config.hidden),
                gate_up=matrix(config.hidden, 2 * config.intermediate),
                down=matrix(config.intermediate, config.hidden),
            )
            for _ in range(config.layers)
        ]
        self._head = matrix(config.hidden, config.vocab)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [vocab] after the last of `tokens` [tokens], which are at `positions` [tokens]."""
        config = self.config
        heads, kv_heads, dim = config.query_heads, config.kv_heads, config.head_dim
        cos, sin = rotary_angles(positions, dim, config.rope_theta)
        x = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            qkv = (self._norm(x) @ layer.qkv).view(len(tokens), heads + 2 * kv_heads, dim)
            q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
            attended = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + attended.reshape(len(tokens), heads * dim) @ layer.output
            gate, up = (self._norm(x) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ layer.down
        logits: Tensor = self._norm(x[-1]) @ self._head
        return logits

    def _norm(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.config.hidden,), eps=self.config.norm_epsilon)


def rotary_angles(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [tokens, 1, dim / 2], of the angles by which `rotate` turns at `positions`."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [tokens, heads, dim]: its first half against its second."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention of the last tokens of a sequence.

    `q` is [tokens, query_heads, dim]; `k` and `v` are [context, kv_heads, dim] and end with the same token. Query head
    `h` reads KV head `h // (query_heads / kv_heads)`. Returns q's shape.
    """
    tokens, heads, dim = q.shape
    context, kv_heads, _ = k.shape
    group = heads // kv_heads
    queries = (q / math.sqrt(dim)).view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
    scores = queries.reshape(kv_heads, group * tokens, dim) @ k.permute(1, 2, 0)
    scores = scores.view(kv_heads, group, tokens, context)
    if tokens > 1:
        future = torch.ones(tokens, context, dtype=torch.bool).triu(diagonal=context - tokens + 1)
        scores.masked_fill_(future, float("-inf"))
    attended = scores.softmax(dim=-1).view(kv_heads, group * tokens, context) @ v.permute(1, 0, 2)
    return attended.view(kv_heads, group, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, heads, dim)
