"""The JETSPEC worker: one decoding round, top to bottom.

B requests, N tree nodes (root included), D depth, W width, V vocabulary, T captured layers, H
hidden size, L a request's committed length. The root is the bonus token of the last round:
committed, at position L, its KV not yet written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_jetspec.backends.tree_mask import verify_mask
from sglang_jetspec.foresight.noise import first_inputs
from sglang_jetspec.grammar import node_masks
from sglang_jetspec.lifecycle import SpecWorkerBase, decode_graphs
from sglang_jetspec.logprobs import write_logprobs
from sglang_jetspec.ranks import agreed
from sglang_jetspec.sampling import batch_sampling, batch_seeds, seed_prefill
from sglang_jetspec.spec_inputs import JetSpecDraftInput, JetSpecVerifyInput
from sglang_jetspec.trees import DraftTree, LinkedTree
from sglang_jetspec.verification import Acceptance
from sglang_jetspec.window import Window, counting

Publish = Callable[[torch.Tensor], None]


class JetSpecWorker(SpecWorkerBase):
    """Drafts a token tree, verifies it in one target pass, commits what the target chose."""

    @torch.inference_mode()
    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Publish | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one scheduled batch: a prefill, an idle step, or one decoding round."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle():
            return self._idle()
        return self._round(batch, batch.spec_info.bonus_tokens, on_publish, grammar_barrier)

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        """The target's prefill (whole, chunked or after a prefix hit) and the head's KV for it.

        The head's KV is written before returning: the prefix cache may take the slots at once.
        """
        self.requests.begin(batch)
        seed_prefill(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        self.ranks.broadcast(result.next_token_ids, src=0)
        self.requests.emit(batch, result.next_token_ids)
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        features, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        if self.text is not None:
            self.text.begin(batch, result.next_token_ids)
        if self.foresight is not None:
            self.foresight.begin(batch, features)
        lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        positions = torch.cat(
            [torch.arange(start, start + n, device=self.device) for start, n in lengths]
        )
        slots = plan.write_ids(self.draft_runner.kv_index_translator)
        self._write_draft_context(features, positions, slots)
        result.next_draft_input = JetSpecDraftInput(
            bonus_tokens=result.next_token_ids.long(), new_seq_lens=batch.seq_lens
        )
        return result

    def _idle(self) -> GenerationBatchResult:
        draft_input = JetSpecDraftInput.create_idle_input(self.device)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=draft_input.bonus_tokens,
            accept_lens=draft_input.bonus_tokens.int(),
            next_draft_input=draft_input,
            can_run_cuda_graph=False,
            speculative_num_draft_tokens=self.options.num_draft_tokens,
            new_seq_lens=draft_input.new_seq_lens,
        )

    def _round(
        self,
        batch: Any,
        roots: torch.Tensor,
        on_publish: Publish | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        window = Window.open(
            self.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            self.options.num_draft_tokens,
            self.model_runner.model_config.context_len,
        )
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=window.slots.reshape(-1),
            read_extent=self.options.num_draft_tokens,
        )
        if self.foresight is None:
            tree, ahead = self._draft(batch, roots, window), None
        else:
            tree, ahead = self.foresight.propose(batch, roots, window)
        build_masks = node_masks(batch, tree, grammar_barrier)
        target = self._verify(batch, tree, window, plan)
        logits = target.logits_output.next_token_logits.view(*tree.tokens.shape, -1)
        self.requests.adjust(batch, tree, logits, build_masks and build_masks())
        acceptance = self._accept(batch, tree, logits)
        self.requests.advance(batch, acceptance)
        if self.text is not None:
            self.text.advance(batch, acceptance)
        new_seq_lens = batch.seq_lens + acceptance.lengths
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            write_logprobs(batch, target.logits_output, acceptance, logits.shape[1])
        features = target.logits_output.hidden_states
        self._commit(window, acceptance, features)
        if self.foresight is not None:
            self.foresight.commit(ahead, tree, acceptance, features, window)
        target.logits_output.hidden_states = None
        last = (acceptance.lengths - 1).unsqueeze(1)
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=acceptance.tokens.reshape(-1),
            accept_lens=acceptance.lengths.int(),
            cap_lens=tree.live.sum(1, dtype=torch.int32),
            next_draft_input=JetSpecDraftInput(
                bonus_tokens=acceptance.tokens.gather(1, last).squeeze(1),
                new_seq_lens=new_seq_lens,
            ),
            can_run_cuda_graph=target.can_run_cuda_graph,
            speculative_num_draft_tokens=self.options.num_draft_tokens,
            speculative_output_stride=acceptance.tokens.shape[1],
            new_seq_lens=new_seq_lens,
            routed_experts_output=target.routed_experts_output,
            indexer_topk_output=target.indexer_topk_output,
        )

    def _draft(self, batch: Any, roots: torch.Tensor, window: Window) -> DraftTree:
        """One pass of the head over [root, mask or noise, ...], and the tree of its rows."""
        rows = self.options.block_size
        anchors, text = roots.unsqueeze(1), self.text and self.text.rows(batch)
        inputs = first_inputs(self.head, text, batch.seq_lens, anchors, rows - 1)
        block = torch.cat([anchors, inputs.squeeze(1)], dim=1)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(roots),
            input_ids=block.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=None,
            seq_lens_sum=batch.seq_lens_sum,
            # FlashInfer plans a captured draft pass from these: the block counts there.
            seq_lens_cpu=None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + rows,
            positions=window.positions(counting(rows, self.device)).flatten(),
            spec_algorithm=batch.spec_algorithm,
            spec_info=make_draft_block_spec_info(draft_token_num=rows, device=self.device),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        translator = self.draft_runner.kv_index_translator
        translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=window.slots[:, :rows].reshape(-1),
            read_extent=rows,
        ).bind(forward_batch, translator)
        graphs = decode_graphs(self.draft_runner)
        replayed = graphs is not None and graphs.can_run_graph(forward_batch)
        with draft_tp_context(self.draft_parallel_layout):
            output = self.draft_runner.forward(forward_batch).logits_output
            if replayed:
                return self.graphed_trees.read(len(roots))
            return self.graphed_trees.drafter(output.hidden_states, block, batch.seq_lens)

    def _verify(self, batch: Any, tree: DraftTree, window: Window, plan: Any) -> Any:
        """One target pass over the trees: logits and captured features of all B * N nodes."""
        runner = self.model_runner
        graphs = decode_graphs(runner)
        mask = verify_mask(
            runner.attn_backend,
            tree.ancestors,
            batch,
            words=tree.words if isinstance(tree, LinkedTree) else None,
            padding=graphs.padding(len(tree.tokens)) if graphs else 0,
            context_len=window.context_len,
        )
        batch.spec_info = JetSpecVerifyInput.from_trees(
            tree.tokens,
            window.positions(tree.depths),
            mask,
            depth=self.options.depth,
            seq_lens_cpu=batch.seq_lens_cpu,
            plan=plan,
        )
        batch.input_ids = batch.spec_info.draft_token
        batch.out_cache_loc = window.slots.reshape(-1)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        forward_batch = ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            kv_loc_plan=plan,
        )
        return self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )

    def _accept(self, batch: Any, tree: DraftTree, logits: torch.Tensor) -> Acceptance:
        sampling = batch_sampling(batch.sampling_info, batch_seeds(batch, batch.seq_lens))
        return agreed(self.steps.accept(tree, logits, sampling), self.ranks)

    def _commit(self, window: Window, acceptance: Acceptance, features: torch.Tensor) -> None:
        """Move accepted KV to the front of the window and give the head the new features."""
        pool = self.model_runner.token_to_kv_pool
        self._write_draft_context(*self.steps.commit(window, acceptance, features, pool))

    def _write_draft_context(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        with draft_tp_context(self.draft_parallel_layout):
            pool = self.draft_runner.token_to_kv_pool
            self.draft_model.write_context(features, positions, slots, pool)
