"""The definition of `commit`: gather everything, then scatter it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_jetspec.kernels.commit.kernel import Committed


def commit(
    path: Tensor,
    window: Tensor,
    prefix_lens: Tensor,
    context_len: int,
    buffers: Sequence[Tensor],
    features: Tensor,
) -> Committed:
    """As the kernel's launcher, with the KV buffers themselves."""
    batch, steps = path.shape
    kept, nodes = path >= 0, path.clamp(min=0)
    source, target = window.gather(1, nodes)[kept], window[:, :steps][kept]
    for buffer in buffers:
        buffer[target] = buffer[source]
    step = torch.arange(steps, device=path.device)
    rows = nodes + torch.arange(batch, device=path.device).unsqueeze(1) * window.shape[1]
    positions = (prefix_lens.unsqueeze(1) + step).clamp(max=context_len - 1)
    slots = window[:, :steps] * kept
    return Committed(features[rows.flatten()], positions.flatten(), slots.flatten())
