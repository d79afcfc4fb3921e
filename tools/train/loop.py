"""The optimisation loop: resumable, with a schedule by steps or by wall clock."""

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.batches import Batch
from sglang_jetspec.tools.train.checkpoint import (
    Progress,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.loss import block_loss, chain_acceptance
from sglang_jetspec.tools.train.target import FrozenTarget


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Linear warm-up, then cosine to zero, at `progress` in [0, 1]."""
    if progress < config.warmup_share:
        return config.learning_rate * progress / config.warmup_share
    rest = (progress - config.warmup_share) / (1 - config.warmup_share)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))


def autocast(config: TrainConfig) -> AbstractContextManager[None]:
    """bf16 autocast on the run's device, if the run uses it."""
    device = torch.device(config.device).type
    return torch.autocast(device, dtype=torch.bfloat16, enabled=config.bf16)


def make_optimizer(head: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; norm weights are not decayed."""
    matrices = [p for p in head.parameters() if p.ndim > 1]
    vectors = [p for p in head.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def train(
    head: JetSpecHead,
    target: FrozenTarget,
    config: TrainConfig,
    batch_at: Callable[[int], Batch],
    held_out: list[Batch],
    attachments: dict[str, Any],
) -> Progress:
    """Train `head` in place, resuming from the newest checkpoint in `config.out`.

    Every checkpoint also holds `attachments`.
    """
    optimizer = make_optimizer(head, config)
    progress = Progress()
    if found := list_checkpoints(config.out):
        state = load_checkpoint(found[-1])
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(state["step"], state["seconds"])
    begun = time.perf_counter() - progress.seconds
    saved = time.perf_counter()
    log = RunLog(config.out / "log.jsonl")
    budget = config.minutes * 60 if config.minutes else math.inf
    with tqdm(total=config.steps, initial=progress.step, desc="Training", unit="step") as bar:
        while progress.step < config.steps and progress.seconds < budget:
            share = max(progress.step / config.steps, progress.seconds / budget)
            rate = learning_rate(config, share)
            for group in optimizer.param_groups:
                group["lr"] = rate
            torch.manual_seed(config.seed + progress.step)  # dropout of a resumed run repeats
            log.add(train_step(head, target, config, optimizer, batch_at(progress.step)))
            progress.step += 1
            progress.seconds = time.perf_counter() - begun
            bar.update()
            if progress.step % config.log_every == 0:
                bar.set_postfix(log.write(progress, rate))
            if time.perf_counter() - saved > config.checkpoint_minutes * 60:
                _save(head, optimizer, config, progress, attachments)
                log.write_held_out(progress, evaluate(head, target, config, held_out))
                saved = time.perf_counter()
    _save(head, optimizer, config, progress, attachments)
    log.write_held_out(progress, evaluate(head, target, config, held_out))
    return progress


def train_step(
    head: JetSpecHead,
    target: FrozenTarget,
    config: TrainConfig,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
) -> dict[str, float]:
    """One update; returns the step's loss, gradient norm and greedy chain acceptance."""
    head.train()
    with autocast(config):
        loss = block_loss(head, target, batch)
    loss.kl.backward()
    norm = nn.utils.clip_grad_norm_(head.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    acceptance = chain_acceptance(loss.matches).float().mean()
    return {
        "kl": loss.kl.item(),
        "grad_norm": float(norm),
        "chain_acceptance": acceptance.item(),
        "blocks": batch.anchors.numel(),
    }


@torch.no_grad()
def evaluate(
    head: JetSpecHead, target: FrozenTarget, config: TrainConfig, batches: list[Batch]
) -> dict[str, float]:
    """Mean loss and teacher-forced greedy chain acceptance over `batches`."""
    head.eval()
    sums = {"kl": 0.0, "chain_acceptance": 0.0, "first_match": 0.0}
    with autocast(config):
        for batch in batches:
            loss = block_loss(head, target, batch)
            sums["kl"] += loss.kl.item()
            sums["chain_acceptance"] += chain_acceptance(loss.matches).float().mean().item()
            sums["first_match"] += loss.matches[..., 1].float().mean().item()
    return {name: total / max(len(batches), 1) for name, total in sums.items()}


class RunLog:
    """Averages of recent steps, appended to a JSON-lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recent: list[dict[str, float]] = []

    def add(self, step: dict[str, float]) -> None:
        self._recent.append(step)

    def write(self, progress: Progress, rate: float) -> dict[str, float]:
        """Append and return the averages since the last call."""
        keys = ("kl", "grad_norm", "chain_acceptance")
        means = {key: sum(s[key] for s in self._recent) / len(self._recent) for key in keys}
        self._append({"step": progress.step, "seconds": progress.seconds, "lr": rate, **means})
        self._recent.clear()
        return {key: round(value, 3) for key, value in means.items()}

    def write_held_out(self, progress: Progress, values: dict[str, float]) -> None:
        """Append held-out metrics."""
        row = {f"held_out_{key}": value for key, value in values.items()}
        self._append({"step": progress.step, "seconds": progress.seconds, **row})

    def _append(self, row: dict[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _save(
    head: JetSpecHead,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    progress: Progress,
    attachments: dict[str, Any],
) -> None:
    states = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), **attachments}
    save_checkpoint(config.out, progress, states, config.keep_checkpoints)
