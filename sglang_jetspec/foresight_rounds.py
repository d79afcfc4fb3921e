"""JetSpec++ in the worker's rounds: from SGLang's batches to `foresight.serving`, and its set-up.

B requests, N tree nodes (here chains), D = N - 1 drafts, F captured feature columns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec
from torch import Tensor
from torch.profiler import record_function

from sglang_jetspec.config import Options
from sglang_jetspec.foresight.drafting import Context, ForesightDrafter
from sglang_jetspec.foresight.executors import Executor, ForesightFault, Ticket, make_executor
from sglang_jetspec.foresight.folder import Foresight as Folder
from sglang_jetspec.foresight.folder import load_foresight
from sglang_jetspec.foresight.meters import Meter
from sglang_jetspec.foresight.options import ForesightOptions
from sglang_jetspec.foresight.paged import Buffers, check_buffers
from sglang_jetspec.foresight.served_layers import served_decoder, served_drafter
from sglang_jetspec.foresight.serving import Block, Foreseen, Foresight, Requests
from sglang_jetspec.heads.format import HeadConfig, HeadError, resolve_head
from sglang_jetspec.observability import publish_foresight
from sglang_jetspec.request_text import RequestText
from sglang_jetspec.sampling import batch_sampling
from sglang_jetspec.trees import Chain, DraftTree
from sglang_jetspec.trees.shrink import shrink
from sglang_jetspec.verification import Acceptance, Sampling
from sglang_jetspec.window import Commit, Window, usable_nodes

logger = logging.getLogger(__name__)

# Targets whose layers are exactly `foresight.layers.DecoderLayer`.
DENSE_TARGETS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


Ahead = tuple[Foreseen | None, float]


@dataclass(frozen=True)
class Round:
    """A round under way. ticket: None where nothing is drafted ahead. started: seconds."""

    requests: Requests
    context: Context
    ticket: Ticket[Ahead] | None
    started: float


class ForesightRounds:
    """What the worker calls where it would draft and commit alone.

    table: [rows, positions] int32, SGLang's request table. text: of the requests, where the head
    reads tokens.
    """

    def __init__(
        self,
        foresight: Foresight,
        table: Tensor,
        text: RequestText | None,
        options: Options,
        executor: Executor,
        meter: Meter,
    ) -> None:
        self.foresight, self.table, self.text, self.options = foresight, table, text, options
        self.executor, self.meter = executor, meter
        self.chain = Chain()
        self.warned = False

    def begin(self, batch: Any, features: Tensor) -> None:
        """After a prefill, whose features [tokens, F] and tokens come request after request."""
        rows = batch.req_pool_indices
        self.foresight.forget(rows)
        counts = list(batch.extend_lens)
        parts = zip(
            rows.split(1),
            batch.prefix_lens,
            batch.input_ids.split(counts),
            features.split(counts),
            strict=True,
        )
        for row, start, tokens, states in parts:
            slots = self.table[row, : start + len(tokens)].squeeze(0).long()
            self.foresight.read_prompt(row, slots, start, tokens, states)

    def propose(self, batch: Any, roots: Tensor, window: Window) -> tuple[DraftTree, Round]:
        """The round's chains; the next round's are on their way before the target judges these."""
        started = time.perf_counter()
        requests = self._requests(batch)
        context = self.foresight.context(requests)
        with record_function("jetspec::draft"):
            block = self.foresight.draft(requests, context, roots)
        self.meter.count(block.waited, block.hit)
        sampling = batch_sampling(batch.sampling_info, None)
        ticket = self._submit(partial(self._foresee, requests, context, block, sampling))
        # A serial executor has done its work by now, which hides behind nothing.
        self.meter.totals.exposed_seconds += time.perf_counter() - started
        return self._chains(block, window), Round(requests, context, ticket, started)

    def _foresee(
        self, requests: Requests, context: Context, block: Block, sampling: Sampling
    ) -> tuple[Foreseen | None, float]:
        """The blocks ahead, and the seconds they took."""
        started = time.perf_counter()
        with record_function("jetspec::foresee"):
            found = self.foresight.foresee(requests, context, block, sampling)
        return found, time.perf_counter() - started

    def _submit(self, work: Callable[[], Ahead]) -> Ticket[Ahead] | None:
        if not self.foresight.options.outcomes:
            return None
        try:
            return self.executor.submit(work)
        except ForesightFault as fault:
            self._lost(fault)
            return None

    def _join(self, done: Round) -> None:
        """Keep what was drafted ahead; without it the next round drafts its own."""
        if done.ticket is None:
            return
        started = time.perf_counter()
        try:
            with record_function("jetspec::join"):
                found, seconds = done.ticket.result()
            self.foresight.keep(done.requests, found)
            self.meter.totals.ahead_seconds += seconds
        except ForesightFault as fault:
            self._lost(fault)
        self.meter.totals.exposed_seconds += time.perf_counter() - started

    def _lost(self, fault: ForesightFault) -> None:
        self.meter.totals.faults += 1
        if not self.warned:
            self.warned = True
            logger.warning(
                "Drafting ahead failed (%s); rounds without it draft for themselves. Further "
                "failures are counted in jetspec:foresight_faults_total.",
                fault,
            )

    def _requests(self, batch: Any) -> Requests:
        known = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        # Under the overlap schedule the host's lengths are a round behind.
        longest = int(known.max()) + self.options.num_draft_tokens
        slots = self.table[batch.req_pool_indices, :longest].long()
        text = None if self.text is None else self.text.rows(batch)
        return Requests(batch.req_pool_indices, batch.seq_lens, slots, text)

    def _chains(self, block: Block, window: Window) -> DraftTree:
        nodes = self.options.num_draft_tokens
        tree = self.chain(
            block.tokens[:, 0], block.tokens[:, 1:, None], block.logprobs.unsqueeze(2), nodes
        )
        return shrink(tree, usable_nodes(window.prefix_lens, nodes, window.context_len))

    def commit(
        self,
        done: Round,
        tree: DraftTree,
        acceptance: Acceptance,
        features: Tensor,
        window: Window,
    ) -> None:
        """After a round: features are [B * N, F] of the nodes."""
        self._join(done)
        shape = acceptance.path.shape
        kept = Commit.of(window, acceptance, compact=False)
        self.foresight.commit(
            done.context,
            tree.tokens.flatten()[kept.rows].view(shape),
            features[kept.rows].view(*shape, -1),
            kept.positions.view(shape),
            kept.slots.view(shape),
        )
        self.meter.totals.round_seconds += time.perf_counter() - done.started
        self.meter.end()


def make_foresight(
    worker: Any, options: ForesightOptions, table: Tensor, text: RequestText | None
) -> ForesightRounds:
    """JetSpec++ for a worker whose models and pools are loaded.

    Raises HeadError or CalibrationError for a folder or a target that cannot be served so.
    """
    spec, head = get_spec(), worker.head
    folder = resolve_head(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)
    runner, dtype = worker.model_runner, worker.draft_model.fc.weight.dtype
    name = type(runner.model).__name__
    if options.reads_predictions and name not in DENSE_TARGETS:
        raise HeadError(
            f"refreshes={options.refreshes}, outcomes={options.outcomes}: predicted states are "
            f"decoded by the layers of {', '.join(DENSE_TARGETS)}; this target is {name}. Use 0."
        )
    found = load_parts(folder, head, options, Path(runner.model_config.model_path).name, dtype)
    first = head.target_layer_ids[-1] + 1
    layers = runner.model_config.num_hidden_layers
    decoder = pool_buffers(runner.token_to_kv_pool, range(first, layers))
    own = pool_buffers(worker.draft_runner.token_to_kv_pool, range(head.num_hidden_layers))
    check_buffers("target", decoder, dtype)
    check_buffers("head", own, dtype)
    adapter = None if found.adapter is None else found.adapter.to(worker.device)
    drafter = ForesightDrafter(
        served_drafter(worker.draft_model, head),
        adapter and served_decoder(runner.model, runner.model_config.hf_text_config, first),
        adapter,
    )
    foresight = Foresight(
        drafter,
        options,
        found.calibration,
        rows=worker.options.num_draft_tokens,
        requests=len(table),
        head=own,
        decoder=decoder,
        on_cpu=worker.on_cpu,
        reach=head.max_position_embeddings,
    )
    executor = make_executor(options.executor, worker.device, options.core_set)
    logger.info("JetSpec++ %s", options)
    meter = Meter(worker.device, publish_foresight)
    return ForesightRounds(foresight, table, text, worker.options, executor, meter)


def load_parts(
    folder: Path, head: HeadConfig, options: ForesightOptions, target: str, dtype: torch.dtype
) -> Folder:
    """Adapter and calibration as far as `options` need them."""
    if not options.reads_predictions:
        return Folder(None, None, ())
    found = load_foresight(folder, target, dtype)
    if found.adapter is None:
        reasons = "; ".join(found.refused) or f"{folder} has no adapter/"
        raise HeadError(
            f"refreshes={options.refreshes}, outcomes={options.outcomes}: both need an adapter, "
            f"and {reasons}. Use 0, or train one with `jetspec train-adapter`."
        )
    if options.rule == "calibrated" and found.calibration is None:
        raise HeadError(
            f"rule='calibrated': {folder} has no calibration. Run `jetspec calibrate`, or use "
            "rule=uncalibrated."
        )
    return found


def pool_buffers(pool: Any, layers: range) -> Buffers:
    """Keys and values of SGLang's pool for these layers."""
    return [(pool.get_key_buffer(layer), pool.get_value_buffer(layer)) for layer in layers]
