"""The target's own choice at a tree node: argmax, or one draw of its sampling law.

The law is that of SGLang's plain decoding with `--sampling-backend pytorch`: softmax of
logits / temperature; tokens ranked by probability; kept while rank < top_k and while the
probability before them is at most top_p (both counted on the full softmax, not renormalised
between steps) and while their probability is at least min_p times the best one; one draw in
proportion to what is kept.

Shapes: B requests, N tree nodes, V vocabulary, M rows of any origin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_jetspec.verification.seeds import Seeds, draw_with_seeds

ARGMAX_CHUNK = 128  # CPU: chunk maxima vectorise, torch.argmax does not (about 10x at V = 49152)
FIRST_RANKS = 1024  # CPU: a top-p set is nearly always inside this many tokens; else sort them all
ROWS_AT_ONCE = 64  # bounds the softmax workspace when every node of every request is drawn


@dataclass(frozen=True)
class Sampling:
    """What each request asks for. Rows of `greedy` requests ignore the other fields."""

    temperatures: Tensor  # [B] fp32, > 0 where not greedy
    top_ks: Tensor  # [B] int, any value >= V keeps the whole vocabulary
    top_ps: Tensor  # [B] fp32 in (0, 1]
    min_ps: Tensor | None  # [B] fp32 in [0, 1]; None: no request uses it
    greedy: Tensor  # [B] bool
    all_greedy: bool
    seeds: Seeds | None = None  # None: no request is seeded

    def rows(self, index: Tensor, depths: Tensor | int = 0) -> Sampling:
        """Settings of [M] rows at ``depths``, given the request each belongs to."""
        return Sampling(
            self.temperatures[index],
            self.top_ks[index],
            self.top_ps[index],
            None if self.min_ps is None else self.min_ps[index],
            self.greedy[index],
            self.all_greedy,
            None if self.seeds is None else self.seeds.rows(index, depths),
        )


def argmax_lowest(logits: Tensor) -> Tensor:
    """[..., V] -> [...] int64, the lowest id among equal maxima."""
    vocab = logits.shape[-1]
    if logits.device.type != "cpu" or vocab % ARGMAX_CHUNK:
        return logits.argmax(-1)
    chunks = logits.reshape(*logits.shape[:-1], vocab // ARGMAX_CHUNK, ARGMAX_CHUNK)
    chunk = chunks.amax(-1).argmax(-1, keepdim=True)
    index = chunk.unsqueeze(-1).expand(*chunk.shape, ARGMAX_CHUNK)
    return chunk.squeeze(-1) * ARGMAX_CHUNK + chunks.gather(-2, index).squeeze(-2).argmax(-1)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One draw per row of the law above (greedy rows: a draw to be discarded).

    Args:
        logits: [M, V], any float type; computed in fp32.
        sampling: settings of the M rows.
        generator: random source on the logits' device; None: torch's default.

    Returns:
        [M] int64.
    """
    # A greedy row's temperature may be 0.
    temperatures = sampling.temperatures.masked_fill(sampling.greedy, 1.0)
    probs = torch.softmax(logits.float() / temperatures.unsqueeze(1), dim=1)
    if sampling.seeds is None:
        return _draw_unseeded(probs, sampling, generator)
    return draw_mixed(probs, sampling, lambda: _draw_unseeded(probs, sampling, generator))


def draw_mixed(probs: Tensor, sampling: Sampling, unseeded: Callable[[], Tensor]) -> Tensor:
    """Seeded rows by their seeds, the others as ``unseeded`` draws them: [M, V] -> [M]."""
    assert sampling.seeds is not None
    given = sampling.seeds.given
    if probs.device.type == "cpu" and given.all():
        return _draw_seeded(probs, sampling, sampling.seeds)
    drawn = unseeded()
    return torch.where(given, _draw_seeded(probs, sampling, sampling.seeds).to(drawn.dtype), drawn)


def _draw_seeded(probs: Tensor, sampling: Sampling, seeds: Seeds) -> Tensor:
    """What SGLang's plain decoding draws for a request alone: [M, V] -> [M] int64.

    Candidates are token ids where the whole vocabulary stands, else ranks.
    """
    whole = (sampling.top_ks >= probs.shape[1]) & (sampling.top_ps >= 1.0)
    if sampling.min_ps is not None:
        whole &= sampling.min_ps <= 0.0
    among_all = draw_with_seeds(probs.log(), seeds)
    if probs.device.type == "cpu" and whole.all():
        return among_all
    ranked, ids = probs.sort(dim=1, descending=True, stable=True)
    rank = draw_with_seeds(_truncate(ranked, sampling).double().log(), seeds)
    return torch.where(whole, among_all, ids.gather(1, rank.unsqueeze(1)).squeeze(1))


def _draw_unseeded(probs: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    if probs.device.type == "cpu":  # a look at the data is free here and saves sorting
        cut = (sampling.top_ks < probs.shape[1]) | (sampling.top_ps < 1.0)
        if not cut.any():
            return _draw_index(_drop_below_min_p(probs, sampling.min_ps), generator)
        if not cut.all():
            choices = torch.empty(len(cut), dtype=torch.int64)
            for part in (cut.nonzero().squeeze(1), (~cut).nonzero().squeeze(1)):
                choices[part] = _draw_unseeded(probs[part], sampling.rows(part), generator)
            return choices
        ranked, ids = _leading_ranks(probs, sampling)
    else:
        ranked, ids = probs.sort(dim=1, descending=True, stable=True)
    picked = _draw_index(_truncate(ranked, sampling), generator)
    return ids.gather(1, picked.unsqueeze(1)).squeeze(1)


def sampling_law(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law that `draw` draws from: [M, V] logits -> [M, V] fp32 probabilities.

    Greedy rows are point masses at the argmax.
    """
    temperatures = sampling.temperatures.masked_fill(sampling.greedy, 1.0)
    probs = torch.softmax(logits.float() / temperatures.unsqueeze(1), dim=1)
    ranked, ids = probs.sort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter_(1, ids, _truncate(ranked, sampling))
    law = kept / kept.sum(1, keepdim=True)
    best = torch.zeros_like(law).scatter_(1, argmax_lowest(logits).unsqueeze(1), 1.0)
    return torch.where(sampling.greedy.unsqueeze(1), best, law)


def target_choices(
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    *,
    depths: Tensor | None = None,
) -> Tensor:
    """The target's choice at every node: [B, N, V] logits -> [B, N] int64.

    Greedy requests take the argmax, the lowest id among equals; the others one draw a node.
    depths: [B, N] int64 of the nodes, read where a request is seeded.
    """
    greedy = argmax_lowest(logits)
    if sampling.all_greedy:
        return greedy
    requests = torch.arange(len(logits), device=logits.device).repeat_interleave(logits.shape[1])
    if depths is None:
        assert sampling.seeds is None, "a seeded draw needs its node's depth"
        depths = torch.zeros_like(greedy)
    drawn = torch.cat(
        [
            draw(rows, sampling.rows(request, depth), generator)
            for rows, request, depth in zip(
                torch.split(logits.flatten(0, 1), ROWS_AT_ONCE),
                torch.split(requests, ROWS_AT_ONCE),
                torch.split(depths.flatten(), ROWS_AT_ONCE),
                strict=True,
            )
        ]
    )
    return torch.where(sampling.greedy.unsqueeze(1), greedy, drawn.view_as(greedy))


def _leading_ranks(probs: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The best tokens of each row, best first: all that top-k and top-p can keep, seldom more.

    [M, V] -> ([M, K] probabilities, [M, K] ids).
    """
    count = min(FIRST_RANKS, probs.shape[1], int(sampling.top_ks.max()))
    ranked, ids = probs.topk(count, dim=1)
    enough = (sampling.top_ks <= count) | (ranked.sum(1) > sampling.top_ps)
    if enough.all():
        return ranked, ids
    ranked, ids = probs.sort(dim=1, descending=True, stable=True)
    return ranked, ids


def _truncate(ranked: Tensor, sampling: Sampling) -> Tensor:
    """Zeroes what top-k, top-p and min-p drop from [M, K] probabilities sorted best first."""
    before = ranked.cumsum(1) - ranked
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    dropped = (ranks >= sampling.top_ks.unsqueeze(1)) | (before > sampling.top_ps.unsqueeze(1))
    return _drop_below_min_p(ranked.masked_fill(dropped, 0.0), sampling.min_ps)


def _drop_below_min_p(weights: Tensor, min_ps: Tensor | None) -> Tensor:
    if min_ps is None:
        return weights
    floor = weights.amax(1, keepdim=True) * min_ps.unsqueeze(1)
    return weights.masked_fill(weights < floor, 0.0)


def _draw_index(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One column a row in proportion to [M, K] weights, by inverting the fp64 running sum."""
    running = weights.cumsum(1, dtype=torch.float64)
    uniform = torch.rand(
        len(weights), 1, dtype=torch.float64, device=weights.device, generator=generator
    )
    # right=True: a column of weight 0 adds nothing to the sum and is stepped over.
    total = running[:, -1:].contiguous()
    picked = torch.searchsorted(running, uniform * total, right=True)
    # uniform * total may round up to the total: then the last column that counts.
    return torch.minimum(picked, torch.searchsorted(running, total)).squeeze(1)
