"""A round reads nothing back to the host: it runs on torch's meta device, which holds no values.

There `device.type` is not "cpu", so the round takes the branches of a GPU; every read of a value
(`item`, `tolist`, a data-dependent shape, a copy to the host) raises. SGLang's runners and pools,
which need a GPU, are stand-ins.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_jetspec import worker as worker_module
from sglang_jetspec.backends.draft_graph import GraphedTrees, TreeDrafter
from sglang_jetspec.config import Options
from sglang_jetspec.request_state import RequestState
from sglang_jetspec.steps import TorchSteps
from sglang_jetspec.worker import JetSpecWorker

BATCH, NODES, DEPTH, WIDTH, VOCABULARY, HIDDEN = 3, 16, 5, 4, 50, 8
OPTIONS = Options(num_draft_tokens=NODES, width=WIDTH, depth=DEPTH, tree="best_first")


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def longs(*shape):
    return meta(*shape, dtype=torch.int64)


class Translator:
    """SGLang's slot translator on a plain pool: it gives back what it is given."""

    def plan(self, **fields):
        return SimpleNamespace(bind=lambda forward_batch, translator: None, **fields)


class Pool:
    def move_kv_cache(self, slots, source):
        assert slots.shape == source.shape == (BATCH * (DEPTH + 1),)


class Head:
    def draft_tree(self, roots, hidden, options, build):
        tokens = longs(BATCH, DEPTH, options.width)
        logprobs = meta(BATCH, DEPTH, options.width)
        return build(roots, tokens, logprobs, options.num_draft_tokens)

    def write_context(self, features, positions, slots, pool):
        assert len(features) == len(positions) == len(slots) == BATCH * (DEPTH + 1)


def runner(outputs, **fields):
    return SimpleNamespace(
        kv_index_translator=Translator(),
        token_to_kv_pool=Pool(),
        decode_cuda_graph_runner=None,
        eager_runner=None,
        forward=lambda forward_batch: SimpleNamespace(logits_output=outputs),
        **fields,
    )


@pytest.fixture
def round_worker(monkeypatch):
    """A worker whose two forward passes return meta tensors."""
    passes = lambda **fields: SimpleNamespace(**fields)  # noqa: E731
    passes.init_new = lambda batch, runner, **fields: SimpleNamespace(**fields)
    monkeypatch.setattr(worker_module, "ForwardBatch", passes)
    monkeypatch.setattr(worker_module, "make_draft_block_spec_info", lambda **fields: None)
    made = object.__new__(JetSpecWorker)
    drafted = SimpleNamespace(hidden_states=meta(BATCH * OPTIONS.block_size, HIDDEN))
    verified = SimpleNamespace(
        next_token_logits=meta(BATCH * NODES, VOCABULARY), hidden_states=meta(BATCH * NODES, HIDDEN)
    )
    target = SimpleNamespace(
        logits_output=verified,
        can_run_cuda_graph=False,
        routed_experts_output=None,
        indexer_topk_output=None,
    )
    steps = TorchSteps(OPTIONS, on_cpu=False)
    vars(made).update(
        options=OPTIONS,
        device="meta",
        on_cpu=False,
        head=SimpleNamespace(mask_token_id=1),
        req_to_token_pool=SimpleNamespace(req_to_token=meta(9, 200, dtype=torch.int32)),
        requests=RequestState(9, DEPTH, "meta"),
        steps=steps,
        ranks=SimpleNamespace(world_size=1),
        graphed_trees=GraphedTrees(TreeDrafter(Head(), steps, 128)),
        draft_runner=runner(drafted),
        draft_model=Head(),
        draft_parallel_layout=None,
        model_runner=runner(
            None,
            model_config=SimpleNamespace(context_len=128),
            attn_backend=SimpleNamespace(tree_mask_layout="flat"),
        ),
        _target_worker=SimpleNamespace(forward_batch_generation=lambda **fields: target),
    )
    monkeypatch.setattr(worker_module, "draft_tp_context", lambda layout: nullcontext())
    # Without CUDA there is no pinned memory to send from.
    to_meta = lambda values, device: torch.tensor(values).to("meta")  # noqa: E731
    monkeypatch.setattr("sglang_jetspec.sampling.sent", to_meta)
    return made


def requests(seed=None, allocated=(40, 60, 150)):
    params = SimpleNamespace(sampling_seed=seed)
    return [
        SimpleNamespace(sampling_params=params, kv=SimpleNamespace(kv_allocated_len=length))
        for length in allocated
    ]


def batch_of(seed=None, **sampling):
    info = {
        "temperatures": meta(BATCH, 1),
        "top_ks": meta(BATCH, dtype=torch.int32),
        "top_ps": meta(BATCH),
        "min_ps": meta(BATCH),
        "need_min_p_sampling": False,
        "is_all_greedy": True,
        "acc_additive_penalties": None,
        "has_custom_logit_processor": False,
        "logit_bias": None,
    }
    lengths = torch.tensor([7, 30, 120])
    return SimpleNamespace(
        req_pool_indices=longs(BATCH),
        seq_lens=longs(BATCH),
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        spec_algorithm=None,
        can_run_decode_cuda_graph=True,
        sampling_info=SimpleNamespace(**info | sampling),
        return_logprob=False,
        has_grammar=False,
        reqs=requests(seed),
    )


SAMPLING = {
    "greedy": {},
    "sampled": {"is_all_greedy": False, "need_min_p_sampling": True},
    "seeded": {"is_all_greedy": False, "seed": 7},
    "bias": {"logit_bias": meta(BATCH, VOCABULARY)},
    "penalties": {"acc_additive_penalties": meta(BATCH, VOCABULARY)},
}


@pytest.mark.parametrize("layout", ["flat", "words"])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_round_waits_for_nothing(round_worker, name, layout):
    round_worker.model_runner.attn_backend.tree_mask_layout = layout
    published = []
    result = round_worker._round(batch_of(**SAMPLING[name]), longs(BATCH), published.append, None)
    assert result.next_token_ids.shape == (BATCH * (DEPTH + 1),)
    assert result.accept_lens.dtype == torch.int32
    assert [lengths is result.new_seq_lens for lengths in published] == [True]
    assert result.next_draft_input.bonus_tokens.shape == (BATCH,)


@pytest.mark.parametrize("layout", ["flat", "words"])
def test_lengths_need_not_be_known_on_the_host(round_worker, layout):
    """As under the overlap schedule with a backend that plans on the device."""
    round_worker.model_runner.attn_backend.tree_mask_layout = layout
    batch = batch_of()
    batch.seq_lens_cpu = batch.seq_lens_sum = None
    result = round_worker._round(batch, longs(BATCH), None, None)
    assert result.new_seq_lens.shape == (BATCH,)


def test_the_detector_detects(round_worker):
    round_worker.steps = TorchSteps(OPTIONS, on_cpu=True)  # the CPU's branches look at values
    round_worker.model_runner.attn_backend.tree_mask_layout = "rows"
    with pytest.raises((NotImplementedError, RuntimeError), match=r"meta|Meta|data-dependent"):
        round_worker._round(batch_of(), longs(BATCH), None, None)
