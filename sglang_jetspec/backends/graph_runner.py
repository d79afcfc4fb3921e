"""CUDA graphs of a round's two passes, through SGLang's decode graph runner.

SGLang captures a block drafter's verify pass without a mask, and sizes the attention backends'
buffers for one token per row of context. Both are put right here; capture, buckets, padding and
replay stay SGLang's. Installed on the two runner instances (`install`), not on SGLang's classes.

B requests of a bucket, N rows a request, L prefix length.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, fast_prefill_plan
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_jetspec.spec_inputs import JetSpecVerifyInput

logger = logging.getLogger(__name__)


class RoundGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner with attention buffers of the size the passes of a round need."""

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        backend = kwargs.get("attn_backend") or model_runner.attn_backend
        fit_graph_buffers(backend, model_runner.decode_num_tokens_per_req())
        super().__init__(model_runner, **kwargs)


class VerifyGraphRunner(RoundGraphRunner):
    """Captures the target's verify pass with the tree mask as an input."""

    def get_spec_info(self, num_tokens: int) -> JetSpecVerifyInput:
        nodes, mask = self.captured_req_width, self.buffers.custom_mask
        if getattr(self.attn_backend, "tree_mask_layout", "flat") == "words":
            mask = self.attn_backend.graph_mask(num_tokens // nodes)
        return JetSpecVerifyInput.for_capture(mask, nodes=nodes)

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        """False above the largest bucket: the round then verifies eagerly."""
        spec_info = forward_batch.spec_info
        has_mask = isinstance(spec_info, JetSpecVerifyInput) and spec_info.custom_mask is not None
        return has_mask and bool(super().can_run_graph(forward_batch))

    def padding(self, batch: int) -> int:
        """Requests the bucket of a batch adds; 0 where no bucket holds the batch."""
        if batch > self.max_bs:
            return 0
        return int(self._pad_to_bucket(batch, self.capture_bs)) - batch

    def capture_one_shape(self, size: int, *args: Any, **kwargs: Any) -> None:
        super().capture_one_shape(size, *args, **kwargs)
        plan_on_host(self.attn_backend, size)


def plan_on_host(backend: Any, batch: int) -> None:
    """Let FlashInfer plan a bucket's replays from host lengths, without reading the device.

    Its own plan copies three index arrays back, which would stall the host behind the draft pass.
    """
    if (
        isinstance(backend, FlashInferAttnBackend)
        and backend.prefill_backend == "fa2"
        and backend.dispatch_reason is None
    ):
        for wrapper in backend.prefill_cuda_graph_metadata[batch]:
            wrapper.begin_forward = partial(fast_prefill_plan, wrapper)


def flashinfer_graph_tokens(max_batch: int, rows: int, context_len: int) -> int:
    """The ``max_num_tokens`` at which FlashInfer's graph buffers just hold a verify batch.

    The backend allocates ``tokens * context_len`` slot indices (int32) and mask bytes. A batch has
    B * (L + N) slots, and N * (L + N) mask bits a request.
    """
    slots = max_batch * (context_len + rows)
    mask_bytes = max_batch * -(-rows * (context_len + rows) // 8)
    return -(-max(slots, mask_bytes) // context_len)


def check_graph_buffers(wanted: int, max_batch: int, rows: int, context_len: int) -> None:
    """Refuse buffers of ``wanted`` bytes that leave too little memory to capture and serve."""
    free, _ = torch.cuda.mem_get_info()
    if wanted > free // 2:
        raise ValueError(
            f"CUDA graphs for {max_batch} requests x {rows} rows x {context_len} tokens of context "
            f"need {wanted / 2**30:.1f} GiB of index and mask buffers, {free / 2**30:.1f} GiB are "
            "free: lower --cuda-graph-max-bs-decode, --speculative-num-draft-tokens or "
            "--context-length, or use --attention-backend jetspec_triton, which needs none."
        )
    logger.info("Graph buffers for %d x %d rows: %.2f GiB", max_batch, rows, wanted / 2**30)


def fit_graph_buffers(backend: Any, rows: int) -> None:
    """Shrink what ``init_cuda_graph_state`` allocates from B * N * context to what is read.

    FlashInfer keeps the mask as bits; SGLang's Triton backend as bytes, B * N * (context + N) of
    them. `jetspec_triton` keeps neither.
    """
    original = backend.init_cuda_graph_state
    context_len = getattr(backend, "max_context_len", 0)

    def init_cuda_graph_state(max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend, FlashInferAttnBackend):
            max_num_tokens = flashinfer_graph_tokens(max_bs, rows, context_len)
            check_graph_buffers(max_num_tokens * context_len * 5, max_bs, rows, context_len)
        elif type(backend) is TritonAttnBackend:
            max_num_tokens = max_bs
            mask_bytes = max_bs * rows * (context_len + rows)
            check_graph_buffers(max_bs * context_len * 8 + mask_bytes, max_bs, rows, context_len)
        original(max_bs, max_num_tokens, *args, **kwargs)

    backend.init_cuda_graph_state = init_cuda_graph_state


def install(target_runner: Any, draft_runner: Any) -> None:
    """Have the two runners build their decode graphs with the classes above.

    ``ModelRunner._decode_cuda_graph_runner_cls`` is SGLang's seam for specialised graph runners.
    """
    target_runner._decode_cuda_graph_runner_cls = lambda: VerifyGraphRunner
    draft_runner._decode_cuda_graph_runner_cls = lambda: RoundGraphRunner
