"""Custom logit processors at every tree node.

A processor sees its request as plain decoding would show it after the node's path: the same
parameters, and ``output_ids`` that end with the path. What it changes in the parameters of a node
is lost, since other nodes are other continuations.

B requests, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from array import array
from typing import Any

from torch import Tensor


class NodeRequest:
    """A request whose output goes on to a tree node; everything else is the request's own."""

    def __init__(self, req: Any, output_ids: list[int]) -> None:
        self._req = req
        self.output_ids = array("q", output_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def apply_processors(
    logits: Tensor, info: Any, reqs: list[Any], outputs: list[list[int]], paths: Tensor
) -> None:
    """Runs the batch's processors over [B, N, V] logits, in place.

    info: SGLang's SamplingBatchInfo. outputs: each request's committed output, the root included.
    paths: [B, N, D] int64, the drafts on each node's path, then -1.
    """
    for entry in info.custom_logit_processor.values():
        params: list[Any] = []
        for row, drafts in zip(entry.rows, paths[entry.indices].tolist(), strict=True):
            given = info.custom_params[row]
            for path in drafts:
                output = outputs[row] + [token for token in path if token >= 0]
                node = NodeRequest(reqs[row], output)
                params.append(given if given is None else {**given, "__req__": node})
        nodes = logits[entry.indices]
        result = entry.processor(nodes.flatten(0, 1), params)
        logits[entry.indices] = result.view_as(nodes).to(logits.dtype)
