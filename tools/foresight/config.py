"""Settings of `jetspec train-adapter` and `jetspec calibrate`; every field is a flag."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class AdapterTrainConfig:
    """Train the adapter of a JetSpec++ head."""

    target: Path
    """Hugging Face folder of the target."""
    head: Path
    """The draft head: its captured layers and block size."""
    prompts: Path
    """JSON lines with `id` and `prompt` or `turns`."""
    answers: Path
    """JSON lines with `id`, `turn`, `answer_ids`, `finished`."""
    out: Path
    """Folder for features, checkpoints and the log; keep it outside the repository."""
    max_sequence_tokens: int = 3072
    """Longer conversations are cut. Paper: 3072."""
    features_dir: Path | None = None
    """Where captured features are kept, OUT/features if left out; runs on the same data share."""
    layers_per_module: tuple[int, ...] | None = None
    """Decoder layers of each module; the default gives deeper modules more, twelve in five."""
    kappa: float = 0.5
    """Exponent of a row's chance of being reached in its weight. Paper: 1/2."""
    kl_weight: float = 1.0
    """Weight of the KL through the decoder beside the state regression."""
    steps: int = 2000
    """Optimiser steps."""
    sequences_per_step: int = 8
    anchors_per_sequence: int = 8
    learning_rate: float = 3e-4
    warmup_share: float = 0.04
    schedule: str = "cosine"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    device: str = "cpu"
    bf16: bool = True
    """Compute in bf16 autocast; weights and optimiser state stay fp32."""
    held_out_share: float = 0.03
    checkpoint_minutes: float = 5.0
    keep_checkpoints: int = 2
    log_every: int = 20
    seed: int = 0


@dataclass(frozen=True)
class CalibrateConfig:
    """Calibrate the outcome scores of a JetSpec++ folder."""

    target: Path
    folder: Path
    """Head and adapter; the calibration is written here."""
    prompts: Path
    """JSON lines with `prompt` or `turns`, not used in training."""
    plots: Path | None = None
    """Folder for reliability diagrams; none are drawn if left out."""
    count: int = 128
    """Prompts to use, from the start of the file."""
    max_new_tokens: int = 128
    batch_size: int = 32
    temperatures: tuple[float, ...] = field(default=(0.0, 1.0))
    """0 fits the class of greedy requests, anything else that of sampled ones."""
    passes: int = 1
    """J, draft passes after the first, as in serving."""
    refreshes: int = 1
    """R, refreshes among them."""
    epsilon: float = 0.01
    """Outcomes may be dropped that are true with at most this chance, by accepted length: it trades
    hits for drafting. Lengths seen fewer than 1 / epsilon times drop nothing."""
    seed: int = 0
