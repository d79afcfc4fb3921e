import pytest
import torch

from sglang_jetspec.tools.train.kl import ROWS, FrozenHeadKL


@pytest.mark.parametrize("rows", [1, 7, ROWS, ROWS + 3])
def test_value_and_gradient_equal_the_plain_divergence(rows):
    generator = torch.Generator().manual_seed(rows)
    hidden, teacher = torch.randn(2, rows, 12, generator=generator, dtype=torch.float64).unbind()
    lm_head = torch.randn(31, 12, generator=generator, dtype=torch.float64)
    hidden.requires_grad_()
    log_q = (hidden @ lm_head.T).log_softmax(-1)
    log_p = (teacher @ lm_head.T).log_softmax(-1)
    plain = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    (expected,) = torch.autograd.grad(3 * plain, hidden)
    kl, matches = FrozenHeadKL.apply(hidden, teacher, lm_head)
    (gradient,) = torch.autograd.grad(3 * kl, hidden)
    torch.testing.assert_close(kl, plain.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(matches, log_q.argmax(-1) == log_p.argmax(-1))


def test_a_perfect_head_has_no_loss_and_no_gradient():
    hidden = torch.randn(5, 8, requires_grad=True)
    kl, matches = FrozenHeadKL.apply(hidden, hidden.detach(), torch.randn(20, 8))
    (gradient,) = torch.autograd.grad(kl, hidden)
    assert kl.item() == pytest.approx(0.0, abs=1e-6)
    assert gradient.abs().max() < 1e-6
    assert matches.all()
