import math

import pytest
import torch

from sglang_jetspec.heads.format import HeadConfig, expected_tensors
from sglang_jetspec.heads.reference import JetSpecHead, block_ids, block_mask, load_reference_head
from sglang_jetspec.tools.train.export import export_head

BLOCK = 5


def tiny_config(causal=True):
    return HeadConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=128,
        vocab_size=50,
        num_target_layers=6,
        block_size=BLOCK,
        mask_token_id=49,
        target_layer_ids=(0, 2, 4),
        causal=causal,
        draft_vocab_size=None,
        jetspec={},
    )


def random_head(causal=True):
    torch.manual_seed(0)
    head = JetSpecHead(tiny_config(causal))
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1))
    return head.eval()


def random_inputs(context=11, anchors=((3, 7, 11), (1, 2, 9))):
    torch.manual_seed(1)
    anchors = torch.tensor(anchors)
    embedded = torch.randn(len(anchors), anchors.shape[1] * BLOCK, 12)
    return embedded, anchors, torch.randn(len(anchors), context, 36)


def blocks(hidden):
    return hidden.unflatten(1, (-1, BLOCK))


@torch.no_grad()
def forward(head, embedded, anchors, taps):
    return blocks(head(embedded, anchors, head.fuse(taps)))


def golden_row(head, rows, row, anchor, taps):
    """Hidden state of one block row, computed position by position with plain loops."""
    weights = dict(head.named_parameters())
    config = head.config
    seen = BLOCK if not config.causal else row + 1

    def norm(x, weight):
        return x / math.sqrt(float((x * x).mean()) + config.rms_norm_eps) * weight

    def turn(x, position):
        out = torch.empty_like(x)
        half = len(x) // 2
        for i in range(half):
            angle = position / config.rope_theta ** (2 * i / len(x))
            a, b = x[i], x[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    fused = [norm(weights["fc.weight"] @ t, weights["hidden_norm.weight"]) for t in taps[:anchor]]
    states = list(rows)
    for i in range(config.num_hidden_layers):
        get = lambda name, i=i: weights[f"layers.{i}.{name}.weight"]  # noqa: E731
        keyed = fused + [norm(s, get("input_layernorm")) for s in states]
        positions = list(range(anchor)) + [anchor + j for j in range(BLOCK)]
        updated = []
        for j, state in enumerate(states):
            visible = anchor + (j + 1 if config.causal else BLOCK)
            attended = []
            for h in range(config.num_attention_heads):
                kv = h // (config.num_attention_heads // config.num_key_value_heads)
                q_rows = slice(h * config.head_dim, (h + 1) * config.head_dim)
                kv_rows = slice(kv * config.head_dim, (kv + 1) * config.head_dim)
                q = get("self_attn.q_proj")[q_rows] @ keyed[anchor + j]
                q = turn(norm(q, get("self_attn.q_norm")), anchor + j)
                scores = []
                for key, position in zip(keyed[:visible], positions[:visible], strict=True):
                    k = norm(get("self_attn.k_proj")[kv_rows] @ key, get("self_attn.k_norm"))
                    scores.append(q @ turn(k, position) / math.sqrt(config.head_dim))
                shares = torch.stack(scores).softmax(0)
                values = [get("self_attn.v_proj")[kv_rows] @ key for key in keyed[:visible]]
                attended.append(sum(p * v for p, v in zip(shares, values, strict=True)))
            state = state + get("self_attn.o_proj") @ torch.cat(attended)
            inner = norm(state, get("post_attention_layernorm"))
            gate = get("mlp.gate_proj") @ inner
            up = get("mlp.up_proj") @ inner
            updated.append(state + get("mlp.down_proj") @ (gate * torch.sigmoid(gate) * up))
        states = updated
    assert seen <= BLOCK
    return norm(states[row], weights["norm.weight"])


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_forward_equals_a_position_by_position_computation(causal):
    head = random_head(causal)
    embedded, anchors, taps = random_inputs()
    hidden = forward(head, embedded, anchors, taps)
    for sequence, block, row in [(0, 0, 0), (0, 1, 2), (0, 2, 4), (1, 0, 1), (1, 2, 3)]:
        rows = blocks(embedded)[sequence, block]
        anchor = int(anchors[sequence, block])
        expected = golden_row(head, rows, row, anchor, taps[sequence])
        torch.testing.assert_close(hidden[sequence, block, row], expected, rtol=2e-4, atol=2e-4)


def test_parameter_names_and_shapes_are_the_published_ones():
    head = random_head()
    shapes = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    assert shapes == expected_tensors(head.config)


@pytest.mark.parametrize("changed", range(BLOCK))
def test_causal_rows_ignore_later_rows(changed):
    head = random_head()
    embedded, anchors, taps = random_inputs()
    before = forward(head, embedded, anchors, taps)
    edited = blocks(embedded).clone()
    edited[:, :, changed] += 1.0
    after = forward(head, edited.flatten(1, 2), anchors, taps)
    torch.testing.assert_close(after[:, :, :changed], before[:, :, :changed], rtol=0, atol=0)
    assert not torch.allclose(after[:, :, changed:], before[:, :, changed:])


def test_bidirectional_rows_see_later_rows():
    head = random_head(causal=False)
    embedded, anchors, taps = random_inputs()
    edited = blocks(embedded).clone()
    edited[:, :, -1] += 1.0
    before = forward(head, embedded, anchors, taps)
    after = forward(head, edited.flatten(1, 2), anchors, taps)
    assert not torch.allclose(after[:, :, 0], before[:, :, 0])


def test_context_is_visible_strictly_before_the_anchor_position():
    head = random_head()
    embedded, anchors, taps = random_inputs()
    before = forward(head, embedded, anchors, taps)
    edited = taps.clone()
    edited[:, 7] += 1.0  # position 7
    after = forward(head, embedded, anchors, edited)
    hidden = anchors <= 7
    torch.testing.assert_close(after[hidden], before[hidden], rtol=0, atol=0)
    for block in (~hidden).nonzero().tolist():
        assert not torch.allclose(after[tuple(block)], before[tuple(block)])


def test_blocks_do_not_see_each_other():
    head = random_head()
    embedded, anchors, taps = random_inputs()
    before = forward(head, embedded, anchors, taps)
    edited = blocks(embedded).clone()
    edited[:, 1] += 1.0
    after = forward(head, edited.flatten(1, 2), anchors, taps)
    torch.testing.assert_close(after[:, [0, 2]], before[:, [0, 2]], rtol=0, atol=0)


def test_padding_after_a_sequence_changes_nothing():
    head = random_head()
    embedded, anchors, taps = random_inputs()
    padded = torch.cat([taps, torch.full((2, 6, 36), 9.0)], dim=1)
    torch.testing.assert_close(
        forward(head, embedded, anchors, padded),
        forward(head, embedded, anchors, taps),
        rtol=1e-5,
        atol=1e-5,
    )


def test_block_ids_and_mask():
    ids = block_ids(torch.tensor([[4, 5]]), 3, 49)
    assert ids.tolist() == [[4, 49, 49, 5, 49, 49]]
    mask = block_mask(torch.tensor([[1, 2]]), 2, 3, causal=True)[0].int().tolist()
    assert mask == [
        [1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]


def test_exported_head_computes_the_same(tmp_path):
    head = random_head()
    head.load_state_dict({k: v.bfloat16().float() for k, v in head.state_dict().items()})
    export_head(head.state_dict(), head.config, None, tmp_path)
    loaded, draft_token_ids = load_reference_head(tmp_path)
    assert draft_token_ids is None
    assert loaded.config == head.config
    inputs = random_inputs()
    torch.testing.assert_close(forward(loaded, *inputs), forward(head, *inputs), rtol=0, atol=0)
