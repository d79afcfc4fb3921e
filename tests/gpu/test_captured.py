"""CUDA graphs of the kernel and of the end of a draft pass."""

from dataclasses import fields

import torch

from sglang_jetspec.backends.draft_graph import TreeDrafter
from sglang_jetspec.config import Options
from sglang_jetspec.kernels.tree_attention import kernel, naive
from sglang_jetspec.steps import round_steps
from sglang_jetspec.trees.bitmask import block_words

ROUNDS = 492  # as many as the JetSpec++ paper compares


def capture(function):
    """A graph of the function, after SGLang's two warm-up runs; its result is static."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_tree_attention_replays_on_new_lengths():
    torch.manual_seed(0)
    batch, nodes, heads, kv_heads, head = 2, 64, 32, 8, 128

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    pools = [normal(20000, kv_heads, head) for _ in range(2)]
    table = torch.randperm(20000, device="cuda")[: batch * 8192].view(batch, -1).int()
    rows, lengths = torch.arange(batch, device="cuda"), torch.ones(batch, device="cuda").long()
    words = block_words(nodes, True, "cuda").repeat(batch, 1, 1)
    queries = normal(batch, nodes, heads, head)
    local = [normal(batch, nodes, kv_heads, head) for _ in range(2)]
    arguments = (queries, *local, *pools, table, rows, lengths, words)
    graph, out = capture(lambda: kernel.tree_attention(*arguments, scale=head**-0.5))
    for wanted in ([4096, 17], [0, 8000], [300, 301]):
        lengths.copy_(torch.tensor(wanted))
        graph.replay()
        expected = naive.tree_attention(*arguments, scale=head**-0.5)
        error = (out.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert error.max() <= 1e-2


class Head:
    """A head whose logits are a fixed projection."""

    correction = None

    def __init__(self):
        self.weight = torch.randn(64, 4096, device="cuda")

    def propose(self, hidden, width):
        top, ids = torch.topk(torch.log_softmax(hidden @ self.weight, -1), width, dim=-1)
        return ids, top, None


def test_drafts_of_graph_and_eager_passes_are_equal():
    options = Options(num_draft_tokens=64, width=7, depth=15, tree="best_first")
    drafter = TreeDrafter(Head(), round_steps(options, on_cpu=False), 4096)
    hidden = torch.zeros(4 * 16, 64, device="cuda")
    block = torch.zeros(4 * 16, dtype=torch.int64, device="cuda")
    lengths = torch.ones(4, dtype=torch.int64, device="cuda")
    graph, replayed = capture(lambda: drafter(hidden, block, lengths))
    for _ in range(ROUNDS):
        hidden.normal_()
        block.random_(4096)
        lengths.random_(1, 4097)
        graph.replay()
        eager = drafter(hidden, block, lengths)
        for field in fields(eager):
            assert torch.equal(getattr(replayed, field.name), getattr(eager, field.name))
