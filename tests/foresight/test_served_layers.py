"""SGLang's fused layers as plain ones: the same results, over the same memory."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.layers import LayerShape, causal_rows
from sglang_jetspec.foresight.served_layers import plain_layer, served_decoder
from sglang_jetspec.heads.format import HeadError

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def fused_linear(*parts):
    made = SimpleNamespace(weight=torch.cat([part.weight.detach() for part in parts]), bias=None)
    if parts[0].bias is not None:
        made.bias = torch.cat([part.bias.detach() for part in parts])
    return made


def fused(layer):
    """A Hugging Face layer's weights where SGLang's modules have them."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = {n: getattr(attention, n) for n in ("q_norm", "k_norm") if hasattr(attention, n)}
    return SimpleNamespace(
        self_attn=SimpleNamespace(
            qkv_proj=fused_linear(attention.q_proj, attention.k_proj, attention.v_proj),
            o_proj=attention.o_proj,
            **norms,
        ),
        mlp=SimpleNamespace(
            gate_up_proj=fused_linear(mlp.gate_proj, mlp.up_proj), down_proj=mlp.down_proj
        ),
        input_layernorm=layer.input_layernorm,
        post_attention_layernorm=layer.post_attention_layernorm,
    )


@pytest.fixture(params=["qwen3", "qwen2"])
def model(request):
    torch.manual_seed(0)
    if request.param == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()


@torch.no_grad()
def test_decoder_equals_the_targets_layers_and_follows_weight_updates(model):
    layers = [fused(layer) for layer in model.model.layers]
    body = SimpleNamespace(layers=layers, norm=model.model.norm)
    target = SimpleNamespace(model=body, lm_head=model.lm_head)
    served = served_decoder(target, model.config, 1)
    rows, positions = torch.randn(2, 6, 32), torch.arange(6).expand(2, -1)

    def final(part):
        return part.logits(part(rows, positions, causal_rows(6))[0])

    torch.testing.assert_close(final(served), final(TargetSlice.of_target(model, 1)))
    before = final(served)
    layers[2].self_attn.qkv_proj.weight.mul_(2)
    layers[1].mlp.gate_up_proj.weight.mul_(0.5)
    assert not torch.allclose(final(served), before)


def test_other_layers_are_refused_by_name(model):
    shape = LayerShape.of_target(model)
    layer = fused(model.model.layers[0])
    layer.mlp = SimpleNamespace(experts=None)
    with pytest.raises(HeadError, match=r"not a dense decoder layer .*gate_up_proj"):
        plain_layer(layer, shape)
    quantised = fused(model.model.layers[0])
    quantised.self_attn.o_proj = SimpleNamespace(qweight=torch.zeros(4, 4))
    with pytest.raises(HeadError, match="weight"):
        plain_layer(quantised, shape)
    biased = fused(model.model.layers[0])
    biased.self_attn.o_proj = torch.nn.Linear(32, 32)
    with pytest.raises(HeadError, match="o_proj has a bias"):
        plain_layer(biased, shape)
    short = fused(model.model.layers[0])
    short.mlp.down_proj = SimpleNamespace(weight=torch.zeros(32, 24))
    with pytest.raises(HeadError, match="down_proj"):
        plain_layer(short, shape)
