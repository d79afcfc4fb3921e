"""The frozen target's parts that a head borrows, and a head initialised from the target."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from sglang_jetspec.heads.correction import CorrectionConfig
from sglang_jetspec.heads.domino import DominoConfig
from sglang_jetspec.heads.dspark import DSparkConfig
from sglang_jetspec.heads.format import HeadConfig, HeadError
from sglang_jetspec.heads.reference import JetSpecHead, load_reference_head
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.export import trainable_weights
from sglang_jetspec.tools.train.precision import computes_bf16


@dataclass(frozen=True)
class FrozenTarget:
    """Embedding [V,H] and the LM-head rows [Vd,H] that the head ranks, both bf16.

    `draft_rows` [V] int64 maps a target token to its row of the draft vocabulary, -1 for none;
    None when the head ranks every token.
    """

    embedding: Tensor
    draft_lm_head: Tensor
    draft_rows: Tensor | None

    def labels(self, tokens: Tensor) -> Tensor:
        """Rows [...] of `draft_lm_head` for target tokens [...] int64; -1 for those it lacks."""
        if self.draft_rows is None:
            return tokens
        return self.draft_rows[tokens.clamp(min=0)].where(tokens >= 0, -1)


def load_target(target: str, device: torch.device) -> nn.Module:
    """The whole target in evaluation mode, in bf16 where the device has it, else in fp32."""
    dtype = torch.bfloat16 if computes_bf16(device) else torch.float32
    return AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()


def freeze(model: nn.Module, draft_token_ids: Tensor | None) -> FrozenTarget:
    """Copy embedding and (selected) LM-head rows out of `model`, on its device."""
    embedding = model.get_input_embeddings().weight.detach().to(torch.bfloat16)
    lm_head = model.get_output_embeddings().weight.detach().to(torch.bfloat16)
    rows = None
    if draft_token_ids is not None:
        ids = draft_token_ids.long().to(lm_head.device)
        lm_head = lm_head[ids].contiguous()
        rows = torch.full((len(embedding),), -1, device=lm_head.device)
        rows[ids] = torch.arange(len(ids), device=lm_head.device)
    return FrozenTarget(embedding, lm_head, rows)


def correction_config(config: TrainConfig) -> CorrectionConfig | None:
    """The sequential part of a head of the run's `kind`."""
    if config.kind == "dspark":
        return DSparkConfig(config.markov_rank, config.markov_head_type)
    if config.kind == "domino":
        return DominoConfig(config.gru_hidden_dim, config.emb_dim)
    return None


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
        correction=correction_config(config),
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
    last = model.model.layers[-config.num_hidden_layers :]
    layers = [deepcopy(layer).float().cpu() for layer in last]
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


def check_imported(head: HeadConfig, config: TrainConfig, target: PretrainedConfig) -> None:
    """Raises HeadError by field unless `head` has the run's settings and fits the target."""
    wanted = head_config(config, target, head.draft_vocab_size)
    for name in (
        "num_hidden_layers",
        "block_size",
        "target_layer_ids",
        "causal",
        "hidden_size",
        "mask_token_id",
        "kind",
        "token_input",
        "draft_shift",
    ):
        _refuse_difference(name, getattr(head, name), getattr(wanted, name))
    for name in ("vocab_size", "num_target_layers"):  # optional in published heads
        if getattr(head, name) is not None:
            _refuse_difference(name, getattr(head, name), getattr(wanted, name))


def _refuse_difference(name: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise HeadError(
            f"{name} of the head given as --init-from is {found}, the run's is {wanted}; continue "
            f"a head with its own settings and its own target"
        )


@torch.no_grad()
def imported_head(
    folder: Path, scales: Tensor, dropout: float
) -> tuple[JetSpecHead, Tensor | None]:
    """The head in `folder`, in fp32 over taps divided by `scales`, and its draft token ids."""
    head, draft_token_ids = load_reference_head(folder)
    head.load_state_dict(trainable_weights(head.state_dict(), scales))
    for layer in head.layers:
        layer.dropout.p = dropout
    return head, draft_token_ids
