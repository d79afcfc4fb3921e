"""Custom logit processors see each node's own continuation."""

from array import array
from types import SimpleNamespace

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

from sglang_jetspec.logit_processors import apply_processors


class AddOutput(CustomLogitProcessor):
    """Adds to a token's logit the number of times the request has emitted it, times a factor."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list, strict=True):
            if params is None:
                row += 100
                continue
            for token in params["__req__"].output_ids:
                row[token] += params["factor"] * params["__req__"].weight
            params["factor"] = 1000  # seen by no other node
        return logits


def test_each_node_sees_its_own_path():
    reqs = [SimpleNamespace(weight=w, output_ids=array("q", [0])) for w in (1, 1, 2, 1)]
    params = [{"factor": 3}, {"factor": 5}, {"factor": 7}, None]
    rows = [0, 2, 3]
    info = SimpleNamespace(
        custom_params=params,
        custom_logit_processor={1: ProcessorEntry(AddOutput(), rows, torch.tensor(rows))},
    )
    paths = torch.full((4, 3, 2), -1)
    paths[:, 1, 0] = 2
    paths[:, 2] = torch.tensor([2, 2])
    logits = torch.zeros(4, 3, 4)
    apply_processors(logits, info, reqs, [[1], [1], [1, 3], [1]], paths)
    assert logits[0].tolist() == [[0, 3, 0, 0], [0, 3, 3, 0], [0, 3, 6, 0]]
    assert logits[1].eq(0).all()
    assert logits[2].tolist() == [[0, 14, 0, 14], [0, 14, 14, 14], [0, 14, 28, 14]]
    assert logits[3].eq(100).all()
