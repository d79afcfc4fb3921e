"""Entry point ``sglang.srt.plugins``: what JETSPEC registers with SGLang, nothing else."""

from __future__ import annotations

import logging

from sglang_jetspec.hooks import LOAD_HOOKS, SUPPORTED_SGLANG, check_hooks

logger = logging.getLogger(__name__)

ALGORITHM = "JETSPEC"
HEAD_GATE = "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias"
PREFILL_DRAW = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
REQUEST_GATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


def register() -> None:
    """Register the algorithm, its request gate and the attention backends.

    Runs once in every process of a server, before arguments are parsed. A missing hook is
    logged at ERROR and raised; SGLang logs it again and goes on without JETSPEC.
    """
    missing = [status for status in check_hooks(LOAD_HOOKS) if not status.found]
    if missing:
        names = "; ".join(f"{status.name} ({status.detail})" for status in missing)
        message = (
            f"JETSPEC is not available: this SGLang lacks {names}. sglang-jetspec supports "
            f"sglang {SUPPORTED_SGLANG}; run `jetspec doctor` for the whole list."
        )
        logger.error(message)
        raise RuntimeError(message)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_jetspec.algorithm import (
        JetSpecAlgorithm,
        check_local_head,
        validate_server_args,
    )
    from sglang_jetspec.backends.registry import register_tree_attention
    from sglang_jetspec.platforms.cpu.attention import register_cpu_attention_backend
    from sglang_jetspec.requests import refuse_foreign_tokens, refuse_unserved
    from sglang_jetspec.sampling import sample_prefill

    register_cpu_attention_backend()
    register_tree_attention()
    HookRegistry.register(HEAD_GATE, check_local_head, HookType.BEFORE)
    HookRegistry.register(PREFILL_DRAW, sample_prefill, HookType.AROUND)
    HookRegistry.register(REQUEST_GATE, refuse_unserved, HookType.BEFORE)
    HookRegistry.register(REQUEST_GATE, refuse_foreign_tokens, HookType.BEFORE)

    @SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=validate_server_args,
        spec_class=JetSpecAlgorithm,
    )
    def create_worker(server_args: object) -> type:
        from sglang_jetspec.worker import JetSpecWorker

        return JetSpecWorker
