"""The platform's small operators against SGLang's native ones."""

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_jetspec.platforms.cpu import fused_ops


def exact(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("hidden", [8, 129, 576])
def test_rms_norm(rows, hidden):
    torch.manual_seed(rows)
    norm = RMSNorm(hidden, eps=1e-5)
    norm.weight.data.normal_()
    x, residual, addition = torch.randn(3, rows, hidden)
    exact(fused_ops.rms_norm(norm, x), norm.forward_native(x))
    exact(fused_ops.rms_norm(norm, x, residual), norm.forward_native(x, residual))
    exact(
        fused_ops.rms_norm(norm, x, residual, addition), norm.forward_native(x, residual, addition)
    )


def test_rms_norm_leaves_its_inputs_alone():
    norm = RMSNorm(8)
    x, residual = torch.randn(2, 3, 8)
    copies = x.clone(), residual.clone()
    fused_ops.rms_norm(norm, x, residual)
    assert torch.equal(x, copies[0])
    assert torch.equal(residual, copies[1])


def test_rms_norm_in_bfloat16_is_close():
    norm = RMSNorm(576).bfloat16()
    x, residual = torch.randn(2, 5, 576).bfloat16()
    actual, total = fused_ops.rms_norm(norm, x, residual)
    expected, expected_total = norm.forward_native(x, residual)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"var_hidden_size": 4},
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
        {"weight_dtype": torch.float32},
    ],
)
def test_norms_of_another_kind_run_natively(options):
    norm = RMSNorm(8, **options)
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 3, 8).bfloat16()
    actual, expected = fused_ops.rms_norm(norm, x, residual), norm.forward_native(x, residual)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("shape", [(1, 2), (5, 1536), (2, 3, 10)])
def test_silu_and_mul(shape):
    x = torch.randn(*shape)
    exact(fused_ops.silu_and_mul(SiluAndMul(), x), SiluAndMul().forward_native(x))


def rotary(head_size=16, rotary_dim=16, neox=True):
    return RotaryEmbedding(head_size, rotary_dim, 64, 10000, neox, torch.float32)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (1, 1)])
@pytest.mark.parametrize("kind", [{}, {"rotary_dim": 8}, {"neox": False}])
def test_rotary_embedding(rows, heads, kv_heads, kind):
    torch.manual_seed(rows)
    module = rotary(**kind)
    positions = torch.randint(0, 64, (rows,))
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * 16)
    query, key, _ = qkv.split((heads * 16, kv_heads * 16, kv_heads * 16), dim=-1)
    before = qkv.clone()
    actual = fused_ops.rotary_embedding(module, positions, query, key)
    expected = module.forward_native(positions, query, key)
    exact(actual[0], expected[0])
    exact(actual[1], expected[1])
    assert torch.equal(qkv, before)


def test_rotary_offsets_run_natively():
    module, positions, offsets = rotary(), torch.tensor([1, 2]), torch.tensor([3, 3])
    query, key = torch.randn(2, 32), torch.randn(2, 16)
    actual = fused_ops.rotary_embedding(module, positions, query, key, offsets)
    exact(actual[0], module.forward_native(positions + offsets, query, key)[0])


def test_positions_rewritten_between_forwards_are_looked_up_again():
    """SGLang may reuse one positions tensor: only a forward's own layers share the look-up."""
    module, positions = rotary(), torch.tensor([1, 2])
    query, key = torch.randn(2, 32), torch.randn(2, 16)
    for values in ([1, 2], [9, 10]):
        positions.copy_(torch.tensor(values))
        with forward_context(ForwardContext(attn_backend=None)):
            for _ in range(2):
                actual = fused_ops.rotary_embedding(module, positions, query, key)
                exact(actual[0], module.forward_native(positions, query, key)[0])
        positions.add_(5)
        actual = fused_ops.rotary_embedding(module, positions, query, key)
        exact(actual[1], module.forward_native(positions, query, key)[1])


def test_operators_are_registered_for_the_platform():
    fused_ops.register_fused_ops("test_key")
    registered = RMSNorm._oot_forward_registry["test_key"]
    assert registered[RMSNorm] is fused_ops.rms_norm
    assert registered[SiluAndMul] is fused_ops.silu_and_mul
    assert registered[RotaryEmbedding] is fused_ops.rotary_embedding
