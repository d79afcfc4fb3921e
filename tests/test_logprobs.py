"""Where committed tokens' logits are found."""

import torch

from sglang_jetspec.logprobs import committed_rows
from sglang_jetspec.verification import Acceptance


def test_rows_and_choices_follow_the_path():
    acceptance = Acceptance(
        path=torch.tensor([[0, 3, 4, -1], [0, -1, -1, -1]]),
        lengths=torch.tensor([3, 1]),
        tokens=torch.tensor([[7, 8, 9, 0], [6, 0, 0, 0]]),
    )
    rows, choices = committed_rows(acceptance, nodes=5)
    assert rows.tolist() == [[0, 3, 4, 0], [5, 5, 5, 5]]
    assert choices[rows[0, :3]].tolist() == [7, 8, 9]
    assert choices.tolist() == [7, 0, 0, 8, 9, 6, 0, 0, 0, 0]
