"""KV slots reserved for a round on the CPU, by SGLang's own allocators."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from sglang_jetspec import spec_inputs
from sglang_jetspec.spec_inputs import JetSpecDraftInput

NODES, WIDTH, SLOTS = 16, 200, 4096


def make_batch(page_size, prompts):
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(
            SLOTS, page_size, torch.float32, "cpu", None, need_sort=False
        )
        assert not allocator.use_triton_kernels
    table = torch.zeros(len(prompts) + 2, WIDTH, dtype=torch.int32)
    rows = torch.arange(len(prompts)) + 1
    for row, length in zip(rows.tolist(), prompts, strict=True):
        whole = -(-length // page_size) * page_size
        table[row, :length] = allocator.alloc(whole)[:length].int()
    kv = [SimpleNamespace(kv_allocated_len=n, kv_committed_len=n) for n in prompts]
    return SimpleNamespace(
        device="cpu",
        reqs=[SimpleNamespace(kv=state, decode_batch_idx=0) for state in kv],
        req_pool_indices=rows,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        tree_cache=SimpleNamespace(token_to_kv_pool_allocator=allocator),
        token_to_kv_pool_allocator=allocator,
        maybe_evict_swa=lambda: None,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_reservations_are_disjoint_whole_pages(monkeypatch, page_size):
    monkeypatch.setattr(allocation, "evict_from_tree_cache", lambda cache, tokens: None)
    spec = SimpleNamespace(speculative_num_draft_tokens=NODES)
    monkeypatch.setattr(spec_inputs, "get_spec", lambda: spec)
    random = torch.Generator().manual_seed(page_size)
    batch = make_batch(page_size, [1, 15, 16, 17, 64, 70])
    table = batch.req_to_token_pool.req_to_token
    empty = torch.zeros(0, dtype=torch.int64)
    draft_input = JetSpecDraftInput(bonus_tokens=empty, new_seq_lens=empty)
    for step in range(60):
        draft_input.prepare_for_decode(batch)
        owned = []
        for row, req in zip(batch.req_pool_indices.tolist(), batch.reqs, strict=True):
            allocated, committed = req.kv.kv_allocated_len, req.kv.kv_committed_len
            row_end = WIDTH - WIDTH % page_size
            assert allocated >= min(committed + 2 * NODES, row_end)
            assert allocated <= WIDTH
            slots = table[row, :allocated].long()
            positions = torch.arange(allocated)
            assert torch.equal(slots % page_size, positions % page_size)
            pages = slots // page_size
            assert torch.equal(pages, pages[positions // page_size * page_size])
            owned += pages.unique().tolist()
            accepted = int(torch.randint(1, NODES, (), generator=random))
            req.kv.kv_committed_len = min(committed + accepted, row_end)
            assert req.decode_batch_idx == step + 1
        assert len(owned) == len(set(owned))
        assert 0 not in owned  # page 0 is padding
        free = batch.token_to_kv_pool_allocator.available_size()
        assert free == SLOTS - len(owned) * page_size
    assert batch.seq_lens_sum == int(batch.seq_lens_cpu.sum())
