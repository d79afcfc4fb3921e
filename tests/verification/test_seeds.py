"""Seeded draws are SGLang's, token for token, and have the law."""

import json
import os
import subprocess
import sys

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers import sampler

from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.verification import Sampling, accept, accept_lazily, target_choices
from sglang_jetspec.verification.sampling import draw
from sglang_jetspec.verification.seeds import Seeds, murmur_hash

SEEDS = [0, 1, 7, 42, -1, 2**40 + 3, 2**63 - 1, -(2**63)]
POSITIONS = [0, 1, 511, 4096, 70_000, 3, 2**31, 12]
CANDIDATES = 1500
# SGLang's hash runs where Triton does; its interpreter does on any machine.
REFERENCE = """
import json, sys, torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
seeds, positions, candidates = json.load(sys.stdin)
columns = torch.arange(candidates)
hashed = torch.empty(len(seeds), candidates, dtype=torch.uint32)
murmur_hash32_kernel[(len(seeds), -(-candidates // 1024))](
    torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), columns, hashed,
    len(seeds), candidates, BLOCK_SIZE=1024,
)
print(json.dumps(hashed.long().tolist()))
"""


def test_the_hash_is_sglangs():
    ran = subprocess.run(
        [sys.executable, "-c", REFERENCE],
        input=json.dumps([SEEDS, POSITIONS, CANDIDATES]),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    ours = murmur_hash(torch.tensor(SEEDS), torch.tensor(POSITIONS), CANDIDATES)
    assert ours.tolist() == json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture
def sglang_draws(monkeypatch):
    """SGLang's samplers, uncompiled, with the hash that the test above compares with its kernel."""
    hashed = lambda seeds, positions, columns: murmur_hash(  # noqa: E731
        seeds.to(torch.int64), positions, len(columns)
    )
    monkeypatch.setattr(sampler, "murmur_hash32", hashed)
    plain = sampler.multinomial_with_seed
    monkeypatch.setattr(
        sampler, "multinomial_with_seed", getattr(plain, "_torchdynamo_orig_callable", plain)
    )
    return sampler


def sampling_of(rows, vocab, *, cut, seed=0):
    random = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 5000, (rows,), generator=random)
    values = torch.randint(-(2**62), 2**62, (rows,), generator=random)
    return Sampling(
        temperatures=0.3 + 1.5 * torch.rand(rows, generator=random),
        top_ks=torch.randint(1, vocab, (rows,), generator=random)
        if cut
        else torch.full((rows,), 1 << 30),
        top_ps=0.3 + 0.7 * torch.rand(rows, generator=random) if cut else torch.ones(rows),
        min_ps=None,
        greedy=torch.zeros(rows, dtype=torch.bool),
        all_greedy=False,
        seeds=Seeds(values, torch.ones(rows, dtype=torch.bool), positions),
    )


@pytest.mark.parametrize("vocab", [7, 668, 3000])
@pytest.mark.parametrize("cut", [False, True])
def test_draws_equal_sglangs(sglang_draws, vocab, cut):
    rows = 300
    logits = 3.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    sampling = sampling_of(rows, vocab, cut=cut)
    seeds = sampling.seeds
    probs = torch.softmax(logits / sampling.temperatures.unsqueeze(1), -1)
    if cut:
        expected = sglang_draws.top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            sampling.top_ks,
            sampling.top_ps,
            None,
            need_min_p_sampling=False,
            sampling_seed=seeds.values,
            positions=seeds.positions,
        )
    else:
        expected = sglang_draws.sampling_from_probs_torch(probs, seeds.values, seeds.positions)
    assert draw(logits, sampling).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 3


def rows_of(sampling, index):
    return sampling.rows(torch.tensor(index))


def test_a_row_does_not_see_its_neighbours():
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    cut, whole = sampling_of(40, 50, cut=True), sampling_of(40, 50, cut=False)
    mixed = Sampling(
        **{
            **vars(whole),
            "top_ks": torch.where(torch.arange(40) % 2 == 0, cut.top_ks, whole.top_ks),
            "min_ps": (torch.arange(40) % 3 == 0) * 0.2,
        }
    )
    together = draw(logits, mixed)
    for row in range(40):
        assert draw(logits[row : row + 1], rows_of(mixed, [row])) == together[row]


def test_unseeded_and_greedy_rows_stay_as_they_are():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    sampling = sampling_of(6, 50, cut=False)
    given = torch.tensor([True, False, True, False, True, False])
    greedy = torch.tensor([False, False, False, False, True, True])
    seeds = Seeds(sampling.seeds.values, given, sampling.seeds.positions)
    mixed = Sampling(**{**vars(sampling), "seeds": seeds, "greedy": greedy})
    choices = [
        target_choices(
            logits.unsqueeze(1),
            mixed,
            torch.Generator().manual_seed(run),
            depths=torch.zeros(6, 1, dtype=torch.int64),
        ).flatten()
        for run in range(40)
    ]
    rows = torch.stack(choices)
    assert torch.equal(rows[:, 4:], logits[4:].argmax(1).expand(40, 2))
    assert all(len(set(rows[:, row].tolist())) == 1 for row in (0, 2))
    assert all(len(set(rows[:, row].tolist())) > 5 for row in (1, 3))


@pytest.mark.parametrize("cut", [False, True])
def test_the_walk_is_the_plain_sequence_whatever_the_tree(cut):
    """Decoding a chain of a Markov model by seeds, with trees and without."""
    vocab, length, batch = 9, 30, 3
    random = torch.Generator().manual_seed(5)
    table = 2.0 * torch.randn(vocab, vocab, generator=random)
    sampling = sampling_of(batch, vocab, cut=cut)
    plain = [torch.zeros(batch, dtype=torch.int64)]
    everyone = torch.arange(batch)
    for step in range(length + 8):
        plain.append(draw(table[plain[-1]], sampling.rows(everyone, step)))
    expected = torch.stack(plain[1:], 1)
    for lazily in (True, False):
        out = [[] for _ in range(batch)]
        roots, done = plain[0], torch.zeros(batch, dtype=torch.int64)
        while min(map(len, out)) < length:
            scores, tokens = torch.rand(batch, 4, vocab, generator=random).log().topk(3, -1)
            tree = best_first_tree(roots, tokens, scores, 12)
            logits = table[tree.tokens]
            here = Sampling(**{**vars(sampling), "seeds": sampling.seeds.rows(everyone, done)})
            if lazily:
                result = accept_lazily(tree, logits, here, max_depth=4)
            else:
                result = accept(tree, target_choices(logits, here, depths=tree.depths), 4)
            for request in range(batch):
                out[request] += result.tokens[request, : result.lengths[request]].tolist()
            done = done + result.lengths
            roots = result.tokens.gather(1, (result.lengths - 1).unsqueeze(1)).squeeze(1)
        for request in range(batch):
            assert out[request][:length] == expected[request, :length].tolist()


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"min_p": 0.3}])
def test_positions_are_independent_draws_of_the_law(settings):
    rows = 20_000
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, 0.2])
    law = torch.softmax(logits.double(), 0)
    if "top_k" in settings:
        law[law < law.sort(descending=True).values[2]] = 0
    if "min_p" in settings:
        law[law < 0.3 * law.max()] = 0
    sampling = Sampling(
        temperatures=torch.ones(rows),
        top_ks=torch.full((rows,), settings.get("top_k", 1 << 30)),
        top_ps=torch.ones(rows),
        min_ps=torch.full((rows,), settings["min_p"]) if "min_p" in settings else None,
        greedy=torch.zeros(rows, dtype=torch.bool),
        all_greedy=False,
        seeds=Seeds(torch.full((rows,), 7), torch.ones(rows, dtype=torch.bool), torch.arange(rows)),
    )
    counts = torch.bincount(draw(logits.expand(rows, -1), sampling), minlength=6).double()
    assert counts[law == 0].sum() == 0
    kept = law > 0
    expected = law[kept] / law[kept].sum() * rows
    assert chisquare(counts[kept], expected).pvalue > 0.001
