"""Batches for adapter training: contexts with their true states, and blocks to predict.

Letters: B sequences, C context positions, A blocks a sequence, R rows a block, T captured layers,
H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from sglang_jetspec.heads.reference import block_mask
from sglang_jetspec.tools.train.batches import draw_anchors
from sglang_jetspec.tools.train.features import FeatureStore

CHUNK = 512  # rows of V logits at a time


@dataclass(frozen=True)
class AdapterBatch:
    """Context rows come first, then the blocks' rows, A * R of them."""

    ids: Tensor  # [B, C + A*R] int64
    positions: Tensor  # [B, C + A*R] int64
    mask: Tensor  # [B, C + A*R, C + A*R] bool
    taps: Tensor  # [B, C + A*R, T*H] bf16 true states
    context: int
    finals: Tensor  # [B, A*R, H] bf16 final normed states of the target
    weights: Tensor  # [B, A*R] fp32; sums to 1 over a block, 0 past the text's end

    def to(self, device: str) -> "AdapterBatch":
        """The same batch on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return AdapterBatch(**moved)


@torch.inference_mode()
def token_logprobs(store: FeatureStore, lm_head: Tensor) -> Tensor:
    """[tokens] fp32: the target's log-probability of every stored token given those before it.

    The first token of an example has none and counts as certain.
    """
    ids = torch.cat([torch.tensor(example.token_ids) for example in store.examples])
    found = torch.zeros(len(ids))
    starts = range(0, len(ids) - 1, CHUNK)
    for start in tqdm(starts, desc="Reading the target's probabilities", unit="chunk"):
        rows = slice(start, min(start + CHUNK, len(ids) - 1))
        logits = F.linear(store.finals[rows].to(lm_head.dtype), lm_head).float()
        following = ids[rows.start + 1 : rows.stop + 1]
        chosen = logits.gather(1, following[:, None]).squeeze(1)
        found[rows.start + 1 : rows.stop + 1] = chosen - logits.logsumexp(-1)
    found[torch.tensor(store.offsets[:-1])] = 0.0
    return found


def reach_weights(logprobs: Tensor, valid: Tensor, kappa: float) -> Tensor:
    """Weights [A, R] of block rows: (chance that verification reaches the row) ** kappa.

    logprobs [A, R]: of each row's token; row 0 is the anchor, which is always reached. Normalised
    over the valid rows of a block (JetSpec++ paper, appendix A: kappa = 1/2).
    """
    reach = F.pad(logprobs[:, 1:].cumsum(1), (1, 0)).mul(kappa).exp() * valid
    return reach / reach.sum(1, keepdim=True).clamp(min=1e-9)


@dataclass(frozen=True)
class AdapterSource:
    """Draws blocks of the target's own text; `logprobs` as of `token_logprobs`."""

    store: FeatureStore
    logprobs: Tensor
    rows: int
    kappa: float = 0.5

    def sample(self, picked: Sequence[int], blocks: int, seed: int, step: int) -> AdapterBatch:
        """`blocks` anchors of every picked example; a function of (seed, step) alone."""
        generator = torch.Generator().manual_seed((seed + 1) * 1_000_003 + step)
        examples = [self.store.examples[i] for i in picked]
        anchors = torch.stack([draw_anchors(e, blocks, generator) for e in examples])
        return self.assemble(picked, anchors)

    def assemble(self, picked: Sequence[int], anchors: Tensor) -> AdapterBatch:
        """Blocks at `anchors` [B, A] of the picked examples."""
        count = int(anchors.max())
        parts = [self._example(i, row, count) for i, row in zip(picked, anchors, strict=True)]
        ids, taps, finals, weights = (torch.stack(part) for part in zip(*parts, strict=True))
        steps = torch.arange(self.rows)
        block_positions = (anchors[:, :, None] + steps).flatten(1)
        context = torch.arange(count).expand(len(anchors), -1)
        return AdapterBatch(
            ids=ids,
            positions=torch.cat([context, block_positions], dim=1),
            mask=training_mask(anchors, self.rows, count),
            taps=taps,
            context=count,
            finals=finals,
            weights=weights,
        )

    def _example(self, index: int, anchors: Tensor, count: int) -> tuple[Tensor, ...]:
        """ids, taps, finals and weights of one example; `count` context positions, padded."""
        start, stop = self.store.offsets[index], self.store.offsets[index + 1]
        length = stop - start
        text = torch.tensor(self.store.examples[index].token_ids)
        block = anchors[:, None] + torch.arange(self.rows)
        valid = block < length
        block = block.clamp(max=length - 1)
        where = torch.cat([torch.arange(count).clamp(max=length - 1), block.flatten()])
        weights = reach_weights(self.logprobs[start + block], valid, self.kappa)
        taps, finals = self.store.taps[start + where], self.store.finals[start + block.flatten()]
        return text[where], taps, finals, weights.flatten()


def training_mask(anchors: Tensor, rows: int, context: int) -> Tensor:
    """[B, S, S] bool, S = context + A * rows: contexts are causal, blocks see what precedes them.

    A block sees the context before its anchor and its own rows up to each; no other block.
    """
    blocks = block_mask(anchors, rows, context, causal=True)
    causal = torch.ones(context, context, dtype=torch.bool).tril()
    before = F.pad(causal, (0, blocks.shape[1]), value=False)
    return torch.cat([before.expand(len(anchors), -1, -1), blocks], dim=1)
