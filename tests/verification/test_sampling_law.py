"""The law of what is committed, against the law of plain decoding, on small vocabularies."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.verification import Sampling, accept, accept_lazily, target_choices
from sglang_jetspec.verification.sampling import FIRST_RANKS, argmax_lowest, draw

DRAWS = 20_000
CASES = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "top_k 3": {"top_k": 3},
    "top_p 0.8": {"top_p": 0.8},
    "min_p 0.2": {"min_p": 0.2},
    "all": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.15},
    "top_p under top_k": {"top_k": 3, "top_p": 0.6},
}
LAWS = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def plain_law(logits: Tensor, temperature=1.0, top_k=1 << 30, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Plain decoding's law of one token, written out token by token."""
    probs = np.exp((logits.double().numpy() - logits.max().item()) / temperature)
    probs /= probs.sum()
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    law, before = np.zeros_like(probs), 0.0
    for rank, token in enumerate(ranked):
        if rank < top_k and before <= top_p and probs[token] >= min_p * probs[ranked[0]]:
            law[token] = probs[token]
        before += probs[token]
    return law / law.sum()


def repeat(count: int, **case: float) -> Sampling:
    min_p = case.get("min_p")
    return Sampling(
        temperatures=torch.full((count,), case.get("temperature", 1.0)),
        top_ks=torch.full((count,), case.get("top_k", 1 << 30)),
        top_ps=torch.full((count,), case.get("top_p", 1.0)),
        min_ps=None if min_p is None else torch.full((count,), min_p),
        greedy=torch.zeros(count, dtype=torch.bool),
        all_greedy=False,
    )


def check_law(observed: np.ndarray, law: np.ndarray) -> None:
    assert observed[law == 0].sum() == 0
    kept = law > 0
    if kept.sum() == 1:  # certain, and chi-square has no degree of freedom
        return
    assert chisquare(observed[kept], law[kept] * observed.sum()).pvalue > 0.001


@LAWS
@pytest.mark.parametrize("lazily", [False, True])
def test_first_two_tokens_follow_the_target(case: dict, lazily: bool) -> None:
    """A Markov target: the law of (t1, t2) is law(root) x law(t1), whatever the tree is. A second
    token that no round committed is drawn plainly, as the next round would."""
    vocab, nodes = 5, 7
    random = torch.Generator().manual_seed(11)
    table = 1.5 * torch.randn(vocab, vocab, generator=random)  # target logits after each token
    drafts = torch.randn(DRAWS, 3, vocab, generator=random).log_softmax(-1)
    logprobs, tokens = drafts.topk(3)
    root = torch.full((DRAWS,), 2)
    tree = best_first_tree(root, tokens, logprobs, nodes)
    sampling, logits = repeat(DRAWS, **case), table[tree.tokens]
    if lazily:
        result = accept_lazily(tree, logits, sampling, random)
    else:
        result = accept(tree, target_choices(logits, sampling, random), 3)
    first = result.tokens[:, 0]
    fresh = draw(table[first], sampling, random)
    second = torch.where(result.lengths > 1, result.tokens[:, 1], fresh)
    assert (result.lengths > 1).float().mean() > 0.3  # drafts do get accepted

    observed = torch.bincount(first * vocab + second, minlength=vocab**2).numpy()
    law = [
        plain_law(table[2], **case)[one] * plain_law(table[one], **case)[two]
        for one, two in itertools.product(range(vocab), repeat=2)
    ]
    check_law(observed, np.array(law))


@LAWS
def test_one_draw_follows_the_law_when_tokens_tie(case: dict) -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, -1.0, 0.5, -3.0, 0.5, 2.5])
    choices = draw(
        logits.expand(DRAWS, -1), repeat(DRAWS, **case), torch.Generator().manual_seed(5)
    )
    observed = torch.bincount(choices, minlength=8).numpy()
    law = plain_law(logits, **case)
    # Which of two equal tokens a top-k or top-p cut keeps is left open; merge them.
    for low, high in ((1, 2), (4, 6)):
        observed[low] += observed[high]
        law[low] += law[high]
        observed[high], law[high] = 0, 0.0
    check_law(observed, law)


def test_rows_of_different_settings_keep_their_own_law() -> None:
    logits = 2.0 * torch.randn(6, generator=torch.Generator().manual_seed(2))
    cases = list(CASES.values())
    rows = [repeat(1, **{"min_p": 0.0, **case}) for case in cases]
    mixed = Sampling(
        *(
            torch.cat([getattr(row, field) for row in rows]).repeat(DRAWS)
            for field in ("temperatures", "top_ks", "top_ps", "min_ps", "greedy")
        ),
        all_greedy=False,
    )
    choices = draw(
        logits.expand(len(cases) * DRAWS, -1), mixed, torch.Generator().manual_seed(3)
    ).view(DRAWS, len(cases))
    for column, case in enumerate(cases):
        observed = torch.bincount(choices[:, column], minlength=6).numpy()
        check_law(observed, plain_law(logits, **case))


@pytest.mark.parametrize(
    ("scale", "case", "beyond"),
    [
        (0.1, {"top_p": 0.9}, True),
        (8.0, {"top_p": 0.9}, False),
        (0.1, {"top_k": 1500}, True),
        (0.1, {"top_k": 2, "top_p": 0.99}, False),
        (0.1, {"min_p": 0.6}, True),
    ],
)
def test_large_vocabularies(scale: float, case: dict, beyond: bool) -> None:
    """Rows that keep more tokens than the first ranks looked at, and rows that keep fewer."""
    logits = scale * torch.randn(4 * FIRST_RANKS, generator=torch.Generator().manual_seed(1))
    law = plain_law(logits, **case)
    assert ((law > 0).sum() > FIRST_RANKS) == beyond
    choices = draw(logits.expand(3000, -1), repeat(3000, **case), torch.Generator().manual_seed(7))
    kept = np.flatnonzero(law)
    outside = np.setdiff1d(choices.numpy(), kept)
    assert len(outside) == 0
    # Coarse bins of neighbouring ranks give the chi-square test its counts.
    bins = np.zeros(len(law), dtype=int)
    order = kept[np.argsort(-law[kept])]
    bins[order] = np.minimum(np.cumsum(law[order]) * 20, 19).astype(int)
    expected = np.bincount(bins[kept], weights=law[kept], minlength=20)
    check_law(np.bincount(bins[choices.numpy()], minlength=20), expected)


def test_greedy_rows_of_a_mixed_batch_take_the_lowest_of_equal_maxima() -> None:
    logits = torch.randn(3, 4, 512, generator=torch.Generator().manual_seed(0))
    logits[:, :, [130, 300, 301]] = 9.0
    sampling = Sampling(
        temperatures=torch.tensor([0.0, 1.0, 0.0]),
        top_ks=torch.tensor([1, 1 << 30, 1 << 30]),
        top_ps=torch.ones(3),
        min_ps=None,
        greedy=torch.tensor([True, False, True]),
        all_greedy=False,
    )
    choices = target_choices(logits, sampling, torch.Generator().manual_seed(0))
    assert (choices[[0, 2]] == 130).all()
    assert len(set(choices[1].tolist())) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 127, 128, 49152])
def test_argmax_takes_the_lowest_id(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randint(40, (5, 3, vocab), generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax_lowest(logits), expected)


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((2000, 6), -float("inf"))
    logits[:, [2, 4]] = 0.0
    choices = draw(logits, repeat(2000), torch.Generator().manual_seed(0))
    assert set(choices.tolist()) == {2, 4}


def test_a_seed_repeats_its_draws() -> None:
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    first, again, other = (
        draw(logits, repeat(50), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
