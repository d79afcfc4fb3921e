"""Adapter training: batches, loss, learning, resuming, export."""

import dataclasses
import json

import pytest
import torch

from sglang_jetspec.foresight.adapter import load_adapter
from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.foresight import train_adapter
from sglang_jetspec.tools.foresight.adapter_batches import (
    reach_weights,
    training_mask,
)
from sglang_jetspec.tools.foresight.adapter_loss import weighted_kl
from sglang_jetspec.tools.foresight.config import AdapterTrainConfig
from sglang_jetspec.tools.foresight.train_adapter import AdapterRun, run
from sglang_jetspec.tools.train.checkpoint import list_checkpoints, load_checkpoint
from sglang_jetspec.tools.train.export import export_head


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def adapter_config(corpus, tmp_path):
    """A run of a second over the corpus, for a head of blocks of 6 that reads layers 1 and 2."""
    shape = HeadConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=256,
        vocab_size=None,
        num_target_layers=4,
        block_size=6,
        mask_token_id=3,
        target_layer_ids=(1, 2),
        causal=True,
        draft_vocab_size=None,
        jetspec={"token_input": True},
    )
    export_head(JetSpecHead(shape).state_dict(), shape, None, tmp_path / "head")

    def make(**changes):
        defaults = {
            "target": corpus / "target",
            "head": tmp_path / "head",
            "prompts": corpus / "prompts.jsonl",
            "answers": corpus / "answers.jsonl",
            "out": tmp_path / "run",
            "layers_per_module": (1, 1),
            "steps": 4,
            "sequences_per_step": 2,
            "anchors_per_sequence": 3,
            "learning_rate": 1e-3,
            "held_out_share": 0.25,
            "bf16": False,
            "log_every": 2,
        }
        return AdapterTrainConfig(**{**defaults, **changes})

    return make


def test_rows_see_what_precedes_them():
    mask = training_mask(torch.tensor([[1, 3]]), rows=2, context=3)[0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 1],
    ]


def test_reach_weights_are_the_root_of_the_chance_to_get_there():
    chances = torch.tensor([[0.3, 0.25, 1.0, 0.04]])
    valid = torch.tensor([[True, True, True, True]])
    found = reach_weights(chances.log(), valid, kappa=0.5)
    expected = torch.tensor([[1.0, 0.5, 0.5, 0.1]])
    torch.testing.assert_close(found, expected / 2.1)
    cut = reach_weights(chances.log(), torch.tensor([[True, True, False, False]]), 0.5)
    torch.testing.assert_close(cut, torch.tensor([[1.0, 0.5, 0, 0]]) / 1.5)


@torch.no_grad()
def test_batches_hold_the_text_its_states_and_its_chances(adapter_config):
    state = AdapterRun(adapter_config())
    source, store = state.source, state.source.store
    picked = (1, 4)
    first = torch.tensor([store.examples[i].prompt_length for i in picked])
    batch = source.assemble(picked, first[:, None] + torch.tensor([0, 9, 20]))
    front = batch.context
    assert front == first.max() + 20
    for row, index in enumerate(picked):
        start, text = store.offsets[index], torch.tensor(store.examples[index].token_ids)
        ids, positions = batch.ids[row, front:], batch.positions[row, front:]
        assert torch.equal(ids, text[positions])
        assert torch.equal(batch.taps[row, front:], store.taps[start + positions])
        # The final state of a row is the one that predicts the row's successor.
        law = (batch.finals[row].float() @ state.decoder.lm_head.T).log_softmax(-1)
        chances = law[torch.arange(18), text[positions + 1]]
        torch.testing.assert_close(chances, source.logprobs[start + positions + 1])
    torch.testing.assert_close(batch.weights.view(2, 3, 6).sum(-1), torch.ones(2, 3))


@torch.no_grad()
def test_true_states_leave_no_loss(adapter_config):
    """An adapter of all the target's layers predicts its bf16 states up to their rounding."""
    state = AdapterRun(adapter_config(layers_per_module=(2, 1)))
    loss = state.loss(state.batch_at(0))
    assert loss.cosine.max() < 1e-4
    assert loss.kl < 1e-3
    assert loss.agreement > 0.97
    rough = AdapterRun(adapter_config(layers_per_module=(1, 1)))
    assert rough.loss(rough.batch_at(0)).kl > 10 * loss.kl


def test_chunked_divergence_is_the_plain_one():
    torch.manual_seed(0)
    hidden, teacher = torch.randn(700, 8, requires_grad=True), torch.randn(700, 8)
    lm_head, weights = torch.randn(30, 8), torch.rand(700)
    kl, agreement = weighted_kl(hidden, teacher, lm_head, weights)
    (gradient,) = torch.autograd.grad(kl, hidden)
    log_q, log_p = ((x @ lm_head.T).log_softmax(-1) for x in (hidden, teacher))
    plain = ((log_p.exp() * (log_p - log_q)).sum(-1) * weights).sum()
    (expected,) = torch.autograd.grad(plain, hidden)
    torch.testing.assert_close(kl, plain)
    torch.testing.assert_close(gradient, expected)
    same = (log_q.argmax(-1) == log_p.argmax(-1)).float() @ weights
    torch.testing.assert_close(agreement, same)


def test_training_lowers_the_loss_and_exports(adapter_config):
    config = adapter_config(steps=60, log_every=20)
    summary = run(config)
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert summary["steps"] == 60
    adapter = load_adapter(config.out / "adapter")
    assert adapter.config.layers_per_module == (1, 1)
    assert sum(p.numel() for p in adapter.parameters()) == summary["parameters"]


def test_interrupted_run_ends_where_an_uninterrupted_one_does(
    adapter_config, tmp_path, monkeypatch
):
    whole = adapter_config(out=tmp_path / "whole")
    run(whole)
    resumed = adapter_config(out=tmp_path / "resumed", checkpoint_minutes=0.0)
    batch_at = AdapterRun.batch_at

    def interrupted(self, step):
        if step == 2:
            raise KeyboardInterrupt
        return batch_at(self, step)

    monkeypatch.setattr(train_adapter.AdapterRun, "batch_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(resumed)
    assert load_checkpoint(list_checkpoints(resumed.out)[-1])["step"] == 2
    monkeypatch.setattr(train_adapter.AdapterRun, "batch_at", batch_at)
    run(resumed)
    ends = [load_checkpoint(list_checkpoints(c.out)[-1]) for c in (whole, resumed)]
    assert ends[0]["step"] == ends[1]["step"] == 4
    for name, weight in ends[0]["adapter"].items():
        torch.testing.assert_close(ends[1]["adapter"][name], weight, rtol=0, atol=0)


def test_flags_have_the_fields_names(adapter_config, capsys):
    config = adapter_config(steps=1)
    flags = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags += [f"--{name}", str(value)]
    train_adapter.main(flags)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 1
