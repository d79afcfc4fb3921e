"""Play decoding rounds of JetSpec++ in plain torch, the target in the loop, no server.

B requests run in lock-step. A round verifies a block [anchor, drafts], commits k drafts and the
bonus token a, and drafts the block behind them from one of three kinds of states: the true ones
(drafting waits for verification), the adapter's predictions (drafted meanwhile), or stale ones
(the block's own positions missing). Predicted drafting always meets the actual outcome here, as
if it were always cached; which outcomes a cache would have held is recorded by `Round.evidence`.

Shapes: B requests, g drafts, P positions, T captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sglang_jetspec.foresight.calibration import Evidence
from sglang_jetspec.foresight.drafter import DraftContext
from sglang_jetspec.foresight.refine import Refined, RefinePlan, noise_tokens, refine
from sglang_jetspec.tools.foresight.models import Models
from sglang_jetspec.verification import Sampling, target_choices
from sglang_jetspec.verification.sampling import sampling_law

StateKind = Literal["true", "predicted", "stale"]


@dataclass(frozen=True)
class RoundPlan:
    """How blocks are drafted. temperature 0 is greedy."""

    refine: RefinePlan
    states: StateKind = "true"
    temperature: float = 0.0
    collect_evidence: bool = False


@dataclass(frozen=True)
class Round:
    """One verification of B requests; `live` [B] marks those that still decode.

    evidence: the decoder's view of the block before its outcome was known, if collected.
    """

    lengths: Tensor  # [B] accepted drafts k
    anchors: Tensor  # [B] bonus token a
    live: Tensor  # [B] bool
    evidence: Evidence | None


class Session:
    """B requests with their caches, from prompts to `max_new_tokens` committed tokens."""

    def __init__(
        self, models: Models, plan: RoundPlan, prompts: list[list[int]], limit: int, seed: int
    ) -> None:
        self.models, self.plan = models, plan
        self.generator = torch.Generator().manual_seed(seed)
        count, self.rows = len(prompts), models.drafts + 1
        self.starts = torch.tensor([len(prompt) for prompt in prompts])
        self.limit = self.starts + limit
        positions = int(self.starts.max()) + limit + 2 * self.rows + 1
        self.history = torch.zeros(count, positions, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self.history[row, : len(prompt)] = torch.tensor(prompt)
        self.target_cache = models.target.make_cache(count, positions)
        self.decoder_cache = models.decoder.make_cache(count, positions)
        self.adapter_cache = models.adapter and models.adapter.make_cache(count, positions)
        hidden = models.embedding.shape[1]
        self.context = DraftContext(
            models.embedding.new_zeros(count, positions, hidden),
            torch.zeros(count, positions, dtype=torch.bool),
        )
        self.sampling = _sampling(plan.temperature, count)
        self.base = self.starts.clone()  # position of the anchor, the last committed token
        self._prefill(int(self.starts.max()))

    def block_positions(self) -> Tensor:
        """[B, g+1] positions of the current block."""
        return self.base[:, None] + torch.arange(self.rows)

    @torch.inference_mode()
    def play(self, eos: int | None = None) -> Iterator[Round]:
        """Rounds until every request has its tokens (or `eos`)."""
        live = torch.ones(len(self.base), dtype=torch.bool)
        block = self._draft("true")
        while live.any():
            positions = self.block_positions()
            anchors = self.history.gather(1, self.base[:, None])
            rows = torch.cat([anchors, block.drafts], dim=1)
            predicted = self._predict(rows, positions)
            evidence = None
            if predicted is not None:  # also fills the decoder's cache for what is drafted next
                logits = self._decode(predicted, positions)
                if self.plan.collect_evidence:
                    evidence = Evidence(block.drafts, block.logprobs, self._law(logits))
            states, lengths, bonus = self._verify(rows, positions)
            yield Round(lengths, bonus, live.clone(), evidence)
            self._advance(rows, positions, lengths, bonus)
            done = self.base + 1 >= self.limit
            if eos is not None:
                done |= self._committed_eos(positions, lengths, eos)
            live &= ~done
            self.base = self.base.where(live, positions[:, 0])
            block = self._next_block(states, predicted, positions, lengths)

    def _next_block(
        self, states: Tensor, predicted: Tensor | None, positions: Tensor, lengths: Tensor
    ) -> Refined[Tensor]:
        """Draft behind the outcome; the true states are committed before or after."""
        kind, head = self.plan.states, self.models.drafter.head
        accepted = torch.arange(self.rows) <= lengths[:, None]
        if kind == "true":
            self._commit(states, positions)
            return self._draft(kind)
        if kind == "predicted":
            assert predicted is not None, "predicted states need an adapter"
            self.context.write(positions, head.fuse(predicted))
            block = self._draft(kind)
        else:
            kept = self.context
            self.context = kept.without(positions, accepted)
            block = self._draft(kind)
            self.context = kept
        self._commit(states, positions)
        return block

    def _draft(self, kind: StateKind) -> Refined[Tensor]:
        head, drafts = self.models.drafter.head.config, self.rows - 1
        anchors = self.history.gather(1, self.base[:, None]).squeeze(1)
        if head.token_input:
            initial = noise_tokens(self.history, self.base + 1, drafts, self.generator)
        else:
            initial = torch.full((len(anchors), drafts), head.mask_token_id)
        positions = self.block_positions()

        def draft(block: Tensor, frozen: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
            drafter = self.models.drafter
            return drafter.draft(self.context, self.base, block, frozen, states)

        def refresh(block: Tensor) -> tuple[Tensor, Tensor]:
            states = self._predict(block, positions)
            assert states is not None, "a context refresh needs an adapter"
            return states, self._decode(states, positions).argmax(-1)

        return refine(anchors, initial, self.plan.refine, draft, refresh)

    def _predict(self, block: Tensor, positions: Tensor) -> Tensor | None:
        """[B, g+1, T*H] predicted states; their keys and values stay cached until the commit."""
        if self.models.adapter is None:
            return None
        return self.models.adapter(self.models.embed(block), positions, self.adapter_cache)

    def _decode(self, states: Tensor, positions: Tensor) -> Tensor:
        hidden = self.models.embedding.shape[1]
        final, _ = self.models.decoder(states[..., -hidden:], positions, self.decoder_cache)
        return self.models.decoder.logits(final)

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

    def _advance(self, rows: Tensor, positions: Tensor, lengths: Tensor, bonus: Tensor) -> None:
        self.history.scatter_(1, positions, rows)
        self.base = self.base + lengths + 1
        self.history.scatter_(1, self.base[:, None], bonus[:, None])

    def _committed_eos(self, positions: Tensor, lengths: Tensor, eos: int) -> Tensor:
        new = self.history.gather(1, positions + 1)
        return ((new == eos) & (torch.arange(self.rows) <= lengths[:, None])).any(1)

    def _commit(self, states: Tensor, positions: Tensor) -> None:
        """True states replace predictions in every cache; rejected rows are overwritten later."""
        models, hidden = self.models, self.models.embedding.shape[1]
        self.context.write(positions, models.drafter.head.fuse(states))
        models.decoder.commit(states[..., -hidden:], positions, self.decoder_cache)
        if models.adapter is not None:
            assert self.adapter_cache is not None
            embedded = models.embed(self.history.gather(1, positions))
            models.adapter.commit(embedded, states, positions, self.adapter_cache)

    @torch.inference_mode()
    def _prefill(self, width: int) -> None:
        """Run the prompts; the first token after them is committed outside of any round."""
        positions = torch.arange(width).expand(len(self.base), -1)
        models, prompt = self.models, self.history[:, :width]
        final, layers = models.target(models.embed(prompt), positions, self.target_cache)
        last = final.gather(1, (self.starts - 1)[:, None, None].expand(-1, 1, final.shape[-1]))
        first = target_choices(models.target.logits(last), self.sampling, self.generator)
        self.history.scatter_(1, self.base[:, None], first)
        self._commit(models.captured(layers), positions)


def _sampling(temperature: float, count: int) -> Sampling:
    return Sampling(
        temperatures=torch.full((count,), temperature or 1.0),
        top_ks=torch.full((count,), 1 << 30),
        top_ps=torch.ones(count),
        min_ps=None,
        greedy=torch.full((count,), temperature == 0),
        all_greedy=temperature == 0,
    )
