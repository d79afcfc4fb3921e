"""Forward KL of the head's rows against the target's next-token distributions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.batches import Batch
from sglang_jetspec.tools.train.kl import FrozenHeadKL
from sglang_jetspec.tools.train.target import FrozenTarget


@dataclass(frozen=True)
class BlockLoss:
    """`kl` is the differentiable mean over supervised rows; `matches` [B,A,block_size] marks rows
    whose most likely draft token is the target's (within the draft vocabulary)."""

    kl: Tensor
    matches: Tensor


def compute_dtype(head: JetSpecHead) -> torch.dtype:
    """Autocast's type inside autocast, else the type of the head's weights."""
    device = head.fc.weight.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return head.fc.weight.dtype


def block_hidden(head: JetSpecHead, target: FrozenTarget, batch: Batch) -> Tensor:
    """Hidden states [B,A,block_size,H] of every slot; slot 0 predicts nothing."""
    config, dtype = head.config, compute_dtype(head)
    embedded = F.embedding(batch.inputs.flatten(1), target.embedding).to(dtype)
    hidden = head(embedded, batch.anchors, head.fuse(batch.taps.to(dtype)))
    hidden = hidden.unflatten(1, (-1, config.block_size))
    return hidden.roll(1, dims=2) if config.draft_shift else hidden


def block_loss(head: JetSpecHead, target: FrozenTarget, batch: Batch) -> BlockLoss:
    """KL(target || head) at temperature 1 over the draft vocabulary (JetSpec paper, training)."""
    hidden = block_hidden(head, target, batch)[batch.supervised]  # [M,H]
    teacher = batch.finals[batch.supervised].to(hidden.dtype)
    kl, same = FrozenHeadKL.apply(hidden, teacher, target.draft_lm_head.to(hidden.dtype))
    matches = torch.zeros_like(batch.supervised)
    matches[batch.supervised] = same
    return BlockLoss(kl, matches)


def chain_acceptance(matches: Tensor) -> Tensor:
    """[..., block_size] row matches -> committed tokens a round of a greedy chain, with bonus."""
    return 1 + matches[..., 1:].long().cumprod(-1).sum(-1)
