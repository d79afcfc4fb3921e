"""Request state over whole lives: prefill in chunks, rounds, retraction, slots used again."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from sglang_jetspec.request_state import RequestState, stop_tokens
from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.verification import Acceptance

VOCAB, DEPTH, SLOTS = 13, 3, 5
ASKED = [(0.5, 0.0, 1.0, 0), (0.0, 0.7, 1.4, 6), (0.0, 0.0, 1.0, 0), (-0.3, 0.2, 0.7, 3)]


@dataclass
class Request:
    """What the state reads of SGLang's request; ``output_ids`` are all committed tokens."""

    prompt: int
    asked: tuple
    slot: int
    output_ids: list = field(default_factory=list)
    eos_token_ids: set = field(default_factory=lambda: {1})
    stops: set = field(default_factory=lambda: {3})
    vocab_size: int = VOCAB

    @property
    def origin_input_ids(self):
        return [0] * self.prompt

    @property
    def tokenizer(self):
        return SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)

    @property
    def sampling_params(self):
        frequency, presence, repetition, minimum = self.asked
        return SimpleNamespace(
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            min_new_tokens=minimum,
            stop_token_ids=self.stops,
            max_new_tokens=40,
        )


def neutral(request):
    return request.asked == (0.0, 0.0, 1.0, 0)


def batch_of(requests, lengths):
    """A batch as the worker sees it; SGLang's own penalty tensors hold rubbish."""
    rubbish = None
    if not all(map(neutral, requests)):
        rubbish = torch.full((len(requests), VOCAB), 99.0)
    info = SimpleNamespace(
        acc_additive_penalties=rubbish,
        acc_scaling_penalties=rubbish,
        logit_bias=None,
        has_custom_logit_processor=False,
    )
    return SimpleNamespace(
        reqs=requests,
        req_pool_indices=torch.tensor([r.slot for r in requests]),
        seq_lens=torch.tensor(lengths),
        sampling_info=info,
    )


def expected(logits, request, output):
    """The definition, token by token."""
    frequency, presence, repetition, minimum = request.asked
    result = logits.clone()
    for token in range(VOCAB):
        count = output.count(token)
        value = logits[token] - frequency * count - presence * (count > 0)
        if count:
            value = value * repetition if value < 0 else value / repetition
        if token in {1, 2} | request.stops and len(output) < minimum:
            value = torch.tensor(float("-inf"))
        result[token] = value
    return result


def prefill(state, requests, rng, chunks=1):
    """The last chunk's sample is the next output; earlier samples are nothing."""
    for chunk in range(chunks):
        lengths = [r.prompt + len(r.output_ids) - 2 * (chunks - 1 - chunk) for r in requests]
        batch = batch_of(requests, lengths)
        state.begin(batch)
        info = batch.sampling_info
        sampled = [rng.randrange(VOCAB) for _ in requests]
        state.emit(batch, torch.tensor(sampled))
    for row, request in enumerate(requests):
        if info.acc_additive_penalties is not None:
            logits = torch.randn(VOCAB)
            got = logits + info.acc_additive_penalties[row]
            scaling = info.acc_scaling_penalties[row]
            got = torch.where(got < 0, got * scaling, got / scaling)
            want = expected(logits, request, request.output_ids)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        request.output_ids = [*request.output_ids, sampled[row]]


def decode_round(state, requests, rng):
    """Every node's logits, then a commit of a random path's length and random tokens."""
    roots = torch.tensor([r.output_ids[-1] for r in requests])
    logprobs, tokens = torch.randn(len(requests), DEPTH, VOCAB).log_softmax(-1).topk(3)
    tree = best_first_tree(roots, tokens, logprobs, 9)
    batch = batch_of(requests, [r.prompt + len(r.output_ids) - 1 for r in requests])
    logits = torch.randn(*tree.tokens.shape, VOCAB)
    before = logits.clone()
    state.adjust(batch, tree, logits, None)
    for row, request in enumerate(requests):
        for node in range(9):
            path, at = [], node
            while at > 0:
                path.insert(0, int(tree.tokens[row, at]))
                at = int(tree.parents[row, at])
            want = expected(before[row, node], request, request.output_ids + path)
            torch.testing.assert_close(logits[row, node], want, rtol=1e-5, atol=1e-5)
    lengths = torch.tensor([rng.randint(1, DEPTH + 1) for _ in requests])
    chosen = torch.randint(VOCAB, (len(requests), DEPTH + 1))
    chosen *= torch.arange(DEPTH + 1) < lengths.unsqueeze(1)
    state.advance(batch, Acceptance(chosen * 0, lengths, chosen))
    for row, request in enumerate(requests):
        request.output_ids = request.output_ids + chosen[row, : lengths[row]].tolist()


@pytest.mark.parametrize("seed", range(10))
def test_every_life_of_a_request_counts_its_whole_output(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    state = RequestState(SLOTS, DEPTH, "cpu")
    waiting = [Request(rng.randint(6, 9), ASKED[i % len(ASKED)], -1) for i in range(10)]
    for request in waiting:
        request.stops = set(rng.sample(range(3, VOCAB), rng.randint(0, 6)))
    free, running = list(range(SLOTS)), []
    for _ in range(30):
        action = rng.random()
        if waiting and free and action < 0.4:
            new = [waiting.pop(0) for _ in range(min(len(waiting), len(free), rng.randint(1, 3)))]
            for request in new:
                request.slot = free.pop(0)
            prefill(state, new, rng, chunks=rng.randint(1, 3))
            running += new
        elif running and action < 0.55:
            left = running.pop(rng.randrange(len(running)))
            free.append(left.slot)
            if len(left.output_ids) < 20:
                waiting.append(left)  # retracted: it comes back with its output
        elif running:
            decode_round(state, running, rng)
            for request in [r for r in running if len(r.output_ids) > 30]:
                running.remove(request)
                free.append(request.slot)


def test_nothing_is_kept_until_a_request_needs_it():
    state = RequestState(SLOTS, DEPTH, "cpu")
    plain = Request(5, ASKED[2], 0)
    prefill(state, [plain], random.Random(0))
    assert not state.used
    assert state.outputs.shape[1] == 1
    prefill(state, [Request(5, ASKED[0], 1)], random.Random(0))
    assert state.used


def test_stop_tokens_are_all_that_sglang_withholds():
    req = Request(1, ASKED[0], 0, eos_token_ids={5, None})
    assert stop_tokens(req) == [2, 3, 5]
    foreign = Request(1, ASKED[0], 0, stops={3, -1, VOCAB, 2**63})
    assert stop_tokens(foreign) == [1, 2, 3]
    bare = SimpleNamespace(
        sampling_params=SimpleNamespace(stop_token_ids=None),
        eos_token_ids=None,
        tokenizer=None,
        vocab_size=VOCAB,
    )
    assert stop_tokens(bare) == []
