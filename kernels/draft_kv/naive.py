"""The definition of `draft_kv`, step by step in double precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sglang_jetspec.kernels.draft_kv.kernel import ContextWeights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def draft_kv(
    features: Tensor,
    positions: Tensor,
    slots: Tensor,
    weights: ContextWeights,
    key_pools: Iterable[Tensor],
    value_pools: Iterable[Tensor],
) -> None:
    """As the kernel's launcher, with the pools themselves, fp64 [slots, Hkv, D]."""
    context = features.double() @ weights.fc.double().T
    context = rms_norm(context, weights.norm, weights.context_eps)
    cos, sin = weights.cos_sin[positions].double().unsqueeze(1).chunk(2, -1)
    for key_weight, value_weight, key_norm, key_pool, value_pool in zip(
        weights.keys, weights.values, weights.key_norms, key_pools, value_pools, strict=True
    ):
        heads, size = key_pool.shape[1:]
        key = (context @ key_weight.double().T).view(-1, heads, size)
        first, second = rms_norm(key, key_norm, weights.head_eps).chunk(2, -1)
        key_pool[slots] = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        value_pool[slots] = (context @ value_weight.double().T).view(-1, heads, size)
