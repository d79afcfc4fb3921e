"""The device steps of a round: as torch programs, or as the Triton kernels that equal them.

B requests, N tree nodes, D depth, W width, V vocabulary, F feature columns.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from sglang_jetspec.config import OptionError, Options
from sglang_jetspec.trees import BestFirst, DraftTree
from sglang_jetspec.trees.shrink import shrink
from sglang_jetspec.verification import (
    Acceptance,
    Sampling,
    accept,
    accept_lazily,
    target_choices,
)
from sglang_jetspec.window import Commit, Window

KERNELS_VARIABLE = "SGLANG_JETSPEC_KERNELS"


def use_kernels(on_cpu: bool) -> bool:
    """Whether rounds run on Triton kernels: by default on a GPU, never on a CPU.

    `SGLANG_JETSPEC_KERNELS=torch` keeps the torch programs, to bisect and to compare.
    """
    choice = os.environ.get(KERNELS_VARIABLE, "triton")
    if choice not in ("torch", "triton"):
        raise OptionError(f"{KERNELS_VARIABLE}={choice!r}: use triton (default on a GPU) or torch.")
    return choice == "triton" and not on_cpu


def round_steps(options: Options, on_cpu: bool) -> TorchSteps:
    """The steps a server with these options takes on its device."""
    return (TritonSteps if use_kernels(on_cpu) else TorchSteps)(options, on_cpu)


class TorchSteps:
    """Plain torch. On a CPU, looking at the data is free and saves work."""

    def __init__(self, options: Options, on_cpu: bool) -> None:
        self.options = options
        self.on_cpu = on_cpu
        self.builder = options.tree_builder()
        if on_cpu:
            # Compiles the CPU's tree builder, or loads it, before the first request.
            self.builder(
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(1, 1, 1, dtype=torch.int64),
                torch.zeros(1, 1, 1),
                nodes=2,
                entropies=torch.zeros(1, 1),
            )

    def draft_tree(self, model: Any, roots: Tensor, hidden: Tensor, usable: Tensor) -> DraftTree:
        """The trees of B requests, of which a request can hold ``usable`` [B] nodes.

        model: the served head. roots: [B]. hidden: [B, D, H], the block's drafting rows.
        """
        return shrink(model.draft_tree(roots, hidden, self.options, self.builder), usable)

    def accept(self, tree: DraftTree, logits: Tensor, sampling: Sampling) -> Acceptance:
        """logits: [B, N, V], the target's at the nodes."""
        if self.on_cpu:
            return accept_lazily(tree, logits, sampling, max_depth=self.options.depth)
        choices = target_choices(logits, sampling, depths=tree.depths)
        return accept(tree, choices, self.options.depth)

    def commit(
        self, window: Window, acceptance: Acceptance, features: Tensor, pool: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Move accepted KV to the front of the window.

        features: [B * N, F]. pool: SGLang's KV pool of the target. Returns the features of the
        committed rows, their positions and their slots; rows of slot 0 are padding.
        """
        commit = Commit.of(window, acceptance, compact=self.on_cpu)
        moves = commit.moved() if self.on_cpu else commit
        if not self.on_cpu or len(moves.slots):
            pool.move_kv_cache(moves.slots, moves.source)
        return features[commit.rows], commit.positions, commit.slots


class TritonSteps(TorchSteps):
    """One launch a step, and no value read back to the host."""

    def __init__(self, options: Options, on_cpu: bool) -> None:
        super().__init__(options, on_cpu)
        self._pool: Any = None
        self._row_bytes: int | None = None

    def draft_tree(self, model: Any, roots: Tensor, hidden: Tensor, usable: Tensor) -> DraftTree:
        from sglang_jetspec.kernels.tree_build.kernel import tree_build

        if model.correction is not None or not isinstance(self.builder, BestFirst):
            return super().draft_tree(model, roots, hidden, usable)
        tokens, logprobs, _ = model.propose(hidden, self.options.width)
        nodes = self.options.num_draft_tokens
        return tree_build(roots, tokens, logprobs, nodes, node_limit=usable)

    def accept(self, tree: DraftTree, logits: Tensor, sampling: Sampling) -> Acceptance:
        from sglang_jetspec.kernels.tree_accept.kernel import tree_accept

        choices = target_choices(logits, sampling, depths=tree.depths)
        return tree_accept(tree, choices, self.options.depth)

    def commit(
        self, window: Window, acceptance: Acceptance, features: Tensor, pool: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        from sglang_jetspec.kernels.commit.kernel import commit

        if self._pool is not pool:
            self._pool, self._row_bytes = pool, uniform_row_bytes(pool)
        if self._row_bytes is None:
            return super().commit(window, acceptance, features, pool)
        done = commit(
            acceptance.path,
            window.slots,
            window.prefix_lens,
            window.context_len,
            pool.data_ptrs.view(dtype=acceptance.path.dtype),
            self._row_bytes,
            features,
        )
        return done.features, done.positions, done.slots


def uniform_row_bytes(pool: Any) -> int | None:
    """Bytes of a slot where each K and V buffer is [slots, heads, size] of one size, else None.

    Other layouts (head-major, paged envelopes, separate scales) move through SGLang.
    """
    if getattr(pool, "kv_cache_layout", None) != "nhd":
        return None
    if getattr(pool, "k_scale_buffer", None) is not None:
        return None
    buffers = [*pool.k_buffer, *pool.v_buffer]
    sizes = {buffer.stride(0) * buffer.element_size() for buffer in buffers}
    plain = all(buffer.is_contiguous() for buffer in buffers)
    return (
        sizes.pop() if plain and len(sizes) == 1 and len(pool.data_ptrs) == len(buffers) else None
    )
