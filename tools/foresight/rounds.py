"""Play decoding rounds of JetSpec++ in plain torch, the target in the loop, no server.

B requests run in lock-step. A round verifies a block [anchor, drafts], commits k drafts and the
bonus token a, and goes on with a block drafted behind them: from true states (drafting waits for
verification), from the adapter's predictions (drafted meanwhile, as if for the actual outcome
alone), from stale states (the block's own positions missing), or from the outcome cache: drafted
meanwhile for the selected outcomes, and behind true states where none of them came true.

Shapes: B requests, g drafts, P positions, T captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from sglang_jetspec.foresight.cache import OutcomeCache
from sglang_jetspec.foresight.calibration import Evidence
from sglang_jetspec.foresight.drafting import Context, Part, Prediction
from sglang_jetspec.foresight.layers import LaterLayers, RowKeys, causal_rows
from sglang_jetspec.foresight.refine import Refined, RefinePlan
from sglang_jetspec.foresight.selection import RULES, RuleSettings
from sglang_jetspec.tools.foresight.models import Models
from sglang_jetspec.verification import Sampling, target_choices
from sglang_jetspec.verification.sampling import sampling_law

StateKind = Literal["true", "predicted", "stale", "cached"]


@dataclass(frozen=True)
class RoundPlan:
    """How blocks are drafted. temperature 0 is greedy.

    outcomes, rule, settings: size B of the cache and how it is filled, for "cached" states.
    miss: passes of a block that was not cached, as a request's first one never is.
    """

    refine: RefinePlan
    states: StateKind = "true"
    temperature: float = 0.0
    collect_evidence: bool = False
    outcomes: int = 0
    rule: str = "calibrated"
    settings: RuleSettings = field(default_factory=RuleSettings)
    miss: RefinePlan = field(default_factory=lambda: RefinePlan(0, 0))


@dataclass(frozen=True)
class Round:
    """One verification of B requests; `live` [B] marks those that still decode.

    cached: [B] whether the verified block came from the cache. evidence: the decoder's view of the
    block before its outcome was known, if collected.
    """

    lengths: Tensor  # [B] accepted drafts k
    anchors: Tensor  # [B] bonus token a
    live: Tensor  # [B] bool
    cached: Tensor  # [B] bool
    evidence: Evidence | None


@dataclass(frozen=True)
class Block:
    """A drafted block. cached: [B] whether it waited in the cache."""

    drafts: Tensor  # [B, g]
    logprobs: Tensor  # [B, g]
    cached: Tensor  # [B] bool

    @classmethod
    def of(cls, refined: Refined[Tensor]) -> Block:
        """A block drafted on the spot."""
        nothing = torch.zeros(len(refined.drafts), dtype=torch.bool)
        return cls(refined.drafts, refined.logprobs, nothing)


class Session:
    """B requests with their caches, from prompts to `limit` committed tokens each."""

    def __init__(
        self, models: Models, plan: RoundPlan, prompts: list[list[int]], limit: int, seed: int
    ) -> None:
        self.models, self.plan, self.foresight = models, plan, models.foresight
        self.generator = torch.Generator().manual_seed(seed)
        count, self.rows = len(prompts), models.head.block_size
        self.base = torch.tensor([len(prompt) for prompt in prompts])  # the anchor's position
        self.limit = self.base + limit
        positions = int(self.base.max()) + limit + 2 * self.rows + 1
        self.history = torch.zeros(count, positions, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self.history[row, : len(prompt)] = torch.tensor(prompt)
        self.target_keys, self.head_keys, self.adapter_keys = models.make_caches(count, positions)
        self.cache = OutcomeCache(count, plan.outcomes, self.rows - 1, "cpu")
        self.sampling = _sampling(plan.temperature, count)
        self._prefill()

    @torch.inference_mode()
    def play(self, eos: int | None = None) -> Iterator[Round]:
        """Rounds until every request has its tokens (or `eos`)."""
        live = torch.ones(len(self.base), dtype=torch.bool)
        plan = self.plan.miss if self.plan.states == "cached" else self.plan.refine
        block = self._draft(plan, self._context())
        while live.any():
            positions = self.base[:, None] + torch.arange(self.rows)
            anchors = self.history.gather(1, self.base[:, None])
            rows = torch.cat([anchors, block.drafts], dim=1)
            found, evidence = self._foresee(rows, block)
            states, lengths, bonus = self._verify(rows, positions)
            shown = evidence if self.plan.collect_evidence else None
            yield Round(lengths, bonus, live.clone(), block.cached, shown)
            before = self._context()
            self._write_text(rows, positions, live)
            self.base = self.base + lengths + 1
            self._write_text(bonus[:, None], self.base[:, None], live)
            done = self.base + 1 >= self.limit
            if eos is not None:
                done |= self._committed_eos(positions, lengths, eos)
            live &= ~done
            self.base = self.base.where(live, positions[:, 0])
            waiting = self._waiting(before, found, positions, lengths)
            self._commit(before, states, positions)
            block = waiting or self._late(bonus)

    def _context(self) -> Context:
        """The committed positions."""
        stored = torch.arange(self.history.shape[1])
        decoder = LaterLayers(self.target_keys, self.models.decoded_from)
        visible = (stored < self.base[:, None])[:, None]
        return [Part(self.head_keys, decoder, self.adapter_keys, visible)]

    def _foresee(self, rows: Tensor, block: Block) -> tuple[Prediction | None, Evidence | None]:
        """What is known before verification ends: predicted states and the decoder's law.

        With a cache, the selected outcomes are drafted into it.
        """
        plan, context, starts = self.plan, self._context(), self.base[:, None]
        if self.foresight.adapter is None:
            return None, None
        found = self.foresight.predict(context, rows[:, None], starts)
        if not plan.collect_evidence and not plan.outcomes:
            return found, None
        evidence = Evidence(block.drafts, block.logprobs, self._law(found.logits))
        if plan.outcomes:
            outcomes = RULES[plan.rule](evidence, plan.outcomes, plan.settings)
            initial = self.foresight.initial(
                self.history, self.base, outcomes.anchors, self.rows - 1, rows, outcomes.lengths
            )
            ahead = self.foresight.draft_ahead(
                context, starts, found, outcomes, initial, plan.refine
            )
            shape = (*outcomes.lengths.shape, self.rows - 1)
            blocks, logprobs = ahead.drafts.view(shape), ahead.logprobs.view(shape)
            self.cache.put(torch.arange(len(rows)), self.base, outcomes, blocks, logprobs)
        return found, evidence

    def _waiting(
        self, before: Context, found: Prediction | None, positions: Tensor, lengths: Tensor
    ) -> Block | None:
        """The block behind the outcome, drafted before the true states come; None: it is late."""
        if self.plan.states not in ("predicted", "stale"):
            return None
        assert found is not None, "predicted states need an adapter"
        suffix = self.foresight.suffix(found, positions[:, :1], lengths[:, None])
        if self.plan.states == "stale":
            suffix = replace(suffix, head=None)
        return self._draft(self.plan.refine, [*before, suffix])

    def _late(self, bonus: Tensor) -> Block:
        """The block behind the outcome, cached or drafted behind the true states."""
        if self.plan.states != "cached":
            return self._draft(self.plan.refine, self._context())
        hit, drafts, logprobs = self.cache.take(torch.arange(len(bonus)), self.base, bonus)
        missed = self._draft(self.plan.miss, self._context())
        drafts = drafts.where(hit[:, None], missed.drafts)
        return Block(drafts, logprobs.where(hit[:, None], missed.logprobs), hit)

    def _draft(self, plan: RefinePlan, context: Context) -> Block:
        anchors = self.history.gather(1, self.base[:, None])
        initial = self.foresight.initial(self.history, self.base, anchors, self.rows - 1)
        return Block.of(self.foresight.draft(context, anchors, self.base[:, None], initial, plan))

    def _commit(self, before: Context, states: Tensor, positions: Tensor) -> None:
        """Keys of true `states` [B, R, T*H], whose target keys are in place."""
        tokens = self.history.gather(1, positions)
        self.head_keys.write(positions, self.foresight.drafter.context_keys(states, positions))
        if self.adapter_keys is not None:
            keys = self.foresight.adapter_keys(before, tokens, states, positions)
            self.adapter_keys.write(positions, keys)

    def _law(self, logits: Tensor) -> Tensor:
        """The decoder's law for scores; greedy requests are scored at temperature 1.

        A point mass would leave nothing to rank outcomes by.
        """
        sampling = _sampling(self.plan.temperature or 1.0, len(logits))
        index = torch.arange(len(logits)).repeat_interleave(logits.shape[1])
        return sampling_law(logits.flatten(0, 1), sampling.rows(index)).view_as(logits)

    def _verify(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """True states of the block, the accepted drafts k and the bonus token."""
        final, states = self._run_target(rows, positions)
        choices = target_choices(self.models.target.logits(final), self.sampling, self.generator)
        lengths = (choices[:, :-1] == rows[:, 1:]).long().cumprod(1).sum(1)
        bonus = choices.gather(1, lengths[:, None]).squeeze(1)
        return states, lengths, bonus

    def _run_target(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Final and captured states of rows behind the positions before them."""
        models, recorded = self.models, RowKeys()
        seen = self.target_keys.before(positions[:, 0], rows.shape[1])
        own = causal_rows(rows.shape[1])
        final, layers = models.target(models.embed(rows), positions, own, [seen], recorded)
        self.target_keys.write(positions, recorded)
        return final, models.captured(layers)

    def _write_text(self, tokens: Tensor, positions: Tensor, live: Tensor) -> None:
        """Requests that have ended keep theirs while the others go on."""
        kept = self.history.gather(1, positions)
        self.history.scatter_(1, positions, tokens.where(live[:, None], kept))

    def _committed_eos(self, positions: Tensor, lengths: Tensor, eos: int) -> Tensor:
        new = self.history.gather(1, positions + 1)
        return ((new == eos) & (torch.arange(self.rows) <= lengths[:, None])).any(1)

    @torch.inference_mode()
    def _prefill(self) -> None:
        """Run the prompts; the first token after them is committed outside of any round."""
        width = int(self.base.max())
        positions = torch.arange(width).expand(len(self.base), -1)
        nothing = Part(self.head_keys, None, self.adapter_keys, _nothing(self.history))
        final, states = self._run_target(self.history[:, :width], positions)
        last = final.gather(1, (self.base - 1)[:, None, None].expand(-1, 1, final.shape[-1]))
        first = target_choices(self.models.target.logits(last), self.sampling, self.generator)
        self.history.scatter_(1, self.base[:, None], first)
        self._commit([nothing], states, positions)


def _nothing(history: Tensor) -> Tensor:
    return torch.zeros(len(history), 1, history.shape[1], dtype=torch.bool)


def _sampling(temperature: float, count: int) -> Sampling:
    return Sampling(
        temperatures=torch.full((count,), temperature or 1.0),
        top_ks=torch.full((count,), 1 << 30),
        top_ps=torch.ones(count),
        min_ps=None,
        greedy=torch.full((count,), temperature == 0),
        all_greedy=temperature == 0,
    )
