"""A batch's settings and seeds, and the token that a prefill samples."""

from types import SimpleNamespace

import torch

from sglang_jetspec.sampling import batch_sampling, batch_seeds, sample_prefill, seed_prefill
from sglang_jetspec.verification.sampling import draw

VOCAB = 40


def make_batch(seeds, **info):
    count = len(seeds)
    settings = {
        "temperatures": torch.ones(count, 1),
        "top_ks": torch.full((count,), 1 << 30),
        "top_ps": torch.ones(count),
        "min_ps": torch.zeros(count),
        "need_min_p_sampling": False,
        "is_all_greedy": False,
        **info,
    }
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=s)) for s in seeds]
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.arange(count) + 10,
        sampling_info=SimpleNamespace(**settings),
    )


def sampled_zero(sampler, probs, info, positions, simple):
    return torch.zeros(len(probs), dtype=torch.int32), "mask"


def prefill(batch, probs):
    seed_prefill(batch)
    positions = batch.seq_lens - 1
    return sample_prefill(sampled_zero, None, probs, batch.sampling_info, positions, True)


def test_a_batch_without_seeds_is_left_to_sglang():
    batch = make_batch([None, None])
    assert batch_seeds(batch, batch.seq_lens) is None
    tokens, mask = prefill(batch, torch.rand(2, VOCAB))
    assert (tokens.tolist(), mask) == ([0, 0], "mask")
    assert batch_sampling(batch.sampling_info, None).min_ps is None


def test_a_prefill_draws_seeded_rows_by_seed_and_last_position():
    seeds = [7, None, 0, -(2**63), None, 9]
    batch = make_batch(seeds)
    logits = torch.randn(len(seeds), VOCAB, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(-1)
    tokens, mask = prefill(batch, probs)
    found = batch_seeds(batch, batch.seq_lens - 1)
    assert found.given.tolist() == [True, False, True, True, False, True]
    assert found.positions.tolist() == [9, 10, 11, 12, 13, 14]
    expected = draw(logits, batch_sampling(batch.sampling_info, found))
    for row, seed in enumerate(seeds):
        assert tokens[row] == (0 if seed is None else expected[row])
    assert tokens.dtype == torch.int32
    assert mask == "mask"
    assert len(set(tokens.tolist())) > 3


def test_a_greedy_row_with_a_seed_stays_greedy():
    batch = make_batch([5, 5], top_ks=torch.tensor([1, 1 << 30]))
    probs = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
    tokens, _ = prefill(batch, probs)
    assert tokens[0] == probs[0].argmax()
    assert batch_sampling(batch.sampling_info, None).greedy.tolist() == [True, False]
