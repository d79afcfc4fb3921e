"""The optimisation loop: resumable, on one device or several, by steps or by wall clock."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm

from sglang_jetspec.tools.train.batches import Batch
from sglang_jetspec.tools.train.checkpoint import (
    Progress,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.log import RunLog, Step
from sglang_jetspec.tools.train.loss import BlockLoss, BlockModel, chain_acceptance

SHOWN = ("loss", "chain_acceptance", "grad_norm")


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Linear warm-up, then the configured course, at `progress` in [0, 1]."""
    if progress < config.warmup_share:
        return config.learning_rate * progress / config.warmup_share
    rest = (min(progress, 1.0) - config.warmup_share) / max(1 - config.warmup_share, 1e-9)
    share = {
        "cosine": 0.5 * (1 + math.cos(math.pi * rest)),
        "linear": 1 - rest,
        "constant": 1.0,
    }
    return config.learning_rate * share[config.schedule]


def make_optimizer(head: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; norm weights are not decayed."""
    matrices = [p for p in head.parameters() if p.ndim > 1]
    vectors = [p for p in head.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


class Trainer:
    """Trains the head of `model` in place, from the newest checkpoint in the run's folder on.

    Every checkpoint also holds `attachments`. With several processes each computes its share of a
    step's batch, and the update is that of the whole batch.
    """

    def __init__(
        self,
        model: BlockModel,
        config: TrainConfig,
        accelerator: Accelerator,
        attachments: dict[str, Any],
    ) -> None:
        self.config, self.accelerator, self.attachments = config, accelerator, attachments
        self.head = model.head
        self.model = accelerator.prepare_model(model)
        self.optimizer = make_optimizer(self.head, config)
        self.progress = Progress()
        recent: list[Step] = []
        if found := list_checkpoints(config.out):
            state = load_checkpoint(found[-1])
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(state["step"], state["seconds"])
            recent = state["recent"]
        self.log = RunLog(config.out / "log.jsonl", recent)

    def train(
        self, batch_at: Callable[[int], Batch], evaluate: Callable[[], Step] | None
    ) -> Progress:
        """Run the remaining steps; the main process alone logs, evaluates and saves."""
        config, progress = self.config, self.progress
        main = self.accelerator.is_main_process
        if main:
            self.log.rewind(progress.step)
        first = progress.step
        begun = time.perf_counter() - progress.seconds
        saved = time.perf_counter()
        with tqdm(
            total=config.steps,
            initial=progress.step,
            desc="Training",
            unit="step",
            disable=not main,
        ) as bar:
            while not self._over():
                measured = self.step(batch_at(progress.step))
                progress.step += 1
                progress.seconds = time.perf_counter() - begun
                bar.update()
                if not main:
                    continue
                self.log.recent.append(measured)
                if progress.step % config.log_every == 0:
                    means = self.log.write_average(progress)
                    bar.set_postfix({key: round(means[key], 3) for key in SHOWN})
                if evaluate and progress.step % config.evaluate_every == 0:
                    self.log.write(progress, evaluate())
                    self.log.plot()
                if time.perf_counter() - saved > config.checkpoint_minutes * 60:
                    self._save()
                    saved = time.perf_counter()
        if main and (progress.step > first or not list_checkpoints(config.out)):
            if evaluate and progress.step % config.evaluate_every:
                self.log.write(progress, evaluate())
            self._save()
        return progress

    def step(self, batch: Batch) -> Step:
        """One update; returns its measurements over all processes' batches."""
        config, step = self.config, self.progress.step
        rate = learning_rate(config, max(step / max(config.steps, 1), self._spent()))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Dropout of a resumed run repeats; processes drop different values.
        torch.manual_seed(config.seed + step + 1_000_003 * self.accelerator.process_index)
        self.model.train()
        loss: BlockLoss = self.model(batch)
        sums = self.accelerator.reduce(batch_sums(loss, batch), "sum")
        measured = averages(sums)
        # Processes' gradients are averaged: scaled like this they are the whole batch's.
        weight = torch.where(sums[2] > 0, sums[2], 1.0)
        (loss.total * self.accelerator.num_processes / weight).backward()
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**measured, "lr": rate, "grad_norm": float(norm)}

    def _over(self) -> bool:
        """Whether the steps are done, or the wall-clock budget by the mean of all processes."""
        spent = torch.tensor(self._spent(), device=self.accelerator.device)
        if self.config.minutes and self.accelerator.num_processes > 1:
            spent = self.accelerator.reduce(spent, "mean")
        return self.progress.step >= self.config.steps or float(spent) >= 1

    def _spent(self) -> float:
        """Share of the wall-clock budget; 0 without one."""
        return self.progress.seconds / (self.config.minutes * 60) if self.config.minutes else 0.0

    def _save(self) -> None:
        states = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "recent": self.log.recent,
            **self.attachments,
        }
        save_checkpoint(self.config.out, self.progress, states, self.config.keep_checkpoints)


@torch.no_grad()
def batch_sums(loss: BlockLoss, batch: Batch) -> Tensor:
    """[5 + 2 * block_size] fp32 sums over a batch, which add up over processes."""
    accepted = chain_acceptance(loss.matches).float()
    scalars = [
        loss.total,
        loss.kl,
        loss.weight,
        accepted.sum(),
        accepted.new_tensor(accepted.numel()),
    ]
    positions = [rows.float().sum((0, 1)) for rows in (loss.matches, batch.supervised)]
    return torch.cat([torch.stack([value.detach().float() for value in scalars]), *positions])


def averages(sums: Tensor) -> Step:
    """What is logged of (added) `batch_sums`."""
    total, kl, weight, accepted, blocks, *positions = sums.tolist()
    weight = weight or 1.0  # no row is supervised: the sums are 0
    half = len(positions) // 2
    pairs = zip(positions[1:half], positions[half + 1 :], strict=True)
    return {
        "loss": total / weight,
        "kl": kl / weight,
        "chain_acceptance": accepted / max(blocks, 1),
        "accuracy": [right / max(rows, 1) for right, rows in pairs],
    }
