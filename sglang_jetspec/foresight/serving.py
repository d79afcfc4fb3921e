"""JetSpec++'s part of a server's rounds.

A round takes its block from the cache or drafts it behind true states; before the target has judged
it, blocks are drafted behind its likeliest outcomes, from predicted states; afterwards the adapter
reads what was committed. Chains of g = N - 1 drafts.

Shapes: B requests, M outcomes, R = g + 1 rows a block, C positions, F = T*H captured features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_jetspec.foresight.cache import OutcomeCache
from sglang_jetspec.foresight.calibration import (
    IDENTITY,
    Calibration,
    ClassCalibration,
    Evidence,
    temperature_class,
)
from sglang_jetspec.foresight.drafting import Context, ForesightDrafter, Part
from sglang_jetspec.foresight.options import ForesightOptions
from sglang_jetspec.foresight.outcomes import Outcomes
from sglang_jetspec.foresight.paged import Buffers, KeyPool, PagedKeys
from sglang_jetspec.foresight.refine import RefinePlan
from sglang_jetspec.foresight.selection import RULES, RuleSettings
from sglang_jetspec.verification import Sampling
from sglang_jetspec.verification.sampling import sampling_law

PROMPT_ROWS = 512  # of a prompt that the adapter reads at once; bounds its attention masks
FIRST_PASS = RefinePlan(0, 0)


@dataclass(frozen=True)
class Requests:
    """The requests of a round.

    rows: [B] their rows of the request table. lengths: [B] committed tokens with KV. slots: [B, C],
    C at least the largest length. text: [B, P] tokens, None for heads that read masks.
    """

    rows: Tensor
    lengths: Tensor
    slots: Tensor
    text: Tensor | None


@dataclass(frozen=True)
class Block:
    """tokens: [B, R] anchor and drafts. logprobs: [B, g].

    waited: [B] bool, whether blocks waited for the request. hit: [B] bool, this one was among them.
    """

    tokens: Tensor
    logprobs: Tensor
    waited: Tensor
    hit: Tensor


@dataclass(frozen=True)
class Foreseen:
    """Blocks behind outcomes. drafts: [B, M, g] int64. logprobs: [B, M, g] fp32."""

    outcomes: Outcomes
    drafts: Tensor
    logprobs: Tensor


class Foresight:
    """Drafts the blocks of a server.

    drafter: the networks. rows: R. requests: rows of the request table. head, decoder: KV pools by
    layer. on_cpu: looking at the data is free and saves work. reach: positions back that the head
    may see, None for all.
    """

    def __init__(
        self,
        drafter: ForesightDrafter,
        options: ForesightOptions,
        calibration: Calibration | None,
        rows: int,
        requests: int,
        head: Buffers,
        decoder: Buffers,
        on_cpu: bool,
        reach: int | None = None,
    ) -> None:
        self.drafter, self.options, self.rows = drafter, options, rows
        self.calibration, self.on_cpu = calibration, on_cpu
        self.head, self.decoder, self.reach = head, decoder, reach
        keys = head[0][0]
        self.cache = OutcomeCache(requests, options.outcomes, rows - 1, keys.device)
        adapter = drafter.adapter
        self.pool = (
            None
            if adapter is None
            else KeyPool(adapter.config.shape, adapter.layers, len(keys), keys)
        )
        self.rule = RULES[options.rule or ("calibrated" if calibration else "uncalibrated")]

    def context(self, requests: Requests) -> Context:
        """The committed positions."""
        slots, lengths = requests.slots, requests.lengths.unsqueeze(1)
        stored = torch.arange(slots.shape[1], device=slots.device)
        known = stored < lengths
        near = known
        if self.reach is not None:
            # The last row of a block behind a whole predicted block is the farthest ahead.
            near = known & (stored > lengths + 2 * self.rows - self.reach)
        adapter = None if self.pool is None else PagedKeys(self.pool.buffers, slots)
        return [
            Part(PagedKeys(self.head, slots), None, None, near.unsqueeze(1)),
            Part(None, PagedKeys(self.decoder, slots), adapter, known.unsqueeze(1)),
        ]

    def draft(self, requests: Requests, context: Context, roots: Tensor) -> Block:
        """The block behind `roots` [B]: foreseen, or drafted now."""
        options = self.options
        if not options.outcomes:
            tokens, logprobs = self._behind(requests, context, roots, options.plan)
            none = torch.zeros_like(roots, dtype=torch.bool)
            return Block(tokens, logprobs, none, none)
        waited = self.cache.waiting(requests.rows)
        hit, drafts, logprobs = self.cache.take(requests.rows, requests.lengths, roots)
        tokens = torch.cat([roots.unsqueeze(1), drafts], dim=1)
        if not (self.on_cpu and bool(hit.all())):
            late, late_logprobs = self._behind(requests, context, roots, FIRST_PASS)
            kept = hit.unsqueeze(1)
            tokens, logprobs = tokens.where(kept, late), logprobs.where(kept, late_logprobs)
        return Block(tokens, logprobs, waited, hit)

    def _behind(
        self, requests: Requests, context: Context, roots: Tensor, plan: RefinePlan
    ) -> tuple[Tensor, Tensor]:
        """A block [B, R] drafted behind true states, and its log-probabilities [B, g]."""
        anchors, starts = roots.unsqueeze(1), requests.lengths.unsqueeze(1)
        initial = self._initial(requests, anchors)
        found = self.drafter.draft(context, anchors, starts, initial, plan, self.on_cpu)
        return torch.cat([anchors, found.drafts], dim=1), found.logprobs

    def foresee(
        self, requests: Requests, context: Context, block: Block, sampling: Sampling
    ) -> Foreseen | None:
        """Draft behind the likeliest outcomes of `block`. Changes nothing."""
        count = self.options.outcomes_of(len(block.tokens))
        if not count:
            return None
        starts = requests.lengths.unsqueeze(1)
        found = self.drafter.predict(context, block.tokens.unsqueeze(1), starts)
        evidence = Evidence(block.tokens[:, 1:], block.logprobs, laws(found.logits, sampling))
        outcomes = self._select(evidence, count, sampling)
        initial = self._initial(requests, outcomes.anchors, block.tokens, outcomes.lengths)
        ahead = self.drafter.draft_ahead(
            context, starts, found, outcomes, initial, self.options.plan, self.on_cpu
        )
        shape = (*outcomes.lengths.shape, -1)
        return Foreseen(outcomes, ahead.drafts.view(shape), ahead.logprobs.view(shape))

    def keep(self, requests: Requests, found: Foreseen | None) -> None:
        """Put blocks into the cache, where the next round looks for its own."""
        if found is not None:
            self.cache.put(
                requests.rows, requests.lengths, found.outcomes, found.drafts, found.logprobs
            )

    def _select(self, evidence: Evidence, count: int, sampling: Sampling) -> Outcomes:
        """The outcomes to draft behind, with each request's own temperature class."""
        fitted = self._fitted(greedy=True), self._fitted(greedy=False)
        greedy = self.rule(evidence, count, RuleSettings(fitted[0]))
        if sampling.all_greedy or fitted[0] == fitted[1]:
            return greedy
        sampled = self.rule(evidence, count, RuleSettings(fitted[1]))
        wanted = sampling.greedy.unsqueeze(1)
        return Outcomes(
            greedy.lengths.where(wanted, sampled.lengths),
            greedy.anchors.where(wanted, sampled.anchors),
            greedy.scores.where(wanted, sampled.scores),
        )

    def _fitted(self, greedy: bool) -> ClassCalibration:
        """The class's calibration; a class that was not fitted takes the decoder's own estimate."""
        classes = self.calibration.classes if self.calibration else {}
        return classes.get(temperature_class(greedy), IDENTITY)

    def _initial(
        self,
        requests: Requests,
        anchors: Tensor,
        block: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """What the first pass behind `anchors` [B, M] reads."""
        text = anchors if requests.text is None else requests.text
        return self.drafter.initial(text, requests.lengths, anchors, self.rows - 1, block, lengths)

    def forget(self, rows: Tensor) -> None:
        """Drop what waits for the requests at `rows` [n] of the request table."""
        self.cache.drop(rows)

    def commit(
        self, context: Context, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        """The adapter reads committed rows behind `context`.

        tokens, positions, slots: [B, R]; rows of slot 0 are padding behind the others. features:
        [B, R, F].
        """
        if self.pool is not None:
            keys = self.drafter.adapter_keys(context, tokens, features, positions)
            self.pool.write(slots, keys)

    def read_prompt(
        self, row: Tensor, slots: Tensor, start: int, tokens: Tensor, features: Tensor
    ) -> None:
        """A prefill of one request: positions start.. with `tokens` [n] and `features` [n, F].

        row: [1], of the request table. slots: [start + n].
        """
        for first in range(0, len(tokens) if self.pool else 0, PROMPT_ROWS):
            part = slice(first, first + PROMPT_ROWS)
            known = start + first
            before = slots[None, :known]
            requests = Requests(row, slots.new_tensor([known]), before, None)
            more = tokens[None, part]
            positions = known + torch.arange(more.shape[1], device=slots.device)[None]
            self.commit(
                self.context(requests),
                more,
                features[None, part],
                positions,
                slots[None, known : known + more.shape[1]],
            )


def laws(logits: Tensor, sampling: Sampling) -> Tensor:
    """The target's laws [B, R, V] as `logits` [B, R, V] and each request's settings have them.

    Greedy requests are scored at temperature 1: a point mass would rank one outcome only.
    """
    if sampling.all_greedy:
        return logits.softmax(-1)
    warm = replace(
        sampling,
        temperatures=sampling.temperatures.masked_fill(sampling.greedy, 1.0),
        top_ks=sampling.top_ks.masked_fill(sampling.greedy, logits.shape[2]),
        greedy=torch.zeros_like(sampling.greedy),
        all_greedy=False,
        seeds=None,
    )
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(logits.shape[1])
    return sampling_law(logits.flatten(0, 1), warm.rows(rows)).view_as(logits)
