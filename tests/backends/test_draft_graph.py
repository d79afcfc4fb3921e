"""The end of a draft pass on static buffers, as a graph replays it, against the eager pass."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from sglang_jetspec.backends.draft_graph import GraphedTrees, TreeDrafter
from sglang_jetspec.config import Options
from sglang_jetspec.steps import TorchSteps

HIDDEN, VOCABULARY, CONTEXT = 8, 40, 64
ROUNDS = 492  # as many as the JetSpec++ paper compares


class Head:
    """A head whose logits are a fixed projection."""

    def __init__(self):
        self.weight = torch.randn(HIDDEN, VOCABULARY, generator=torch.Generator().manual_seed(0))

    def draft_tree(self, roots, hidden, options, build):
        logprobs = torch.log_softmax(hidden @ self.weight, -1)
        top, ids = torch.topk(logprobs, options.width, dim=-1)
        return build(roots, ids, top, options.num_draft_tokens)


@pytest.mark.parametrize("tree", ["best_first", "algorithm1"])
def test_replayed_drafts_equal_eager_drafts(tree):
    options = Options(num_draft_tokens=16, width=4, depth=5, tree=tree)
    drafter = TreeDrafter(Head(), TorchSteps(options, on_cpu=True), CONTEXT)
    graphed = GraphedTrees(drafter)
    # Static inputs of every bucket, the largest captured first.
    rows = options.block_size
    buckets = {
        size: SimpleNamespace(
            input_ids=torch.zeros(size * rows, dtype=torch.int64),
            seq_lens=torch.ones(size, dtype=torch.int64),
            hidden_states=torch.zeros(size * rows, HIDDEN),
        )
        for size in (4, 2, 1)
    }
    for static in buckets.values():
        graphed.capture(None, static, static, len(static.input_ids))
    held = graphed.read(4).tokens.data_ptr()
    generator = torch.Generator().manual_seed(1)
    for round_ in range(ROUNDS):
        batch = 1 + round_ % 4
        static = buckets[min(size for size in buckets if size >= batch)]
        hidden = torch.randn(batch * rows, HIDDEN, generator=generator)
        block = torch.randint(VOCABULARY, (batch * rows,), generator=generator)
        lengths = torch.randint(1, CONTEXT + 1, (batch,), generator=generator)
        static.hidden_states[: len(hidden)] = hidden
        static.input_ids[: len(block)] = block
        static.seq_lens.fill_(1)
        static.seq_lens[:batch] = lengths
        graphed.capture(None, static, static, len(static.input_ids))  # what a replay runs
        replayed, eager = graphed.read(batch), drafter(hidden, block, lengths)
        for field in fields(eager):
            assert torch.equal(getattr(replayed, field.name), getattr(eager, field.name)), round_
        usable = (CONTEXT - lengths).clamp(1, 16)
        assert (replayed.live.sum(1) <= usable).all()
    assert graphed.read(4).tokens.data_ptr() == held


def test_buckets_come_largest_first():
    options = Options(num_draft_tokens=4, width=2, depth=2, tree="best_first")
    graphed = GraphedTrees(TreeDrafter(Head(), TorchSteps(options, on_cpu=True), CONTEXT))

    def capture(size):
        static = SimpleNamespace(
            input_ids=torch.zeros(size * 3, dtype=torch.int64),
            seq_lens=torch.ones(size, dtype=torch.int64),
            hidden_states=torch.zeros(size * 3, HIDDEN),
        )
        graphed.capture(None, static, static, size * 3)

    capture(1)
    with pytest.raises(RuntimeError, match="largest first"):
        capture(2)
