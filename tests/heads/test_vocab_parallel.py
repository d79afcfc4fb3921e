"""Two gloo processes propose over a split vocabulary what one does, and accept alike."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_jetspec.heads.vocab_parallel import VocabularyShard
from sglang_jetspec.ranks import agreed
from sglang_jetspec.verification import Acceptance

VOCABULARY = 61
ALONE = SimpleNamespace(world_size=1)


def all_logits():
    """[2, 3, V] fp32; the best tokens lie in both halves."""
    return torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(8)) * 3


@dataclass
class Gloo:
    """SGLang's GroupCoordinator over the default group."""

    world_size: int

    def all_gather(self, input_, dim=-1):
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(parts, input_)
        return torch.cat(parts, dim)

    def broadcast(self, input_, src=0):
        dist.broadcast(input_, src)
        return input_


def shards():
    """Columns of rank 0 and rank 1: runs of ids, a draft vocabulary, one held by rank 0 alone."""
    logits, ids = all_logits(), torch.arange(VOCABULARY)
    drafted, few = ids[1::3], ids[:20:2]
    none = ids[:0]
    return [
        ((logits[..., :31], 0, None), (logits[..., 31:], 31, None), 5),
        ((logits[..., drafted[:9]], 0, drafted[:9]), (logits[..., drafted[9:]], 0, drafted[9:]), 4),
        ((logits[..., few], 0, few), (logits[..., none], 0, none), 6),
    ]


def work(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for *parts, width in shards():
        logits, first, ids = parts[rank]
        proposal = VocabularyShard(Gloo(2), first, ids).propose(logits, width, entropies=True)
        results.put((rank, [part.numpy() for part in proposal]))
    drawn = torch.randint(99, (2, 4), generator=torch.Generator().manual_seed(rank))
    kept = agreed(Acceptance(drawn, drawn[:, 0], drawn + 1), Gloo(2))
    results.put((rank, [part.numpy() for part in (kept.path, kept.lengths, kept.tokens)]))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def proposals():
    """What each of the two ranks proposes in every case, and the acceptance it ends with."""
    from sglang_jetspec.tools.bench.server import free_port

    context = mp.get_context("spawn")
    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=work, args=(rank, port, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = {0: [], 1: []}
    for _ in range(2 * len(shards()) + 2):
        rank, proposal = queue.get(timeout=120)
        found[rank].append([torch.from_numpy(part) for part in proposal])
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return found


def test_two_ranks_propose_what_one_does(proposals):
    for case, (*parts, width) in enumerate(shards()):
        logits = torch.cat([part[0] for part in parts], -1)
        if parts[0][2] is None:
            whole = VocabularyShard(ALONE)
        else:
            whole = VocabularyShard(ALONE, 0, torch.cat([part[2] for part in parts]))
        tokens, logprobs, entropies = whole.propose(logits, width, entropies=True)
        for rank in range(2):
            assert torch.equal(proposals[rank][case][0], tokens)
            torch.testing.assert_close(proposals[rank][case][1], logprobs, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(proposals[rank][case][2], entropies, rtol=1e-5, atol=1e-6)


def test_both_ranks_hold_the_same_bits(proposals):
    for mine, other in zip(proposals[0], proposals[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_ranks_end_with_rank_zeros_acceptance(proposals):
    drawn = torch.randint(99, (2, 4), generator=torch.Generator().manual_seed(0))
    for rank in range(2):
        path, lengths, tokens = proposals[rank][-1]
        assert torch.equal(path, drawn)
        assert torch.equal(lengths, drawn[:, 0])
        assert torch.equal(tokens, drawn + 1)


def test_one_rank_ranks_its_own_ids():
    logits = torch.tensor([[[0.0, 3.0, 1.0]]])
    tokens, logprobs, _ = VocabularyShard(ALONE, 0, torch.tensor([7, 2, 9])).propose(logits, 2)
    assert tokens.tolist() == [[[2, 9]]]
    expected = logits.log_softmax(-1)[..., [1, 2]]
    torch.testing.assert_close(logprobs, expected)
