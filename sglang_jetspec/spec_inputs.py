"""What travels between rounds and into a forward pass.

B requests, N tree nodes (root included).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocation import (
    alloc_for_spec_decode,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
)
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


@dataclass
class JetSpecDraftInput(SpecInput):
    """A batch's state between rounds: the bonus tokens, committed but without KV yet.

    bonus_tokens: [B] int64. new_seq_lens: [B] int64, committed lengths L.
    future_indices: [B] int64 under the overlap schedule, where SGLang relays the two tensors
    by request slot and fills them in again before the next round.
    The remaining fields are read by SGLang's relay and stay None.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    topk_p: None = None
    topk_index: None = None
    hidden_states: None = None

    def __post_init__(self) -> None:
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def create_idle_input(cls, device: torch.device | str) -> JetSpecDraftInput:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return cls(bonus_tokens=empty, new_seq_lens=empty)

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, spec_info: JetSpecDraftInput) -> None:
        if self.future_indices is not None:
            assert spec_info.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, spec_info.new_seq_lens])

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve KV slots for the next round: 2 N past the committed length.

        Twice, because under the overlap schedule ``kv_committed_len`` lags by one round. The
        reservation ends where the request's row of ``req_to_token`` ends; the worker lets the
        tree shrink to what the row still holds.
        """
        reqs = batch.reqs
        if not reqs:
            return
        batch.maybe_evict_swa()
        page_size = batch.token_to_kv_pool_allocator.page_size
        row = batch.req_to_token_pool.req_to_token.shape[1]
        reserve = 2 * int(get_spec().speculative_num_draft_tokens)
        current, wanted, _ = page_aligned_decode_alloc_lens(
            reqs, reserve=reserve, page_size=page_size
        )
        row -= row % page_size
        wanted = [max(c, min(w, row)) for c, w in zip(current, wanted, strict=True)]
        reserve_slots(batch, current, wanted)
        committed = [req.kv.kv_committed_len for req in reqs]
        for req in reqs:
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)


def reserve_slots(batch: ScheduleBatch, current: list[int], wanted: list[int]) -> None:
    """Extend each request's slots from ``current[i]`` to ``wanted[i]`` tokens.

    The CPU writes the slot table itself: SGLang does it with Triton.
    """
    needed = sum(wanted) - sum(current)
    if needed == 0:
        return
    current_cpu, wanted_cpu = (torch.tensor(x, dtype=torch.int64) for x in (current, wanted))
    if batch.device != "cpu":
        current_cpu, wanted_cpu = current_cpu.int(), wanted_cpu.int()
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=current_cpu.to(batch.device, non_blocking=True),
            cur_kv_lens_cpu=current_cpu,
            nxt_kv_lens=wanted_cpu.to(batch.device, non_blocking=True),
            nxt_kv_lens_cpu=wanted_cpu,
            num_needed_tokens=needed,
            batch=batch,
        )
        return
    table = batch.req_to_token_pool.req_to_token
    if batch.token_to_kv_pool_allocator.page_size == 1:
        slots = alloc_token_slots(batch.tree_cache, needed)
    else:
        slots = alloc_paged_token_slots_extend(
            batch.tree_cache,
            current_cpu,
            current_cpu,
            wanted_cpu,
            wanted_cpu,
            last_loc=table[batch.req_pool_indices, current_cpu - 1].long(),
            extend_num_tokens=needed,
        )
    slots, start = slots.to(torch.int32), 0
    for req, row, old, new in zip(
        batch.reqs, batch.req_pool_indices.tolist(), current, wanted, strict=True
    ):
        table[row, old:new] = slots[start : start + new - old]
        start += new - old
        req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, new)


class JetSpecVerifyInput(EagleVerifyInput):
    """A batch of trees as the input of the target's verify pass.

    Typed EAGLE_VERIFY, so that FlashInfer and Triton read its mask.
    """

    @classmethod
    def for_capture(cls, mask: torch.Tensor, *, nodes: int) -> JetSpecVerifyInput:
        """The input a CUDA graph is captured with. mask: a buffer in the backend's layout, at
        least as long as the largest bucket's masks at the runner's fill lengths."""
        return cls._of(None, None, mask, nodes=nodes, spec_steps=nodes - 1)

    @classmethod
    def from_trees(
        cls,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        *,
        depth: int,
        seq_lens_cpu: torch.Tensor | None,
        plan: KVLocPlan,
    ) -> JetSpecVerifyInput:
        """Build the input. tokens, positions: [B, N] int64.

        mask: in the layout of the attention backend (``backends.tree_mask``). seq_lens_cpu: [B]
        committed lengths, if known.
        """
        return cls._of(
            tokens.reshape(-1),
            positions.reshape(-1),
            mask,
            nodes=tokens.shape[1],
            spec_steps=depth,
            seq_lens_sum=None if seq_lens_cpu is None else int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            kv_loc_plan=plan,
        )

    @classmethod
    def _of(
        cls,
        tokens: torch.Tensor | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor,
        *,
        nodes: int,
        seq_lens_sum: int | None = None,
        seq_lens_cpu: torch.Tensor | None = None,
        **fields: Any,
    ) -> JetSpecVerifyInput:
        return cls(
            draft_token=tokens,
            custom_mask=mask,
            positions=positions,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            topk=nodes,
            draft_token_num=nodes,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=seq_lens_sum,
            seq_lens_cpu=seq_lens_cpu,
            **fields,
        )

    @property
    def tree_topk(self) -> int:
        return -1
