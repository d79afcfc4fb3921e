"""The Triton steps of a round equal the torch steps, in Triton's interpreter or on a GPU."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from sglang_jetspec.backends.draft_graph import TreeDrafter
from sglang_jetspec.config import OptionError, Options
from sglang_jetspec.ranks import agreed
from sglang_jetspec.steps import TorchSteps, TritonSteps, round_steps, use_kernels
from sglang_jetspec.trees import DraftTree
from sglang_jetspec.verification import Acceptance, Sampling
from sglang_jetspec.window import Window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, NODES, DEPTH, WIDTH, VOCABULARY = 3, 12, 4, 3, 20


def steps(tree="best_first"):
    options = Options(num_draft_tokens=NODES, width=WIDTH, depth=DEPTH, tree=tree)
    return TorchSteps(options, on_cpu=False), TritonSteps(options, on_cpu=False)


class Head:
    """A head whose rows' logits are their hidden states."""

    correction = None

    def propose(self, hidden, width):
        top = hidden.log_softmax(-1).topk(width)
        return top.indices, top.values, None

    def draft_tree(self, roots, hidden, options, build):
        return build(roots, *self.propose(hidden, options.width)[:2], options.num_draft_tokens)


def drafts():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(BATCH, DEPTH, VOCABULARY, generator=generator)
    roots, usable = torch.arange(BATCH), torch.tensor([NODES, 5, 1])
    return Head(), roots.to(DEVICE), hidden.to(DEVICE), usable.to(DEVICE)


def pool(layers=2, layout="nhd"):
    generator = torch.Generator().manual_seed(5)
    made = torch.randn(2, layers, 60, 2, 8, generator=generator).to(DEVICE)
    pointers = [buffer.data_ptr() for buffer in made.flatten(0, 1)]

    def move_kv_cache(target, source):
        made[:, :, target] = made[:, :, source]

    return SimpleNamespace(
        kv_cache_layout=layout,
        k_buffer=list(made[0]),
        v_buffer=list(made[1]),
        data_ptrs=torch.tensor(pointers, dtype=torch.uint64, device=DEVICE),
        move_kv_cache=move_kv_cache,
        values=made,
    )


@pytest.mark.parametrize("tree", ["best_first", "algorithm1"])
def test_trees(tree):
    expected, got = (s.draft_tree(*drafts()) for s in steps(tree))
    for field in fields(DraftTree):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name


def test_trees_of_a_block_whose_roots_are_a_column():
    head, _, hidden, _ = drafts()
    rows = torch.randn(BATCH, DEPTH + 1, VOCABULARY, generator=torch.Generator().manual_seed(8))
    rows = rows.to(DEVICE)
    rows[:, 1:] = hidden
    block = torch.full((BATCH, DEPTH + 1), 19, device=DEVICE)
    block[:, 0] = torch.arange(3, 3 + BATCH)
    lengths = torch.tensor([4, 9, 13], device=DEVICE)
    expected, got = (
        TreeDrafter(head, one, context_len=16)(rows.flatten(0, 1), block.flatten(), lengths)
        for one in steps()
    )
    assert got.tokens[:, 0].tolist() == [3, 4, 5]
    for field in fields(DraftTree):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name


def test_acceptance():
    plain, triton = steps()
    tree = plain.draft_tree(*drafts())
    logits = torch.randn(BATCH, NODES, VOCABULARY, generator=torch.Generator().manual_seed(6))
    logits = logits.to(DEVICE)
    logits[:, 0].scatter_(1, tree.tokens[:, 1:2], 9.0)  # the first child is accepted
    ones = torch.ones(BATCH, device=DEVICE)
    sampling = Sampling(ones, ones.long(), ones, None, ones.bool(), all_greedy=True)
    expected, got = (s.accept(tree, logits, sampling) for s in (plain, triton))
    assert expected.lengths.tolist() == [2, 2, 1] or expected.lengths.max() > 1
    for name in ("path", "lengths", "tokens"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


class TwoRanks:
    """This rank is rank 0, so that a broadcast gives back what it sent."""

    world_size = 2

    def broadcast(self, input_, src=0):
        return input_


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_commit(layout, ranks):
    table = torch.arange(1, 60, device=DEVICE).view(1, -1).int()
    window = Window.open(
        table.expand(BATCH, -1),
        torch.arange(BATCH, device=DEVICE),
        torch.tensor([0, 13, 40], device=DEVICE),
        NODES,
        45,
    )
    path = torch.tensor([[0, 2, 3, 7, 9], [0, 1, 5, -1, -1], [0, -1, -1, -1, -1]], device=DEVICE)
    acceptance = Acceptance(path, (path >= 0).sum(1), path.clamp(min=0))
    if ranks > 1:
        acceptance = agreed(acceptance, TwoRanks())
    features = torch.randn(BATCH * NODES, 6).to(DEVICE)
    results = []
    for one in steps():
        held = pool(layout=layout)
        results.append((held.values, *one.commit(window, acceptance, features, held)))
    for got, expected in zip(*results, strict=True):
        kept = slice(1, None)  # slot 0 is padding
        if got.dim() == 5:
            got, expected = got[:, :, kept], expected[:, :, kept]
        assert torch.equal(got, expected)


def test_a_cpu_never_takes_the_kernels(monkeypatch):
    options = steps()[0].options
    assert type(round_steps(options, on_cpu=True)) is TorchSteps
    assert type(round_steps(options, on_cpu=False)) is TritonSteps
    monkeypatch.setenv("SGLANG_JETSPEC_KERNELS", "torch")
    assert type(round_steps(options, on_cpu=False)) is TorchSteps
    monkeypatch.setenv("SGLANG_JETSPEC_KERNELS", "cuda")
    with pytest.raises(OptionError, match="use triton"):
        use_kernels(on_cpu=False)
