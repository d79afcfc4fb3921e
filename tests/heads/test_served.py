"""How SGLang's loader gets a head: its window, its rotary reach and its tensors."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.models.dflash import DFlashDraftModel
from torch import nn

from sglang_jetspec.heads import jetspec
from sglang_jetspec.heads.jetspec import JetSpecDraftModel, JetSpecDraftWorker

HEAD = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3" / "head"
REACH, NODES = 4096, 8  # the fixture's max_position_embeddings


@pytest.mark.parametrize(
    ("context", "layer", "rotary"),
    [
        (512, "full_attention", REACH),
        (REACH, "full_attention", REACH + NODES + 1),
        (REACH + 1, "sliding_attention", REACH + 1 + NODES + 1),
        (3 * REACH, "sliding_attention", 3 * REACH + NODES + 1),
    ],
)
def test_a_context_beyond_the_heads_reach_gives_it_a_window(monkeypatch, context, layer, rotary):
    monkeypatch.setattr(TpModelWorker, "_init_model_config", lambda self: None)
    spec = SimpleNamespace(
        speculative_draft_model_path=str(HEAD),
        speculative_draft_model_revision=None,
        speculative_num_draft_tokens=NODES,
    )
    monkeypatch.setattr(jetspec, "get_spec", lambda: spec)
    worker = JetSpecDraftWorker.__new__(JetSpecDraftWorker)
    worker.context_length = context
    config = SimpleNamespace()
    worker.model_config = SimpleNamespace(hf_config=config)
    worker._init_model_config()
    assert config.layer_types == [layer] * 2
    assert config.max_position_embeddings == rotary
    if layer == "sliding_attention":
        assert config.sliding_window == REACH


def test_an_update_of_the_target_passes_the_head_by(monkeypatch):
    model = JetSpecDraftModel.__new__(JetSpecDraftModel)
    nn.Module.__init__(model)
    model.register_buffer("draft_token_ids", torch.zeros(3, dtype=torch.int32))
    loaded = []
    monkeypatch.setattr(
        DFlashDraftModel, "load_weights", lambda self, weights: loaded.extend(n for n, _ in weights)
    )
    own = ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"]
    others = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]
    tensors = [(name, torch.zeros(1)) for name in own + others]
    model.load_weights([*tensors, ("draft_token_ids", torch.tensor([5, 6, 7]))])
    assert loaded == own
    assert model.draft_token_ids.tolist() == [5, 6, 7]
