"""Training the kinds of heads whose rows depend on the tokens before them (DSpark, Domino).

The tokens before a row are the text's own (teacher forcing). A head that predicts whether its
drafts are accepted learns that beside the objective: cross entropy with 1 - |q - p|_1 / 2, the
probability that a token drawn from the draft's law q survives verification against p (DSpark's
confidence head).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.batches import Batch
from sglang_jetspec.tools.train.objectives import row_objective
from sglang_jetspec.tools.train.target import FrozenTarget

BLOCKS = 32  # blocks whose logits exist at once; they are computed again for the gradient


def sequential_loss(
    head: JetSpecHead,
    target: FrozenTarget,
    batch: Batch,
    hidden: Tensor,
    weights: Tensor,
    objective: str,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums over the supervised rows of a batch.

    hidden [B,A,block_size,H]: the head's rows. weights [B,A,C]: of the batch's columns, 0 where a
    row is not supervised. C = D + 1 columns: the anchor and the D tokens that a block drafts.

    Returns the loss [] (differentiable), the forward KL [] at temperature 1, and matches [B,A,C].
    """
    depth = weights.shape[-1] - 1
    first = head.config.first_row
    rows = hidden[:, :, first : first + depth].flatten(0, 1)
    finals, tokens = batch.finals[:, :, 1:].flatten(0, 1), batch.tokens.flatten(0, 1)
    weights = weights[..., 1:].flatten(0, 1)
    total = divergence = torch.zeros((), device=hidden.device)
    matches = []
    for part in torch.arange(len(rows), device=hidden.device).split(BLOCKS):
        inputs: list[Any] = [head, target, rows[part], finals[part], tokens[part], weights[part]]
        loss, kl, same = checkpoint(
            _block_sums, *inputs, objective, temperature, use_reentrant=False
        )
        total, divergence = total + loss, divergence + kl
        matches.append(same)
    same = torch.cat(matches).view(*batch.tokens.shape[:2], depth)
    return total, divergence, F.pad(same, (1, 0)) & batch.supervised


def _block_sums(
    head: JetSpecHead,
    target: FrozenTarget,
    hidden: Tensor,
    finals: Tensor,
    tokens: Tensor,
    weights: Tensor,
    objective: str,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sequential_loss` of M blocks: hidden, finals [M,D,H], tokens [M,D+1], weights [M,D]."""
    lm_head, correction = target.draft_lm_head.to(hidden.dtype), head.correction
    previous, labels = tokens[:, :-1].clamp(min=0), target.labels(tokens[:, 1:])
    base = F.linear(hidden, lm_head).float()
    rows, state = [], None
    for depth in range(base.shape[1]):
        bias, state = correction.step(
            depth + 1,
            hidden[:, depth],
            previous[:, depth],
            state,
            lambda ids: F.embedding(ids, target.embedding).to(hidden.dtype),
        )
        rows.append(base[:, depth] if bias is None else base[:, depth] + bias.float())
    draft = torch.stack(rows, 1).flatten(0, 1)
    with torch.no_grad():
        wanted = F.linear(finals.to(hidden.dtype), lm_head).float().flatten(0, 1)
        weights, labels = weights.flatten(), labels.flatten().clamp(min=0)
        losses, gradient = row_objective(draft.detach(), wanted, labels, objective, temperature)
        gradient *= weights[:, None]
        divergence = weights @ row_objective(draft.detach(), wanted, labels, "forward_kl", 1.0)[0]
        matches = (draft.argmax(-1) == wanted.argmax(-1)).view(len(tokens), -1)
    linear = (draft * gradient).sum()  # has the objective's gradient
    total = weights @ losses + linear - linear.detach()
    predicted = correction.confidence(hidden.flatten(0, 1), previous.flatten())
    if predicted is not None:
        survival = 1 - 0.5 * (draft.detach().softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
        total = total + weights @ F.binary_cross_entropy_with_logits(
            predicted.float(), survival, reduction="none"
        )
    return total, divergence, matches
