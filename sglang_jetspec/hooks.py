"""The parts of SGLang this plug-in stands on, checked by name and signature at load.

SGLang logs a failing plug-in and goes on, so that a user sees only "Unknown speculative
algorithm name". Checking here turns a changed SGLang into one message that names the part.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

SUPPORTED_SGLANG = "0.5.23"


@dataclass(frozen=True)
class Hook:
    """One part of SGLang: ``module:attribute.path`` and the parameters we pass to it."""

    path: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class HookStatus:
    name: str
    found: bool
    detail: str


_SPEC = "sglang.srt.speculative."
LOAD_HOOKS = (
    Hook(_SPEC + "spec_info:SpeculativeAlgorithm.register", ("name", "supports_overlap")),
    Hook(_SPEC + "spec_registry:CustomSpecAlgo", ("name", "factory", "validate_server_args")),
    Hook(_SPEC + "spec_registry:CustomSpecAlgo.handle_server_args", ("server_args",)),
    Hook("sglang.srt.plugins.hook_registry:HookRegistry.register", ("target", "hook")),
    Hook("sglang.srt.layers.attention.attention_registry:register_attention_backend", ("name",)),
    Hook("sglang.srt.arg_groups.choices:add_attention_backend_choices"),
    Hook("sglang.srt.arg_groups.choices:add_draft_attention_backend_choices"),
    Hook(
        "sglang.srt.arg_groups.speculative_hook:_resolve_speculative_algorithm_alias",
        ("speculative_algorithm", "speculative_draft_model_path"),
    ),
    Hook("sglang.srt.runtime_context:get_spec"),
)
SERVE_HOOKS = (
    Hook("sglang.srt.distributed:get_tp_group"),
    Hook("sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather", ("input_", "dim")),
    Hook("sglang.srt.distributed.parallel_state:GroupCoordinator.broadcast", ("input_", "src")),
    Hook(
        "sglang.srt.layers.logprob_processor:compute_spec_logprobs",
        ("batch", "logits_output", "predict", "accept_index"),
    ),
    Hook(
        "sglang.srt.layers.sampler:Sampler._sample_from_probs",
        ("probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    Hook("sglang.srt.managers.overlap_utils:FutureMap", ("device", "spec_algo")),
    Hook("sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request", ("obj",)),
    Hook("sglang.srt.managers.tp_worker:TpModelWorker._init_model_config"),
    Hook(
        "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
        ("batch", "forward_batch", "is_verify", "capture_hidden_mode", "return_kv_loc_plan"),
    ),
    Hook("sglang.srt.managers.utils:GenerationBatchResult", ("accept_lens", "next_draft_input")),
    Hook("sglang.srt.mem_cache.allocation:alloc_for_spec_decode", ("cur_kv_lens", "batch")),
    Hook("sglang.srt.mem_cache.allocation_sizing:page_aligned_decode_alloc_lens", ("reserve",)),
    Hook("sglang.srt.model_executor.forward_batch_info:ForwardBatch", ("spec_info", "positions")),
    Hook(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new",
        ("batch", "model_runner", "capture_hidden_mode", "kv_loc_plan"),
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
        ("model_runner", "attn_backend"),
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.get_spec_info",
        ("num_tokens",),
    ),
    Hook("sglang.srt.model_executor.model_runner:ModelRunner._decode_cuda_graph_runner_cls"),
    Hook(
        "sglang.srt.layers.attention.flashinfer_backend:fast_prefill_plan",
        ("qo_indptr_host", "kv_indptr_host", "kv_lens_host", "uniform_verify_width"),
    ),
    Hook(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.init_forward_metadata_out_graph",
        ("forward_batch", "in_capture"),
    ),
    Hook("sglang.srt.models.dflash:DFlashDraftModel.project_target_hidden", ("target_hidden",)),
    Hook("sglang.srt.models.dflash:DFlashAttention.kv_proj_only", ("hidden_states",)),
    Hook("sglang.srt.models.registry:ModelRegistry.register", ("package_name",)),
    Hook(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
        ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"),
    ),
    Hook(_SPEC + "base_spec_worker:BaseSpecWorker.alloc_memory_pool", ("memory_pool_config",)),
    Hook(_SPEC + "draft_worker_common:build_draft_tp_worker", ("draft_worker_cls",)),
    Hook(
        _SPEC + "spec_utils:build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Hook(
        _SPEC + "spec_utils:GrammarTree.from_device",
        ("retrieve_next_token", "retrieve_next_sibling", "draft_token"),
    ),
    Hook(_SPEC + "eagle_info:EagleVerifyInput", ("draft_token", "custom_mask", "positions")),
)


def _lookup(path: str) -> object:
    module, _, attributes = path.partition(":")
    found: object = importlib.import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name)
    return found


def check(hook: Hook) -> HookStatus:
    """Look one hook up; its ``detail`` says what is missing."""
    try:
        found = _lookup(hook.path)
    except (ImportError, AttributeError) as error:
        return HookStatus(hook.path, False, str(error))
    if not hook.parameters:
        return HookStatus(hook.path, True, "")
    present = inspect.signature(found).parameters  # type: ignore[arg-type]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in present.values()):
        return HookStatus(hook.path, True, "")
    missing = [name for name in hook.parameters if name not in present]
    return HookStatus(
        hook.path, not missing, f"no parameter {', '.join(missing)}" if missing else ""
    )


def check_hooks(hooks: tuple[Hook, ...] = LOAD_HOOKS + SERVE_HOOKS) -> list[HookStatus]:
    """Check ``hooks``, by default all of them (this imports much of SGLang: seconds)."""
    return [check(hook) for hook in hooks]
