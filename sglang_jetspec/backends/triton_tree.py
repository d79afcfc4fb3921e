"""Attention backend `jetspec_triton`: SGLang's Triton backend with our kernel for token trees.

Prefill is SGLang's own. Verify passes and draft blocks (TARGET_VERIFY) read the request table and a
packed ancestor bitmask; nothing of the size of a context is planned, copied or kept for a graph.

B requests, N rows a request, W = ceil(N / 32) mask words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from sglang_jetspec.backends.registry import TREE_ATTENTION
from sglang_jetspec.kernels.tree_attention.arguments import DTYPES, HEAD_SIZES
from sglang_jetspec.kernels.tree_attention.kernel import tree_attention
from sglang_jetspec.trees.bitmask import block_words, mask_words


@dataclass(frozen=True)
class TreeMetadata:
    """What a verify batch shares between layers.

    words: [B, N, W] int32, the batch's trees; None for draft blocks, whose mask is the layer's.
    causal, open: [B, N, W] int32, the masks of causal and of bidirectional blocks.
    """

    table_rows: Tensor  # [B]
    prefix_lens: Tensor  # [B]
    positions: Tensor  # [B, N]
    words: Tensor | None
    causal: Tensor
    open: Tensor


class TreeAttentionBackend(TritonAttnBackend):
    """Serves dense models with multi-head or grouped-query attention, eager and in CUDA graphs."""

    tree_mask_layout = "words"

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        _check_model(model_runner)
        super().__init__(model_runner, **kwargs)
        self._graph_words: Tensor | None = None
        self._blocks: dict[tuple[int, bool], Tensor] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata(forward_batch)
            return
        spec_info = forward_batch.spec_info
        self.forward_metadata = self._plan(forward_batch, spec_info.custom_mask)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *_: Any) -> None:
        """Only tree masks are kept; SGLang's own buffers would span every context."""
        rows = max_num_tokens // max_bs
        shape = (max_bs, rows, mask_words(rows))
        self._graph_words = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def graph_mask(self, batch: int) -> Tensor:
        """[batch, N, W] int32, the words a bucket's graph reads."""
        assert self._graph_words is not None, "init_cuda_graph_state comes first"
        return self._graph_words[:batch]

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Every layer reads the request table, so a pass has done so only when it has ended."""
        if fm.is_target_verify():
            return SharedReadEnds.POST_REPLAY
        return super().shared_read_ends(fm)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Captured kernels read the runner's slots and `_graph_words`; only the words are new.

        Rows a bucket adds keep the words of earlier batches: each is a request of its own, whose
        output nobody reads.
        """
        if not forward_batch.forward_mode.is_target_verify():
            raise ValueError(
                f"attention backend {TREE_ATTENTION!r} captures verify passes, not "
                f"{forward_batch.forward_mode.name}; use --disable-prefill-cuda-graph."
            )
        words = forward_batch.spec_info.custom_mask
        if words is not None:
            self.graph_mask(len(words)).copy_(words)
        if in_capture:
            static = None if words is None else self.graph_mask(forward_batch.batch_size)
            self.forward_metadata = self._plan(forward_batch, static)

    def _plan(self, forward_batch: ForwardBatch, words: Tensor | None) -> TreeMetadata:
        batch = len(forward_batch.seq_lens)
        rows = forward_batch.positions.numel() // batch
        return TreeMetadata(
            table_rows=forward_batch.req_pool_indices,
            prefix_lens=forward_batch.seq_lens,
            positions=forward_batch.positions.view(batch, rows),
            words=words,
            causal=self._block(batch, rows, causal=True),
            open=self._block(batch, rows, causal=False),
        )

    def _block(self, batch: int, rows: int, causal: bool) -> Tensor:
        """[batch, rows, W] constant words, allocated once and kept: graphs hold their address."""
        words = self._blocks.get((rows, causal))
        if words is None or len(words) < batch:  # the largest bucket is captured first
            count = max(batch, self.req_to_token_pool.size)
            one = block_words(rows, causal, self.device)
            words = self._blocks[rows, causal] = one.expand(count, -1, -1).contiguous()
        return words[:batch]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        plan = self.forward_metadata
        if not isinstance(plan, TreeMetadata):
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        _check_layer(layer, kwargs)
        pool = self.token_to_kv_pool
        key_pool, value_pool = pool.get_kv_buffer(layer.layer_id)
        if k is None or v is None:
            k, v = (buffer[forward_batch.out_cache_loc] for buffer in (key_pool, value_pool))
        elif save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        is_open = layer.attn_type is AttentionType.ENCODER_ONLY
        words = plan.words if plan.words is not None else plan.open if is_open else plan.causal
        batch, rows = plan.positions.shape
        shape = (batch, rows, -1, layer.head_dim)
        out = tree_attention(
            q.reshape(shape),
            k.reshape(shape),
            v.reshape(shape),
            key_pool,
            value_pool,
            self.req_to_token,
            plan.table_rows,
            plan.prefix_lens,
            words,
            scale=layer.scaling,
            window=layer.sliding_window_size,
            positions=plan.positions,
            logit_cap=layer.logit_cap,
        )
        return out.view(q.shape[0], -1)


def _check_model(model_runner: Any) -> None:
    """Raise ValueError for a model whose attention the kernel would not compute exactly."""
    config, pool = model_runner.model_config, model_runner.token_to_kv_pool
    if model_runner.use_mla_backend:
        problem = "multi-head latent attention (MLA)"
    elif config.is_encoder_decoder:
        problem = "an encoder-decoder model"
    elif model_runner.kv_index_translator.is_translating:
        problem = "the unified KV pool"
    elif config.head_dim not in HEAD_SIZES or config.v_head_dim != config.head_dim:
        problem = f"heads of {config.head_dim} and {config.v_head_dim}"
    elif pool.dtype not in DTYPES or pool.dtype is not model_runner.dtype:
        problem = f"--kv-cache-dtype {pool.dtype} with {model_runner.dtype} activations"
    else:
        return
    raise ValueError(
        f"attention backend {TREE_ATTENTION!r} does not serve {problem}; use "
        "--attention-backend flashinfer or triton."
    )


def _check_layer(layer: RadixAttention, options: dict[str, Any]) -> None:
    """Raise ValueError for layer attributes that change the attention result."""
    used = [name for name, value in options.items() if value is not None]
    if layer.is_cross_attention:
        used.append("cross attention")
    if layer.xai_temperature_len > 0:
        used.append("xai_temperature_len")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        used.append(f"logit_capping_method {layer.logit_capping_method}")
    if layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL:
        used.append("bidirectional decoding")
    if used:
        raise ValueError(
            f"attention backend {TREE_ATTENTION!r} does not serve {', '.join(used)} "
            f"(layer {layer.layer_id}); use --attention-backend flashinfer or triton."
        )
