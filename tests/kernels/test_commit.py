"""`commit` against gather-then-scatter, in Triton's interpreter or on a GPU."""

import pytest
import torch

from sglang_jetspec.kernels.commit import kernel, naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def case(seed):
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    batch, nodes, layers = integer(1, 3), integer(2, 20), integer(1, 2)
    steps = integer(1, min(nodes, 9))
    dtype = DTYPES[seed % 4]
    heads, size = integer(1, 3), (8, 6, 64)[seed % 3]
    rows = batch * nodes + 7
    buffers = torch.randint(0, 100, (2 * layers, rows, heads, size), generator=generator)
    slots = torch.randperm(rows - 1, generator=generator)[: batch * nodes] + 1
    if seed % 2:  # runs of neighbouring slots, as a fresh pool gives them
        slots = slots.sort().values
    window = slots.view(batch, nodes)
    path = torch.full((batch, steps), -1)
    for b in range(batch):
        length = integer(1, steps)
        later = torch.randperm(nodes - 1, generator=generator)[: length - 1] + 1
        path[b, 0] = 0
        path[b, 1:length] = later.sort().values
    features = torch.randint(0, 100, (batch * nodes, 6 * integer(1, 40)), generator=generator)
    prefix_lens = torch.randint(0, 50, (batch,), generator=generator)
    tensors = (path, window, prefix_lens, buffers.to(dtype), features.to(dtype))
    return [t.to(DEVICE) for t in tensors]


@pytest.mark.parametrize("seed", range(200))
def test_random_paths(seed, monkeypatch):
    path, window, prefix_lens, buffers, features = case(seed)
    moved = buffers.clone()
    expected = naive.commit(path, window, prefix_lens, 52, list(moved), features)
    if seed % 5 == 0:  # several spans a row
        monkeypatch.setattr(kernel, "TILE_BYTES", 16)
    row_bytes = buffers[0, 0].numel() * buffers.element_size()
    table = kernel.buffer_table(list(buffers))
    got = kernel.commit(path, window, prefix_lens, 52, table, row_bytes, features)
    assert torch.equal(buffers, moved)
    for name in ("features", "positions", "slots"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_the_paths_move_rows_over_each_other():
    overlaps = 0
    for seed in range(200):
        path = case(seed)[0]
        for row in path.tolist():
            kept = [node for node in row if node >= 0]
            overlaps += any(node != i and node < len(kept) for i, node in enumerate(kept))
    assert overlaps > 50
