"""The layers of models that SGLang has loaded, as plain-torch layers over the same weights.

SGLang updates weights in place, which these layers see at once. One rank, dense layers, plain
weights; everything else is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.drafter import BlockDrafter, Map, head_shape
from sglang_jetspec.foresight.layers import DecoderLayer, LayerShape, LayerStack
from sglang_jetspec.heads.fields import HeadError
from sglang_jetspec.heads.format import HeadConfig


def plain_layer(layer: nn.Module, shape: LayerShape) -> DecoderLayer:
    """One of SGLang's decoder layers; HeadError where it is not of the plain shape."""
    with torch.device("meta"):
        made = DecoderLayer(shape)
    try:
        made.load_state_dict(layer_weights(layer, shape), assign=True)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise HeadError(
            f"{type(layer).__name__} is not a dense decoder layer with plain weights ({error}); "
            "serve this model without SGLANG_JETSPEC_PASSES, _REFRESHES and _OUTCOMES"
        ) from error
    return made.requires_grad_(False).eval()


def layer_weights(layer: Any, shape: LayerShape) -> dict[str, Tensor]:
    """The weights by their Hugging Face names, views of SGLang's fused ones."""
    attention, mlp = layer.self_attn, layer.mlp
    for part, name in ((attention, "o_proj"), (mlp, "down_proj")):
        if getattr(getattr(part, name, None), "bias", None) is not None:
            raise TypeError(f"{name} has a bias")
    query = shape.num_attention_heads * shape.head_dim
    key_value = shape.num_key_value_heads * shape.head_dim
    sizes = [query, key_value, key_value]
    found: dict[str, Tensor] = {}
    for name in ("weight", "bias") if shape.attention_bias else ("weight",):
        parts = getattr(attention.qkv_proj, name).split(sizes)
        for letter, part in zip("qkv", parts, strict=True):
            found[f"self_attn.{letter}_proj.{name}"] = part
    if shape.qk_norm:
        found["self_attn.q_norm.weight"] = attention.q_norm.weight
        found["self_attn.k_norm.weight"] = attention.k_norm.weight
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    return found | {
        "self_attn.o_proj.weight": attention.o_proj.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": mlp.down_proj.weight,
        "input_layernorm.weight": layer.input_layernorm.weight,
        "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
    }


def plain_stack(layers: list[nn.Module], shape: LayerShape) -> LayerStack:
    """Consecutive layers of SGLang's."""
    made = LayerStack(shape, 0)
    made.layers.extend(plain_layer(layer, shape) for layer in layers)
    return made


def served_drafter(model: Any, head: HeadConfig) -> BlockDrafter:
    """The served head (`heads.jetspec.JetSpecDraftModel`), bound to its target."""
    layers = plain_stack(list(model.layers), head_shape(head))
    return BlockDrafter(
        head,
        layers,
        _by_row(model.project_target_hidden),
        _by_row(model.norm),
        lambda ids: model.forward_embed(ids.flatten()).view(*ids.shape, -1),
        _by_row(model.draft_logits),
        model.draft_token_ids,
    )


def _by_row(function: Map) -> Map:
    """SGLang's modules take [rows, size] only."""
    return lambda x: function(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def served_decoder(target: Any, config: Any, first: int) -> TargetSlice:
    """Target layers `first`.., final norm and LM head. config: the target's, Hugging Face's."""
    body = target.model
    attention = body.layers[0].self_attn
    shape = LayerShape.of_config(
        config, hasattr(attention, "q_norm"), attention.qkv_proj.bias is not None
    )
    made = TargetSlice(shape, 0, target.lm_head.weight.detach()[: config.vocab_size])
    made.stack = plain_stack(list(body.layers[first:]), shape)
    made.norm.weight = body.norm.weight
    return made.requires_grad_(False).eval()
