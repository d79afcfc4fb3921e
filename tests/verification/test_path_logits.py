"""Every node's logits equal those of SGLang's plain decoding after the node's path."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.verification.path_logits import (
    Penalties,
    ban_early_stops,
    count_tokens,
    path_tokens,
    penalize,
)

PENALIZERS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}
VOCAB, DEPTH = 11, 5
# frequency, presence, repetition, min_new_tokens; the last request asks for nothing.
ASKED = [
    (0.6, 1.0, 1.3, 4),
    (0.0, 0.0, 1.7, 0),
    (-0.5, 0.0, 1.0, 9),
    (0.0, -0.8, 0.6, 1),
    (0.0, 0.0, 1.0, 0),
]
STOPS = [[2, 5], [3], [7, 8, 9], [1], []]


class Batch(SimpleNamespace):
    """A namespace that takes weak references."""


def random_trees(random, batch, width=3, nodes=14):
    logits = torch.randn(batch, DEPTH, VOCAB, generator=random)
    logprobs, tokens = logits.log_softmax(-1).topk(width)
    roots = torch.randint(VOCAB, (batch,), generator=random)
    limit = torch.randint(DEPTH + 1, (batch,), generator=random)
    return best_first_tree(roots, tokens, logprobs, nodes, depth_limit=limit)


def plain_logits(logits, output, request):
    """SGLang's penalizers, fed the output token by token."""
    frequency, presence, repetition, minimum = ASKED[request]
    params = SimpleNamespace(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=minimum,
        stop_token_ids=set(STOPS[request]),
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    req = SimpleNamespace(sampling_params=params, eos_token_ids=None, tokenizer=tokenizer)
    batch = Batch(device="cpu", reqs=[req])
    orchestrator = BatchedPenalizerOrchestrator(VOCAB, batch, PENALIZERS)
    for token in output:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    additive = torch.zeros(1, VOCAB)
    orchestrator.accumulate_additive_penalties(additive)
    scaling = orchestrator.accumulate_scaling_penalties()
    logits = logits + additive[0]
    if scaling is not None:
        logits = torch.where(logits < 0, logits * scaling[0], logits / scaling[0])
    return logits


def path(tree, request, node):
    """Drafts from below the root down to the node, by parent links."""
    tokens = []
    while node > 0 and tree.live[request, node]:
        tokens.insert(0, int(tree.tokens[request, node]))
        node = int(tree.parents[request, node])
    return tokens


@pytest.mark.parametrize("seed", range(25))
def test_every_node_has_the_logits_of_plain_decoding(seed):
    random = torch.Generator().manual_seed(seed)
    batch = len(ASKED)
    tree = random_trees(random, batch)
    logits = 3 * torch.randn(*tree.tokens.shape, VOCAB, generator=random)
    before = logits.clone()
    lengths = torch.randint(1, 7, (batch,), generator=random)
    outputs = torch.randint(VOCAB, (batch, 8), generator=random)
    outputs[torch.arange(batch), lengths - 1] = tree.tokens[:, 0]  # the root is the last output

    frequency, presence, repetition, minimum = torch.tensor(ASKED).unbind(1)
    counts = count_tokens(outputs.int(), lengths, VOCAB)
    penalize(logits, tree, Penalties(frequency, presence, repetition, counts), DEPTH)
    stops = torch.tensor([(row + row[:1] * 3 or [0] * 3)[:3] for row in STOPS])
    ban_early_stops(logits, tree.depths, stops, minimum.long() - lengths)

    for request in range(batch):
        for node in range(tree.tokens.shape[1]):
            output = outputs[request, : lengths[request]].tolist() + path(tree, request, node)
            expected = plain_logits(before[request, node], output, request)
            torch.testing.assert_close(logits[request, node], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[-1], before[-1])


def test_a_path_holds_the_drafts_from_the_root_down():
    random = torch.Generator().manual_seed(0)
    tree = random_trees(random, 4)
    paths = path_tokens(tree, DEPTH)
    for request in range(4):
        for node in range(tree.tokens.shape[1]):
            expected = path(tree, request, node)
            assert paths[request, node].tolist() == expected + [-1] * (DEPTH - len(expected))


def test_only_the_first_tokens_are_counted():
    tokens = torch.tensor([[1, 1, 3, 1], [2, 0, 0, 0], [4, 4, 4, 4]], dtype=torch.int32)
    counts = count_tokens(tokens, torch.tensor([3, 1, 0]), 5)
    assert counts.tolist() == [[0, 2, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
