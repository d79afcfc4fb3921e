"""What FlashInfer is planned with, bit by bit against a dense mask.

SGLang's own planner runs on the CPU; its Triton kernels run in Triton's interpreter, and a wrapper
that records its arguments stands in for FlashInfer's.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.kernels.ops.speculative.pack_verify_mask import pack_verify_mask_into
from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

from sglang_jetspec.backends.tree_mask import verify_mask
from sglang_jetspec.spec_inputs import JetSpecVerifyInput
from sglang_jetspec.trees import best_first_tree

ROWS, COLUMNS, MAX_BATCH = 7, 96, 8


class RecordingWrapper:
    """The planning interface of a FlashInfer prefill wrapper."""

    is_cuda_graph_enabled = False
    _custom_mask_buf = None

    def begin_forward(self, qo_indptr, kv_indptr, kv_indices, last_page_len, *_, **options):
        self.qo_indptr, self.kv_indptr, self.kv_indices = qo_indptr, kv_indptr, kv_indices
        self.last_page_len, self.custom_mask = last_page_len, options["custom_mask"]


class Planner:
    """SGLang's planner over a request table of random slots, pages of any size."""

    def __init__(self, page_size):
        generator = torch.Generator().manual_seed(page_size)
        pages = torch.randperm(ROWS * COLUMNS, generator=generator).view(ROWS, COLUMNS)
        position = torch.arange(COLUMNS)
        slots = pages[:, position // page_size] * page_size + position % page_size
        self.req_to_token = slots.to(torch.int32)
        translator = KVIndexTranslator(
            req_to_token=self.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=None,
            page_size=page_size,
            device="cpu",
        )
        self.translator = translator
        self.updater = object.__new__(FlashInferIndicesUpdaterPrefill)
        vars(self.updater).update(
            attn_backend=SimpleNamespace(kv_index_translator=translator),
            prefill_wrapper_ragged=None,
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim=64,
            data_type=torch.bfloat16,
            q_data_type=torch.bfloat16,
            _swa_kv_pool=None,
            kv_indptr=[torch.zeros(MAX_BATCH + 1, dtype=torch.int32)],
            qo_indptr=[torch.zeros(MAX_BATCH + 1, dtype=torch.int32)],
            kv_last_page_len=torch.ones(MAX_BATCH, dtype=torch.int32),
        )

    def plan(self, wrapper, rows, seq_lens, spec_info, prefix_lens=None):
        plan = self.translator.plan(
            req_pool_indices=rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens, write_virtual=None
        )
        self.updater.update_single_wrapper(
            rows,
            seq_lens,
            seq_lens,
            int(seq_lens.sum()),
            prefix_lens,
            [wrapper],
            False,
            None,
            spec_info,
            plan=plan,
        )


def trees(batch, nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(torch.randn(batch, 6, 4, generator=generator) * 2, -1)
    ranked = logprobs.sort(-1, descending=True).values
    tokens = torch.arange(4).expand(batch, 6, 4)
    limit = torch.randint(1, 7, (batch,), generator=generator)
    return best_first_tree(torch.arange(batch), tokens, ranked, nodes, limit)


def dense(tree, prefix_lens, b):
    """[N, L + N] bool: the oracle, from parent links."""
    nodes, length = tree.tokens.shape[1], int(prefix_lens[b])
    mask = torch.zeros(nodes, length + nodes, dtype=torch.bool)
    mask[:, :length] = True
    for i in range(nodes):
        at = i
        while at >= 0:
            mask[i, length + at] = True
            at = int(tree.parents[b, at]) if tree.live[b, at] else -1
    return mask


def flashinfer_packed(mask, qo_indptr, kv_indptr):
    """FlashInfer's ``segment_packbits(..., bitorder="little")`` as its documentation has it."""
    lengths = (qo_indptr[1:] - qo_indptr[:-1]) * (kv_indptr[1:] - kv_indptr[:-1])
    ends = torch.cumsum(lengths, 0).tolist()
    parts = [mask.numpy()[e - n : e] for e, n in zip(ends, lengths.tolist(), strict=True)]
    return [np.packbits(part, bitorder="little") for part in parts]


def verify(planner, wrapper, prefix, nodes, seed, padding=0):
    """Plan one verify pass; checks everything the wrapper was given."""
    prefix_lens = torch.tensor(prefix)
    rows = torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(seed))[: len(prefix)]
    rows += 1
    tree = trees(len(prefix), nodes, seed)
    batch = SimpleNamespace(seq_lens=prefix_lens, seq_lens_cpu=prefix_lens)
    mask = verify_mask(SimpleNamespace(), tree.ancestors, batch, padding, COLUMNS)
    info = JetSpecVerifyInput.from_trees(
        tree.tokens, tree.depths, mask, depth=6, seq_lens_cpu=prefix_lens, plan=None
    )
    padded_rows = torch.cat([rows, rows.new_zeros(padding)])
    padded_lens = torch.cat([prefix_lens, prefix_lens.new_ones(padding)])
    planner.plan(wrapper, padded_rows, padded_lens, info)
    size = len(prefix) + padding
    assert wrapper.qo_indptr.tolist() == [i * nodes for i in range(size + 1)]
    widths = (padded_lens + nodes).tolist()
    assert wrapper.kv_indptr.tolist() == [sum(widths[:i]) for i in range(size + 1)]
    table = planner.req_to_token
    expected = torch.cat([table[r, :w] for r, w in zip(padded_rows, widths, strict=True)])
    assert wrapper.kv_indices[: len(expected)].tolist() == expected.tolist()
    assert wrapper.last_page_len.tolist() == [1] * size
    packed = flashinfer_packed(wrapper.custom_mask, wrapper.qo_indptr, wrapper.kv_indptr)
    oracles = [dense(tree, prefix_lens, b) for b in range(len(prefix))]
    oracles += [torch.ones(nodes, 1 + nodes, dtype=torch.bool)] * padding
    for bits, oracle in zip(packed, oracles, strict=True):
        seen = np.unpackbits(bits, count=oracle.numel(), bitorder="little").astype(bool)
        assert (seen == oracle.flatten().numpy()).all()
    return packed


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("nodes", [2, 9, 33])
def test_planning_inputs_are_the_dense_mask(page_size, nodes):
    planner = Planner(page_size)
    verify(planner, RecordingWrapper(), [17, 0, 40], nodes, seed=nodes)
    verify(planner, RecordingWrapper(), [3], nodes, seed=nodes + 1)


def test_rows_a_bucket_adds_see_everything_they_read():
    verify(Planner(1), RecordingWrapper(), [17, 5], 9, seed=3, padding=2)


def test_prefill_between_verify_passes_leaves_no_mask_behind():
    planner, wrapper = Planner(1), RecordingWrapper()
    verify(planner, wrapper, [17, 5], 9, seed=4)
    lengths = torch.tensor([20, 30])
    planner.plan(wrapper, torch.tensor([1, 2]), lengths, None, torch.tensor([0, 8]))
    assert wrapper.custom_mask is None
    assert wrapper.qo_indptr.tolist() == [0, 20, 42]
    verify(planner, wrapper, [40, 2], 9, seed=5)


def test_the_host_planned_path_packs_the_same_bits():
    """Replays pack with SGLang's kernel, from host lengths, into one buffer."""
    wrapper = RecordingWrapper()
    packed = verify(Planner(1), wrapper, [17, 0, 40], 9, seed=6)
    sizes = torch.tensor([0] + [len(part) for part in packed])
    indptr = torch.cumsum(sizes, 0).int()
    out = torch.full((int(indptr[-1]) + 8,), 255, dtype=torch.uint8)
    pack_verify_mask_into(
        wrapper.custom_mask,
        wrapper.kv_indptr,
        indptr,
        out,
        batch_size=3,
        query_width=9,
        max_kv_len=49,
    )
    assert out.numpy()[: int(indptr[-1])].tolist() == np.concatenate(packed).tolist()
    assert (out[int(indptr[-1]) :] == 255).all()
