"""The interface of tree builders: a typed set of parameters that is called with a head's rows."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree


@dataclass(frozen=True)
class Drafts:
    """A head's rows, what a batch of trees is built of; see `TreeBuilder.__call__`."""

    roots: Tensor
    tokens: Tensor
    logprobs: Tensor
    depth_limit: Tensor | None
    entropies: Tensor | None

    def row_entropies(self) -> Tensor:
        """[B, D]; ValueError where the caller gave none."""
        if self.entropies is None:
            raise ValueError("this kind of tree is built by the rows' entropies; give `entropies`")
        return self.entropies


class _AbstractStruct(msgspec.StructMeta, ABCMeta):
    """Typed parameters and abstract methods in one class."""


class TreeBuilder(
    msgspec.Struct, metaclass=_AbstractStruct, frozen=True, forbid_unknown_fields=True
):
    """Fields are the parameters (``tree_options``); a call builds the trees of a batch.

    needs_entropies: whether calls want the rows' entropies.
    any_head: whether the builder may branch over a head that drafts its block bidirectionally.
    max_width: the most children a node can have, None where the width decides.
    """

    needs_entropies: ClassVar[bool] = False
    any_head: ClassVar[bool] = False
    max_width: ClassVar[int | None] = None

    def __call__(
        self,
        roots: Tensor,
        top_tokens: Tensor,
        top_logprobs: Tensor,
        nodes: int,
        depth_limit: Tensor | None = None,
        entropies: Tensor | None = None,
    ) -> DraftTree:
        """Trees of `nodes` rows each, root included.

        Args:
            roots: [B] int64, last committed token of each request.
            top_tokens: [B, D, W] int64, distinct candidates for each depth, best first.
            top_logprobs: [B, D, W] fp32, their log-probabilities.
            nodes: budget N, root included.
            depth_limit: [B] int64; deeper nodes stay dead. None: no limit below D.
            entropies: [B, D] fp32, in nats, over each row's whole vocabulary.

        Raises:
            ValueError: shapes disagree, nodes < 1, or entropies that are needed are missing.
        """
        drafts = Drafts(roots, top_tokens, top_logprobs, depth_limit, entropies)
        return self.build(drafts, nodes)

    @abstractmethod
    def build(self, drafts: Drafts, nodes: int) -> DraftTree:
        """What a call does, its arguments in one object."""

    def __post_init__(self) -> None:
        """Checks between fields; raises ValueError."""


def tree_builder(
    kinds: dict[str, type[TreeBuilder]], name: str, options: dict[str, Any]
) -> TreeBuilder:
    """The builder `name` with `options`; ValueError names the kind or field that does not fit."""
    if name not in kinds:
        raise ValueError(f"tree={name!r}: use one of {', '.join(sorted(kinds))}.")
    kind = kinds[name]
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise ValueError(f"tree_options of tree={name!r}: {error}. Its options: {known}.") from None
