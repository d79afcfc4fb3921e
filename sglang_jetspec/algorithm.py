"""The JETSPEC algorithm object: the yes/no questions SGLang asks, and its start-up checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_jetspec.backends.registry import TREE_ATTENTION
from sglang_jetspec.config import (
    OptionError,
    Options,
    PartialOptions,
    causality_override,
    resolve_options,
)
from sglang_jetspec.heads.format import (
    HeadConfig,
    HeadError,
    check_tensors,
    load_head_config,
    resolve_head,
)

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap

# Backends whose verify pass reads a tree mask. The others ignore it without a word.
TREE_BACKENDS = ("jetspec_cpu", "flashinfer", "triton", TREE_ATTENTION)
DEFAULT_MAX_RUNNING_REQUESTS = 48


class JetSpecAlgorithm(CustomSpecAlgo):
    """JETSPEC as SGLang sees it: a member of the block-drafter ("dflash") family.

    The family predicate brings target feature capture, the draft's share of the KV budget and
    a plug-in-owned ``prepare_for_decode``; no other built-in predicate is true.
    """

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> type | None:
        return None

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_dflash_block_size)

    def handle_server_args(self, server_args: Any) -> None:
        """Resolve the options and write them to SGLang's fields."""
        _, head, options = resolve_head_options(server_args)
        server_args.speculative_num_draft_tokens = options.num_draft_tokens
        server_args.speculative_eagle_topk = options.width
        # SGLang's memory check reserves max(steps * topk, N) slots a request and round, which fits
        # a draft model's own KV; ours needs N. The depth travels as the block's size.
        server_args.speculative_num_steps = 1
        server_args.speculative_dflash_block_size = options.block_size
        server_args.enable_mixed_chunk = False
        length = server_args.context_length
        if length is not None and length > head.max_position_embeddings:
            # SGLang has checked the length against the target by now. It would hold the head to it
            # too, in every process, though the head is given a window (`heads/jetspec.py`).
            envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.set(True)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        if server_args.speculative_draft_attention_backend is None:
            server_args.speculative_draft_attention_backend = server_args.attention_backend


def resolve_head_options(args: Any) -> tuple[Path, HeadConfig, Options]:
    """Locate the head, read its configuration and resolve the options for it.

    args: SGLang's resolved view, or the published ``get_spec()`` leaves joined with ``device``.
    Raises HeadError or OptionError.
    """
    folder = resolve_head(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    head = load_head_config(folder, causal=causality_override())
    flags = PartialOptions(
        num_draft_tokens=args.speculative_num_draft_tokens,
        width=args.speculative_eagle_topk,
        depth=args.speculative_num_steps,
    )
    return folder, head, resolve_options(head, on_cpu=args.device == "cpu", flags=flags)


def check_local_head(
    speculative_algorithm: str | None, speculative_draft_model_path: str | None, **kwargs: Any
) -> None:
    """Hook before SGLang reads the head's configuration, whose own errors do not name the head."""
    path = speculative_draft_model_path
    if speculative_algorithm == "JETSPEC" and path and (path[0] in "/.~" or Path(path).exists()):
        folder = resolve_head(path)
        try:
            load_head_config(folder)
        except HeadError as error:
            raise HeadError(f"--speculative-draft-model-path {path}: {error}") from None


def _refuse(condition: bool, flag: str, value: Any, fix: str) -> None:
    if condition:
        raise OptionError(f"JETSPEC does not serve {flag} {value}: {fix}")


def _choose_tree_backend(args: Any) -> None:
    """Where the user named no attention backend, replace a default that ignores tree masks."""
    raw = getattr(args, "_raw_input", None) or {}
    unnamed = all(
        raw.get(f"{kind}attention_backend") is None for kind in ("", "prefill_", "decode_")
    )
    if raw and unnamed and args.attention_backend not in TREE_BACKENDS:
        args.attention_backend = "jetspec_cpu" if args.device == "cpu" else "flashinfer"
        args.prefill_attention_backend = args.decode_attention_backend = None


def validate_server_args(args: Any) -> None:
    """Refuse at start-up, by flag, every combination JETSPEC does not serve exactly."""
    if not args.speculative_draft_model_path:
        raise OptionError(
            "JETSPEC needs a draft head: set --speculative-draft-model-path to a folder or a "
            "hub id, for example JetSpec/jetspec-qwen3-8b."
        )
    _refuse(args.pp_size != 1, "--pp-size", args.pp_size, "use --tp-size.")
    _refuse(args.enable_dp_attention, "--enable-dp-attention", "", "use --dp-size or --tp-size.")
    mode = args.disaggregation_mode
    _refuse(mode not in (None, "null"), "--disaggregation-mode", mode, "serve without it.")
    count = args.tokenizer_worker_num
    _refuse(count != 1, "--tokenizer-worker-num", count, "SGLang loads no plug-in in them; use 1.")
    _choose_tree_backend(args)
    for kind in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        backend = getattr(args, kind)
        _refuse(
            backend is not None and backend not in TREE_BACKENDS,
            "--" + kind.replace("_", "-"),
            backend,
            f"it ignores tree masks; use {' or '.join(TREE_BACKENDS)}.",
        )
    backends = {
        getattr(args, f"{kind}_attention_backend") or args.attention_backend
        for kind in ("prefill", "decode")
    }
    _refuse(
        TREE_ATTENTION in backends and backends != {TREE_ATTENTION},
        "--prefill-attention-backend and --decode-attention-backend",
        " and ".join(sorted(map(str, backends))),
        f"{TREE_ATTENTION} serves both phases; use --attention-backend {TREE_ATTENTION}.",
    )
    for name in ("single", "acc"):
        value = getattr(args, f"speculative_accept_threshold_{name}")
        flag = f"--speculative-accept-threshold-{name}"
        _refuse(value != 1.0, flag, value, "it changes the output's law; leave it at 1.0.")
    for name, fix in (
        ("speculative_adaptive", "set --speculative-num-draft-tokens instead."),
        ("speculative_use_rejection_sampling", "JETSPEC's own sampling is lossless already."),
        ("speculative_draft_window_size", "serve without it."),
        ("speculative_token_map", "the head's own draft_token_ids name its draft vocabulary."),
        ("enable_two_batch_overlap", "serve without it."),
        ("enable_hierarchical_cache", "serve without it."),
        ("enable_lora", "merge the adapter into the target first."),
        ("enable_deterministic_inference", "sampling_seed is served without it."),
        ("enable_watermark", "accepted drafts would not carry the mark; serve without it."),
    ):
        value = getattr(args, name)
        _refuse(bool(value), "--" + name.replace("_", "-"), value, fix)
    folder, head, options = resolve_head_options(args)
    check_tensors(folder, head)
    if options.foresight is not None:
        fix = "the networks of JetSpec++ are held whole; use 1, or passes=0 and outcomes=0."
        _refuse(args.tp_size != 1, "--tp-size", args.tp_size, fix)
    if head.correction is not None:
        fix = f"the sequential part of a {head.kind} head reads the whole vocabulary; use 1."
        _refuse(args.tp_size != 1, "--tp-size", args.tp_size, fix)
