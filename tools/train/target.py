"""The frozen target's parts that a head borrows, and a head initialised from the target."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.config import TrainConfig


@dataclass(frozen=True)
class FrozenTarget:
    """Embedding [V,H] and the LM-head rows [Vd,H] that the head ranks, both bf16."""

    embedding: Tensor
    draft_lm_head: Tensor


def load_target(folder: Path) -> nn.Module:
    """The whole target in fp32, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def freeze(model: nn.Module, draft_token_ids: Tensor | None, device: str = "cpu") -> FrozenTarget:
    """Copy embedding and (selected) LM-head rows out of `model` to `device`."""
    embedding = model.get_input_embeddings().weight.detach().to(torch.bfloat16)
    lm_head = model.get_output_embeddings().weight.detach().to(torch.bfloat16)
    if draft_token_ids is not None:
        lm_head = lm_head[draft_token_ids.long()].contiguous()
    return FrozenTarget(embedding.to(device), lm_head.to(device))


def head_config(
    config: TrainConfig, target: PretrainedConfig, draft_vocab: int | None
) -> HeadConfig:
    """A head of the target's own layer shape."""
    heads = target.num_attention_heads
    return HeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=config.draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=float(target.rope_parameters["rope_theta"]),
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_hidden_layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=tuple(config.target_layer_ids),
        causal=config.causal,
        draft_vocab_size=draft_vocab,
        jetspec={name: True for name in ("token_input", "draft_shift") if getattr(config, name)},
    )


@torch.no_grad()
def tap_scales(taps: Tensor) -> Tensor:
    """Per-dimension root mean square [T*H] of sampled tapped states `taps` [M, T*H].

    A few dimensions of a language model's states are hundreds of times larger than the rest.
    Training on `taps / scales` keeps one learning rate right for every column of `fc`;
    `export.published_weights` folds the scales back.
    """
    return taps.float().pow(2).mean(0).sqrt().clamp(min=1e-6)


@torch.no_grad()
def initial_head(config: HeadConfig, model: nn.Module, taps: Tensor, dropout: float) -> JetSpecHead:
    """A head over scaled taps that starts from the target's last layers.

    `taps` [M, T*H] is a sample of raw tapped states. `fc` passes the deepest tap through and mixes
    in a little of the others; `hidden_norm` undoes the scaling, so that the draft layers' K/V
    projections first see what the target's own layers would. Query and key norms absent from the
    target start at the magnitude its own layers produce.
    """
    head = JetSpecHead(config, dropout)
    layers = model.model.layers[-config.num_hidden_layers :]
    hidden, tap_count = config.hidden_size, len(config.target_layer_ids)
    deepest = taps[:, -hidden:].float()  # [M,H]
    head.fc.weight.normal_(std=0.1 / (tap_count * hidden) ** 0.5)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for draft, source in zip(head.layers, layers, strict=True):
        draft.load_state_dict(source.state_dict(), strict=False)
        normed = source.input_layernorm(deepest)
        for name in ("q", "k"):
            if not hasattr(source.self_attn, f"{name}_norm"):
                produced = getattr(source.self_attn, f"{name}_proj")(normed)
                scale = produced.unflatten(-1, (-1, config.head_dim)).pow(2).mean().sqrt()
                getattr(draft.self_attn, f"{name}_norm").weight.fill_(scale)
    entry_norms = torch.stack([layer.input_layernorm.weight for layer in layers]).mean(0)
    typical = deepest.pow(2).mean(-1).sqrt().median()
    head.hidden_norm.weight.copy_(entry_norms * tap_scales(deepest) / typical)
    head.norm.load_state_dict(model.model.norm.state_dict())
    return head
