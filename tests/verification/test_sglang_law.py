"""Plain decoding in SGLang keeps the same tokens with the same weights."""

import pytest
import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

from sglang_jetspec.verification import sampling as ours
from sglang_jetspec.verification.sampling import Sampling


@pytest.mark.parametrize("vocab", [7, 3000])
def test_kept_weights_equal_sglang(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    rows = 64
    random = torch.Generator().manual_seed(vocab)
    logits = 4.0 * torch.randn(rows, vocab, generator=random)
    sampling = Sampling(
        temperatures=0.3 + 1.5 * torch.rand(rows, generator=random),
        top_ks=torch.randint(1, vocab, (rows,), generator=random),
        top_ps=0.3 + 0.7 * torch.rand(rows, generator=random),
        min_ps=0.1 * torch.rand(rows, generator=random),
        greedy=torch.zeros(rows, dtype=torch.bool),
        all_greedy=False,
    )
    weights = []
    real = ours._draw_index
    monkeypatch.setattr(ours, "_draw_index", lambda w, g: weights.append(w) or real(w, g))
    ours.draw(logits, sampling, random)

    _, expected, _, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(logits / sampling.temperatures.unsqueeze(1), -1),
        sampling.top_ks,
        sampling.top_ps,
        sampling.min_ps,
        need_min_p_sampling=True,
        sampling_seed=None,
        positions=torch.zeros(rows, dtype=torch.int64),
        return_filtered_probs=True,
    )
    (kept,) = weights
    assert torch.equal(kept, expected[:, : kept.shape[1]])
    assert not expected[:, kept.shape[1] :].any()
    assert ((kept > 0).sum(1) > 1).any()
