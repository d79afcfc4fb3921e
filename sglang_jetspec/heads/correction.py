"""What lets a row of a block depend on the tokens drafted before it.

JetSpec and DFlash heads draft every row of a block independently of the others' tokens. DSpark and
Domino heads add a small sequential part: a bias on each row's logits computed from the tokens on
the path that leads there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

Embed = Callable[[Tensor], Tensor]  # [M] int64 token ids -> [M, H] the target's embeddings


class Correction(nn.Module, ABC):
    """The sequential part of a head. Its children carry the published tensor names.

    M rows (any mixture of requests and paths), H hidden size, S state size, V ranked tokens (the
    target's vocabulary, or the head's own draft vocabulary).
    """

    @abstractmethod
    def step(
        self, depth: int, hidden: Tensor, previous: Tensor, state: Tensor | None, embed: Embed
    ) -> tuple[Tensor | None, Tensor | None]:
        """The bias for the token at ``depth`` (1 is the first draft), after ``previous``.

        hidden: [M, H] the rows' hidden states. previous: [M] int64, the token before each (the
        root's at depth 1). state: [M, S] what the steps above left, None at depth 1.

        Returns the bias [M, V] (None: no bias at this depth) and the state for the children.
        """

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """[M] logit of the probability that the token drafted after ``previous`` is accepted.

        None from a head that does not predict it.
        """
        return None


class CorrectionConfig(Protocol):
    """A kind's own part of a head's configuration."""

    @property
    def kind(self) -> str: ...

    @property
    def first_row(self) -> int:
        """The block row that drafts the first token."""
        ...

    @property
    def idle_rows(self) -> int:
        """Rows of a block that draft nothing."""
        ...

    def tensors(self, hidden_size: int, vocab_size: int, ranked: int) -> dict[str, tuple[int, ...]]:
        """Published name -> shape of the tensors that this part adds.

        ranked: tokens that the head drafts from, vocab_size without a draft vocabulary.
        """
        ...

    def build(self, hidden_size: int, vocab_size: int, ranked: int) -> Correction:
        """The module, its weights yet to be loaded."""
        ...

    def raw(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The keys of ``config.json`` and of its ``dflash_config`` that read back as this part."""
        ...


# A kind's reader: its part of (config.json, dflash_config), None where it is not of this kind.
ReadCorrection = Callable[[Mapping[str, Any], Mapping[str, Any]], CorrectionConfig | None]


def adopt(owner: nn.Module, correction: Correction) -> None:
    """Register the children of ``correction`` in ``owner`` under their published names.

    ``owner.correction`` then computes with the weights that ``owner`` loads.
    """
    for name, child in correction.named_children():
        owner.add_module(name, child)
    owner.__dict__["correction"] = correction
