"""A dense decoder's layers in one plain loop.

SGLang wraps every sub-layer into modules that arrange communication between ranks and choose among
fused kernels. One process on a CPU needs neither, and at a few rows the wrapping costs as much as
the arithmetic. The loop computes what `fused_ops` and `linear` compute under SGLang's own modules.

Shapes: T rows (tokens), H hidden size, Hq and Hkv heads, D head size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend

from sglang_jetspec.platforms.cpu.attention import CpuAttentionBackend
from sglang_jetspec.platforms.cpu.fused_ops import cos_sin, is_plain_norm, is_plain_rotary, rotate
from sglang_jetspec.platforms.cpu.linear import PackedLinearMethod

logger = logging.getLogger(__name__)

# Models whose layers are exactly: norm, fused QKV (with or without per-head norms), rotary
# embedding, attention, output projection, norm, gate-up projection, SiLU, down projection.
DENSE_MODELS = {
    ("sglang.srt.models.llama", "LlamaForCausalLM"),
    ("sglang.srt.models.qwen2", "Qwen2ForCausalLM"),
    ("sglang.srt.models.qwen3", "Qwen3ForCausalLM"),
}


class Norm:
    def __init__(self, norm: RMSNorm) -> None:
        self.weight, self.eps, self.shape = norm.weight, norm.variance_epsilon, (norm.hidden_size,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, self.shape, self.weight, self.eps)


class Linear:
    def __init__(self, layer: torch.nn.Module) -> None:
        self.weight, self.bias = layer.weight, layer.bias
        self.apply = layer.quant_method.packed_weight.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x, self.weight, self.bias)


@dataclass(slots=True)
class DenseLayer:
    """One decoder layer's weights, taken out of SGLang's modules."""

    input_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    attention: RadixAttention
    output: Linear
    feed_forward_norm: Norm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, layer: torch.nn.Module) -> DenseLayer:
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = hasattr(attention, "q_norm")
        return cls(
            Norm(layer.input_layernorm),
            Linear(attention.qkv_proj),
            Norm(attention.q_norm) if head_norms else None,
            Norm(attention.k_norm) if head_norms else None,
            attention.attn,
            Linear(attention.o_proj),
            Norm(layer.post_attention_layernorm),
            Linear(mlp.gate_up_proj),
            Linear(mlp.down_proj),
        )

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        backend: CpuAttentionBackend,
        write: KVWriteLoc,
    ) -> torch.Tensor:
        """x: [T, H], the residual stream. rotary: cos and sin [T, 1, D]. Returns [T, H]."""
        query, key, value = self.project(self.input_norm(x), rotary)
        backend.token_to_kv_pool.set_kv_buffer(self.attention, write, key, value)
        x = x + self.output(backend.attend(query, self.attention))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate).mul_(up))

    def project(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [T, Hq, D], rotated keys and values [T, Hkv, D]."""
        heads, kv_heads = self.attention.tp_q_head_num, self.attention.tp_k_head_num
        qkv = self.qkv(x).unflatten(-1, (-1, self.attention.qk_head_dim))
        value = qkv[:, heads + kv_heads :]
        if self.query_norm is None or self.key_norm is None:
            query, key = rotate(qkv[:, : heads + kv_heads], *rotary).split((heads, kv_heads), 1)
            return query, key, value
        query, key = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, *rotary), rotate(key, *rotary), value


class DenseDecoder:
    """Takes over the `forward` of a model body such as `LlamaModel`."""

    def __init__(self, body: torch.nn.Module) -> None:
        self.body = body
        self.stock_forward = body.forward
        self.rotary = body.layers[0].self_attn.rotary_emb
        self.layers = [DenseLayer.of(layer) for layer in body.layers]
        self.final_norm = Norm(body.norm)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Normalised hidden states [T, H], with the captured layers' inputs where asked for."""
        backend = get_attn_backend()
        if not isinstance(backend, CpuAttentionBackend) or forward_batch.forward_mode.is_idle():
            return self.stock_forward(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        x = self.body.embed_tokens(input_ids) if input_embeds is None else input_embeds
        rotary = cos_sin(self.rotary, positions, x.dtype)
        write = KVWriteLoc(forward_batch.out_cache_loc)
        captured = AuxHiddenStateList()
        for index, layer in enumerate(self.layers):
            if index in self.body.layers_to_capture:
                captured.capture(x, owned=index > 0)
            x = layer.forward(x, rotary, backend, write)
        x = self.final_norm(x)
        return (x, captured) if captured else x


def install_dense_decoder(model: torch.nn.Module) -> bool:
    """Run a loaded and packed model's layers in the plain loop, if they have the plain shape.

    Returns whether they do. Adapters, forward hooks and several ranks keep SGLang's modules.
    """
    body = getattr(model, "model", None)
    if (type(model).__module__, type(model).__name__) not in DENSE_MODELS or body is None:
        return False
    if not is_plain_process() or not all(is_plain_layer(layer) for layer in body.layers):
        return False
    body.forward = DenseDecoder(body).forward
    return True


def is_plain_process() -> bool:
    """Whether one process holds the whole model, without adapters or forward hooks."""
    from sglang.srt.runtime_context import get_lora, get_observability, get_parallel

    parallel = get_parallel()
    return (
        parallel.tp_size == parallel.pp_size == parallel.dp_size == 1
        and not get_lora().enable_lora
        and not get_observability().forward_hooks
    )


def is_plain_layer(layer: torch.nn.Module) -> bool:
    """Whether a decoder layer is packed and exactly of the shape `DenseLayer` computes."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        norms += [attention.q_norm, attention.k_norm]
    linears = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return (
        all(type(linear.quant_method) is PackedLinearMethod for linear in linears)
        and all(is_plain_norm(norm, linears[0].weight.dtype) for norm in norms)
        and type(mlp.act_fn) is SiluAndMul
        and is_plain_rotary(attention.rotary_emb)
    )
