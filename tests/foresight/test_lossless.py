"""Point-mass verification of argmax drafts is lossless; the head's softmax as proposal is not."""

import pytest
import torch
from scipy.stats import chisquare

from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.verification import Sampling, accept, target_choices

ROUNDS = 20_000


def committed_counts(target: torch.Tensor, draft: int) -> torch.Tensor:
    """First committed tokens of many rounds that verify `draft` against the law `target`."""
    roots = torch.zeros(ROUNDS, dtype=torch.long)
    tokens = torch.full((ROUNDS, 1, 1), draft)
    tree = best_first_tree(roots, tokens, torch.zeros(ROUNDS, 1, 1), 2)
    sampling = Sampling(
        temperatures=torch.ones(ROUNDS),
        top_ks=torch.full((ROUNDS,), 1 << 30),
        top_ps=torch.ones(ROUNDS),
        min_ps=None,
        greedy=torch.zeros(ROUNDS, dtype=torch.bool),
        all_greedy=False,
    )
    logits = target.log().expand(ROUNDS, 2, -1)
    choices = target_choices(logits, sampling, torch.Generator().manual_seed(1))
    accepted = accept(tree, choices, 1)
    return torch.bincount(accepted.tokens[:, 0], minlength=len(target))


def softmax_proposal_law(target: torch.Tensor, head: torch.Tensor, draft: int) -> torch.Tensor:
    """Law of the committed token if `draft` is treated as a sample of `head`.

    Accepted with probability min(1, p/q), else a draw of the normalised positive part of p - q.
    """
    chance = (target[draft] / head[draft]).clamp(max=1.0)
    residual = (target - head).clamp(min=0)
    law = (1 - chance) * residual / residual.sum()
    law[draft] += chance
    return law


def test_argmax_drafts_leave_the_targets_law_and_the_softmax_rule_would_not():
    target = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    head = torch.tensor([0.6, 0.2, 0.1, 0.1]).double()
    draft = int(head.argmax())
    counts = committed_counts(target, draft).double()
    assert chisquare(counts, target / target.sum() * ROUNDS).pvalue > 0.001
    biased = softmax_proposal_law(target, head, draft)
    assert biased.sum().item() == pytest.approx(1.0)
    assert biased[draft] > 0.8  # the target gives it 0.5
    assert (counts / ROUNDS - biased).abs().max() > 0.3
    assert biased[3] == 0.0  # the target gives it 0.05
