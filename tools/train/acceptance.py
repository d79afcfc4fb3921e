"""Acceptance length of a head on greedy text, without running a server.

Greedy decoding fixes the text, so every round can be played against it: the head drafts at each
position of the answer, and a round starting there commits what the text confirms.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.block_inputs import block_inputs
from sglang_jetspec.tools.train.features import FeatureStore
from sglang_jetspec.tools.train.target import FrozenTarget
from sglang_jetspec.trees import best_first_tree, max_nodes
from sglang_jetspec.verification import accept


@dataclass(frozen=True)
class TreeShape:
    """`nodes` counts the root; width 1 is a chain."""

    nodes: int
    width: int

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"chain{self.nodes - 1}" if self.width == 1 else f"tree{self.nodes}"


@dataclass(frozen=True)
class Candidates:
    """The head's best tokens at every answer position of one example."""

    anchors: Tensor  # [A] int64 positions
    tokens: Tensor  # [A,D,W] int64 target ids
    logprobs: Tensor  # [A,D,W] fp32


@torch.inference_mode()
def draft_everywhere(
    head: JetSpecHead,
    target: FrozenTarget,
    draft_token_ids: Tensor | None,
    store: FeatureStore,
    index: int,
    width: int,
    blocks: int = 64,
) -> Candidates:
    """Drafts of `head` (reading raw taps) anchored at every answer token of example `index`."""
    example, start = store.examples[index], store.offsets[index]
    ids = torch.tensor(example.token_ids)
    anchors = torch.arange(example.prompt_length, len(ids) - 1)
    dtype = head.fc.weight.dtype
    context = head.fuse(store.taps[start : start + len(ids)].to(dtype))[None]
    size = head.config.block_size
    inputs, generator = block_inputs(head.config), torch.Generator().manual_seed(index)
    tokens, logprobs = [], []
    for part in anchors.split(blocks):
        rows, _ = inputs.fill(ids, part, size, generator)
        embedded = F.embedding(rows.view(1, -1), target.embedding).to(dtype)
        hidden = head(embedded, part[None], context)[0].unflatten(0, (-1, size))
        hidden = hidden[:, :-1] if head.config.draft_shift else hidden[:, 1:]
        logits = F.linear(hidden, target.draft_lm_head.to(dtype)).float()
        best = logits.log_softmax(-1).topk(width, dim=-1)
        chosen = best.indices
        if draft_token_ids is not None:
            chosen = draft_token_ids.long()[chosen]
        tokens.append(chosen)
        logprobs.append(best.values)
    return Candidates(anchors, torch.cat(tokens), torch.cat(logprobs))


def committed_per_round(
    candidates: Candidates, token_ids: list[int], finished: bool, shape: TreeShape
) -> list[int]:
    """Tokens committed by each round of decoding the answer with trees of `shape`.

    The first answer token comes from the prefill and belongs to no round. The last round is
    left out unless the answer ended by itself, as its true length is unknown.
    """
    text = torch.tensor(token_ids)
    anchors, depth = candidates.anchors, candidates.tokens.shape[1]
    nodes = min(shape.nodes, max_nodes(shape.width, depth))
    tree = best_first_tree(
        text[anchors],
        candidates.tokens[..., : shape.width],
        candidates.logprobs[..., : shape.width],
        nodes,
    )
    following = F.pad(text, (0, depth + 2), value=-1)
    choices = following[anchors[:, None] + tree.depths + 1]
    lengths = accept(tree, choices, depth).lengths.tolist()
    first, last = int(anchors[0]), len(token_ids) - 1
    rounds, position = [], first
    while position < last:
        step = min(lengths[position - first], last - position)
        if position + lengths[position - first] >= last and not finished:
            break
        rounds.append(step)
        position += step
    return rounds
