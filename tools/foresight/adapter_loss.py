"""What an adapter is trained on: the captured states, and the law the decoder reads off them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sglang_jetspec.foresight.adapter import Adapter
from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.tools.foresight.adapter_batches import CHUNK, AdapterBatch


@dataclass(frozen=True)
class AdapterLoss:
    """`total` is differentiable; the others are for the log.

    cosine: mean 1 - cosine similarity of each captured layer [T]. kl: reach-weighted
    KL(target || decoder). agreement: reach-weighted share of rows with the target's argmax.
    """

    total: Tensor
    cosine: Tensor
    kl: Tensor
    agreement: Tensor


def adapter_loss(
    adapter: Adapter,
    decoder: TargetSlice,
    embedding: Tensor,
    scales: Tensor,
    batch: AdapterBatch,
    kl_weight: float = 1.0,
) -> AdapterLoss:
    """Hidden-state regression plus KL through the decoder, weighted by reach.

    scales [T*H]: root mean square of each dimension of the captured states, so that the few large
    ones do not drown the rest.
    """
    front = batch.context
    embedded = F.embedding(batch.ids, embedding).to(scales.dtype)
    is_given = torch.arange(batch.ids.shape[1], device=batch.ids.device) < front
    is_given = is_given.expand(len(batch.ids), -1)
    taps = batch.taps.to(scales.dtype)
    predicted, _ = adapter(embedded, batch.positions, batch.mask, given=taps, is_given=is_given)
    true, found = (x[:, front:] / scales for x in (taps, predicted))
    blocks = batch.weights.sum().clamp(min=1e-9)
    layers = len(adapter.config.target_layer_ids)
    cosine = torch.stack(
        [
            ((1 - F.cosine_similarity(a, b, dim=-1)) * batch.weights).sum() / blocks
            for a, b in zip(found.chunk(layers, -1), true.chunk(layers, -1), strict=True)
        ]
    )
    distance = F.smooth_l1_loss(found, true, reduction="none").mean(-1)
    regression = cosine.mean() + (distance * batch.weights).sum() / blocks

    hidden = scales.shape[0] // layers
    deepest = torch.where(is_given.unsqueeze(-1), taps[..., -hidden:], predicted[..., -hidden:])
    final, _ = decoder(deepest, batch.positions, batch.mask)
    kl, agreement = weighted_kl(
        final[:, front:].flatten(0, 1),
        batch.finals.to(final.dtype).flatten(0, 1),
        decoder.lm_head,
        batch.weights.flatten() / blocks,
    )
    return AdapterLoss(regression + kl_weight * kl, cosine.detach(), kl.detach(), agreement)


def weighted_kl(
    hidden: Tensor, teacher: Tensor, lm_head: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of weights * KL(teacher || hidden) through the LM head, and of argmax agreement.

    hidden, teacher [M, H]; weights [M]. Logits are recomputed in the backward pass, CHUNK rows at
    a time, so that M * V values never exist at once.
    """

    def part(h: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        log_q = F.linear(h, lm_head.to(h.dtype)).float().log_softmax(-1)
        log_p = F.linear(t, lm_head.to(t.dtype)).float().log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        same = (log_p.argmax(-1) == log_q.argmax(-1)).float()
        return (divergence * w).sum(), (same * w).sum()

    kl, agreement = hidden.new_zeros((), dtype=torch.float32), torch.zeros(())
    for rows in zip(hidden.split(CHUNK), teacher.split(CHUNK), weights.split(CHUNK), strict=True):
        more_kl, more_agreement = checkpoint(part, *rows, use_reentrant=False)
        kl, agreement = kl + more_kl, agreement + more_agreement.detach().cpu()
    return kl, agreement
