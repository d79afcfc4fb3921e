import json
import sys
from importlib import metadata

import msgspec
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from msgspec.structs import replace
from safetensors.torch import load_file

from sglang_jetspec.heads.format import check_tensors, load_head_config
from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.export_head import newest_checkpoint
from sglang_jetspec.tools.train.checkpoint import list_checkpoints, load_checkpoint
from sglang_jetspec.tools.train.export import export_checkpoint, published_weights
from sglang_jetspec.tools.train.loop import averages, learning_rate
from sglang_jetspec.tools.train.loss import block_hidden, chain_acceptance
from sglang_jetspec.tools.train.run import TrainingRun, main, run


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(config, key):
    lines = (config.out / "log.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def test_run_from_the_command_line_exports_a_head(train_config, tmp_path, capsys):
    config = train_config()
    values = msgspec.to_builtins(config, enc_hook=str)
    settings = {name: value for name, value in values.items() if value is not None}
    settings.pop("out")
    (tmp_path / "run.json").write_text(json.dumps(settings | {"steps": 9}))
    main(["--config", str(tmp_path / "run.json"), "--out", str(config.out), "--steps", "6"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 6
    assert summary["train_examples"] + summary["held_out_examples"] == 12
    head = load_head_config(config.out / "head")
    check_tensors(config.out / "head", head)
    assert head.causal
    assert head.target_layer_ids == (0, 2)
    assert head.block_size == 5
    assert [row["step"] for row in rows(config, "loss")] == [2, 4, 6]
    assert len(rows(config, "loss")[0]["accuracy"]) == 4
    measured = rows(config, "acceptance_length")
    assert [row["step"] for row in measured] == [4, 6]
    assert all(1 <= measured[-1]["acceptance_length"][tree] <= 5 for tree in ("chain4", "tree6"))
    assert measured[-1]["held_out_kl"] > 0


def test_head_folder_says_how_it_was_made(train_config):
    config = train_config()
    run(config)
    provenance = json.loads((config.out / "head" / "run.json").read_text())
    (launch,) = provenance["launches"]
    assert launch["argv"] == sys.argv
    assert launch["settings"]["learning_rate"] == 1e-3
    assert launch["settings"]["seed"] == 0
    assert launch["versions"]["torch"] == metadata.version("torch")
    card = ModelCard.load(config.out / "head" / "README.md")
    assert card.data.base_model.endswith("target")
    assert "| learning_rate | 0.001 |" in card.text
    assert "| step | forward KL | chain4 | tree6 |" in card.text
    assert "Sources: not named. Licences: MIT." in card.text
    image = (config.out / "head" / "curves.png").read_bytes()
    assert image.startswith(b"\x89PNG")


def test_resuming_with_other_settings_is_refused(train_config):
    config = train_config(steps=1)
    run(config)
    run(replace(config, steps=2, log_every=1, dropout=0.1))
    with pytest.raises(ValueError, match=r"^anchors_per_sequence is 4, the run in .* has 3"):
        run(replace(config, anchors_per_sequence=4))
    launches = json.loads((config.out / "run.json").read_text())["launches"]
    assert len(launches) == 2


def test_online_features_equal_cached_ones(train_config, accelerator, tmp_path):
    config = train_config()
    cached = TrainingRun(config, accelerator)
    online = TrainingRun(replace(config, features="online"), accelerator)
    pairs = zip(cached.features.fetch([3, 0]), online.features.fetch([3, 0]), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(other.taps, one.taps, rtol=0.02, atol=5e-3)
        torch.testing.assert_close(other.finals, one.finals, rtol=0.02, atol=0.05)


def test_online_features_train_as_cached_ones_do(train_config, tmp_path):
    cached = train_config(steps=3, log_every=1, held_out_share=0.0)
    run(cached)
    online = replace(cached, out=tmp_path / "online", features="online")
    run(online)
    assert not (online.out / "features").exists()
    for one, other in zip(rows(cached, "loss"), rows(online, "loss"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.1)


@pytest.mark.parametrize("objective", ["sft", "reverse_kl"])
def test_other_objectives_and_corpus_answers(train_config, objective):
    config = train_config(
        steps=40,
        log_every=10,
        learning_rate=3e-3,
        schedule="constant",
        objective=objective,
        loss_decay_gamma=3.0,
        data="corpus",
        answers=None,
    )
    run(config)
    losses = [row["loss"] for row in rows(config, "loss")]
    assert losses[-1] < 0.92 * losses[0]
    assert all(row["lr"] == pytest.approx(3e-3) for row in rows(config, "loss")[1:])


def test_training_lowers_the_loss(train_config):
    config = train_config(steps=60, log_every=10, learning_rate=3e-3)
    run(config)
    losses = [row["loss"] for row in rows(config, "loss")]
    assert losses[-1] < 0.8 * losses[0]


def test_only_the_newest_checkpoints_are_kept(train_config):
    config = train_config(checkpoint_minutes=0.0, keep_checkpoints=2)
    run(config)
    assert [path.name for path in list_checkpoints(config.out)] == [
        "checkpoint-0000005.pt",
        "checkpoint-0000006.pt",
    ]


def test_features_of_other_taps_are_refused(train_config, tmp_path):
    config = train_config(steps=1, features_dir=tmp_path / "shared")
    run(config)
    run(replace(config, out=tmp_path / "again", seed=1))
    other = replace(config, out=tmp_path / "other", target_layer_ids=(1, 2))
    with pytest.raises(ValueError, match="other examples or taps"):
        run(other)


def test_exported_head_reads_raw_taps_as_the_trained_one_reads_scaled(
    train_config, accelerator, tmp_path
):
    config = train_config(steps=2)
    run(config)
    state = TrainingRun(config, accelerator)
    head = state.model.head
    checkpoint = newest_checkpoint(config.out)
    head.load_state_dict(load_checkpoint(checkpoint)["head"])
    raw = state.features.fetch([0])[0].taps[:50].float()
    expected = head.fuse(raw / state.scales)
    export_checkpoint(checkpoint, tmp_path / "exported")
    loaded, draft_token_ids = load_reference_head(tmp_path / "exported")
    torch.testing.assert_close(loaded.fuse(raw), expected, rtol=3e-2, atol=3e-2)
    assert torch.equal(draft_token_ids, state.draft_token_ids)
    head.load_state_dict(published_weights(head.state_dict(), state.scales))
    torch.testing.assert_close(head.fuse(raw), expected, rtol=1e-4, atol=1e-4)


def test_a_head_exported_imported_and_exported_again_is_equal(train_config, tmp_path):
    first = train_config(steps=2, draft_vocab_size=40)
    run(first)
    exported = first.out / "head"
    settings = {"out": tmp_path / "second", "init_from": str(exported)}
    left_out = ("target_layer_ids", "draft_layers", "block_size", "mask_token_id")
    settings |= dict.fromkeys(left_out)
    second = train_config(steps=0, **settings)
    run(second)
    for name in ("config.json", "model.safetensors"):
        assert (second.out / "head" / name).read_bytes() == (exported / name).read_bytes(), name
    before = load_file(exported / "model.safetensors")
    continued = train_config(steps=2, learning_rate=1e-4, **settings)
    run(continued)
    after = load_file(continued.out / "head" / "model.safetensors")
    assert not torch.equal(after["fc.weight"], before["fc.weight"])
    torch.testing.assert_close(after["fc.weight"], before["fc.weight"], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block_size", {"block_size": 4}),
        ("num_hidden_layers", {"draft_layers": 2}),
        ("target_layer_ids", {"target_layer_ids": (1, 2)}),
        ("causal", {"causal": False}),
        ("mask_token_id", {"mask_token_id": 16}),
        ("token_input", {"token_input": True}),
        ("draft_shift", {"draft_shift": True}),
    ],
)
def test_a_head_of_other_settings_is_not_continued(train_config, tmp_path, field, changes):
    first = train_config(steps=0)
    run(first)
    other = train_config(out=tmp_path / "other", init_from=str(first.out / "head"), **changes)
    with pytest.raises(ValueError, match=f"^{field} of the head given as --init-from"):
        run(other)
    assert not (other.out / "features").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (1, 3)}, "target_layer_ids"),
        ({"mask_token_id": 100_000}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"draft_vocab_size": 100_000}, "draft_vocab_size"),
        ({"mask_token_id": 1}, "occurs in the training text"),
        ({"held_out_share": 1.0}, "0 of 12 answers are left.*held_out_share is 1.0"),
    ],
)
def test_unusable_settings_are_refused_before_any_work(train_config, changes, message):
    config = train_config(**changes)
    with pytest.raises(ValueError, match=message):
        run(config)
    assert not (config.out / "features").exists()


def test_folder_without_checkpoint_is_explained(tmp_path):
    with pytest.raises(ValueError, match=r"holds no checkpoint-"):
        newest_checkpoint(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_loss_is_the_weighted_divergence_of_supervised_rows(train_config, accelerator, gamma):
    state = TrainingRun(train_config(loss_decay_gamma=gamma), accelerator)
    batch, weight = state.batch_at(0), state.model.target.draft_lm_head.float()
    loss = state.model(batch)
    hidden = block_hidden(state.model.head, state.model.target, batch)
    q = (hidden @ weight.T).log_softmax(-1)
    p = (batch.finals.float() @ weight.T).log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    decay = torch.exp(-(torch.arange(5) - 1) / gamma) if gamma else torch.ones(5)
    expected = (divergence * decay)[batch.supervised].sum()
    torch.testing.assert_close(loss.total, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.weight, (decay * batch.supervised).sum())
    same = (p.argmax(-1) == q.argmax(-1)) & batch.supervised
    assert torch.equal(loss.matches, same)


@torch.no_grad()
def test_cross_entropy_reads_the_text_within_the_draft_vocabulary(train_config, accelerator):
    state = TrainingRun(train_config(objective="sft", draft_vocab_size=12), accelerator)
    batch, target = state.batch_at(0), state.model.target
    loss = state.model(batch)
    q = block_hidden(state.model.head, target, batch) @ target.draft_lm_head.float().T
    ids = state.draft_token_ids.tolist()
    known = batch.supervised & torch.isin(batch.tokens, state.draft_token_ids.long())
    assert 0 < known.sum() < batch.supervised.sum()
    labels = torch.tensor([ids.index(token) for token in batch.tokens[known].tolist()])
    expected = F.cross_entropy(q[known], labels, reduction="sum")
    torch.testing.assert_close(loss.total, expected, rtol=1e-4, atol=1e-4)
    assert loss.weight == known.sum()


def test_chain_acceptance_stops_at_the_first_miss():
    matches = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    assert chain_acceptance(matches).tolist() == [3, 1, 5]


def test_a_batch_without_a_supervised_row_counts_as_nothing():
    assert averages(torch.zeros(5 + 2 * 3)) == {
        "loss": 0.0,
        "kl": 0.0,
        "chain_acceptance": 0.0,
        "accuracy": [0.0, 0.0],
    }


def test_learning_rate_warms_up_and_decays_to_zero(train_config):
    config = train_config(learning_rate=1.0, warmup_share=0.1)
    assert learning_rate(config, 0.0) == 0.0
    assert learning_rate(config, 0.05) == pytest.approx(0.5)
    assert learning_rate(config, 0.1) == pytest.approx(1.0)
    assert learning_rate(config, 0.55) == pytest.approx(0.5)
    assert learning_rate(config, 1.0) == pytest.approx(0.0)
    linear, constant = (replace(config, schedule=name) for name in ("linear", "constant"))
    assert learning_rate(linear, 0.775) == pytest.approx(0.25)
    assert learning_rate(constant, 0.05) == pytest.approx(0.5)
    assert learning_rate(constant, 1.0) == 1.0
