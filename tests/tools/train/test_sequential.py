"""Heads with a sequential part: loss, gradient and acceptance against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from sglang_jetspec.heads.domino import DominoConfig
from sglang_jetspec.heads.dspark import DSparkConfig
from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import JetSpecHead, block_ids
from sglang_jetspec.tools.train.acceptance import SequentialCandidates, TreeShape
from sglang_jetspec.tools.train.acceptance import committed_per_round as committed
from sglang_jetspec.tools.train.batches import Batch
from sglang_jetspec.tools.train.loss import Objective, block_hidden, block_loss
from sglang_jetspec.tools.train.target import FrozenTarget
from sglang_jetspec.trees import TREE_BUILDERS

HIDDEN, VOCAB, BLOCK = 12, 17, 4
CORRECTIONS = {
    "dspark-vanilla": DSparkConfig(5, "vanilla", confidence=False),
    "dspark-gated": DSparkConfig(5, "gated", confidence=False),
    "dspark-rnn": DSparkConfig(5, "rnn", confidence=False),
    "dspark-confidence": DSparkConfig(5, "vanilla"),
    "domino": DominoConfig(6, 3),
}
DRAFT_IDS = torch.tensor([0, 2, 3, 7, 8, 11, 12, 15])
every_kind = pytest.mark.parametrize("name", CORRECTIONS)


def make_head(name, ranked=None):
    torch.manual_seed(0)
    config = HeadConfig(
        HIDDEN, 20, 1, 2, 1, 6, 1e-6, 1e4, 64, VOCAB, 6, BLOCK, 16, (0, 2), False, ranked, {},
        CORRECTIONS[name],
    )  # fmt: skip
    head = JetSpecHead(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def make_target(draft_ids=None):
    random = torch.Generator().manual_seed(1)
    embedding, lm_head = (torch.randn(VOCAB, HIDDEN, generator=random) for _ in range(2))
    if draft_ids is None:
        return FrozenTarget(embedding, lm_head, None)
    rows = torch.full((VOCAB,), -1)
    rows[draft_ids] = torch.arange(len(draft_ids))
    return FrozenTarget(embedding, lm_head[draft_ids], rows)


def make_batch(head, blocks=3):
    """Two sequences; the second one's last columns lie past its end."""
    random = torch.Generator().manual_seed(2)
    columns = head.config.max_depth + 1
    tokens = torch.randint(VOCAB, (2, blocks, columns), generator=random)
    tokens[1, :, -1] = -1
    supervised = tokens >= 0
    supervised[..., 0] = False
    return Batch(
        torch.randn(2, 9, 2 * HIDDEN, generator=random),
        torch.tensor([[2, 5, 8]] * 2)[:, :blocks],
        tokens,
        torch.randn(2, blocks, columns, HIDDEN, generator=random),
        supervised,
        block_ids(tokens[..., 0], head.config.block_size, head.config.mask_token_id).view(
            2, blocks, -1
        ),
    )


def direct_loss(head, target, batch, objective):
    """Row by row, with plain autograd."""
    hidden = block_hidden(head, target, batch)
    total = divergence = torch.zeros(())
    embed = lambda ids: target.embedding[ids]  # noqa: E731
    for b, a in torch.cartesian_prod(*(torch.arange(n) for n in batch.anchors.shape)).tolist():
        state = None
        for depth in range(1, batch.tokens.shape[-1]):
            row = hidden[b, a, depth - 1 + head.config.first_row][None]
            previous = batch.tokens[b, a, depth - 1].clamp(min=0)[None]
            bias, state = head.correction.step(depth, row, previous, state, embed)
            logits = (row @ target.draft_lm_head.T + (0 if bias is None else bias))[0]
            if not batch.supervised[b, a, depth]:
                continue
            weight = objective.row_weights(depth + 1, row.device)[depth]
            wanted = target.draft_lm_head @ batch.finals[b, a, depth]
            log_q, log_p = logits.log_softmax(-1), wanted.log_softmax(-1)
            label = target.labels(batch.tokens[b, a, depth])
            if objective.kind == "sft" and label < 0:
                continue
            divergence = divergence + weight * (log_p.exp() * (log_p - log_q)).sum()
            if objective.kind == "sft":
                loss = -log_q[label]
            elif objective.kind == "forward_kl":
                loss = (log_p.exp() * (log_p - log_q)).sum()
            else:
                loss = (log_q.exp() * (log_q - log_p)).sum()
            if hasattr(head, "confidence_head"):
                survives = 1 - (log_q.exp() - log_p.exp()).abs().sum().detach() / 2
                logit = head.correction.confidence(row, previous)[0]
                loss = loss + F.binary_cross_entropy_with_logits(logit, survives)
            total = total + weight * loss
    return total, divergence


@every_kind
@pytest.mark.parametrize("kind", ["forward_kl", "sft", "reverse_kl"])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["whole", "draft-vocabulary"])
def test_loss_and_gradients_equal_the_definition(name, kind, draft_ids, monkeypatch):
    monkeypatch.setattr("sglang_jetspec.tools.train.sequential.BLOCKS", 2)
    head = make_head(name, None if draft_ids is None else len(draft_ids))
    target = make_target(draft_ids)
    batch, objective = make_batch(head), Objective(kind, 1.0, gamma=3.0)
    loss = block_loss(head, target, batch, objective)
    loss.total.backward()
    found = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
    head.zero_grad(set_to_none=True)
    total, divergence = direct_loss(head, target, batch, objective)
    total.backward()
    torch.testing.assert_close(loss.total, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.kl, divergence, rtol=1e-4, atol=1e-4)
    expected = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert any("markov_w2" in n or "embed_proj.2" in n for n in found)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4)
    weights = objective.row_weights(batch.tokens.shape[-1], torch.device("cpu"))
    counted = batch.supervised
    if kind == "sft":
        counted = counted & (target.labels(batch.tokens) >= 0)
    assert loss.weight == pytest.approx(float((counted * weights).sum()))
    assert not (loss.matches & ~batch.supervised).any()


@every_kind
def test_mixed_precision_gives_about_the_same(name):
    head, target = make_head(name), make_target()
    batch = make_batch(head)
    exact = block_loss(head, target, batch, Objective())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = block_loss(head, target, batch, Objective())
    rounded.total.backward()
    torch.testing.assert_close(rounded.total, exact.total, rtol=0.05, atol=0.05)
    assert rounded.total.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_training_the_bias_alone_finds_the_text():
    """A chain of tokens that only the Markov bias can predict."""
    head, target = make_head("dspark-vanilla"), make_target()
    random = torch.Generator().manual_seed(5)
    batch = make_batch(head)
    following = torch.randperm(VOCAB, generator=random)
    tokens = batch.tokens.clone()
    for column in range(1, tokens.shape[-1]):
        tokens[..., column] = following[tokens[..., column - 1]]
    supervised = torch.ones_like(batch.supervised)
    supervised[..., 0] = False
    batch = Batch(batch.taps, batch.anchors, tokens, batch.finals, supervised, batch.inputs)
    optimizer = torch.optim.Adam(head.markov_head.parameters(), lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        block_loss(head, target, batch, Objective("sft")).total.backward()
        optimizer.step()
    rows = block_hidden(head, target, batch)[0].detach()
    text = [tokens[0, 0, 0].item()]
    while len(text) < 12:
        text.append(int(following[text[-1]]))
    anchors = torch.arange(3)
    candidates = SequentialCandidates(anchors, rows[:3], head, target)
    trees = candidates.trees(tokens[0, :, 0], 1, BLOCK + 1)
    assert trees.tokens.equal(tokens[0, :, : BLOCK + 1])


def test_rounds_follow_the_sequential_drafts():
    head, target = make_head("domino"), make_target()
    batch = make_batch(head)
    rows = block_hidden(head, target, batch)[0].detach()[:, :3]
    candidates = SequentialCandidates(torch.tensor([1, 2, 3]), rows, head, target)
    trees = candidates.trees(torch.tensor([4, 4, 4]), 1, 4)
    text = [0, 4, *trees.tokens[0, 1:].tolist()]
    assert committed(candidates, text, True, TreeShape(4, 1))[0] == 3


@every_kind
@torch.no_grad()
def test_a_draft_vocabulary_drafts_target_ids(name):
    head, target = make_head(name, len(DRAFT_IDS)), make_target(DRAFT_IDS)
    rows = block_hidden(head, target, make_batch(head))[0].detach()[:, : head.config.max_depth]
    roots = torch.tensor([4, 5, 6])
    candidates = SequentialCandidates(torch.arange(3), rows, head, target, DRAFT_IDS)
    tree = candidates.trees(roots, 3, 12)
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= set(DRAFT_IDS.tolist())
    embed = lambda ids: target.embedding[ids]  # noqa: E731
    chain = candidates.trees(roots, 1, 3).tokens
    for request in range(3):
        state = None
        for depth in (1, 2):
            row, before = rows[request, depth - 1 : depth], chain[request, depth - 1 : depth]
            bias, state = head.correction.step(depth, row, before, state, embed)
            logits = row @ target.draft_lm_head.T + (0 if bias is None else bias)
            assert chain[request, depth] == DRAFT_IDS[logits.argmax()]


def test_only_exact_trees_suit_rows_that_depend_on_their_path():
    head, target = make_head("domino"), make_target()
    candidates = SequentialCandidates(torch.arange(1), torch.zeros(1, 3, HIDDEN), head, target)
    with pytest.raises(ValueError, match="a domino head's rows depend on their path"):
        candidates.trees(torch.tensor([4]), 2, 4, TREE_BUILDERS["algorithm1"]())
