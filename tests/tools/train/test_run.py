import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from sglang_jetspec.heads.format import check_tensors, load_head_config
from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.export_head import newest_checkpoint
from sglang_jetspec.tools.train.checkpoint import list_checkpoints, load_checkpoint
from sglang_jetspec.tools.train.export import export_checkpoint, published_weights
from sglang_jetspec.tools.train.loop import learning_rate
from sglang_jetspec.tools.train.loss import block_hidden, block_loss, chain_acceptance
from sglang_jetspec.tools.train.run import TrainingRun, main, run


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_run_from_the_command_line_exports_a_head(train_config, capsys):
    config = train_config()
    flags = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags += [f"--{name}", str(value)]
    main(flags)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 6
    assert summary["train_examples"] + summary["held_out_examples"] == 12
    head = load_head_config(config.out / "head")
    check_tensors(config.out / "head", head)
    assert head.causal
    assert head.target_layer_ids == (0, 2)
    assert head.block_size == 5
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "kl" in row] == [2, 4, 6]
    assert "held_out_chain_acceptance" in rows[-1]


def test_training_lowers_the_loss(train_config):
    config = train_config(steps=60, log_every=10, learning_rate=3e-3)
    run(config)
    losses = [
        row["kl"]
        for row in map(json.loads, (config.out / "log.jsonl").read_text().splitlines())
        if "kl" in row
    ]
    assert losses[-1] < 0.8 * losses[0]


def test_interrupted_run_ends_where_an_uninterrupted_one_does(train_config, tmp_path, monkeypatch):
    whole = train_config(out=tmp_path / "whole", dropout=0.1)
    run(whole)
    resumed = train_config(out=tmp_path / "resumed", dropout=0.1, checkpoint_minutes=0.0)
    seen = []
    batch_at = TrainingRun.batch_at

    def interrupted(self, step):
        if step == 3 and not seen:
            seen.append(step)
            raise KeyboardInterrupt
        return batch_at(self, step)

    monkeypatch.setattr(TrainingRun, "batch_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(resumed)
    assert load_checkpoint(list_checkpoints(resumed.out)[-1])["step"] == 3
    run(resumed)
    ends = [load_checkpoint(list_checkpoints(c.out)[-1]) for c in (whole, resumed)]
    assert ends[0]["step"] == ends[1]["step"] == 6
    for name, weight in ends[0]["head"].items():
        torch.testing.assert_close(ends[1]["head"][name], weight, rtol=0, atol=0)


def test_only_the_newest_checkpoints_are_kept(train_config):
    config = train_config(checkpoint_minutes=0.0, keep_checkpoints=2)
    run(config)
    assert [path.name for path in list_checkpoints(config.out)] == [
        "checkpoint-0000005.pt",
        "checkpoint-0000006.pt",
    ]


def test_features_of_other_examples_are_refused(train_config):
    config = train_config(steps=1)
    run(config)
    with pytest.raises(ValueError, match="other examples or taps"):
        run(dataclasses.replace(config, target_layer_ids=(1, 2)))


def test_exported_head_reads_raw_taps_as_the_trained_one_reads_scaled(train_config, tmp_path):
    config = train_config(steps=2)
    run(config)
    state = TrainingRun(config)
    checkpoint = newest_checkpoint(config.out)
    state.head.load_state_dict(load_checkpoint(checkpoint)["head"])
    raw = state.store.taps[:50].float()
    expected = state.head.fuse(raw / state.scales)
    export_checkpoint(checkpoint, tmp_path / "exported")
    loaded, draft_token_ids = load_reference_head(tmp_path / "exported")
    torch.testing.assert_close(loaded.fuse(raw), expected, rtol=3e-2, atol=3e-2)
    assert torch.equal(draft_token_ids, state.draft_token_ids)
    state.head.load_state_dict(published_weights(state.head.state_dict(), state.scales))
    torch.testing.assert_close(state.head.fuse(raw), expected, rtol=1e-4, atol=1e-4)


def test_a_head_exported_imported_and_exported_again_is_equal(train_config, tmp_path):
    first = train_config(steps=2, draft_vocab_size=40)
    run(first)
    exported = first.out / "head"
    settings = {"out": tmp_path / "second", "init_from": str(exported), "mask_token_id": 16}
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
def test_loss_is_the_mean_divergence_of_supervised_rows(train_config):
    state = TrainingRun(train_config())
    batch, weight = state.batch_at(0), state.target.draft_lm_head.float()
    loss = block_loss(state.head, state.target, batch)
    q = (block_hidden(state.head, state.target, batch) @ weight.T).log_softmax(-1)
    p = (batch.finals.float() @ weight.T).log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    expected = divergence[batch.supervised].mean()
    torch.testing.assert_close(loss.kl, expected, rtol=1e-4, atol=1e-5)
    same = (p.argmax(-1) == q.argmax(-1)) & batch.supervised
    assert torch.equal(loss.matches, same)


def test_chain_acceptance_stops_at_the_first_miss():
    matches = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    assert chain_acceptance(matches).tolist() == [3, 1, 5]


def test_learning_rate_warms_up_and_decays_to_zero(train_config):
    config = train_config(learning_rate=1.0, warmup_share=0.1)
    assert learning_rate(config, 0.0) == 0.0
    assert learning_rate(config, 0.05) == pytest.approx(0.5)
    assert learning_rate(config, 0.1) == pytest.approx(1.0)
    assert learning_rate(config, 0.55) == pytest.approx(0.5)
    assert learning_rate(config, 1.0) == pytest.approx(0.0)
