import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_jetspec.foresight.adapter import (
    Adapter,
    AdapterConfig,
    initial_adapter,
    save_adapter,
    segments,
)
from sglang_jetspec.foresight.layers import LayerShape
from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.foresight.models import assemble_models
from sglang_jetspec.tools.train.export import export_head

VOCAB, TAPS = 40, (0, 2)
HEAD = HeadConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=256,
    vocab_size=VOCAB,
    num_target_layers=4,
    block_size=5,
    mask_token_id=0,
    target_layer_ids=TAPS,
    causal=True,
    draft_vocab_size=None,
    jetspec={"token_input": True, "draft_shift": True},
)


@pytest.fixture(scope="session")
def tiny_target():
    """A random four-layer Qwen3 whose law is neither flat nor certain."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def make_folder(tiny_target, tmp_path_factory):
    """Writes a JetSpec++ folder: random head, and an adapter that is exact, random or absent."""

    def make(adapter="random", **jetspec):
        folder = tmp_path_factory.mktemp("jetspec")
        torch.manual_seed(1)
        config = dataclasses.replace(HEAD, jetspec={**HEAD.jetspec, **jetspec})
        export_head(JetSpecHead(config).state_dict(), config, None, folder)
        shape = LayerShape.of_target(tiny_target)
        if adapter == "exact":
            layers = tuple(len(s) for s in segments(TAPS))
            made = initial_adapter(AdapterConfig(shape, TAPS, layers), tiny_target)
        else:
            made = Adapter(AdapterConfig(shape, TAPS, (1, 1)))
        if adapter != "absent":
            save_adapter(made, folder / "adapter")
        return folder

    return make


@pytest.fixture(scope="session")
def make_models(tiny_target, make_folder):
    """Models of such a folder; an exact adapter keeps the target's fp32 weights."""

    def make(adapter="random", **jetspec):
        folder = make_folder(adapter, **jetspec)
        path = None if adapter == "absent" else folder / "adapter"
        models = assemble_models(tiny_target, folder, path)
        if adapter == "exact":
            foresight = models.foresight
            foresight.adapter = initial_adapter(foresight.adapter.config, tiny_target).eval()
        return models

    return make
