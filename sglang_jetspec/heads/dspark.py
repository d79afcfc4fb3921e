"""DSpark heads: a DFlash block whose rows get a bias from the token before (a Markov chain).

As SGLang 0.5.23 (``models/dspark.py``) and DeepSeek's released checkpoints define them. The anchor
row drafts too (``sample_from_anchor``), so that a block of ``block_size`` rows drafts as many
tokens. The confidence head is loaded, trained and exported, but drafting does not read it: a tree's
nodes are ranked by their log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sglang_jetspec.heads.correction import Correction, Embed
from sglang_jetspec.heads.fields import HeadError, boolean, positive_int, section

MARKOV_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig:
    """``markov_rank`` r of the bias; ``confidence`` whether the checkpoint has that head."""

    rank: int
    markov: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    sample_from_anchor: bool = True
    kind: str = "dspark"

    @property
    def first_row(self) -> int:
        return 0 if self.sample_from_anchor else 1

    @property
    def idle_rows(self) -> int:
        return self.first_row

    def tensors(self, hidden_size: int, vocab_size: int, ranked: int) -> dict[str, tuple[int, ...]]:
        rank = self.rank
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (vocab_size, rank),
            "markov_head.markov_w2.weight": (ranked, rank),
        }
        if self.markov == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden_size + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if self.markov == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden_size)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.confidence:
            width = hidden_size + (rank if self.confidence_with_markov else 0)
            shapes["confidence_head.proj.weight"] = (1, width)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    def build(self, hidden_size: int, vocab_size: int, ranked: int) -> Correction:
        return MarkovCorrection(self, hidden_size, vocab_size, ranked)

    def raw(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {
            "architectures": ["DSparkDraftModel"],
            "markov_rank": self.rank,
            "markov_head_type": self.markov,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence_with_markov,
            "sample_from_anchor": self.sample_from_anchor,
        }, {"projector_type": "dspark"}


def read_dspark(top: Mapping[str, Any], dflash: Mapping[str, Any]) -> DSparkConfig | None:
    """Keys stand at the top level (DeepSeek), in ``dflash_config`` or ``dspark_config``
    (SpecForge); the innermost wins."""
    fields = {**top, **dflash, **section(top, "dspark_config")}
    named = any("DSpark" in name for name in top.get("architectures") or ())
    if not (named or fields.get("projector_type") == "dspark" or fields.get("markov_rank")):
        return None
    markov = str(fields.get("markov_head_type", "vanilla")).lower()
    if markov not in MARKOV_TYPES:
        raise HeadError(f"markov_head_type is {markov!r}; use one of {', '.join(MARKOV_TYPES)}")
    return DSparkConfig(
        rank=positive_int(fields, "markov_rank"),
        markov=markov,
        confidence=boolean(fields, "enable_confidence_head", True),
        confidence_with_markov=boolean(fields, "confidence_head_with_markov", True),
        sample_from_anchor=boolean(fields, "sample_from_anchor", True),
    )


class MarkovHead(nn.Module):
    """Weights of the three published types; untrained, they add no bias."""

    def __init__(
        self, config: DSparkConfig, hidden_size: int, vocab_size: int, ranked: int
    ) -> None:
        super().__init__()
        rank = config.rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, ranked, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if config.markov == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if config.markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)


class ConfidenceHead(nn.Module):
    """The probability that a drafted token is accepted, as a logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class MarkovCorrection(Correction):
    """``vanilla`` and ``gated`` look at the previous token only, ``rnn`` at the whole path."""

    def __init__(
        self, config: DSparkConfig, hidden_size: int, vocab_size: int, ranked: int
    ) -> None:
        super().__init__()
        self.config = config
        self.markov_head = MarkovHead(config, hidden_size, vocab_size, ranked)
        if config.confidence:
            width = hidden_size + (config.rank if config.confidence_with_markov else 0)
            self.confidence_head = ConfidenceHead(width)

    def step(
        self, depth: int, hidden: Tensor, previous: Tensor, state: Tensor | None, embed: Embed
    ) -> tuple[Tensor, Tensor | None]:
        head, latent = self.markov_head, self.markov_head.markov_w1(previous)
        if self.config.markov == "gated":
            latent = latent * head.gate_proj(torch.cat([hidden, latent], -1)).sigmoid()
        elif self.config.markov == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            joint = head.joint_proj(torch.cat([state, latent, hidden], -1))
            gate, candidate, output = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            latent = output.tanh()
        return head.markov_w2(latent), state

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        if not self.config.confidence:
            return None
        if self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(previous)], -1)
        logits: Tensor = self.confidence_head.proj(hidden).squeeze(-1)
        return logits
