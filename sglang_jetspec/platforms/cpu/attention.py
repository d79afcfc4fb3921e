"""Attention backend `jetspec_cpu`: batched plain-torch attention that also verifies token trees."""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_jetspec.backends.registry import register_backend
from sglang_jetspec.platforms.cpu import attention_ops
from sglang_jetspec.platforms.cpu.attention_plan import (
    DecodePlan,
    ExtendPlan,
    VerifyPlan,
    plan_decode,
    plan_extend,
    plan_verify,
)
from sglang_jetspec.platforms.cpu.platform import ATTENTION_BACKEND


class CpuAttentionBackend(AttentionBackend):
    """Decode, extend and TARGET_VERIFY over SGLang's paged KV cache.

    What depends only on the batch (slots to gather, masks) is planned once a forward, so a layer
    does one gather and one attention call for the whole batch. A verify batch carries `n` rows per
    request at `out_cache_loc`; `spec_info.custom_mask` is None (causal inside the block, or
    bidirectional for ENCODER_ONLY layers) or a bool tensor of B*n*n entries, True = may attend.
    Every row sees the whole committed prefix.
    """

    tree_mask_layout = "rows"

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _check_model(model_runner)
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.forward_metadata: DecodePlan | ExtendPlan | VerifyPlan | None = None
        self._layer_specs: dict[RadixAttention, attention_ops.LayerSpec] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        req_to_token = self.req_to_token_pool.req_to_token
        if mode.is_idle():
            self.forward_metadata = None
        elif mode.is_decode():
            self.forward_metadata = plan_decode(
                req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens
            )
        elif mode.is_target_verify():
            self.forward_metadata = plan_verify(
                req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.out_cache_loc,
                forward_batch.positions,
                getattr(forward_batch.spec_info, "custom_mask", None),
            )
        elif mode.is_extend_or_draft_extend_or_mixed(include_draft_extend_v2=True):
            self.forward_metadata = plan_extend(
                req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.extend_prefix_lens,
                forward_batch.extend_seq_lens,
            )
        else:
            raise ValueError(
                f"forward mode {mode.name} is not served by attention backend "
                f"{ATTENTION_BACKEND!r}; use another attention backend."
            )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if kwargs:
            _check_options(kwargs, layer)
        if save_kv_cache and k is not None and v is not None:
            loc = KVWriteLoc(forward_batch.out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        return self.attend(q, layer)

    # The plan made in init_forward_metadata tells the modes apart.
    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False

    def attend(self, q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        """Attention of the batch's rows once their K/V is stored.

        q: [tokens, Hq*D] or [tokens, Hq, D]. Returns [tokens, Hq*Dv].
        """
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata must run before a layer's attention.")
        spec = self._layer_spec(layer)
        if isinstance(self.forward_metadata, ExtendPlan):
            # A block drafter's window reaches back from its block; an encoder's reaches both ways.
            two_sided = not spec.causal and spec.window >= 0
            _check_options({"sliding_window_size with ENCODER_ONLY": two_sided}, layer)
        pool = self.token_to_kv_pool
        output = attention_ops.attend(
            self.forward_metadata,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            spec,
        )
        return output.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _layer_spec(self, layer: RadixAttention) -> attention_ops.LayerSpec:
        """The layer's attention options, checked the first time."""
        spec = self._layer_specs.get(layer)
        if spec is None:
            _check_layer(layer)
            spec = attention_ops.LayerSpec(
                scale=layer.scaling,
                causal=layer.attn_type is not AttentionType.ENCODER_ONLY,
                window=layer.sliding_window_size,
                logit_cap=layer.logit_cap,
            )
            self._layer_specs[layer] = spec
        return spec


def register_cpu_attention_backend() -> None:
    """Make `jetspec_cpu` a value of SGLang's attention-backend options. Safe to call twice."""
    register_backend(ATTENTION_BACKEND, CpuAttentionBackend)


def _check_model(model_runner: Any) -> None:
    """Raise ValueError for a model whose attention this backend would not compute exactly."""
    pool = model_runner.token_to_kv_pool
    if model_runner.use_mla_backend:
        problem = "multi-head latent attention (MLA)"
    elif model_runner.model_config.is_encoder_decoder:
        problem = "an encoder-decoder model"
    elif not isinstance(pool, MHATokenToKVPool):
        problem = f"KV pool {type(pool).__name__} (sliding-window, hybrid or state-space layers)"
    elif pool.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        problem = f"--kv-cache-dtype {pool.dtype}"
    else:
        return
    raise ValueError(
        f"attention backend {ATTENTION_BACKEND!r} does not serve {problem}; use a dense model with "
        "multi-head or grouped-query attention and --kv-cache-dtype auto (for hybrid sliding "
        "windows: --disable-hybrid-swa-memory), or a GPU host."
    )


def _check_layer(layer: RadixAttention) -> None:
    """Raise ValueError for layer attributes that change the attention result."""
    options: dict[str, Any] = {
        "is_cross_attention": layer.is_cross_attention,
        "xai_temperature_len": layer.xai_temperature_len > 0,
        "logit_capping_method": bool(layer.logit_cap) and layer.logit_capping_method != "tanh",
        "pos_encoding_mode": layer.pos_encoding_mode != "NONE",
        "attn_type": layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL,
    }
    _check_options(options, layer)


def _check_options(options: dict[str, Any], layer: RadixAttention) -> None:
    """Raise ValueError when any of a layer's options is set."""
    used = [name for name, value in options.items() if value is not None and value is not False]
    if used:
        raise ValueError(
            f"attention backend {ATTENTION_BACKEND!r} does not serve {', '.join(used)} "
            f"(layer {layer.layer_id}); use another attention backend or a GPU host."
        )
