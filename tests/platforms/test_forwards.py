"""Whole models on the platform: the plain loop, packed weights and verification agree in fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide, so that greedy outputs vary
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", params=MODELS)
def results(request, tmp_path_factory):
    """What compare_forwards.py prints for a random model of each family."""
    config_class, model_class, extra = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model_class(config_class(**SHAPE, **extra)).float().save_pretrained(folder)
    script = Path(__file__).with_name("compare_forwards.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SGLANG_PLUGINS": "jetspec,jetspec_cpu"}
    run = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_verified_chain_gives_the_decoded_logits(results):
    assert results["varied"] > 3
    assert results["verify_against_decode"] < 1e-4
    assert results["same_choices"]


def test_the_plain_loop_equals_sglangs_modules(results):
    assert results["loop_against_modules"] < 1e-5
    assert len(results["captured"]) == 2
    assert max(results["captured"]) < 1e-5


def test_packed_weights_and_small_operators_equal_the_native_ones(results):
    assert results["packed_against_plain"] < 1e-4
