import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_jetspec.tools.train import features
from sglang_jetspec.tools.train.data import load_examples, read_prompts
from sglang_jetspec.tools.train.features import capture_features

TAPS = (0, 2)


@pytest.fixture
def model(corpus):
    return AutoModelForCausalLM.from_pretrained(corpus / "target", dtype=torch.float32).eval()


@pytest.fixture
def examples(corpus, monkeypatch):
    monkeypatch.setattr(features, "BATCH_TOKENS", 150)  # a few batches
    tokenizer = AutoTokenizer.from_pretrained(corpus / "target")
    prompts = read_prompts(corpus / "prompts.jsonl")
    return load_examples(prompts, corpus / "answers.jsonl", tokenizer, 3072)


@torch.no_grad()
def run_with_hooks(model, ids):
    """Output states of every layer, and logits, of one sequence."""
    seen = []

    def keep(module, inputs, output):
        seen.append((output if torch.is_tensor(output) else output[0]).reshape(ids.shape[1], -1))

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    logits = model(ids).logits[0]
    for hook in hooks:
        hook.remove()
    return seen, logits


def test_states_are_those_after_the_tapped_layers(model, examples, tmp_path):
    store = capture_features(model, TAPS, examples, tmp_path)
    for index in (0, 7):
        (states,) = store.fetch([index])
        ids = torch.tensor([examples[index].token_ids])
        seen, logits = run_with_hooks(model, ids)
        expected = torch.cat([seen[layer] for layer in TAPS], dim=-1)
        torch.testing.assert_close(states.taps.float(), expected, rtol=0.01, atol=0.01)
        predicted = states.finals.float() @ model.get_output_embeddings().weight.T
        torch.testing.assert_close(predicted, logits, rtol=0.05, atol=0.05)


def test_an_interrupted_capture_goes_on_after_its_last_batch(
    model, examples, tmp_path, monkeypatch
):
    whole = capture_features(model, TAPS, examples, tmp_path / "whole")
    calls, compute = [], features.target_states

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(*arguments)

    monkeypatch.setattr(features, "target_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture_features(model, TAPS, examples, tmp_path / "again")
    assert not (tmp_path / "again" / "index.json").exists()
    again = capture_features(model, TAPS, examples, tmp_path / "again")
    batches = len(features._groups(examples))
    assert batches > 3
    assert len(calls) == batches + 1
    assert torch.equal(again.taps, whole.taps)
    assert torch.equal(again.finals, whole.finals)
    capture_features(model, TAPS, examples, tmp_path / "again")
    assert len(calls) == batches + 1


def test_processes_share_the_capture(model, examples, tmp_path):
    whole = capture_features(model, TAPS, examples, tmp_path / "whole")
    for rank in range(2):
        capture_features(model, TAPS, examples, tmp_path / "parts", slice(rank, None, 2))
        (tmp_path / "parts" / "index.json").rename(tmp_path / f"index-{rank}.json")
    (tmp_path / "index-1.json").rename(tmp_path / "parts" / "index.json")
    parts = capture_features(model, TAPS, examples, tmp_path / "parts")
    assert torch.equal(parts.taps, whole.taps)
