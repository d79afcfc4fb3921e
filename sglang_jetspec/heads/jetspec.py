"""A draft head of any kind as SGLang's model loader builds it, and the worker that loads it.

A head holds no embedding and no LM head: it drafts with the frozen target's (paper, section 2).
B requests, D depth, W width, H hidden size, T captured target layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.distributed import get_tp_group
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.runtime_context import get_spec
from torch import nn

from sglang_jetspec.config import Options, causality_override
from sglang_jetspec.heads.correction import Correction, adopt
from sglang_jetspec.heads.drafting import corrected_tree
from sglang_jetspec.heads.format import (
    HeadConfig,
    HeadError,
    load_head_config,
    make_correction,
    resolve_head,
)
from sglang_jetspec.heads.vocab_parallel import VocabularyShard
from sglang_jetspec.steps import use_kernels
from sglang_jetspec.trees import DraftTree, TreeBuilder

logger = logging.getLogger(__name__)

# How the published tensors of a head are named; a target's have a prefix before these.
HEAD_PREFIXES = (
    *("fc.", "hidden_norm.", "norm.", "layers."),
    *("markov_head.", "confidence_head.", "prefix_gru.", "embed_proj."),
)


def make_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """x -> x @ weight.T, on a CPU over a packed copy of the weight."""
    if weight.device.type != "cpu":
        return partial(F.linear, weight=weight)
    from sglang_jetspec.platforms.cpu.linear import PackedWeight, WeightVersion

    packed = PackedWeight(WeightVersion())
    return lambda x: packed.linear(x, weight, None)


class JetSpecDraftModel(DFlashDraftModel):
    """Draft head over fused target features, causal or bidirectional inside its block.

    dense: the same passes in a plain loop, where the platform has one.
    correction: the sequential part of DSpark and Domino heads.
    context_kernel: the fused write of context KV, where the device and the layers allow it.
    """

    dense: Any = None
    correction: Correction | None = None
    context_kernel: Any = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        head = load_head_config(Path(config.jetspec_folder), causal=config.is_causal)
        size = head.draft_vocab_size
        if (correction := make_correction(head)) is not None:
            adopt(self, correction)
        self.register_buffer(
            "draft_token_ids", None if size is None else torch.zeros(size, dtype=torch.int32)
        )
        # The fused bf16 kernel behind this switch is Triton's.
        if next(self.parameters()).device.type == "cpu":
            for layer in self.layers:
                layer.self_attn.use_table_qk_norm_rope = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the published tensors; every expected one must arrive (``check_tensors``).

        A weight update of the target comes here too, and the base class would take the target's
        ``model.layers.0`` for the head's ``layers.0``.
        """

        def model_weights() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == "draft_token_ids":
                    self.draft_token_ids.copy_(tensor)
                elif name.startswith(HEAD_PREFIXES):
                    yield name, tensor

        super().load_weights(model_weights())

    def bind_target(self, target: nn.Module) -> None:
        """Share the target's embedding and LM head, without owning them as parameters."""
        embedding, lm_head = target.get_input_embeddings(), getattr(target, "lm_head", None)
        if lm_head is None or getattr(lm_head, "weight", None) is None:
            raise HeadError(
                f"target {type(target).__name__} exposes no dense lm_head.weight; JETSPEC drafts "
                "through the target's LM head. Use an unquantised LM head."
            )
        self.__dict__["target_embedding"] = embedding
        self.__dict__["target_lm_head"] = lm_head
        self.embedding_scale = (
            float(target.get_dflash_noise_embedding_scale())
            if hasattr(target, "get_dflash_noise_embedding_scale")
            else 1.0
        )
        self.refresh_draft_vocabulary()
        if embedding.weight.device.type == "cpu":
            from sglang_jetspec.platforms.cpu.dense_draft import DenseDraft

            self.__dict__["dense"] = DenseDraft.of(self)
        elif use_kernels(on_cpu=False):
            from sglang_jetspec.heads.context_kv import ContextKernel

            self.__dict__["context_kernel"] = ContextKernel.of(self)

    def refresh_draft_vocabulary(self) -> None:
        """Gather the LM head's rows of the draft vocabulary, again after a weight update."""
        held = self.target_lm_head.shard_indices
        first = held.org_vocab_start_index
        ids = self.draft_token_ids
        if ids is not None:
            ids = ids.long()
            ids = ids[(ids >= first) & (ids < held.org_vocab_end_index)]
            rows = self.target_lm_head.weight[ids - first].contiguous()
            if rows.device.type != "cpu" and "draft_rows" in self.__dict__:
                # Captured graphs hold their addresses.
                self.draft_rows.copy_(rows)
                self.vocabulary.ids.copy_(ids)
                return
            self.__dict__["draft_rows"] = rows
            self.__dict__["draft_projection"] = make_linear(rows)
        self.__dict__["vocabulary"] = VocabularyShard(get_tp_group(), first, ids)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] to logits over this rank's (draft) vocabulary, through the target's LM head."""
        if self.draft_token_ids is not None:
            return self.draft_projection(hidden)
        head = self.target_lm_head
        return head.quant_method.apply(head, hidden)[..., : head.shard_indices.num_org_elements]

    def forward_embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 to [..., H], the target's embeddings as the head reads them.

        SGLang captures a model with this method from ids, not from embeddings.
        """
        embeds: torch.Tensor = self.target_embedding(input_ids)
        return embeds if self.embedding_scale == 1.0 else embeds * self.embedding_scale

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if input_embeds is None:
            input_embeds = self.forward_embed(input_ids)
        if self.dense is None:
            return super().forward(input_ids, positions, forward_batch, input_embeds)
        hidden = self.dense.forward(input_embeds, positions, forward_batch)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def draft_tree(
        self, roots: torch.Tensor, hidden: torch.Tensor, options: Options, build: TreeBuilder
    ) -> DraftTree:
        """The tree of the block's drafting rows ``hidden`` [B, D, H] behind ``roots`` [B].

        build: makes it of rows that do not depend on the tokens before them.
        """
        width, nodes = options.width, options.num_draft_tokens
        if self.correction is not None:
            base = self.draft_logits(hidden)
            return corrected_tree(
                roots,
                hidden,
                base,
                self.correction,
                self.forward_embed,
                width,
                nodes,
                self.draft_token_ids,
            )
        tokens, logprobs, entropies = self.propose(hidden, width, build.needs_entropies)
        return build(roots, tokens, logprobs, nodes, entropies=entropies)

    def propose(
        self, hidden: torch.Tensor, width: int, entropies: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The rows' best tokens, log-probabilities and entropies, over all ranks."""
        return self.vocabulary.propose(self.draft_logits(hidden).float(), width, entropies)

    def write_context(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pool: Any,
    ) -> None:
        """Write the KV of committed positions: the same projected features for every layer.

        features: [n, T * H] captured target states. positions: [n]. slots: [n], the target's.
        """
        if self.dense is not None:
            self.dense.write_context(features, positions, slots, pool)
            return
        if self.context_kernel is not None and self.context_kernel.takes(features, pool):
            self.context_kernel.write(features, positions, slots, pool)
            return
        context = self.project_target_hidden(features)
        for layer in self.layers:
            attention = layer.self_attn
            k, v = attention.kv_proj_only(context)
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            shape = (-1, attention.num_kv_heads, attention.head_dim)
            location = KVWriteLoc(slots, physical=True)
            pool.set_kv_buffer(attention.attn, location, k.view(shape), v.view(shape))


class JetSpecDraftWorker(TpModelWorker):
    """Loads the head with the causality its checkpoint states.

    Stock SGLang loads these checkpoints as ``DFlashDraftModel`` and never reads
    ``dflash_config.causal_head``: it would draft bidirectionally.
    """

    head: HeadConfig

    def _init_model_config(self) -> None:
        # A head trained on shorter texts than the target serves is given a window below.
        with envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True):
            super()._init_model_config()
        spec = get_spec()
        folder = resolve_head(
            spec.speculative_draft_model_path, spec.speculative_draft_model_revision
        )
        self.head = load_head_config(folder, causal=causality_override())
        config = self.model_config.hf_config
        config.architectures = [JetSpecDraftModel.__name__]
        config.is_causal = self.head.causal
        config.jetspec_folder = str(folder)  # SGLang writes the configuration out as JSON
        reach = self.head.max_position_embeddings
        if reach < int(self.context_length):
            # Distances the head was never trained on stay out of its sight.
            config.layer_types = ["sliding_attention"] * self.head.num_hidden_layers
            config.sliding_window = reach
            logger.info("the head sees the last %d tokens, its max_position_embeddings", reach)
        elif getattr(config, "layer_types", None) is None:
            config.layer_types = ["full_attention"] * self.head.num_hidden_layers
        # Positions are absolute, so that the rotary table covers the context and one block.
        last = int(self.context_length) + int(spec.speculative_num_draft_tokens) + 1
        config.max_position_embeddings = max(reach, last)


EntryClass = JetSpecDraftModel
