"""Forward KL through a frozen LM head, in slices of rows.

M rows of V logits in fp32 are gigabytes for a large vocabulary. Since the LM head is not trained,
a slice's gradient is known as soon as its logits are, so no slice outlives its turn, and one of a
few hundred rows stays in the cache of a CPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256


class FrozenHeadKL(torch.autograd.Function):
    """mean over rows of KL(softmax(teacher @ W^T) || softmax(hidden @ W^T)).

    hidden, teacher [M,H] of one dtype; lm_head [V,H]. Returns the mean [] fp32, differentiable in
    `hidden` alone, and [M] bool: whether both rank the same token first.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Tensor, lm_head: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        gradient = torch.empty_like(hidden)
        matches = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            log_q = F.linear(hidden[rows], lm_head).log_softmax(-1, dtype=torch.float32)
            log_p = F.linear(teacher[rows], lm_head).log_softmax(-1, dtype=torch.float32)
            matches[rows] = log_q.argmax(-1) == log_p.argmax(-1)
            p = log_p.exp()
            total += torch.linalg.vecdot(p, log_p - log_q).sum()
            difference = log_q.exp_().sub_(p)  # gradient of KL with respect to the draft logits
            gradient[rows] = difference.to(hidden.dtype) @ lm_head
        ctx.save_for_backward(gradient.div_(len(hidden)))
        ctx.mark_non_differentiable(matches)
        return total / len(hidden), matches

    @staticmethod
    def backward(ctx: Any, kl_gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient found in the forward pass."""
        (gradient,) = ctx.saved_tensors
        return gradient * kl_gradient.to(gradient.dtype), None, None
