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
from sglang_jetspec.foresight.drafter import BlockDrafter
from sglang_jetspec.foresight.layers import KeyCache, LayerShape, RowKeys, Seen, causal_rows
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
    final, layers = part(hidden[first], counting(ids), causal_rows(12))
    torch.testing.assert_close(part.logits(final), logits, rtol=1e-4, atol=1e-4)
    if first == 0:
        torch.testing.assert_close(layers[2], hidden[3], rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in part.parameters())


def passed(part, rows, positions, cache):
    """A pass of `part` behind the cached positions, whose keys are then cached too."""
    recorded = RowKeys()
    seen = [cache.before(positions[:, 0], rows.shape[1])]
    final, _ = part(rows, positions, causal_rows(rows.shape[1]), seen, recorded)
    cache.write(positions, recorded)
    return final


@torch.no_grad()
def test_cached_rows_give_what_one_pass_gives_and_stale_rows_are_overwritten(model, ids, states):
    """Rows 8..11 first hold other tokens, as after a rejected draft."""
    hidden, logits = states
    part = TargetSlice.of_target(model, 0)
    cache, positions = KeyCache(part.stack.shape, 4, 2, 16), counting(ids)
    passed(part, hidden[0][:, :8], positions[:, :8], cache)
    passed(part, hidden[0][:, :4].flip(1), positions[:, 8:], cache)
    final = passed(part, hidden[0][:, 8:10], positions[:, 8:10], cache)
    torch.testing.assert_close(part.logits(final), logits[:, 8:10], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_adapter_with_every_layer_of_the_target_is_the_target(model, ids, states):
    hidden, _ = states
    full = tuple(len(s) for s in segments(TAPS))
    assert full == (1, 2)
    adapter = initial_adapter(AdapterConfig(LayerShape.of_target(model), TAPS, full), model)
    true = torch.cat([hidden[1], hidden[3]], dim=-1)
    predicted = predict(adapter, hidden[0], true, 7, 12)
    torch.testing.assert_close(predicted, true[:, 7:], rtol=1e-4, atol=1e-4)


def predict(adapter, embedded, true, front, end, given=()):
    """States of rows front..end behind committed ones.

    given: (start, end) of commits, one after the other; by default all at once.
    """
    positions = torch.arange(end).expand(len(embedded), -1)
    cache = KeyCache(adapter.config.shape, adapter.layers, len(embedded), 16)
    for start, stop in given or [(0, front)]:
        seen = [cache.before(positions[:, start], stop - start)]
        part = slice(start, stop)
        own = causal_rows(stop - start)
        _, keys = adapter(embedded[:, part], positions[:, part], own, seen, given=true[:, part])
        cache.write(positions[:, part], keys)
    seen = [cache.before(positions[:, front], end - front)]
    own = causal_rows(end - front)
    return adapter(embedded[:, front:end], positions[:, front:], own, seen)[0]


@torch.no_grad()
def test_adapter_rows_do_not_see_later_drafts_and_commits_replace_predictions(model, ids, states):
    hidden, _ = states
    torch.manual_seed(3)
    adapter = Adapter(AdapterConfig(LayerShape.of_target(model), TAPS, (1, 1))).eval()
    embedded, true = hidden[0], torch.cat([hidden[1], hidden[3]], dim=-1)
    whole = predict(adapter, embedded, true, 6, 11)
    torch.testing.assert_close(whole[:, :3], predict(adapter, embedded, true, 6, 9))
    in_parts = predict(adapter, embedded, true, 9, 12, given=[(0, 6), (6, 9)])
    torch.testing.assert_close(in_parts, predict(adapter, embedded, true, 9, 12))
    without_truth = predict(adapter, embedded, true, 6, 12)
    assert not torch.allclose(in_parts, without_truth[:, 3:], atol=1e-3)


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
    """A head with random weights, its drafter, random states, and block starts."""
    torch.manual_seed(2)
    config = dataclasses.replace(HEAD, jetspec={"draft_shift": request.param})
    head = JetSpecHead(config).eval()
    embedding, lm_head = torch.randn(VOCAB, 32), torch.randn(VOCAB, 32)
    drafter = BlockDrafter.of_head(head, embedding, lm_head)
    states = torch.randn(2, 20, 64)
    return head, drafter, states, torch.tensor([9, 12])


def draft(drafter, states, starts, block, frozen, refreshed=None, blocks=1):
    """`BlockDrafter.draft` of `blocks` equal blocks a request."""
    positions = torch.arange(states.shape[1]).expand(len(states), -1)
    visible = (positions < starts[:, None])[:, None].expand(-1, blocks * block.shape[1], -1)
    seen = [Seen(drafter.context_keys(states, positions), visible)]
    return drafter.draft(
        block[:, None].expand(-1, blocks, -1),
        starts[:, None].expand(-1, blocks),
        seen,
        frozen[:, None].expand(-1, blocks),
        None if refreshed is None else refreshed.repeat(1, blocks, 1),
    )


def expected_rows(head, drafter, block, starts, states):
    hidden = head(drafter.embed(block), starts[:, None], head.fuse(states))
    hidden = hidden[:, :-1] if head.config.draft_shift else hidden[:, 1:]
    return drafter.logits(hidden).log_softmax(-1).max(-1)


@torch.no_grad()
@pytest.mark.parametrize("blocks", [1, 3])
def test_plain_blocks_equal_the_heads_own_forward(drafting, blocks):
    head, drafter, states, starts = drafting
    block = torch.randint(VOCAB, (2, 6))
    tokens, logprobs = draft(drafter, states, starts, block, torch.zeros(2).long(), None, blocks)
    expected = expected_rows(head, drafter, block, starts, states)
    for index in range(blocks):
        assert torch.equal(tokens[:, index], expected.indices)
        torch.testing.assert_close(logprobs[:, index], expected.values, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("blocks", [1, 2])
def test_frozen_front_is_read_as_states_and_the_block_starts_behind_it(drafting, blocks):
    """The same as a shorter block whose context holds the refreshed states."""
    head, drafter, states, starts = drafting
    block, refreshed = torch.randint(VOCAB, (2, 6)), torch.randn(2, 6, 64)
    frozen = torch.tensor([2, 3])
    tokens, _ = draft(drafter, states, starts, block, frozen, refreshed, blocks)
    for row in range(2):
        start, skip = starts[row], int(frozen[row])
        known = torch.cat([states[row, :start], refreshed[row, :skip]])[None]
        expected = expected_rows(head, drafter, block[None, row, skip:], start[None] + skip, known)
        for index in range(blocks):
            assert torch.equal(tokens[row, index, skip:], expected.indices[0])


@torch.no_grad()
def test_invisible_positions_are_not_seen(drafting):
    _, drafter, states, starts = drafting
    block, zero = torch.randint(VOCAB, (2, 6)), torch.zeros(2).long()
    changed = states.where(torch.arange(20)[:, None] < starts[:, None, None], 100.0)
    one, other = (draft(drafter, s, starts, block, zero) for s in (states, changed))
    torch.testing.assert_close(one, other)


@torch.no_grad()
def test_the_drafter_shares_the_heads_weights(drafting):
    head, drafter, states, starts = drafting
    block, zero = torch.randint(VOCAB, (2, 6)), torch.zeros(2).long()
    before, _ = draft(drafter, states, starts, block, zero)
    for parameter in head.layers.parameters():
        parameter.normal_()
    after, _ = draft(drafter, states, starts, block, zero)
    assert not torch.equal(before, after)
    assert torch.equal(after[:, 0], expected_rows(head, drafter, block, starts, states).indices)
