"""The out-of-tree SGLang platform that serves on a host without an accelerator."""

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, SRTPlatform

ATTENTION_BACKEND = "jetspec_cpu"
DISPATCH_KEY = "jetspec_cpu"

# `native` keeps SGLang's plain-torch operators, to bisect numerical differences and to compare.
CPU_OPS_VARIABLE = "SGLANG_JETSPEC_CPU_OPS"
CPU_OVERLAP_VARIABLE = "SGLANG_JETSPEC_CPU_OVERLAP"

DEFAULT_MAX_RUNNING_REQUESTS = 16
# KV rows a host serves unless `--max-total-tokens` says otherwise. SGLang would take most of the
# memory and zero it before it listens.
DEFAULT_MAX_TOTAL_TOKENS = 32768


class JetSpecCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain-torch CPU serving without SGLang's CPU build of `sgl_kernel` and without Triton."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = 0) -> str:
        """SGLang's default for `--device`, which it splits as text."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open; `server_args` is SGLang's recording proxy."""
        if server_args.device != "cpu":
            return
        _default_attention_backend(server_args)
        _disable_graphs(server_args)
        # There is no second stream to overlap with: the schedule would only decode each request
        # one step past its end and report every token one step late.
        if not overlap_enabled():
            server_args.disable_overlap_schedule = True
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = default_max_total_tokens(
                server_args.max_running_requests, server_args.context_length
            )

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """Asked for every kind at start-up; the attention backend refuses models of the others."""
        from sglang_jetspec.platforms.cpu.kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool if kind == "mha" else None

    def get_speculative_cache_locs_fn(self) -> Any:
        from sglang_jetspec.platforms.cpu.kv_pool import verify_cache_locs

        return verify_cache_locs

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compiler is assumed on the host."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        from sglang_jetspec.platforms.cpu.attention import register_cpu_attention_backend
        from sglang_jetspec.platforms.cpu.fused_ops import register_fused_ops

        register_cpu_attention_backend()
        if fast_ops_enabled():
            register_fused_ops(DISPATCH_KEY)

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_jetspec.platforms.cpu.dense_decoder import install_dense_decoder
        from sglang_jetspec.platforms.cpu.linear import pack_model

        if fast_ops_enabled():
            pack_model(model)
            install_dense_decoder(model)

    def get_dispatch_key_name(self) -> str:
        return DISPATCH_KEY


def overlap_enabled() -> bool:
    """Whether the server keeps SGLang's overlap schedule (see CPU_OVERLAP_VARIABLE)."""
    choice = os.environ.get(CPU_OVERLAP_VARIABLE, "0")
    if choice not in ("0", "1"):
        raise ValueError(f"{CPU_OVERLAP_VARIABLE}={choice!r}: use 0 (default) or 1.")
    return choice == "1"


def fast_ops_enabled() -> bool:
    """Whether models run on this platform's operators (see CPU_OPS_VARIABLE)."""
    choice = os.environ.get(CPU_OPS_VARIABLE, "fast")
    if choice not in ("fast", "native"):
        raise ValueError(f"{CPU_OPS_VARIABLE}={choice!r}: use 'fast' (default) or 'native'.")
    return choice == "fast"


def default_max_total_tokens(max_running_requests: int, context_length: int | None) -> int:
    """KV rows for all requests at full context, within DEFAULT_MAX_TOTAL_TOKENS."""
    if context_length is None:
        return DEFAULT_MAX_TOTAL_TOKENS
    return min(max_running_requests * context_length, DEFAULT_MAX_TOTAL_TOKENS)


def _default_attention_backend(server_args: Any) -> None:
    # SGLang has already filled in its own CPU default, so only the raw input tells a user's choice.
    raw = getattr(server_args, "_raw_input", None) or {}
    if raw.get("attention_backend") is None:
        server_args.attention_backend = ATTENTION_BACKEND


def _disable_graphs(server_args: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = server_args.cuda_graph_config
    for phase in Phase.ALL:
        config = with_phase(config, phase, backend=Backend.DISABLED)
    server_args.cuda_graph_config = config
