"""What a head is trained on: its block rows against the target's next-token distributions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.batches import Batch
from sglang_jetspec.tools.train.objectives import FrozenHeadLoss
from sglang_jetspec.tools.train.sequential import sequential_loss
from sglang_jetspec.tools.train.target import FrozenTarget


@dataclass(frozen=True)
class Objective:
    """See `TrainConfig`: `kind` is its `objective`, `gamma` its `loss_decay_gamma`."""

    kind: str = "forward_kl"
    temperature: float = 1.0
    gamma: float = 0.0

    def row_weights(self, block_size: int, device: torch.device) -> Tensor:
        """[block_size] fp32: exp(-(k - 1) / gamma) of row k (DFlash paper), 0 of the anchor's."""
        rows = torch.arange(block_size, device=device, dtype=torch.float32)
        weights = torch.exp(-(rows - 1) / self.gamma) if self.gamma else torch.ones_like(rows)
        return weights * (rows > 0)


@dataclass(frozen=True)
class BlockLoss:
    """Weighted sums over the supervised rows of a batch.

    `total` [] is differentiable; `kl` [] is the forward KL at temperature 1 whatever the objective;
    `weight` [] is the sum of weights. `matches` [B,A,block_size] marks supervised rows whose most
    likely draft token is the target's (within the draft vocabulary).
    """

    total: Tensor
    kl: Tensor
    weight: Tensor
    matches: Tensor


class BlockModel(nn.Module):
    """A head with its loss as one module, the unit that several devices train together."""

    def __init__(self, head: JetSpecHead, target: FrozenTarget, objective: Objective) -> None:
        super().__init__()
        self.head, self.target, self.objective = head, target, objective

    def forward(self, batch: Batch) -> BlockLoss:
        """See `block_loss`."""
        return block_loss(self.head, self.target, batch, self.objective)


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


def block_loss(
    head: JetSpecHead, target: FrozenTarget, batch: Batch, objective: Objective
) -> BlockLoss:
    """The objective over the draft vocabulary, summed over supervised rows."""
    rows = batch.supervised
    hidden = block_hidden(head, target, batch)
    weights = objective.row_weights(rows.shape[-1], hidden.device).expand(rows.shape)
    if head.correction is not None:
        known = target.labels(batch.tokens) >= 0
        weights = weights * (rows & (known | (objective.kind != "sft")))
        total, kl, matches = sequential_loss(
            head, target, batch, hidden, weights, objective.kind, objective.temperature
        )
        return BlockLoss(total, kl, weights.sum(), matches)
    hidden, weights, labels = hidden[rows], weights[rows], batch.tokens[rows]  # [M,H], [M], [M]
    teacher = batch.finals[rows].to(hidden.dtype)
    if objective.kind == "sft":  # what the text or the draft vocabulary lacks is no label
        labels = target.labels(labels)
        weights = weights * (labels >= 0)
    total, kl, same = FrozenHeadLoss.apply(
        hidden,
        teacher,
        target.draft_lm_head.to(hidden.dtype),
        labels.clamp(min=0),
        weights,
        objective.kind,
        objective.temperature,
    )
    matches = torch.zeros_like(rows)
    matches[rows] = same
    return BlockLoss(total, kl, weights.sum(), matches)


def chain_acceptance(matches: Tensor) -> Tensor:
    """[..., block_size] row matches -> committed tokens a round of a greedy chain, with bonus."""
    return 1 + matches[..., 1:].long().cumprod(-1).sum(-1)
