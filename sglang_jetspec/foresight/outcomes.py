"""Probabilities of verification outcomes, from a decoder's estimate of the target's law.

An outcome (k, a): the first k of g drafts are accepted and a is the bonus token. With point-mass
drafts and p(.|i) the law after i accepted drafts, the chance of reaching length k is
S(k) = prod_{i<=k} p(d_i|i-1), and P(k, a) = S(k) p(a|k) for a other than the next draft
(JetSpec++ paper, appendix F.1). With the target's own law these are exact.

Shapes: B requests, g drafts, V vocabulary, M candidate outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """Candidate outcomes, best first; -inf where a request has fewer than M.

    scores are log-probabilities, so that long drafts do not underflow.
    """

    lengths: Tensor  # [B, M] int64 accepted drafts k
    anchors: Tensor  # [B, M] int64 bonus token a
    scores: Tensor  # [B, M] fp32 log score

    def best(self, count: int) -> Outcomes:
        """The first `count` outcomes, or all when there are fewer."""
        return Outcomes(self.lengths[:, :count], self.anchors[:, :count], self.scores[:, :count])

    def contains(self, lengths: Tensor, anchors: Tensor) -> Tensor:
        """[B] bool: whether outcome (lengths [B], anchors [B]) is among the live candidates."""
        same = (self.lengths == lengths[:, None]) & (self.anchors == anchors[:, None])
        return (same & self.scores.isfinite()).any(1)


def acceptance_probabilities(drafts: Tensor, law: Tensor) -> Tensor:
    """p(d_i | i-1): drafts [B, g] int64, law [B, g+1, V] -> [B, g]."""
    return law[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)


def log_survival(log_accept: Tensor) -> Tensor:
    """log S(k): log acceptance probabilities [B, g] -> [B, g+1], starting with log S(0) = 0."""
    return torch.nn.functional.pad(log_accept.cumsum(1), (1, 0))


def log_length_law(accept: Tensor) -> Tensor:
    """log probability of exactly k accepted drafts: acceptance [B, g] -> [B, g+1]."""
    stopped = torch.log1p(-accept)
    return log_survival(accept.log()) + torch.nn.functional.pad(stopped, (0, 1))


def without_next_draft(drafts: Tensor, law: Tensor) -> Tensor:
    """The law with the next draft's probability set to 0: [B, g+1, V]; row g is unchanged."""
    return law.scatter(2, torch.nn.functional.pad(drafts, (0, 1)).unsqueeze(2), 0.0).where(
        _has_next(law), law
    )


def bonus_law(drafts: Tensor, law: Tensor) -> Tensor:
    """Law of the bonus token given that exactly k drafts are accepted: [B, g+1, V].

    Rows where the draft has all the mass are 0: no bonus token follows a certain draft.
    """
    rest = without_next_draft(drafts, law)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, 0.0)


def outcome_law(drafts: Tensor, law: Tensor) -> Tensor:
    """P(k, a) of every outcome: drafts [B, g], law [B, g+1, V] -> [B, g+1, V]; sums to 1."""
    survival = log_survival(acceptance_probabilities(drafts, law).log()).exp()
    return survival.unsqueeze(2) * without_next_draft(drafts, law)


def rank_outcomes(log_lengths: Tensor, bonus: Tensor, count: int) -> Outcomes:
    """The `count` best outcomes of score P(k) * P(a | k); ties by k, then by rank of a.

    log_lengths: [B, g+1] log score of each length. bonus: [B, g+1, V] law of the bonus token.
    """
    per_length = min(count, bonus.shape[2])
    best, anchors = bonus.topk(per_length, dim=2)
    scores = log_lengths.unsqueeze(2) + best.log()
    lengths = torch.arange(scores.shape[1], device=scores.device)
    lengths = lengths[None, :, None].expand_as(scores).flatten(1)
    return sort_outcomes(lengths, anchors.flatten(1), scores.flatten(1), count)


def sort_outcomes(lengths: Tensor, anchors: Tensor, scores: Tensor, count: int) -> Outcomes:
    """The `count` best of [B, M] candidates in any order; equal scores keep their order."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    picked = (x.gather(1, order) for x in (lengths, anchors, scores))
    return Outcomes(*picked)


def _has_next(law: Tensor) -> Tensor:
    rows = torch.arange(law.shape[1], device=law.device)
    return (rows < law.shape[1] - 1)[None, :, None]
