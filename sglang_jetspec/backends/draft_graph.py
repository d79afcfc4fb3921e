"""From the head's hidden states to draft trees: one function, run eagerly or inside a CUDA graph.

B requests (in a graph: of a batch-size bucket), D depth, N tree nodes, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sglang_jetspec.steps import TorchSteps
from sglang_jetspec.trees import DraftTree
from sglang_jetspec.window import usable_nodes


@dataclass(frozen=True)
class TreeDrafter:
    """The end of a draft pass: candidates and trees. Reads nothing back to the host.

    model: a head with ``draft_tree``. steps: of the server's device.
    first_row: the block row that drafts the first token.
    """

    model: Any
    steps: TorchSteps
    context_len: int
    first_row: int = 1

    def __call__(self, hidden: Tensor, block: Tensor, prefix_lens: Tensor) -> DraftTree:
        """hidden: [B * rows, H]. block: [B * rows] int64, each request's root first.
        prefix_lens: [B] int64."""
        options, batch = self.steps.options, len(prefix_lens)
        rows = hidden.view(batch, options.block_size, -1)[:, self.first_row :]
        roots = block.view(batch, options.block_size)[:, 0]
        usable = usable_nodes(prefix_lens, options.num_draft_tokens, self.context_len)
        return self.steps.draft_tree(self.model, roots, rows, usable)


class GraphedTrees:
    """The trees of the last replay, in buffers that captured graphs write.

    Registered with SGLang's decode graph runner as a hook at the end of the head's forward, so that
    candidates and tree are part of the graph. A bucket's padding rows get trees like any other;
    nobody reads them. What `read` returns is valid until the next replay.
    """

    def __init__(self, drafter: TreeDrafter) -> None:
        self.drafter = drafter
        self._buffers: list[Tensor] | None = None
        self._kind: type[DraftTree] = DraftTree

    def capture(self, runner: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
        """SGLang's ``capture_tail_hooks`` interface; the largest bucket comes first."""
        tree = self.drafter(output.hidden_states, forward_batch.input_ids, forward_batch.seq_lens)
        values = [getattr(tree, field.name) for field in fields(tree)]
        if self._buffers is None:
            # The warm-up before the first capture, so that no graph owns the memory.
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the draft graph was captured without a warm-up run")
            self._kind = type(tree)
            self._buffers = [torch.zeros_like(value) for value in values]
        for buffer, value in zip(self._buffers, values, strict=True):
            if len(value) > len(buffer):
                raise RuntimeError(
                    f"a bucket of {len(value)} requests was captured after one of {len(buffer)}; "
                    "SGLang captures the largest first"
                )
            buffer[: len(value)].copy_(value)

    def read(self, batch: int) -> DraftTree:
        """The first ``batch`` trees."""
        assert self._buffers is not None, "no graph has been captured"
        return self._kind(*(buffer[:batch] for buffer in self._buffers))
