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
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sglang_jetspec.foresight.cache import OutcomeCache
from sglang_jetspec.foresight.calibration import Evidence
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
    miss: passes of a block that was not cached.
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
        count, self.rows = len(prompts), models.foresight.rows
        self.base = torch.tensor([len(prompt) for prompt in prompts])  # the anchor's position
        self.limit = self.base + limit
        positions = int(self.base.max()) + limit + 2 * self.rows + 1
        history = torch.zeros(count, positions, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            history[row, : len(prompt)] = torch.tensor(prompt)
        self.state = models.foresight.make_state(history)
        self.target_cache = models.target.make_cache(count, positions)
        self.cache = OutcomeCache(count, plan.outcomes, self.rows - 1, "cpu")
        self.sampling = _sampling(plan.temperature, count)
        self._prefill()

    @property
    def history(self) -> Tensor:
        """[B, P] tokens; committed up to `base`."""
        return self.state.history

    @torch.inference_mode()
    def play(self, eos: int | None = None) -> Iterator[Round]:
        """Rounds until every request has its tokens (or `eos`)."""
        live = torch.ones(len(self.base), dtype=torch.bool)
        block = self._draft(self.plan.refine)
        while live.any():
            positions = self.foresight.block_positions(self.base)
            anchors = self.history.gather(1, self.base[:, None])
            rows = torch.cat([anchors, block.drafts], dim=1)
            predicted, evidence = self._foresee(rows, positions, block)
            states, lengths, bonus = self._verify(rows, positions)
            shown = evidence if self.plan.collect_evidence else None
            yield Round(lengths, bonus, live.clone(), block.cached, shown)
            self._write_text(rows, positions, live)
            self.base = self.base + lengths + 1
            self._write_text(bonus[:, None], self.base[:, None], live)
            done = self.base + 1 >= self.limit
            if eos is not None:
                done |= self._committed_eos(positions, lengths, eos)
            live &= ~done
            self.base = self.base.where(live, positions[:, 0])
            block = self._next_block(states, predicted, positions, lengths, bonus)

    def _foresee(
        self, rows: Tensor, positions: Tensor, block: Block
    ) -> tuple[Tensor | None, Evidence | None]:
        """What is known before verification ends: predicted states and the decoder's law.

        With a cache, the selected outcomes are drafted into it.
        """
        if self.foresight.adapter is None:
            return None, None
        predicted = self.foresight.predict(self.state, rows, positions)
        logits = self.foresight.decode(self.state, predicted, positions)
        if not self.plan.collect_evidence and not self.plan.outcomes:
            return predicted, None
        evidence = Evidence(block.drafts, block.logprobs, self._law(logits))
        if self.plan.outcomes:
            plan, slots = self.plan, torch.arange(len(rows))
            outcomes = RULES[plan.rule](evidence, plan.outcomes, plan.settings)
            blocks = self.foresight.draft_ahead(
                self.state, self.base, rows, predicted, outcomes, plan.refine, self.generator
            )
            self.cache.put(slots, slots, self.base, outcomes, blocks)
        return predicted, evidence

    def _next_block(
        self,
        states: Tensor,
        predicted: Tensor | None,
        positions: Tensor,
        lengths: Tensor,
        bonus: Tensor,
    ) -> Block:
        """The block behind the outcome; the true states are committed before or after."""
        kind, state = self.plan.states, self.state
        if kind == "cached":
            slots = torch.arange(len(lengths))
            hit, drafts = self.cache.take(slots, slots, positions[:, 0], lengths, bonus)
            self.foresight.commit(state, states, positions)
            missed = self._draft(self.plan.miss)
            drafts = drafts.where(hit[:, None], missed.drafts)
            logprobs = missed.logprobs.masked_fill(hit[:, None], 0.0)
            return Block(drafts, logprobs, hit)
        if kind == "true":
            self.foresight.commit(state, states, positions)
            return self._draft(self.plan.refine)
        if kind == "predicted":
            assert predicted is not None, "predicted states need an adapter"
            state.context.write(positions, self.foresight.drafter.head.fuse(predicted))
            block = self._draft(self.plan.refine)
        else:
            kept = state.context
            state.context = kept.without(positions, torch.arange(self.rows) <= lengths[:, None])
            block = self._draft(self.plan.refine)
            state.context = kept
        self.foresight.commit(state, states, positions)
        return block

    def _draft(self, plan: RefinePlan) -> Block:
        return Block.of(self.foresight.draft(self.state, self.base, plan, self.generator))

    def _law(self, logits: Tensor) -> Tensor:
        """The decoder's law for scores; greedy requests are scored at temperature 1.

        A point mass would leave nothing to rank outcomes by.
        """
        sampling = _sampling(self.plan.temperature or 1.0, len(logits))
        index = torch.arange(len(logits)).repeat_interleave(logits.shape[1])
        return sampling_law(logits.flatten(0, 1), sampling.rows(index)).view_as(logits)

    def _verify(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """True states of the block, the accepted drafts k and the bonus token."""
        models = self.models
        final, layers = models.target(models.embed(rows), positions, self.target_cache)
        choices = target_choices(models.target.logits(final), self.sampling, self.generator)
        lengths = (choices[:, :-1] == rows[:, 1:]).long().cumprod(1).sum(1)
        bonus = choices.gather(1, lengths[:, None]).squeeze(1)
        return models.captured(layers), lengths, bonus

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
        width, models = int(self.base.max()), self.models
        positions = torch.arange(width).expand(len(self.base), -1)
        prompt = self.history[:, :width]
        final, layers = models.target(models.embed(prompt), positions, self.target_cache)
        last = final.gather(1, (self.base - 1)[:, None, None].expand(-1, 1, final.shape[-1]))
        first = target_choices(models.target.logits(last), self.sampling, self.generator)
        self.history.scatter_(1, self.base[:, None], first)
        self.foresight.commit(self.state, models.captured(layers), positions)


def _sampling(temperature: float, count: int) -> Sampling:
    return Sampling(
        temperatures=torch.full((count,), temperature or 1.0),
        top_ks=torch.full((count,), 1 << 30),
        top_ps=torch.ones(count),
        min_ps=None,
        greedy=torch.full((count,), temperature == 0),
        all_greedy=temperature == 0,
    )
