"""Linear layers over weights in oneDNN's packed layout.

A plain torch linear repacks the weight on every call, which for a few rows costs more than the
product itself. The packed copy is made once; the plain weight stays, so SGLang can load, update
and export it as always.
"""

import logging
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

logger = logging.getLogger(__name__)

# Row count the packed layout is chosen for; it also measured best for a single row.
PACK_ROWS = 16
# Packed copies may take this share of the memory that is free after loading.
MEMORY_SHARE = 0.5


class WeightVersion:
    """Counts the moments at which a model's weights may have been written."""

    def __init__(self) -> None:
        self.value = 0

    def watch(self, model: torch.nn.Module) -> None:
        """Count every enumeration of the model's parameters: writers must look them up first."""
        enumerate_parameters = model.named_parameters

        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.value += 1
            return enumerate_parameters(*args, **kwargs)

        model.named_parameters = named_parameters  # type: ignore[method-assign]


class PackedWeight:
    """The packed copy of one layer's weight, renewed after the weight may have changed."""

    def __init__(self, version: WeightVersion) -> None:
        self.version = version
        self.packed_at = -1
        self.packed: torch.Tensor | None = None

    def pack(self, weight: torch.Tensor) -> None:
        self.packed_at = self.version.value
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [..., in], weight: [out, in], bias: [out]. Returns [..., out]."""
        if x.dtype is not weight.dtype or x.numel() == 0:
            return torch.nn.functional.linear(x, weight, bias)
        if self.packed_at != self.version.value:
            self.pack(weight)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, bias, "none", [], "")


class PackedMethod:
    """A layer's product with its packed weight, in place of an unquantized method's."""

    def __init__(self, weight: PackedWeight) -> None:
        self.packed_weight = weight

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.packed_weight.pack(layer.weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.packed_weight.linear(x, layer.weight, bias)


class PackedLinearMethod(PackedMethod, UnquantizedLinearMethod):
    """SGLang's unquantized linear method on a packed weight."""


class PackedEmbeddingMethod(PackedMethod, UnquantizedEmbeddingMethod):
    """Vocabulary projection on a packed weight; embedding look-ups read the plain one."""


def pack_model(model: torch.nn.Module) -> int:
    """Give every unquantized linear layer of a loaded model a packed weight; returns how many.

    Layers keep their method where oneDNN has no kernel for the dtype, and all do where the copies
    would not fit into memory.
    """
    layers = [layer for layer in model.modules() if _packable(layer)]
    head = getattr(model, "lm_head", None)
    if head is not None and _packable_head(model, head):
        layers.append(head)
    needed = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    free = psutil.virtual_memory().available
    if needed > MEMORY_SHARE * free:
        logger.warning(
            "Weights stay unpacked: packed copies need %.1f GB of %.1f GB free memory, more than "
            "a share of %.1f. Linear layers will be slower.",
            needed / 1e9,
            free / 1e9,
            MEMORY_SHARE,
        )
        return 0
    version = WeightVersion()
    version.watch(model)
    for layer in layers:
        _pack_layer(layer, PackedWeight(version))
    return len(layers)


def _pack_layer(layer: torch.nn.Module, packed: PackedWeight) -> None:
    packed.pack(layer.weight)
    if isinstance(layer, torch.nn.Linear):
        layer.forward = lambda x: packed.linear(x, layer.weight, layer.bias)
    elif type(layer.quant_method) is UnquantizedEmbeddingMethod:
        layer.quant_method = PackedEmbeddingMethod(packed)
    else:
        layer.quant_method = PackedLinearMethod(packed)


def _packable(layer: torch.nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    plain = type(layer) is torch.nn.Linear or type(method) is UnquantizedLinearMethod
    return plain and _has_kernel(layer.weight)


def _packable_head(model: torch.nn.Module, head: torch.nn.Module) -> bool:
    """Whether the vocabulary projection runs in the weight's own precision."""
    processor = getattr(model, "logits_processor", None)
    return (
        type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and processor is not None
        and not processor.use_fp32_lm_head
        and not processor.use_fp32_lm_head_output
        and processor.rl_on_policy_target is None
        and _has_kernel(head.weight)
    )


def _has_kernel(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype is torch.float32
