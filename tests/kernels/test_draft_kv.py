"""`draft_kv` against its double-precision definition, in Triton's interpreter or on a GPU."""

import pytest
import torch

from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import JetSpecHead, rotary_table, rotate
from sglang_jetspec.kernels.draft_kv.kernel import ContextWeights, draft_kv
from sglang_jetspec.kernels.draft_kv.naive import draft_kv as oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
POSITIONS = 5000


def cos_sin_table(size):
    positions = torch.arange(POSITIONS).unsqueeze(0)
    cos, sin = rotary_table(positions, size, 1e6)
    return torch.cat([cos[0, :, : size // 2], sin[0, :, : size // 2]], -1).to(DEVICE)


TABLES = {size: cos_sin_table(size) for size in (32, 64, 128, 256)}


def relative_error(got, expected):
    return float((got.double() - expected).abs().max() / expected.abs().max())


def make_weights(generator, dtype, hidden, taps, layers, heads, size):
    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)

    rows = heads * size
    return ContextWeights(
        fc=normal(hidden, taps * hidden, scale=(taps * hidden) ** -0.5),
        norm=normal(hidden) + 1,
        keys=[normal(rows, hidden, scale=hidden**-0.5) for _ in range(layers)],
        values=[normal(rows, hidden, scale=hidden**-0.5) for _ in range(layers)],
        key_norms=[normal(size) + 1 for _ in range(layers)],
        cos_sin=TABLES[size],
        context_eps=1e-6,
        head_eps=1e-6,
    )


@pytest.mark.parametrize("seed", range(200))
def test_random_heads(seed):
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    dtype = (torch.float32, torch.bfloat16, torch.float32, torch.float16)[seed % 4]
    n, taps, (layers, heads) = integer(1, 20), integer(1, 3), ((1, 1), (1, 2), (2, 1))[seed % 3]
    n = 70 if seed % 100 == 0 else n
    hidden, size = 8 * integer(2, 12), (32, 64, 32, 128, 256)[seed % 5]
    weights = make_weights(generator, dtype, hidden, taps, layers, heads, size)
    features = torch.randn(n, taps * hidden, generator=generator).to(DEVICE, dtype)
    positions = torch.randint(0, POSITIONS, (n,), generator=generator).to(DEVICE)
    slots = (torch.randperm(n + 9, generator=generator)[:n] + 1).to(DEVICE)
    shape = (2, layers, n + 10, heads, size)
    pools = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    expected = torch.full(shape, float("nan"), dtype=torch.float64, device=DEVICE)
    oracle(features, positions, slots, weights, expected[0], expected[1])
    addresses = weights.addresses(pools[0], pools[1])
    draft_kv(features, positions, slots, weights, addresses, heads, size)
    assert torch.equal(pools.isnan(), expected.isnan())
    for got, exact in zip(pools, expected, strict=True):
        assert relative_error(got[:, slots], exact[:, slots]) <= TOLERANCE[dtype]


def test_weights_and_pools_read_by_address_are_checked():
    weights = make_weights(torch.Generator(), torch.float32, 16, 1, 2, 2, 32)
    pools = torch.zeros(2, 2, 5, 2, 32, device=DEVICE)
    with pytest.raises(ValueError, match=r"value pool of layer 0: .*strides \(32, 64, 1\)"):
        weights.addresses(pools[0], pools[1].transpose(1, 2))
    with pytest.raises(ValueError, match=r"key pool of layer 0: torch\.float16"):
        weights.addresses(pools[0].half(), pools[1])


def test_definition_is_the_reference_heads():
    """The oracle's K and V are those the trainer's head computes of a context."""
    config = HeadConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=4096,
        vocab_size=99,
        block_size=4,
        mask_token_id=1,
        target_layer_ids=(0, 1),
        num_target_layers=4,
        causal=True,
        draft_vocab_size=None,
        jetspec={},
    )
    torch.manual_seed(3)
    head = JetSpecHead(config).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(std=0.3)
    attentions = [layer.self_attn for layer in head.layers]
    weights = ContextWeights(
        head.fc.weight,
        head.hidden_norm.weight,
        [a.k_proj.weight for a in attentions],
        [a.v_proj.weight for a in attentions],
        [a.k_norm.weight for a in attentions],
        TABLES[32].cpu(),
        1e-6,
        1e-6,
    )
    features, positions = torch.randn(5, 128).double(), torch.tensor([0, 9, 3, 700, 2])
    pools = torch.zeros(2, 2, 5, 2, 32, dtype=torch.float64)
    oracle(features, positions, torch.arange(5), weights, pools[0], pools[1])
    context = head.fuse(features)
    cos, sin = rotary_table(positions.unsqueeze(0), 32, 1e6)
    for layer, attention in enumerate(attentions):
        keys = attention.k_norm(attention.k_proj(context).view(1, 5, 2, 32)).transpose(1, 2)
        keys = rotate(keys, cos, sin).transpose(1, 2)[0]
        assert relative_error(pools[0, layer], keys) < 1e-6
        values = attention.v_proj(context).view(5, 2, 32)
        assert relative_error(pools[1, layer], values.detach()) < 1e-6
