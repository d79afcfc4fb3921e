"""Log-probabilities of the committed tokens.

B requests, N tree nodes, D depth.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from torch import Tensor

from sglang_jetspec.verification import Acceptance
from sglang_jetspec.window import counting


def committed_rows(acceptance: Acceptance, nodes: int) -> tuple[Tensor, Tensor]:
    """Where the committed tokens' logits are, and the choice made there.

    Returns ([B, D+1] int64 rows among the B * N nodes, [B * N] int64 choices). Past a request's
    last token the rows are its root's. Nodes that were not accepted have choice 0.
    """
    path, tokens = acceptance.path, acceptance.tokens
    first = counting(len(path), path.device).unsqueeze(1) * nodes
    choices = tokens.new_zeros(len(path), nodes + 1)
    choices.scatter_(1, torch.where(path < 0, nodes, path), tokens)
    return first + path.clamp(min=0), choices[:, :nodes].flatten()


def write_logprobs(batch: Any, logits_output: Any, acceptance: Acceptance, nodes: int) -> None:
    """Fill in what the batch's requests ask of their output's log-probabilities.

    Reads the nodes' logits, [B * N, V], as the choices were made from them.
    """
    rows, choices = committed_rows(acceptance, nodes)
    compute_spec_logprobs(batch, logits_output, choices, accept_index=rows)
