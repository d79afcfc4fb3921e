import pytest
import torch

from sglang_jetspec.foresight.calibration import Evidence


@pytest.fixture(scope="session")
def random_evidence():
    """Drafts, draft probabilities and a law, all drawn from a seed."""

    def make(seed: int, batch: int = 2, drafts: int = 4, vocab: int = 9) -> Evidence:
        generator = torch.Generator().manual_seed(seed)
        law = (2 * torch.randn(batch, drafts + 1, vocab, generator=generator)).softmax(-1)
        tokens = torch.randint(vocab, (batch, drafts), generator=generator)
        return Evidence(tokens, -torch.rand(batch, drafts, generator=generator) - 0.01, law)

    return make
