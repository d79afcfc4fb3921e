"""Which targets are refused at start-up."""

from types import SimpleNamespace

import pytest

from sglang_jetspec.heads.format import HeadError, parse_head_config
from sglang_jetspec.lifecycle import capturing_targets, check_target

HEAD = parse_head_config(
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "vocab_size": 1000,
        "num_target_layers": 8,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 999, "target_layer_ids": [1, 6], "causal_head": True},
    }
)


class Opaque:
    """A target that keeps its layers' states to itself."""


class Capturing:
    def set_dflash_layers_to_capture(self, layers):
        self.layers = layers


def runner(model, **changes):
    config = SimpleNamespace(
        is_multimodal=False,
        hidden_size=64,
        num_hidden_layers=8,
        vocab_size=1000,
        hf_config=SimpleNamespace(architectures=["X"]),
        hf_text_config=SimpleNamespace(architectures=["X"]),
    )
    return SimpleNamespace(
        model=model, use_mla_backend=False, is_hybrid_swa=False, model_config=config, **changes
    )


def test_capturing_targets_are_those_with_the_method():
    models = {"B": Capturing, "A": Capturing, "C": Opaque, "D": "not loaded"}
    assert capturing_targets(models) == ["A", "B"]


def test_a_target_without_features_is_refused_with_the_list(monkeypatch):
    from sglang.srt.models.registry import ModelRegistry

    monkeypatch.setattr("sglang_jetspec.lifecycle.mambaish_config", lambda config: None)
    check_target(runner(Capturing()), None, HEAD)
    with pytest.raises(HeadError, match=r"Opaque.*layers' states") as refused:
        check_target(runner(Opaque()), None, HEAD)
    listed = str(refused.value).split("Those that do: ")[1].rstrip(".").split(", ")
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"} <= set(listed)
    assert "Qwen2ForCausalLM" not in listed
    assert set(listed) <= set(ModelRegistry.models)
