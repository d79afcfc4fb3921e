"""The fused write of context KV over a loaded head's modules, against the trainer's head."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_jetspec.heads.context_kv import ContextKernel
from sglang_jetspec.heads.reference import RMSNorm, rotary_table, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, TAPS, HEADS, KV_HEADS, SIZE, LAYERS = 48, 3, 4, 2, 32, 2


def attention():
    """What the kernel reads of SGLang's DFlashAttention."""
    cos, sin = rotary_table(torch.arange(100).unsqueeze(0), SIZE, 1e4)
    table = torch.cat([cos[0, :, : SIZE // 2], sin[0, :, : SIZE // 2]], -1).to(DEVICE)
    norm = SimpleNamespace(weight=torch.rand(SIZE, device=DEVICE), variance_epsilon=1e-5)
    rows = (HEADS + 2 * KV_HEADS) * SIZE
    return SimpleNamespace(
        qkv_proj=SimpleNamespace(weight=torch.randn(rows, HIDDEN, device=DEVICE), bias=None),
        q_size=HEADS * SIZE,
        kv_size=KV_HEADS * SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        k_norm=norm,
        v_scale=None,
        use_gemma_norm=False,
        rotary_emb=SimpleNamespace(cos_sin_cache=table, rotary_dim=SIZE, is_neox_style=True),
    )


def model():
    torch.manual_seed(0)
    return SimpleNamespace(
        config=SimpleNamespace(),
        fc=nn.Linear(TAPS * HIDDEN, HIDDEN, bias=False).to(DEVICE).requires_grad_(False),
        hidden_norm=SimpleNamespace(
            weight=torch.rand(HIDDEN, device=DEVICE), variance_epsilon=1e-6
        ),
        layers=[SimpleNamespace(self_attn=attention()) for _ in range(LAYERS)],
    )


def kv_pool(dtype=torch.float32, layout="nhd"):
    made = torch.zeros(2, LAYERS, 30, KV_HEADS, SIZE, device=DEVICE, dtype=dtype)
    return SimpleNamespace(
        k_buffer=list(made[0]),
        v_buffer=list(made[1]),
        kv_cache_layout=layout,
        dtype=dtype,
        data_ptrs=torch.zeros(2 * LAYERS),
    )


def normed(x, norm):
    made = RMSNorm(x.shape[-1], norm.variance_epsilon)
    made.weight.data = norm.weight
    return made(x).detach()


def test_writes_what_the_head_computes():
    head, pool = model(), kv_pool()
    features = torch.randn(5, TAPS * HIDDEN, device=DEVICE)
    positions = torch.tensor([3, 0, 99, 41, 7], device=DEVICE)
    slots = torch.tensor([29, 4, 11, 5, 6], device=DEVICE)
    kernel = ContextKernel.of(head)
    assert kernel.takes(features, pool)
    kernel.write(features, positions, slots, pool)
    context = normed(head.fc(features), head.hidden_norm)
    cos, sin = rotary_table(positions.unsqueeze(0), SIZE, 1e4)
    for layer in range(LAYERS):
        one = head.layers[layer].self_attn
        qkv = (context @ one.qkv_proj.weight.T).view(1, 5, -1, SIZE)
        key = normed(qkv[:, :, HEADS : HEADS + KV_HEADS], one.k_norm).transpose(1, 2)
        key = rotate(key, cos, sin).transpose(1, 2)[0]
        torch.testing.assert_close(pool.k_buffer[layer][slots], key, rtol=1e-4, atol=1e-4)
        value = qkv[0, :, HEADS + KV_HEADS :]
        torch.testing.assert_close(pool.v_buffer[layer][slots], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("v_scale", 0.5),
        ("use_gemma_norm", True),
        ("head_dim", 48),
        ("k_norm", SimpleNamespace(weight=torch.rand(SIZE).half(), variance_epsilon=1e-5)),
    ],
)
def test_leaves_other_attention_to_sglang(field, value):
    head = model()
    setattr(head.layers[-1].self_attn, field, value)
    assert ContextKernel.of(head) is None


def test_leaves_other_weights_and_pools_to_sglang():
    head = model()
    head.layers[0].self_attn.rotary_emb.is_neox_style = False
    assert ContextKernel.of(head) is None
    head = model()
    head.fc = nn.Linear(TAPS * HIDDEN, HIDDEN, device=DEVICE)
    assert ContextKernel.of(head) is None
    kernel, features = ContextKernel.of(model()), torch.zeros(300, TAPS * HIDDEN, device=DEVICE)
    assert not kernel.takes(features, kv_pool())
    assert not kernel.takes(features[:4], kv_pool(torch.bfloat16))
    assert not kernel.takes(features[:4], kv_pool(layout="hnd"))
    assert kernel.takes(features[:4], kv_pool())
