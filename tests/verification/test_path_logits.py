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
from sglang_jetspec.verification import Sampling
from sglang_jetspec.verification.path_logits import (
    Penalties,
    ban_early_stops,
    count_tokens,
    path_tokens,
    penalize,
)
from sglang_jetspec.verification.sampling import sampling_law

PENALIZERS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}
VOCAB, DEPTH, COPIES, MIN_P = 11, 5, 8, 0.15
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
def test_every_node_has_the_logits_and_the_min_p_law_of_plain_decoding(seed):
    """40 trees a seed, 1,000 in all."""
    random = torch.Generator().manual_seed(seed)
    asked, batch = ASKED * COPIES, len(ASKED) * COPIES
    tree = random_trees(random, batch)
    logits = 3 * torch.randn(*tree.tokens.shape, VOCAB, generator=random)
    before = logits.clone()
    lengths = torch.randint(1, 7, (batch,), generator=random)
    outputs = torch.randint(VOCAB, (batch, 8), generator=random)
    outputs[torch.arange(batch), lengths - 1] = tree.tokens[:, 0]  # the root is the last output

    frequency, presence, repetition, minimum = torch.tensor(asked).unbind(1)
    counts = count_tokens(outputs.int(), lengths, VOCAB)
    penalize(logits, tree, Penalties(frequency, presence, repetition, counts), DEPTH)
    stops = torch.tensor([(row + row[:1] * 3 or [0] * 3)[:3] for row in STOPS * COPIES])
    ban_early_stops(logits, tree.depths, stops, minimum.long() - lengths)

    expected = torch.empty_like(logits)
    for request in range(batch):
        for node in range(tree.tokens.shape[1]):
            output = outputs[request, : lengths[request]].tolist() + path(tree, request, node)
            expected[request, node] = plain_logits(
                before[request, node], output, request % len(ASKED)
            )
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[len(ASKED) - 1], before[len(ASKED) - 1])
    probs = expected.softmax(-1)
    kept = probs.masked_fill(probs < MIN_P * probs.amax(-1, keepdim=True), 0.0)
    found = sampling_law(logits.flatten(0, 1), min_p_rows(batch * tree.tokens.shape[1]))
    torch.testing.assert_close(found.view_as(kept), kept / kept.sum(-1, keepdim=True))
    assert (kept > 0).sum(-1).float().mean() < VOCAB - 2


def min_p_rows(count):
    return Sampling(
        temperatures=torch.ones(count),
        top_ks=torch.full((count,), VOCAB),
        top_ps=torch.ones(count),
        min_ps=torch.full((count,), MIN_P),
        greedy=torch.zeros(count, dtype=torch.bool),
        all_greedy=False,
    )


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
