"""Seeded draws: the token is a function of (seed, position, law) and of nothing else.

The function is SGLang's own (`multinomial_with_seed`, used there under
`--enable-deterministic-inference`): the highest of each candidate's log-probability plus Gumbel
noise hashed from seed, position and the candidate's index. So a tree node gets what plain decoding
draws at its position, whatever the tree and the batch.

Shapes: B requests, M rows of any origin, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Seeds:
    """Which requests are seeded, and where they stand.

    positions: the position of the token that is fed in; the drawn one follows it.
    """

    values: Tensor  # [B] int64, what is given as the seed
    given: Tensor  # [B] bool; the others are drawn from the generator
    positions: Tensor  # [B] int64, of the tree's root

    def rows(self, index: Tensor, depths: Tensor | int = 0) -> Seeds:
        """Seeds of [M] rows at ``depths`` below the root, given the request each belongs to."""
        return Seeds(self.values[index], self.given[index], self.positions[index] + depths)


def draw_with_seeds(logprobs: Tensor, seeds: Seeds) -> Tensor:
    """One candidate a row: [M, K] log-probabilities, not necessarily normalised -> [M] int64.

    The candidates' order matters: it is what the noise is hashed from.
    """
    return (logprobs.double() + _gumbel(seeds, logprobs.shape[1])).argmax(1)


def _gumbel(seeds: Seeds, candidates: int) -> Tensor:
    """[M, K] fp64 standard Gumbel noise."""
    uniform = murmur_hash(seeds.values, seeds.positions, candidates).double() / _WORD
    # Both ends are clamped where SGLang clamps them: 0 has no logarithm, 1 would always win.
    log = uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return log.neg_().log_().neg_()


def murmur_hash(seeds: Tensor, positions: Tensor, candidates: int) -> Tensor:
    """MurmurHash3 (32 bit) of 16 bytes: the seed's low and high word, position, candidate.

    seeds, positions: [M] int64. Returns [M, K] int64 in 0..2^32-1.
    """
    state = torch.zeros_like(seeds)
    for word in (seeds & _WORD, (seeds >> 32) & _WORD, positions & _WORD):
        state = _mix(state, word)
    index = torch.arange(candidates, device=seeds.device)
    hashed = _mix(state.unsqueeze(1), index) ^ 16  # the length in bytes
    # int64 products wrap around; their low words are right.
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _WORD
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _WORD
    return hashed ^ (hashed >> 16)


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = (_rotated((word * 0xCC9E2D51) & _WORD, 15) * 0x1B873593) & _WORD
    return (_rotated(state ^ word, 13) * 5 + 0xE6546B64) & _WORD


def _rotated(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
