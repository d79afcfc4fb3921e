"""Layers, decoder, adapter and drafter against Hugging Face and full recomputation."""

import dataclasses

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sglang_jetspec.foresight.adapter import (
    Adapter,
    AdapterConfig,
    default_layers,
    initial_adapter,
    load_adapter,
    save_adapter,
    segments,
)
from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.drafter import BlockDrafter, DraftContext
from sglang_jetspec.foresight.layers import LayerShape
from sglang_jetspec.heads.format import HeadConfig, HeadError
from sglang_jetspec.heads.reference import JetSpecHead

VOCAB, TAPS = 50, (0, 2)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def model(request):
    torch.manual_seed(0)
    if request.param == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()  # biases, no query and key norms


@pytest.fixture(scope="module")
def ids():
    return torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def states(model, ids):
    """Hugging Face's states: before layer 0, after each layer; and the logits."""
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    return out.hidden_states, out.logits


def counting(ids):
    return torch.arange(ids.shape[1]).expand_as(ids)


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 3])
def test_slice_continues_the_target(model, ids, states, first):
    hidden, logits = states
    part = TargetSlice.of_target(model, first)
    cache = part.make_cache(2, 16)
    final, layers = part(hidden[first], counting(ids), cache)
    torch.testing.assert_close(part.logits(final), logits, rtol=1e-4, atol=1e-4)
    if first == 0:
        torch.testing.assert_close(layers[2], hidden[3], rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in part.parameters())


@torch.no_grad()
def test_cached_rows_give_what_one_pass_gives_and_stale_rows_are_overwritten(model, ids, states):
    """Rows 8..11 first hold other tokens, as after a rejected draft."""
    hidden, logits = states
    part = TargetSlice.of_target(model, 0)
    cache, positions = part.make_cache(2, 16), counting(ids)
    part(hidden[0][:, :8], positions[:, :8], cache)
    part(hidden[0][:, :4].flip(1), positions[:, 8:], cache)
    final, _ = part(hidden[0][:, 8:10], positions[:, 8:10], cache)
    torch.testing.assert_close(part.logits(final), logits[:, 8:10], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_adapter_with_every_layer_of_the_target_is_the_target(model, ids, states):
    hidden, _ = states
    full = tuple(len(s) for s in segments(TAPS))
    assert full == (1, 2)
    adapter = initial_adapter(AdapterConfig(LayerShape.of_target(model), TAPS, full), model)
    cache, positions = adapter.make_cache(2, 16), counting(ids)
    true = torch.cat([hidden[1], hidden[3]], dim=-1)
    adapter.commit(hidden[0][:, :7], true[:, :7], positions[:, :7], cache)
    predicted = adapter(hidden[0][:, 7:], positions[:, 7:], cache)
    torch.testing.assert_close(predicted, true[:, 7:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_adapter_rows_do_not_see_later_drafts_and_commits_replace_predictions(model, ids, states):
    hidden, _ = states
    torch.manual_seed(3)
    adapter = Adapter(AdapterConfig(LayerShape.of_target(model), TAPS, (1, 1))).eval()
    true, positions = torch.cat([hidden[1], hidden[3]], dim=-1), counting(ids)
    embedded = hidden[0]

    def predict(front, rows, tokens):
        cache = adapter.make_cache(2, 16)
        adapter.commit(embedded[:, :front], true[:, :front], positions[:, :front], cache)
        return cache, adapter(tokens, positions[:, front : front + rows], cache)

    cache, whole = predict(6, 5, embedded[:, 6:11])
    _, part = predict(6, 3, embedded[:, 6:9])
    torch.testing.assert_close(whole[:, :3], part)
    adapter.commit(embedded[:, 6:9], true[:, 6:9], positions[:, 6:9], cache)
    after = adapter(embedded[:, 9:], positions[:, 9:], cache)
    _, fresh = predict(9, 3, embedded[:, 9:])
    torch.testing.assert_close(after, fresh)
    _, without_truth = predict(6, 6, embedded[:, 6:])
    assert not torch.allclose(after, without_truth[:, 3:], atol=1e-3)


def test_sizes_of_published_adapters():
    """Twelve target-shaped layers are the published 2.32B (Qwen3-8B)."""
    layers = default_layers((1, 9, 17, 25, 33))
    assert layers == (1, 2, 3, 3, 3)
    shape = LayerShape(4096, 12288, 32, 8, 128, 1e-6, 1e6, qk_norm=True)
    with torch.device("meta"):
        adapter = Adapter(AdapterConfig(shape, (1, 9, 17, 25, 33), layers))
    assert sum(p.numel() for p in adapter.parameters()) == 2_315_357_184


def test_adapter_round_trips_and_refuses_what_does_not_fit(model, tmp_path):
    config = AdapterConfig(LayerShape.of_target(model), TAPS, (1, 2))
    adapter = initial_adapter(config, model)
    save_adapter(adapter, tmp_path)
    loaded = load_adapter(tmp_path)
    assert loaded.config == config
    for name, value in adapter.state_dict().items():
        expected = value.to(torch.bfloat16).float()
        torch.testing.assert_close(loaded.state_dict()[name], expected)
    text = (tmp_path / "config.json").read_text()
    damaged = text.replace('"qk_norm": true', '"qk_norm": false').replace(
        '"attention_bias": true', '"attention_bias": false'
    )
    (tmp_path / "config.json").write_text(damaged)
    with pytest.raises(HeadError, match="self_attn"):
        load_adapter(tmp_path)
    (tmp_path / "config.json").write_text('{"layers": 2}')
    with pytest.raises(HeadError, match="train-adapter"):
        load_adapter(tmp_path)
    with pytest.raises(HeadError, match="one module of at least one layer"):
        AdapterConfig(config.shape, TAPS, (1,))


HEAD = HeadConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=64,
    vocab_size=VOCAB,
    num_target_layers=4,
    block_size=6,
    mask_token_id=0,
    target_layer_ids=TAPS,
    causal=True,
    draft_vocab_size=None,
    jetspec={},
)


@pytest.fixture(params=[False, True], ids=["in_place", "shift"])
def drafting(request):
    """A drafter with random weights, a context of random states, and block starts."""
    torch.manual_seed(2)
    config = dataclasses.replace(HEAD, jetspec={"draft_shift": request.param})
    head = JetSpecHead(config).eval()
    drafter = BlockDrafter(head, torch.randn(VOCAB, 32), torch.randn(VOCAB, 32))
    states = torch.randn(2, 20, 64)
    starts = torch.tensor([9, 12])
    valid = torch.arange(20) < starts[:, None]
    return drafter, states, DraftContext(head.fuse(states), valid), starts


@torch.no_grad()
def test_plain_block_equals_the_heads_own_forward(drafting):
    drafter, _, context, starts = drafting
    block = torch.randint(VOCAB, (2, 6))
    tokens, logprobs = drafter.draft(context, starts, block, torch.zeros(2).long(), None)
    hidden = drafter.head(drafter.embedding[block], starts[:, None], context.fused)
    hidden = hidden[:, :-1] if drafter.head.config.draft_shift else hidden[:, 1:]
    expected = (hidden @ drafter.lm_head.T).log_softmax(-1).max(-1)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(logprobs, expected.values, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_frozen_front_is_read_as_states_and_the_block_starts_behind_it(drafting):
    """The same as a shorter block whose context holds the refreshed states."""
    drafter, states, context, starts = drafting
    block, refreshed = torch.randint(VOCAB, (2, 6)), torch.randn(2, 6, 64)
    frozen = torch.tensor([2, 3])
    tokens, _ = drafter.draft(context, starts, block, frozen, refreshed)
    for row in range(2):
        start, skip = int(starts[row]), int(frozen[row])
        known = torch.cat([states[row, :start], refreshed[row, :skip]])
        fused = drafter.head.fuse(known)[None]
        embedded = drafter.embedding[block[row, skip:]][None]
        hidden = drafter.head(embedded, torch.tensor([[start + skip]]), fused)
        hidden = hidden[:, :-1] if drafter.head.config.draft_shift else hidden[:, 1:]
        expected = (hidden @ drafter.lm_head.T).argmax(-1)[0]
        assert torch.equal(tokens[row, skip:], expected)


@torch.no_grad()
def test_missing_positions_are_not_seen(drafting):
    drafter, _, context, starts = drafting
    block, zero = torch.randint(VOCAB, (2, 6)), torch.zeros(2).long()
    gap = starts[:, None] - torch.arange(1, 4)
    stale = context.without(gap, torch.ones_like(gap, dtype=torch.bool))
    before = drafter.draft(stale, starts, block, zero, None)
    changed = DraftContext(context.fused.clone(), stale.valid)
    changed.fused.scatter_(1, gap.unsqueeze(-1).expand(-1, -1, 32), 100.0)
    after = drafter.draft(changed, starts, block, zero, None)
    torch.testing.assert_close(before, after)
    assert context.valid.sum() == starts.sum()
    assert stale.valid.sum() == starts.sum() - 6
