"""From a block's logits to candidates and trees, the same for served and reference heads.

B requests, D depth, W width, H hidden size, V (draft) vocabulary, N nodes, P parents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_jetspec.heads.correction import Correction, Embed
from sglang_jetspec.trees import DraftTree, search_tree

# Rows of corrected logits computed at once: bounds the memory of wide trees in large batches.
LOGIT_ROWS = 1024


def top_rows(
    logits: Tensor, width: int, token_ids: Tensor | None, entropies: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The best tokens of independent rows.

    logits: [B, D, V]. token_ids: [V] target ids of a draft vocabulary, None for the target's own.

    Returns tokens [B, D, W] int64 and log-probabilities [B, D, W] fp32 under the whole row, best
    first, and the rows' entropies [B, D] fp32 in nats if asked for.
    """
    logits = logits.float()
    top, ids = torch.topk(logits, width, dim=-1)
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    if token_ids is not None:
        ids = token_ids[ids].long()
    spread = torch.special.entr((logits - total).exp()).sum(-1) if entropies else None
    return ids, top - total, spread


def corrected_tree(
    roots: Tensor,
    hidden: Tensor,
    base: Tensor,
    correction: Correction,
    embed: Embed,
    width: int,
    nodes: int,
    token_ids: Tensor | None = None,
) -> DraftTree:
    """The best tree where a row's distribution depends on the tokens before it, exactly.

    A node's W children are the best under the row's logits corrected for the node's own path.

    hidden: [B, D, H] drafting rows. base: [B, D, V] their uncorrected logits. token_ids: as of
    `top_rows`.
    """
    batch, depth = base.shape[:2]
    tokens, state = roots.unsqueeze(1), None  # of the kept nodes: [B, P], [B, P, S]

    def expand(level: int, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        nonlocal tokens, state
        if kept is not None:
            tokens = tokens.gather(1, kept)
            if state is not None:
                parent = (kept // width).unsqueeze(2).expand(-1, -1, state.shape[2])
                state = state.gather(1, parent)
        count = tokens.shape[1]
        request = torch.arange(batch, device=roots.device).repeat_interleave(count)
        rows = None if state is None else state.flatten(0, 1)
        children, steps, states = [], [], []
        for start in range(0, batch * count, LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            owner = request[part]
            previous = tokens.flatten()[part]
            before = None if rows is None else rows[part]
            bias, after = correction.step(level, hidden[owner, level - 1], previous, before, embed)
            logits = base[owner, level - 1].float()
            corrected = logits if bias is None else logits + bias
            ids, logprobs, _ = top_rows(corrected, width, token_ids)
            children.append(ids)
            steps.append(logprobs)
            states.append(after)
        state = None
        if states[0] is not None:
            parts = torch.cat([part for part in states if part is not None])
            state = parts.view(batch, count, -1)
        tokens = torch.cat(children).view(batch, count * width)
        return tokens.view(batch, count, width), torch.cat(steps).view(batch, count, width)

    return search_tree(roots, expand, depth, width, nodes)
