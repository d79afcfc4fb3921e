import dataclasses
import json

import pytest
import torch

from sglang_jetspec.heads.format import load_head_config
from sglang_jetspec.tools.train.block_inputs import MaskInputs, TokenInputs, block_inputs
from sglang_jetspec.tools.train.loss import block_hidden
from sglang_jetspec.tools.train.run import TrainingRun, run

SIZE = 16
TEXT = torch.arange(100, 140)


def fill(inputs, count, seed=0, anchor=8):
    generator = torch.Generator().manual_seed(seed)
    return inputs.fill(TEXT, torch.full((count,), anchor), generator)


@pytest.mark.parametrize("shift", [False, True])
def test_clean_prefixes_follow_the_schedule(shift):
    """None with 0.25, the other lengths equally; noise only from the text up to the anchor."""
    ids, hidden = fill(TokenInputs(SIZE, shift), 20_000)
    assert (ids[:, 0] == TEXT[8]).all()
    clean = (ids[:, 1:] == TEXT[9 : 8 + SIZE]).long().cumprod(1).sum(1)
    shares = torch.bincount(clean, minlength=SIZE) / len(clean)
    longest = SIZE - 1 if shift else SIZE - 2
    assert shares[0].item() == pytest.approx(0.25, abs=0.015)
    each = 0.75 / longest
    assert shares[1 : longest + 1].tolist() == pytest.approx([each] * longest, abs=0.01)
    noise = ids[torch.arange(SIZE) > clean[:, None]]
    assert noise.min() == 100
    assert noise.max() == 108
    counts = torch.bincount(noise - 100)
    assert (counts / counts.sum() - 1 / 9).abs().max() < 0.01
    shown = torch.arange(SIZE) <= clean[:, None]
    assert torch.equal(hidden, torch.ones_like(shown) if shift else ~shown)


def test_shares_of_zero_and_one():
    ids, _ = fill(TokenInputs(SIZE, True, noised_share=1.0), 500)
    assert (ids[:, 1:] <= 108).all()
    ids, _ = fill(TokenInputs(SIZE, True, noised_share=0.0), 500)
    assert (ids[:, 1] == 109).all()


def test_prefix_ends_with_the_text():
    ids, _ = fill(TokenInputs(SIZE, True, noised_share=0.0), 200, anchor=len(TEXT) - 3)
    assert ids.max() == 139
    assert (ids[:, 3:] <= 137).all()


def test_masks():
    ids, hidden = fill(MaskInputs(SIZE, 7), 2)
    assert ids.tolist() == [[108, *[7] * 15]] * 2
    assert hidden.all()


@torch.no_grad()
def test_no_shifted_slot_sees_its_own_answer(train_config, accelerator):
    """Changing the token at anchor + i leaves slot i as it is."""
    config = train_config(token_input=True, draft_shift=True, noised_share=0.0)
    state = TrainingRun(config, accelerator)
    batch, size = state.batch_at(0), config.block_size
    before = block_hidden(state.model.head, state.model.target, batch)
    assert batch.supervised.any()
    seen = torch.zeros_like(batch.supervised)
    for slot in range(1, size):
        inputs = batch.inputs.clone()
        inputs[..., slot] = (inputs[..., slot] + 1) % 600
        after = block_hidden(
            state.model.head, state.model.target, dataclasses.replace(batch, inputs=inputs)
        )
        changed = (after != before).any(-1)
        assert not (changed[..., slot] & batch.supervised[..., slot]).any()
        seen |= changed
    assert (seen & batch.supervised).any()  # later slots do read it


def test_a_token_head_is_exported_as_one_and_held_out_blocks_are_noised(train_config, accelerator):
    config = train_config(token_input=True, draft_shift=True, draft_vocab_size=None)
    run(config)
    head = load_head_config(config.out / "head")
    assert head.token_input
    assert head.draft_shift
    assert block_inputs(head) == TokenInputs(config.block_size, True, 1.0)


def test_held_out_blocks_are_those_of_a_first_pass(train_config, accelerator):
    runs = [
        TrainingRun(train_config(token_input=True, noised_share=share), accelerator)
        for share in (0.0, 1.0)
    ]
    for one, other in zip(*(r.held_out().batches for r in runs), strict=True):
        assert torch.equal(one.inputs, other.inputs)
    one, other = (r.batch_at(0) for r in runs)
    assert torch.equal(one.anchors, other.anchors)
    assert not torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize("shift", [False, True])
def test_training_a_token_head_lowers_its_loss(train_config, shift):
    config = train_config(
        token_input=True, draft_shift=shift, steps=60, log_every=10, learning_rate=3e-3
    )
    run(config)
    rows = map(json.loads, (config.out / "log.jsonl").read_text().splitlines())
    losses = [row["kl"] for row in rows if "kl" in row]
    assert losses[-1] < 0.85 * losses[0]
