"""The frozen upper layers of a target: from states of one layer to its next-token law.

On predicted states this is the decoder of JetSpec++ (appendix A): no training, the target's own
layers, final norm and LM head. Started at layer 0 it is the whole target, which makes a "perfect
decoder" for tests and the verifier of offline evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sglang_jetspec.foresight.layers import LayerShape, LayerStack, RowKeys, Seen
from sglang_jetspec.heads.fields import HeadError
from sglang_jetspec.heads.reference import RMSNorm


class TargetSlice(nn.Module):
    """Target layers `first`.. to the last, the final norm and the LM head, frozen."""

    lm_head: Tensor

    def __init__(self, shape: LayerShape, layers: int, lm_head: Tensor) -> None:
        super().__init__()
        self.stack = LayerStack(shape, layers)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.register_buffer("lm_head", lm_head, persistent=False)

    @classmethod
    def of_target(cls, model: nn.Module, first: int) -> TargetSlice:
        """Copy layers `first`.. of a Hugging Face causal language model.

        Raises HeadError when its layers hold tensors that this form of layer does not have.
        """
        inner: Any = model.get_submodule("model")
        output: Any = model.get_submodule("lm_head")
        lm_head = output.weight.detach()
        made = cls(LayerShape.of_target(model), len(inner.layers) - first, lm_head)
        try:
            for layer, source in zip(made.stack.layers, inner.layers[first:], strict=True):
                layer.load_state_dict(source.state_dict())
        except RuntimeError as error:
            raise HeadError(
                f"layers of {type(model).__name__} are not plain pre-norm decoder layers: "
                f"{error}; serve this target with a plain JetSpec head"
            ) from error
        made.norm.load_state_dict(inner.norm.state_dict())
        made.requires_grad_(False).eval()
        return made.to(dtype=lm_head.dtype)

    def forward(
        self,
        rows: Tensor,
        positions: Tensor,
        own: Tensor,
        seen: Sequence[Seen] = (),
        recorded: RowKeys | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Final normed states [B, R, H] and the states after every layer of the slice.

        Arguments as of `LayerStack.forward`.
        """
        states = self.stack(rows, positions, own, seen, recorded)
        return self.norm(states[-1] if states else rows), states

    def logits(self, final: Tensor) -> Tensor:
        """[..., H] -> [..., V] fp32."""
        return F.linear(final, self.lm_head).float()
