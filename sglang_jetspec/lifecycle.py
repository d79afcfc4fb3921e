"""Construction of the JETSPEC worker and what the scheduler asks of it between rounds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.distributed import get_tp_group
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_parallel import (
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from sglang_jetspec.acceptance_watch import AcceptanceWatch
from sglang_jetspec.backends.draft_graph import GraphedTrees, TreeDrafter
from sglang_jetspec.config import Options, PartialOptions, resolve_options
from sglang_jetspec.heads.fit import fit_problems
from sglang_jetspec.heads.format import HeadConfig, HeadError
from sglang_jetspec.heads.jetspec import JetSpecDraftModel, JetSpecDraftWorker
from sglang_jetspec.request_state import RequestState
from sglang_jetspec.request_text import RequestText
from sglang_jetspec.steps import round_steps

if TYPE_CHECKING:
    from sglang_jetspec.foresight_rounds import ForesightRounds

logger = logging.getLogger(__name__)


# What a model of SGLang has if it gives out its layers' states for a head to read.
CAPTURE = "set_dflash_layers_to_capture"


def capturing_targets(models: Mapping[str, Any]) -> list[str]:
    """Architectures among SGLang's ``models`` (name -> class) that a head can draft for."""
    return sorted(name for name, model in models.items() if hasattr(model, CAPTURE))


def check_target(runner: Any, tokenizer: Any, head: HeadConfig) -> None:
    """Refuse a target JETSPEC cannot serve exactly, or one the head was not made for."""
    config = runner.model_config
    name = type(runner.model).__name__
    for unsupported, what in (
        (runner.use_mla_backend, "multi-head latent attention"),
        (runner.is_hybrid_swa, "hybrid sliding-window layers"),
        (mambaish_config(config) is not None, "recurrent (Mamba-like) layers"),
        (config.is_multimodal, "image, video or audio input"),
    ):
        if unsupported:
            raise HeadError(f"JETSPEC does not serve {name}: it has {what}; serve it without.")
    if not hasattr(runner.model, CAPTURE):
        raise HeadError(
            f"JETSPEC does not serve {name}: SGLang's model does not give out its layers' states. "
            f"Those that do: {', '.join(capturing_targets(ModelRegistry.models))}."
        )
    sizes = [config.vocab_size] + ([len(tokenizer)] if tokenizer is not None else [])
    problems = fit_problems(head, config.hidden_size, config.num_hidden_layers, sizes)
    if problems:
        raise HeadError(
            f"the head does not fit {name}: its {'; its '.join(problems)}. Use the head trained "
            "for this target."
        )


def decode_graphs(runner: Any) -> Any:
    """A runner's decode graphs, or None where it has captured none."""
    graphs = runner.decode_cuda_graph_runner
    return None if graphs is runner.eager_runner else graphs


class SpecWorkerBase(BaseSpecWorker):
    """The draft runner beside the target's: weights, KV pool, attention backend, graphs.

    The draft's KV pool has the target's slot numbers (allocator and request table are shared),
    so that a prefix-cache hit brings the head's KV along.

    text: the requests' tokens, for heads that read tokens. foresight: JetSpec++, where asked for.
    """

    text: RequestText | None = None
    foresight: ForesightRounds | None = None

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        self.on_cpu = self.device == "cpu"
        self.ranks = get_tp_group()
        self.watch = AcceptanceWatch()
        spec = get_spec()
        if not ModelRegistry.is_arch_supported(JetSpecDraftModel.__name__):
            ModelRegistry.register("sglang_jetspec.heads")
        self.draft_parallel_layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(
                self.model_runner.spec_aux_config.draft_model_config,
                spec_algorithm=self.model_runner.spec_algorithm,
            ),
            collapse_cp=True,
        )
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=self.model_runner.model_config,
                algo_label="JETSPEC",
                draft_worker_cls=JetSpecDraftWorker,
            )
        self._draft_worker: JetSpecDraftWorker = bundle.draft_worker
        self.draft_runner = bundle.draft_model_runner
        self.draft_model: JetSpecDraftModel = bundle.draft_model
        self.head = self._draft_worker.head
        check_target(self.model_runner, target_worker.tokenizer, self.head)
        self.draft_model.bind_target(self.model_runner.model)
        self.options: Options = resolve_options(
            self.head,
            on_cpu=self.on_cpu,
            flags=PartialOptions(
                num_draft_tokens=spec.speculative_num_draft_tokens,
                width=spec.speculative_eagle_topk,
                depth=spec.speculative_dflash_block_size - self.head.idle_rows,
            ),
        )
        self.steps = round_steps(self.options, self.on_cpu)
        self.graphed_trees = GraphedTrees(
            TreeDrafter(
                self.draft_model,
                self.steps,
                int(self.model_runner.model_config.context_len),
                self.head.first_row,
            )
        )
        if not self.on_cpu:
            from sglang_jetspec.backends.graph_runner import install

            install(self.model_runner, self.draft_runner)
        self.speculative_num_draft_tokens = self.options.num_draft_tokens
        self.speculative_num_steps = self.options.depth
        logger.info(
            "JETSPEC head %s (%s), %s",
            spec.speculative_draft_model_path,
            self.head.kind,
            self.options,
        )

    def __getattr__(self, name: str) -> Any:
        # The scheduler uses the speculative worker as its model worker.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("draft", self.draft_runner)]

    def clear_cache_pool(self) -> None:
        """Called when the cache is flushed, as it is after a weight update."""
        self.draft_model.refresh_draft_vocabulary()

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self.watch.count(num_correct_drafts_per_req)

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.model_runner.attn_backend, self.draft_runner.attn_backend)

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        slots = len(req_to_token_pool.req_to_token)
        self.requests = RequestState(slots, self.options.depth, self.device)
        if self.head.token_input:
            self.text = RequestText(slots, req_to_token_pool.req_to_token.shape[1], self.device)
        with draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.alloc_memory_pool(
                memory_pool_config=memory_pool_config,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        if self.options.foresight is not None:
            from sglang_jetspec.foresight_rounds import make_foresight

            self.foresight = make_foresight(
                self, self.options.foresight, req_to_token_pool.req_to_token, self.text
            )

    def init_attention_backends(self) -> None:
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Capture the draft pass, trees included, per bucket, where the target's verify pass is."""
        capture = not self.on_cpu and decode_graphs(self.model_runner) is not None
        capture &= self.foresight is None
        if capture:
            self.draft_runner.capture_tail_hooks.append(self.graphed_trees.capture)
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=capture)
