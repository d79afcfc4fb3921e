"""The two passes of a round with random weights, for timing without a checkpoint or SGLang.

A draft pass and a verify pass are the same thing at two depths: a stack of Qwen3 layers over new
rows behind a cached prefix, an LM head and what is read off its logits. Attention is
`tree_attention` over a pool of KV slots; a pass reads nothing back, so that a CUDA graph can hold
it.

B requests, R rows a request, L prefix length, H hidden size, N tree nodes, D depth, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_jetspec.heads.reference import rotary_table, rotate
from sglang_jetspec.kernels.tree_attention.kernel import tree_attention
from sglang_jetspec.kernels.tree_build.kernel import tree_build
from sglang_jetspec.trees.bitmask import block_words


@dataclass(frozen=True)
class ModelShape:
    """Defaults: Qwen3-8B."""

    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 151936


class Stack:
    """Layers with random bf16 weights and caches for `batch` requests at one prefix length."""

    def __init__(self, shape: ModelShape, batch: int, prefix: int, rows: int, device: str) -> None:
        self.shape, self.prefix = shape, prefix

        def normal(*size: int) -> Tensor:
            weight = torch.empty(size, device=device, dtype=torch.bfloat16)
            return weight.normal_(std=size[-1] ** -0.5)

        width = (shape.heads + 2 * shape.kv_heads) * shape.head
        self.weights = [
            (
                normal(width, shape.hidden),
                normal(shape.hidden, shape.heads * shape.head),
                normal(2 * shape.intermediate, shape.hidden),
                normal(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        window = torch.arange(batch * (prefix + rows), device=device).view(batch, -1)
        self.table, self.window = window.int(), window[:, prefix:].flatten()
        self.requests = torch.arange(batch, device=device)
        self.lengths = torch.full((batch,), prefix, device=device)
        pool = (shape.layers, 2, window.numel(), shape.kv_heads, shape.head)
        self.pools = torch.empty(pool, device=device, dtype=torch.bfloat16).normal_()
        self.norm = torch.ones(shape.hidden, device=device, dtype=torch.bfloat16)
        self.head_norm = torch.ones(shape.head, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor, depths: Tensor, words: Tensor) -> Tensor:
        """x: [B, R, H]. depths: [B, R] below the prefix. words: [B, R, ceil(R / 32)] int32, which
        new rows a row sees. Returns normalised hidden states [B, R, H].
        """
        rotary = rotary_table(self.prefix + depths, self.shape.head, 1e6)
        for weights, pool in zip(self.weights, self.pools, strict=True):
            x = self._layer(x, weights, pool, rotary, words)
        return self._rms(x, self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    def _rotated(self, heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Normed and rotated [B, R, heads, head size]."""
        normed = self._rms(heads, self.head_norm).transpose(1, 2)
        return rotate(normed, *rotary).transpose(1, 2).contiguous()

    def _layer(
        self,
        x: Tensor,
        weights: tuple[Tensor, ...],
        pool: Tensor,
        rotary: tuple[Tensor, Tensor],
        words: Tensor,
    ) -> Tensor:
        qkv, output, gate_up, down = weights
        shape = self.shape
        split = (shape.heads, shape.kv_heads, shape.kv_heads)
        heads = F.linear(self._rms(x, self.norm), qkv).unflatten(-1, (-1, shape.head))
        query, key, value = heads.split(split, dim=2)
        query, key = (self._rotated(part, rotary) for part in (query, key))
        value = value.contiguous()
        pool[0, self.window], pool[1, self.window] = key.flatten(0, 1), value.flatten(0, 1)
        attended = tree_attention(
            query,
            key,
            value,
            *pool,
            self.table,
            self.requests,
            self.lengths,
            words,
            scale=shape.head**-0.5,
        )
        x = x + F.linear(attended.flatten(2), output)
        gate, up = F.linear(self._rms(x, self.norm), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)


class DraftPass:
    """[root, mask x D] through the head, the target's LM head, top-W and the tree."""

    def __init__(
        self, head: Stack, lm_head: Tensor, batch: int, depth: int, width: int, nodes: int
    ) -> None:
        self.head, self.lm_head, self.width, self.nodes = head, lm_head, width, nodes
        device, rows = lm_head.device, depth + 1
        self.roots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.block = torch.randn(batch, rows, lm_head.shape[1], device=device).bfloat16()
        self.depths = torch.arange(rows, device=device).expand(batch, -1)
        self.words = block_words(rows, True, device).repeat(batch, 1, 1)

    def __call__(self) -> Any:
        """The batch's trees."""
        hidden = self.head.forward(self.block, self.depths, self.words)[:, 1:]
        logits = F.linear(hidden, self.lm_head).float()
        top, tokens = logits.topk(self.width, dim=-1)
        logprobs = top - logits.logsumexp(-1, keepdim=True)
        return tree_build(self.roots, tokens, logprobs, self.nodes)


class VerifyPass:
    """N nodes through the target, and the choices at them."""

    def __init__(self, target: Stack, lm_head: Tensor, tree: Any) -> None:
        self.target, self.lm_head = target, lm_head
        self.depths, self.words = tree.depths.clone(), tree.words.clone()
        batch, nodes = tree.tokens.shape
        self.x = torch.randn(batch, nodes, lm_head.shape[1], device=lm_head.device).bfloat16()

    def __call__(self) -> Tensor:
        """[B, N] int64."""
        hidden = self.target.forward(self.x, self.depths, self.words)
        return F.linear(hidden, self.lm_head).argmax(-1)


def graphed(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """`call` as a CUDA graph to replay, and the result that replays overwrite."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result
