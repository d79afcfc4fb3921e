"""Packed linear layers against plain ones, and their weights' life."""

import pytest
import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch import nn

from sglang_jetspec.platforms.cpu import linear as packed_linear
from sglang_jetspec.platforms.cpu.linear import (
    PackedWeight,
    WeightVersion,
    choose_product,
    half_storage_product,
    pack_model,
)


class Layer(nn.Module):
    """A layer as SGLang builds it: a weight and a method that applies it."""

    def __init__(self, out_features, in_features, method, dtype=torch.float32):
        super().__init__()
        weight = torch.randn(out_features, in_features, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = method

    def forward(self, x, bias=None):
        return self.quant_method.apply(self, x, bias)


class Model(nn.Module):
    """Two linear layers, a plain torch one and a head tied to the embedding."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.up = Layer(33, 20, UnquantizedLinearMethod(), dtype)
        self.down = Layer(20, 33, UnquantizedLinearMethod(), dtype)
        self.fuse = nn.Linear(33, 20, dtype=dtype)
        self.embed_tokens = Layer(50, 20, UnquantizedEmbeddingMethod(), dtype)
        self.lm_head = self.embed_tokens
        self.logits_processor = nn.Module()
        self.logits_processor.use_fp32_lm_head = False
        self.logits_processor.use_fp32_lm_head_output = False
        self.logits_processor.rl_on_policy_target = None

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


@pytest.mark.parametrize("rows", [1, 3, 8, 17, 130])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 20), (577, 130)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_products_equal_plain_ones(rows, out_features, in_features, with_bias):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if with_bias else None
    packed = PackedWeight(WeightVersion()).linear(x, weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(packed.double(), expected, atol=1e-6 * in_features, rtol=1e-6)


def test_bfloat16_products_are_rounded_once():
    torch.manual_seed(0)
    x, weight = torch.randn(8, 576).bfloat16(), torch.randn(96, 576).bfloat16()
    packed = PackedWeight(WeightVersion()).linear(x, weight, None)
    exact = x.double() @ weight.double().T
    assert packed.dtype is torch.bfloat16
    torch.testing.assert_close(packed.double(), exact, atol=1e-2, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 6, 8, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_half_storage_products_sum_in_float32(dtype, rows, with_bias):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 576), (torch.randn(97, 576) * 0.05).to(dtype)
    bias = torch.randn(97) if with_bias else None
    actual = half_storage_product(weight)(x, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)


def test_half_storage_keeps_normal_weights_and_nearly_keeps_tiny_ones():
    magnitudes = 2.0 ** torch.arange(-30, 16)
    weight = (magnitudes * 1.9921875).bfloat16().diag()  # all eight significant bits set
    kept = half_storage_product(weight)(torch.eye(len(magnitudes)), None).diag()
    exact = weight.float().diag()
    assert torch.equal(kept[13:], exact[13:])  # from 2 ** -17 on
    assert (kept - exact).abs().max() <= 2.0**-25


def test_the_product_follows_what_the_processor_computes(monkeypatch):
    weight = torch.randn(4, 4).bfloat16()
    monkeypatch.setattr(packed_linear, "_onednn_computes", lambda dtype: True)
    assert choose_product(weight) is packed_linear.onednn_product
    monkeypatch.setattr(packed_linear, "_onednn_computes", lambda dtype: False)
    assert choose_product(weight) is half_storage_product
    assert choose_product(weight * 1e6) is None  # beyond fp16
    assert choose_product(weight.float()) is None
    monkeypatch.setattr(packed_linear, "has_half_storage", lambda: False)
    assert choose_product(weight) is None
    x = torch.randn(3, 4).bfloat16()
    plain = PackedWeight(WeightVersion()).linear(x, weight, None)
    assert torch.equal(plain, torch.nn.functional.linear(x, weight))


def test_leading_dimensions_and_empty_batches_are_kept():
    weight = torch.randn(7, 5)
    packed = PackedWeight(WeightVersion())
    assert packed.linear(torch.randn(2, 3, 5), weight, None).shape == (2, 3, 7)
    assert packed.linear(torch.randn(0, 5), weight, None).shape == (0, 7)


def test_every_unquantized_layer_of_a_model_is_packed():
    model, plain = Model(), Model()
    assert pack_model(model) == 4
    for name, width in (("up", 20), ("down", 33), ("lm_head", 20), ("fuse", 33)):
        x = torch.randn(4, width)
        actual, expected = getattr(model, name)(x), getattr(plain, name)(x)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert should_apply_lm_head_quant_method(model.lm_head, model.lm_head.quant_method)
    ids = torch.tensor([3, 49])
    rows = model.embed_tokens.quant_method.embedding(model.embed_tokens, ids)
    assert torch.equal(rows, plain.embed_tokens.weight[ids])


@pytest.mark.parametrize("name", ["up", "lm_head", "fuse"])
def test_updated_weights_are_used(name):
    model = Model()
    pack_model(model)
    layer = getattr(model, name)
    x = torch.randn(4, layer.weight.shape[1])
    before = layer(x)
    parameter = next(key for key, value in model.named_parameters() if value is layer.weight)
    model.load_weights([(parameter, torch.full_like(layer.weight, 0.25))])
    bias = layer.bias if name == "fuse" else 0
    expected = (x.sum(-1, keepdim=True) * 0.25 + bias).expand_as(before)
    assert not torch.allclose(before, expected, atol=1e-3)
    torch.testing.assert_close(layer(x), expected.contiguous(), atol=1e-5, rtol=1e-5)


def test_reloading_from_disk_repacks():
    model = Model()
    pack_model(model)
    model.up.weight.data.fill_(0.5)
    model.up.quant_method.process_weights_after_loading(model.up)
    x = torch.randn(2, 20)
    torch.testing.assert_close(model.up(x)[:, 0], x.sum(-1) * 0.5)


def test_weights_that_do_not_fit_twice_stay_plain(monkeypatch, caplog):
    model = Model()
    monkeypatch.setattr(packed_linear, "MEMORY_SHARE", 1e-12)
    assert pack_model(model) == 0
    assert type(model.up.quant_method) is UnquantizedLinearMethod
    assert "stay unpacked" in caplog.text


@pytest.mark.parametrize("flag", ["use_fp32_lm_head", "use_fp32_lm_head_output"])
def test_a_head_in_another_precision_stays_plain(flag):
    model = Model(torch.bfloat16)
    setattr(model.logits_processor, flag, True)
    pack_model(model)
    assert type(model.lm_head.quant_method) is UnquantizedEmbeddingMethod


def test_dtypes_without_a_kernel_stay_plain():
    model = Model(torch.float64)
    assert pack_model(model) == 0
    assert model.up(torch.randn(2, 20, dtype=torch.float64)).dtype is torch.float64
