"""Structured output: what a request's grammar allows at every node of its tree.

The grammar's state stands behind the root. SGLang's traversal walks the tree with it, notes what
may follow at each node the grammar can reach and rolls it back; the state itself is advanced by
the scheduler, over committed tokens only. A draft the grammar forbids has no mask of its own: its
parent's already keeps the target from choosing it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_jetspec.trees import DraftTree
from sglang_jetspec.trees.links import child_links

MaskBuilder = Callable[[], GrammarMask | None]


def node_masks(
    batch: Any, tree: DraftTree, barrier: Callable[[], None] | None
) -> MaskBuilder | None:
    """A function that builds the masks of a batch's nodes; None where no request has a grammar.

    Call this before the verify pass, whose launch hides the copy of the trees to the host, and
    the function after it. barrier: brings the grammars up to the last round's tokens.
    """
    if not batch.has_grammar:
        return None
    links = GrammarTree.from_device(*child_links(tree), tree.tokens)
    return lambda: build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=links,
        sampling_info=batch.sampling_info,
        device=tree.tokens.device,
        barrier=barrier,
    )
