"""Draws of a sampled continuation, and the test that two servers draw from one law."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness import Server
from scipy.stats import chi2_contingency
from workloads import prompts

DRAWS = 4000
AT_ONCE = 500
TOKENS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "top_k 3": {"temperature": 1.0, "top_k": 3},
    "top_p 0.8": {"temperature": 1.0, "top_p": 0.8},
    "min_p 0.1": {"temperature": 1.3, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
}


def draw(server: Server, settings: dict[str, Any]) -> list[list[int]]:
    """``DRAWS`` continuations of ``TOKENS`` tokens of one prompt."""
    prompt = list(prompts(1, seed=5)[0])
    drawn: list[list[int]] = []
    while len(drawn) < DRAWS:
        answers = server.generate(
            [prompt] * AT_ONCE, max_new_tokens=TOKENS, ignore_eos=True, **settings
        )
        drawn += [answer["output_ids"] for answer in answers]
    return drawn


def same_law(ours: list[list[int]], theirs: list[list[int]], first: int) -> float:
    """p-value of the chi-square test that token pairs (t_first, t_first+1) have one law.

    Pairs seen fewer than 10 times in all are counted together.
    """
    counts = [Counter(tuple(ids[first : first + 2]) for ids in side) for side in (ours, theirs)]
    both = counts[0] + counts[1]
    common = [pair for pair, seen in both.items() if seen >= 10]
    rare = [sum(both.values()) // 2 - sum(count[pair] for pair in common) for count in counts]
    table = [[count[pair] for pair in common] for count in counts]
    if min(rare) > 0:
        table = [[*row, left] for row, left in zip(table, rare, strict=True)]
    assert len(table[0]) > 3, "the prompt's continuation is too certain to test a law"
    return float(chi2_contingency(table).pvalue)
