"""The adapter: predicts the target's captured states of tokens that are still being verified.

A chain of modules, one a captured layer: the first maps token embeddings to the states after layer
l1, each further one maps the states after one captured layer to those after the next (JetSpec++
paper, appendix A). A module is a few target-shaped decoder layers, causal over committed positions
and the block [anchor, drafts], so that one pass serves every accepted length. At committed
positions a module reads the true states of the layer before it.

Shapes: B sequences, R rows, T captured layers, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_jetspec.foresight.layers import LayerShape, LayerStack, RowKeys, Seen
from sglang_jetspec.heads.fields import HeadError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "adapter.safetensors"


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of an adapter. layers_per_module: decoder layers of each of the T modules."""

    shape: LayerShape
    target_layer_ids: tuple[int, ...]
    layers_per_module: tuple[int, ...]

    def __post_init__(self) -> None:
        layers, taps = self.layers_per_module, self.target_layer_ids
        if len(layers) != len(taps) or min(layers, default=0) < 1:
            raise HeadError(
                f"layers_per_module is {list(layers)}, target_layer_ids is {list(taps)}; an "
                "adapter has one module of at least one layer a captured layer"
            )


class Adapter(nn.Module):
    """A chain of T modules, named by the layer that they predict."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        starts = accumulate(config.layers_per_module, initial=0)
        self.chain = nn.ModuleList(
            LayerStack(config.shape, layers, first)
            for layers, first in zip(config.layers_per_module, starts, strict=False)
        )

    @property
    def layers(self) -> int:
        """Decoder layers of all modules."""
        return sum(self.config.layers_per_module)

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        own: Tensor,
        seen: Sequence[Seen] = (),
        given: Tensor | None = None,
        is_given: Tensor | None = None,
    ) -> tuple[Tensor, RowKeys]:
        """Predicted states [B, R, T*H] after the captured layers, and the rows' keys.

        embedded: [B, R, H] token embeddings. positions, own, seen: as of `LayerStack.forward`.
        given: [B, R, T*H] true states; rows marked in is_given [B, R] (None: all) feed them,
        instead of the predicted ones, to the next module. The keys of committed rows are those of a
        pass that was given their states.
        """
        rows, predicted, recorded = embedded, [], RowKeys()
        for index, module in enumerate(self.chain):
            out = module(rows, positions, own, seen, recorded)[-1]
            predicted.append(out)
            rows = out
            if given is not None:
                true = given.chunk(len(self.chain), dim=-1)[index].to(out.dtype)
                rows = true if is_given is None else true.where(is_given.unsqueeze(-1), out)
        return torch.cat(predicted, dim=-1), recorded


def segments(target_layer_ids: tuple[int, ...]) -> list[range]:
    """The target layers that each module stands for."""
    bounds = [-1, *target_layer_ids]
    return [range(a + 1, b + 1) for a, b in pairwise(bounds)]


def default_layers(target_layer_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Layers a module: more for the deeper ones, never more than the target has there.

    Five modules get 1, 2, 3, 3, 3: twelve layers, as many as the published adapters (JetSpec++
    paper, appendix A, names the total and that the deeper modules are the larger).
    """
    return tuple(
        min(index + 1, 3, len(segment)) for index, segment in enumerate(segments(target_layer_ids))
    )


def initial_adapter(config: AdapterConfig, model: nn.Module) -> Adapter:
    """An adapter whose modules start from the last target layers of their segments."""
    adapter = Adapter(config)
    inner: Any = model.get_submodule("model")
    parts = zip(
        adapter.chain, config.layers_per_module, segments(config.target_layer_ids), strict=True
    )
    for module, count, segment in parts:
        for index, source in enumerate(segment[-count:]):
            layer = module.get_submodule(f"layers.{index}")
            layer.load_state_dict(inner.layers[source].state_dict())
    return adapter


def save_adapter(adapter: Adapter, folder: Path) -> None:
    """Write `config.json` and bf16 `adapter.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in adapter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    text = json.dumps(msgspec.to_builtins(adapter.config), indent=2) + "\n"
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def load_adapter(folder: Path, dtype: torch.dtype = torch.float32) -> Adapter:
    """Read an adapter's folder; HeadError names keys or tensors that do not fit."""
    path = Path(folder) / CONFIG_NAME
    try:
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise HeadError(
            f"{path}: {error}; give an adapter written by `jetspec train-adapter`"
        ) from error
    weights: dict[str, Tensor] = {}
    for part in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(part)
    adapter = Adapter(config)
    expected = {name: tuple(value.shape) for name, value in adapter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if expected != found:
        odd = sorted(set(expected.items()) ^ set(found.items()))[:6]
        raise HeadError(
            f"{folder}: tensors do not fit config.json, among them {odd}; use an adapter whose "
            "weights and config.json belong together"
        )
    adapter.load_state_dict(weights)
    return adapter.to(dtype).eval()
