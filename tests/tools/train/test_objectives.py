import pytest
import torch
import torch.nn.functional as F

from sglang_jetspec.tools.train.loss import Objective
from sglang_jetspec.tools.train.objectives import ROWS, FrozenHeadLoss


def plain(objective, temperature, draft, target, labels):
    """The definition of each objective, one value a row."""
    if objective == "sft":
        return F.cross_entropy(draft, labels, reduction="none")
    q, p = (draft / temperature).softmax(-1), (target / temperature).softmax(-1)
    if objective == "reverse_kl":
        p, q = q, p
    return temperature**2 * (p * (p.log() - q.log())).sum(-1)


@pytest.mark.parametrize("rows", [1, ROWS + 3])
@pytest.mark.parametrize(
    ("objective", "temperature"),
    [
        ("forward_kl", 1.0),
        ("forward_kl", 2.0),
        ("reverse_kl", 1.0),
        ("reverse_kl", 0.5),
        ("sft", 1),
    ],
)
def test_value_and_gradient_equal_the_definition(rows, objective, temperature):
    generator = torch.Generator().manual_seed(rows)
    hidden, teacher = torch.randn(2, rows, 12, generator=generator).unbind()
    lm_head = torch.randn(31, 12, generator=generator)
    labels = torch.randint(31, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    hidden.requires_grad_()
    draft, target = hidden @ lm_head.T, teacher @ lm_head.T
    expected = weights @ plain(objective, temperature, draft, target, labels)
    (expected_gradient,) = torch.autograd.grad(3 * expected, hidden)
    total, kl, matches = FrozenHeadLoss.apply(
        hidden, teacher, lm_head, labels, weights, objective, temperature
    )
    (gradient,) = torch.autograd.grad(3 * total, hidden)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        kl, (weights @ plain("forward_kl", 1.0, draft, target, labels)).detach()
    )
    assert torch.equal(matches, draft.argmax(-1) == target.argmax(-1))


def test_a_perfect_head_has_no_divergence_and_no_gradient():
    hidden = torch.randn(5, 8, requires_grad=True)
    arguments = (torch.randn(20, 8), torch.zeros(5, dtype=torch.long), torch.ones(5))
    for objective in ("forward_kl", "reverse_kl"):
        total, _, matches = FrozenHeadLoss.apply(
            hidden, hidden.detach(), *arguments, objective, 1.0
        )
        (gradient,) = torch.autograd.grad(total, hidden)
        assert total.item() == pytest.approx(0.0, abs=1e-5)
        assert gradient.abs().max() < 1e-5
        assert matches.all()


def test_weights_decay_from_the_first_draft_on():
    weights = Objective(gamma=4.0).row_weights(4, torch.device("cpu"))
    assert weights.tolist() == pytest.approx([0.0, 1.0, 0.7788008, 0.6065307])
    assert Objective().row_weights(3, torch.device("cpu")).tolist() == [0.0, 1.0, 1.0]
