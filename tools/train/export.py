"""Write a trained head as a published-format folder: `config.json` and `model.safetensors`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_jetspec.heads.format import (
    DRAFT_TOKEN_IDS,
    HeadConfig,
    check_tensors,
    load_head_config,
    parse_head_config,
)
from sglang_jetspec.tools.train.card import write_card
from sglang_jetspec.tools.train.checkpoint import load_checkpoint
from sglang_jetspec.tools.train.provenance import RUN_FILE


def raw_config(config: HeadConfig) -> dict[str, Any]:
    """The `config.json` object that parses back to `config`."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "causal_head": config.causal,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }
    if config.correction is not None:
        top, nested = config.correction.raw()
        raw = raw | top
        raw["dflash_config"] |= nested
    jetspec = dict(config.jetspec)
    if config.draft_vocab_size is not None:
        jetspec["draft_vocab_size"] = config.draft_vocab_size
    if jetspec:
        raw["jetspec"] = jetspec
    return raw


def published_weights(weights: dict[str, Tensor], scales: Tensor) -> dict[str, Tensor]:
    """Weights of a head trained on `taps / scales`, as one that reads raw `taps`."""
    return {**weights, "fc.weight": weights["fc.weight"] / scales}


def trainable_weights(weights: dict[str, Tensor], scales: Tensor) -> dict[str, Tensor]:
    """The inverse of `published_weights`."""
    return {**weights, "fc.weight": weights["fc.weight"] * scales}


def export_details(
    config: HeadConfig, scales: Tensor, draft_token_ids: Tensor | None
) -> dict[str, Any]:
    """What a checkpoint holds besides weights, so that it can be exported on its own."""
    return {
        "config": json.dumps(raw_config(config)),
        "scales": scales,
        "draft_token_ids": draft_token_ids,
    }


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Export a training checkpoint, finished or not, with its run's model card and `run.json`."""
    state = load_checkpoint(checkpoint)
    details = state["export"]
    config = parse_head_config(json.loads(details["config"]))
    weights = published_weights(state["head"], details["scales"])
    export_head(weights, config, details["draft_token_ids"], folder)
    if (checkpoint.parent / RUN_FILE).exists():
        write_card(checkpoint.parent, folder, config, state["step"])


def export_head(
    weights: dict[str, Tensor], config: HeadConfig, draft_token_ids: Tensor | None, folder: Path
) -> None:
    """Write bf16 `weights` and `config`, then check the folder as a loader would."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    if draft_token_ids is not None:
        tensors[DRAFT_TOKEN_IDS] = draft_token_ids.to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(raw_config(config), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    check_tensors(folder, load_head_config(folder))
