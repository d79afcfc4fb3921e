"""Linear layers over packed copies of their weights.

A plain torch linear repacks the weight on every call, which for a few rows costs more than the
product itself. The packed copy is made once; the plain weight stays, so SGLang can load, update
and export it as always.
"""

import logging
from collections.abc import Callable, Iterator
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
LARGEST_HALF = 65504.0

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def onednn_product(weight: torch.Tensor) -> Product:
    """(x, bias) -> x @ weight.T + bias in oneDNN's layout and the weight's own dtype."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
    kernel = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, bias: kernel(x, packed, bias, "none", [], "")


def half_storage_product(weight: torch.Tensor) -> Product:
    """The same for 16-bit weights where oneDNN has no 16-bit kernel: FBGEMM's, which keeps fp16.

    It multiplies and sums in fp32. A bf16 weight of at least 2**-17 is an fp16 number, a smaller
    one moves by at most 2**-25.
    """
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
    kernel = torch.ops.quantized.linear_dynamic_fp16.default

    def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = kernel(x.float(), packed)
        return (y if bias is None else y + bias).to(x.dtype)

    return product


def choose_product(weight: torch.Tensor) -> Callable[[torch.Tensor], Product] | None:
    """What packs `weight` ([out, in]) best on this CPU; None where a plain product must do."""
    if weight.device.type != "cpu" or weight.dim() != 2:
        return None
    if torch.backends.mkldnn.is_available() and _onednn_computes(weight.dtype):
        return onednn_product
    if weight.dtype not in (torch.bfloat16, torch.float16) or not has_half_storage():
        return None
    return half_storage_product if weight.abs().max() <= LARGEST_HALF else None


def has_half_storage() -> bool:
    """Whether this build of torch has FBGEMM (x86 builds do)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def _onednn_computes(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


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
        self.product: Product | None = None

    def pack(self, weight: torch.Tensor) -> None:
        version = self.version.value
        pack = choose_product(weight)
        self.product = pack(weight.detach()) if pack else None
        self.packed_at = version  # last: another thread may draft with this weight

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [..., in], weight: [out, in], bias: [out]. Returns [..., out]."""
        if x.dtype is not weight.dtype or x.numel() == 0:
            return torch.nn.functional.linear(x, weight, bias)
        if self.packed_at != self.version.value:
            self.pack(weight)
        if self.product is None:
            return torch.nn.functional.linear(x, weight, bias)
        return self.product(x, bias)


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

    Layers keep their method where no kernel takes the dtype, and all do where the copies would not
    fit into memory.
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
    return plain and choose_product(layer.weight) is not None


def _packable_head(model: torch.nn.Module, head: torch.nn.Module) -> bool:
    """Whether the vocabulary projection runs in the weight's own precision."""
    processor = getattr(model, "logits_processor", None)
    return (
        type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and processor is not None
        and not processor.use_fp32_lm_head
        and not processor.use_fp32_lm_head_output
        and processor.rl_on_policy_target is None
        and choose_product(head.weight) is not None
    )
