"""Tree masks in the layouts attention backends read.

B requests, N tree nodes, L committed length of a request.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flat_tree_mask(ancestors: Tensor, prefix_lens: Tensor, prefix_lens_sum: int) -> Tensor:
    """The flat mask of FlashInfer and Triton: per request a row-major [N, L + N] block.

    ancestors: [B, N, N] bool, True = row may attend to column. prefix_lens: [B] L.
    prefix_lens_sum: sum of L, known on the host, so that no value is read back.
    Returns [N * sum(L) + B * N * N] bool; every prefix column is True.
    """
    batch, nodes, _ = ancestors.shape
    device = ancestors.device
    mask = torch.ones(
        nodes * prefix_lens_sum + batch * nodes * nodes, dtype=torch.bool, device=device
    )
    width = (prefix_lens + nodes).view(-1, 1, 1)
    start = (torch.cumsum(width.view(-1) * nodes, 0) - width.view(-1) * nodes).view(-1, 1, 1)
    index = torch.arange(nodes, device=device)
    where = start + index.view(1, -1, 1) * width + prefix_lens.view(-1, 1, 1) + index
    mask[where.reshape(-1)] = ancestors.reshape(-1)
    return mask
