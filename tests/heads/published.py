"""The published head formats in small sizes: config keys and tensor names as released, seeded
weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTER, HEADS, KV, HEAD_DIM, VOCAB, RANK, STATE, EMB = 16, 24, 4, 2, 8, 29, 6, 5, 3
BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 5,
    "dtype": "bfloat16",
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": KV,
    "num_target_layers": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
TAPS = {"mask_token_id": 28, "target_layer_ids": [1, 3, 5]}
FULL = ["full_attention", "full_attention"]


def config(format_name: str) -> dict[str, Any]:
    """`config.json` of a released format."""
    if format_name == "jetspec":  # JetSpec/jetspec-qwen3-8b; newer ones spell rope differently
        rope = {"rope_theta": 1000000.0, "rope_type": "default"}
        raw = {key: value for key, value in BASE.items() if key != "rope_theta"}
        return {**raw, "rope_parameters": rope, "dflash_config": {**TAPS, "causal_head": True}}
    if format_name == "dflash":  # z-lab/Qwen3-8B-DFlash-b16
        return {**BASE, "layer_types": FULL, "dflash_config": TAPS}
    if format_name.startswith("dspark-deepseek"):  # deepseek-ai/dspark_qwen3_8b_block7
        keys = {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, **TAPS}
        keys |= {"markov_head_type": format_name.split("-")[2], "enable_confidence_head": True}
        return {**BASE, "layer_types": FULL, **keys, "confidence_head_with_markov": True}
    if format_name == "dspark-specforge":
        keys = {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla"}
        keys |= {"enable_confidence_head": False, "confidence_head_alpha": 1.0}
        named = {"architectures": ["DSparkDraftModel"], "layer_types": FULL}
        return {**BASE, **named, "dflash_config": {**TAPS, **keys}}
    assert format_name == "domino"
    keys = {"projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": EMB}
    keys |= {"gru_hidden_dim": STATE, "shift_label": True}
    return {**BASE, "emb_dim": EMB, "layer_types": FULL, "dflash_config": {**TAPS, **keys}}


def shapes(format_name: str) -> dict[str, tuple[int, ...]]:
    """Released tensor names; written out, not derived from the code under test."""
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(2):
        found |= {
            f"layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": (KV * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": (KV * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"layers.{i}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"layers.{i}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"layers.{i}.mlp.gate_proj.weight": (INTER, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": (INTER, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": (HIDDEN, INTER),
        }
    if format_name.startswith("dspark"):
        found |= {f"markov_head.markov_w{i}.weight": (VOCAB, RANK) for i in (1, 2)}
    if format_name.startswith("dspark-deepseek"):
        found |= {"confidence_head.proj.weight": (1, HIDDEN + RANK)}
        found |= {"confidence_head.proj.bias": (1,)}
        found |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    if format_name == "dspark-deepseek-gated":
        found |= {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK)}
        found |= {"markov_head.gate_proj.bias": (RANK,)}
    if format_name == "dspark-deepseek-rnn":
        found |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN)}
        found |= {"markov_head.joint_proj.bias": (3 * RANK,)}
    if format_name == "domino":
        found |= {
            "prefix_gru.weight_ih_l0": (3 * STATE, HIDDEN),
            "prefix_gru.weight_hh_l0": (3 * STATE, STATE),
            "embed_proj.0.weight": (EMB, HIDDEN + STATE),
            "embed_proj.2.weight": (VOCAB, EMB),
        }
    return found


def write(folder: Path, format_name: str) -> dict[str, torch.Tensor]:
    """Write a released folder; returns its weights in fp32."""
    random = torch.Generator().manual_seed(7)
    weights = {}
    for name, shape in shapes(format_name).items():
        scale = 0.1 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        weights[name] = scale * torch.randn(shape, generator=random)
        if name.endswith("norm.weight"):
            weights[name] += 1.0
    (folder / "config.json").write_text(json.dumps(config(format_name)))
    save_file(weights, folder / "model.safetensors")
    return weights
