"""Training objectives through a frozen LM head, in slices of rows.

M rows of V logits in fp32 are gigabytes for a large vocabulary. Since the LM head is not trained,
a slice's gradient is known as soon as its logits are, so no slice outlives its turn, and one of a
few hundred rows stays in the cache of a CPU.

A row's objective, with draft and target distributions q and p softened by temperature T (1 for
"sft"), and its gradient with respect to the draft logits:

    forward_kl  T^2 KL(p || q)     T (q - p)
    reverse_kl  T^2 KL(q || p)     T q (log q - log p - KL(q || p))
    sft         -log q[label]      q - onehot(label)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256
OBJECTIVES = ("forward_kl", "sft", "reverse_kl")


class FrozenHeadLoss(torch.autograd.Function):
    """sum over rows of weight * objective(row).

    hidden, teacher [M,H] of one dtype; lm_head [V,H]; labels [M] int64, rows of lm_head, read by
    "sft" alone; weights [M] fp32. Returns the sum [] fp32, differentiable in `hidden` alone, the
    sum [] of weighted forward KL at temperature 1, and [M] bool: whether draft and target rank the
    same token first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher: Tensor,
        lm_head: Tensor,
        labels: Tensor,
        weights: Tensor,
        objective: str,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the class."""
        gradient = torch.empty_like(hidden)
        matches = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        divergence = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            draft = F.linear(hidden[rows], lm_head).float()
            target = F.linear(teacher[rows], lm_head).float()
            matches[rows] = draft.argmax(-1) == target.argmax(-1)
            losses, difference = row_objective(draft, target, labels[rows], objective, temperature)
            total += weights[rows] @ losses
            plain = losses
            if objective != "forward_kl" or temperature != 1:
                plain = row_objective(draft, target, labels[rows], "forward_kl", 1.0)[0]
            divergence += weights[rows] @ plain
            difference *= weights[rows, None]
            gradient[rows] = difference.to(hidden.dtype) @ lm_head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(divergence, matches)
        return total, divergence, matches

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradient found in the forward pass."""
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient.to(gradient.dtype), None, None, None, None, None, None


def row_objective(
    draft: Tensor, target: Tensor, labels: Tensor, objective: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """Losses [M] and their gradients [M,V] with respect to logits `draft`; all fp32."""
    if objective == "sft":
        log_q = draft.log_softmax(-1)
        losses = F.nll_loss(log_q, labels, reduction="none")
        return losses, log_q.exp() - F.one_hot(labels, draft.shape[-1])
    log_q = (draft / temperature).log_softmax(-1)
    log_p = (target / temperature).log_softmax(-1)
    if objective == "forward_kl":
        p = log_p.exp()
        divergence = torch.linalg.vecdot(p, log_p - log_q)
        gradient = log_q.exp_().sub_(p)
    elif objective == "reverse_kl":
        q, ratio = log_q.exp(), log_q - log_p
        divergence = torch.linalg.vecdot(q, ratio)
        gradient = q * (ratio - divergence[:, None])
    else:
        raise ValueError(f"objective is {objective!r}; use one of {', '.join(OBJECTIVES)}")
    return temperature**2 * divergence, temperature * gradient
