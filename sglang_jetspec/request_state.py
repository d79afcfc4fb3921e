"""What logit processing needs to know of each running request, by request slot.

SGLang's own penalty state does not do: it counts one token a round, not at all for block-drafting
algorithms, and starts again from nothing when a retracted request is prefilled again. Here the
output of every request is kept on the device, written at prefill and at each commit.

B requests, N tree nodes, D depth, V vocabulary, R request slots, C output columns, S stop tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_jetspec.logit_processors import apply_processors
from sglang_jetspec.trees import DraftTree
from sglang_jetspec.verification import Acceptance
from sglang_jetspec.verification.path_logits import (
    Penalties,
    ban_early_stops,
    count_tokens,
    path_tokens,
    penalize,
)
from sglang_jetspec.window import counting


def _reads_output(info: Any) -> bool:
    """Whether a batch's logits depend on what its requests have generated."""
    return info.acc_additive_penalties is not None or info.has_custom_logit_processor


def _grown(table: Tensor, columns: int) -> Tensor:
    """At least ``columns`` columns; new ones repeat the first."""
    missing = max(columns - table.shape[1], 0)
    return torch.cat([table, table[:, :1].expand(-1, missing)], 1) if missing else table


def _padded(rows: list[list[int]]) -> list[list[int]]:
    """Rows of one length, at least 1: short ones repeat their first entry, empty ones hold 0."""
    longest = max(1, *map(len, rows))
    return [row + (row[:1] or [0]) * (longest - len(row)) for row in rows]


def sent(values: list[Any], device: torch.device | str) -> Tensor:
    """A tensor on the device, without waiting for the work under way there."""
    tensor = torch.tensor(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def stop_tokens(req: Any) -> list[int]:
    """The tokens SGLang withholds until ``min_new_tokens`` have been generated.

    Requests may name ids outside the vocabulary; those cannot be sampled and are left out.
    """
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None and 0 <= i < req.vocab_size)


class RequestState:
    """Logit processing at every tree node, in plain decoding's order.

    Penalties and minimum length, grammar masks, logit bias, custom processors. The tables are
    empty until a request that needs its output is prefilled. From then on every prefill writes
    its requests' rows, so that a reused slot never shows the settings of its last owner.
    """

    def __init__(self, slots: int, depth: int, device: torch.device | str) -> None:
        self.depth = depth
        self.device = device
        self.used = False
        self.prompt_lens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.minimum = torch.zeros(slots, dtype=torch.int64, device=device)
        self.stops = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.penalties = torch.tensor([0.0, 0.0, 1.0], device=device).repeat(slots, 1)
        self.outputs = torch.zeros(slots, 1, dtype=torch.int32, device=device)

    def begin(self, batch: Any) -> None:
        """Before a prefill: take the requests' rows, and set the penalties of its own sampling.

        Each chunk of a long prompt and each return of a retracted request comes here.
        """
        info = batch.sampling_info
        if not self.used and not _reads_output(info):
            return
        self.used = True
        reqs, rows = batch.reqs, batch.req_pool_indices
        params = [req.sampling_params for req in reqs]
        stops = [stop_tokens(req) for req in reqs]
        knobs = [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in params]
        minimum = [p.min_new_tokens if ids else 0 for p, ids in zip(params, stops, strict=True)]
        self.prompt_lens[rows] = self._sent([len(req.origin_input_ids) for req in reqs])
        self.minimum[rows] = self._sent(minimum)
        self.penalties[rows] = self._sent(knobs).float()
        self._write_stops(rows, stops)
        # A round may overshoot the limit, and the round after it is already under way.
        columns = max(p.max_new_tokens for p in params) + 2 * (self.depth + 1)
        self.outputs = _grown(self.outputs, columns)
        past = self._sent(_padded([list(req.output_ids) for req in reqs]))
        self.outputs[rows, : past.shape[1]] = past.int()
        if info.acc_additive_penalties is not None:
            self._replace_penalties(info, rows, [len(req.output_ids) for req in reqs])

    def _sent(self, values: list[Any]) -> Tensor:
        return sent(values, self.device)

    def _write_stops(self, rows: Tensor, stops: list[list[int]]) -> None:
        new = self._sent(_padded(stops))
        self.stops = _grown(self.stops, new.shape[1])
        self.stops[rows] = _grown(new, self.stops.shape[1])

    def _replace_penalties(self, info: Any, rows: Tensor, lengths: list[int]) -> None:
        """Plain sampling's penalties, counted from the output and not from nothing."""
        held = self._sent(lengths)
        penalties = self._penalties(rows, held, info.acc_additive_penalties.shape[1])
        additive = penalties.additive(penalties.counts)
        root = torch.zeros(len(rows), 1, dtype=torch.int64, device=self.device)
        ban_early_stops(additive.unsqueeze(1), root, self.stops[rows], self.minimum[rows] - held)
        info.acc_additive_penalties = additive
        info.acc_scaling_penalties = penalties.scaling(penalties.counts)

    def _penalties(self, rows: Tensor, lengths: Tensor, vocab: int) -> Penalties:
        frequency, presence, repetition = self.penalties[rows].unbind(1)
        counts = count_tokens(self.outputs[rows], lengths, vocab)
        return Penalties(frequency, presence, repetition, counts)

    def emit(self, batch: Any, tokens: Tensor) -> None:
        """After a prefill: [B] sampled tokens, each the first of its request or the next."""
        if not _reads_output(batch.sampling_info):
            return
        rows = batch.req_pool_indices
        # Negative in a chunk that is not the last, whose sampled token is nothing.
        columns = (batch.seq_lens - self.prompt_lens[rows]).clamp(min=0)
        self.outputs[rows, columns] = tokens.int()

    def adjust(self, batch: Any, tree: DraftTree, logits: Tensor, grammar_mask: Any) -> None:
        """Give the logits [B, N, V] of every node what plain decoding gives them, in place.

        grammar_mask: SGLang's GrammarMask over the B * N nodes, or None.
        """
        info, rows = batch.sampling_info, batch.req_pool_indices
        if info.acc_additive_penalties is not None:
            lengths = self._output_lens(batch)
            penalize(logits, tree, self._penalties(rows, lengths, logits.shape[2]), self.depth)
            ban_early_stops(logits, tree.depths, self.stops[rows], self.minimum[rows] - lengths)
        if grammar_mask is not None:
            grammar_mask.apply(logits.flatten(0, 1))
        if info.logit_bias is not None:
            logits.add_(info.logit_bias.unsqueeze(1))
        if info.has_custom_logit_processor:
            held = zip(self.outputs[rows].tolist(), self._output_lens(batch), strict=True)
            outputs = [tokens[: int(length)] for tokens, length in held]
            paths = path_tokens(tree, self.depth)
            apply_processors(logits, info, batch.reqs, outputs, paths)

    def advance(self, batch: Any, acceptance: Acceptance) -> None:
        """Append what the round committed."""
        if not _reads_output(batch.sampling_info):
            return
        columns = self._output_lens(batch).unsqueeze(1) + counting(self.depth + 1, self.device)
        # Padding lands past the output, where the next round writes.
        columns = columns.clamp(0, self.outputs.shape[1] - 1)
        self.outputs[batch.req_pool_indices.unsqueeze(1), columns] = acceptance.tokens.int()

    def _output_lens(self, batch: Any) -> Tensor:
        """[B] committed output tokens, the root included."""
        return batch.seq_lens + 1 - self.prompt_lens[batch.req_pool_indices]
