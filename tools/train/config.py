"""Settings of one training run; every field is a command-line flag with the same default."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TrainConfig:
    """Train a JetSpec head for a frozen target on the target's own answers."""

    target: Path
    """Hugging Face folder of the target."""
    prompts: Path
    """JSON lines with `id` and `prompt`."""
    answers: Path
    """JSON lines with `id`, `answer_ids`, `finished`, `license`, `source`."""
    out: Path
    """Folder for features, checkpoints and the log; keep it outside the repository."""

    target_layer_ids: tuple[int, ...] = (1, 8, 14, 20, 27)
    """Target layers whose output states the head reads (0 = first layer)."""
    draft_layers: int = 2
    """Layers of the head, initialised from the target's last layers."""
    block_size: int = 8
    """Rows a block: the anchor and block_size - 1 masks."""
    mask_token_id: int = 16
    """Target token whose embedding stands for a position to draft; must not occur in text."""
    draft_vocab_size: int | None = 8192
    """Draft only from this many most frequent answer tokens; None drafts from all."""
    causal: bool = True
    """Row i of a block sees rows <= i (JetSpec); False sees the whole block (DFlash)."""

    token_input: bool = False
    """Fill blocks with tokens instead of masks and train on clean prefixes, so that the head can
    refine its own drafts (JetSpec++)."""
    draft_shift: bool = False
    """Row i predicts the token behind its own position, instead of the one at it."""
    noised_share: float = 0.25
    """With `token_input`: share of blocks without a clean prefix. Paper: 0.25."""

    steps: int = 2000
    """Optimiser steps; with `minutes` an upper bound."""
    minutes: float | None = None
    """Wall-clock budget: the learning-rate schedule ends when it does."""
    sequences_per_step: int = 8
    anchors_per_sequence: int = 32
    learning_rate: float = 6e-4
    warmup_share: float = 0.04
    weight_decay: float = 0.01
    dropout: float = 0.0
    """Dropout of each layer's contributions; helps when the answers are seen several times."""
    max_grad_norm: float = 1.0
    device: str = "cpu"
    """Where the target and the head compute, for example "cuda"."""
    bf16: bool = True
    """Compute in bf16 autocast; weights and optimiser state stay fp32."""

    held_out_share: float = 0.03
    """Share of tasks never trained on, by the hash of their id."""
    checkpoint_minutes: float = 5.0
    keep_checkpoints: int = 2
    log_every: int = 20
    seed: int = 0
    licenses: tuple[str, ...] = field(default=("MIT", "Apache-2.0", "CC-BY-4.0"))
    """Answers under other licences are left out."""
