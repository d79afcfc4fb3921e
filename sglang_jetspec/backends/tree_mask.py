"""Tree masks in the layouts attention backends read.

B requests, N tree nodes, L committed length of a request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_jetspec.trees.bitmask import pack_ancestors


def flat_tree_mask(
    ancestors: Tensor, prefix_lens: Tensor, prefix_lens_sum: int, padding: int = 0
) -> Tensor:
    """The flat mask of FlashInfer and Triton: per request a row-major [N, L + N] block.

    ancestors: [B, N, N] bool, True = row may attend to column. prefix_lens: [B] L.
    prefix_lens_sum: sum of L or more, known on the host, so that no value is read back.
    padding: tokens of context that a graph's bucket adds, in blocks behind the batch's own.
    Returns [N * prefix_lens_sum + B * N * N + N * padding] bool; every column of a prefix, and
    everything behind the last block, is True.
    """
    batch, nodes, _ = ancestors.shape
    device = ancestors.device
    tokens = prefix_lens_sum + batch * nodes + padding
    mask = torch.ones(nodes * tokens, dtype=torch.bool, device=device)
    width = (prefix_lens + nodes).view(-1, 1, 1)
    start = (torch.cumsum(width.view(-1) * nodes, 0) - width.view(-1) * nodes).view(-1, 1, 1)
    index = torch.arange(nodes, device=device)
    where = start + index.view(1, -1, 1) * width + prefix_lens.view(-1, 1, 1) + index
    mask[where.reshape(-1)] = ancestors.reshape(-1)
    return mask


def verify_mask(
    backend: Any,
    ancestors: Tensor,
    batch: Any,
    padding: int,
    context_len: int,
    words: Tensor | None = None,
) -> Any:
    """The mask of a batch's trees as its attention backend reads it.

    backend: SGLang's; ours say in `tree_mask_layout` what they read: "rows" [B, N, N] bool, "words"
    packed (`trees.bitmask`); those of SGLang read the flat mask. batch: SGLang's, at committed
    lengths. padding: requests a CUDA graph's bucket adds, at the one token SGLang fills in.
    words: the trees' packed ancestors, where a kernel has built them.
    """
    layout = getattr(backend, "tree_mask_layout", "flat")
    if layout == "rows":
        return ancestors
    if layout == "words":
        return pack_ancestors(ancestors) if words is None else words
    if batch.seq_lens_cpu is not None:
        total = int(batch.seq_lens_cpu.sum())
    else:  # not copied to the host under the overlap schedule: what is allocated is enough
        total = sum(min(req.kv.kv_allocated_len, context_len) for req in batch.reqs)
    rows = padding * (1 + ancestors.shape[1])
    return flat_tree_mask(ancestors, batch.seq_lens, total, rows)
