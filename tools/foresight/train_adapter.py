"""`jetspec train-adapter`: the adapter of a JetSpec++ head, from the target's own answers.

    python -m sglang_jetspec.tools.foresight.train_adapter --target DIR --head DIR \
        --prompts FILE --answers FILE --out DIR

Running it again with the same --out resumes. The adapter is exported to `OUT/adapter`; the last
line of stdout is one JSON object.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import tyro
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from sglang_jetspec.foresight.adapter import (
    Adapter,
    AdapterConfig,
    default_layers,
    initial_adapter,
    save_adapter,
)
from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.layers import LayerShape
from sglang_jetspec.heads.format import load_head_config
from sglang_jetspec.tools.foresight.adapter_batches import (
    AdapterBatch,
    AdapterSource,
    token_logprobs,
)
from sglang_jetspec.tools.foresight.adapter_loss import AdapterLoss, adapter_loss
from sglang_jetspec.tools.foresight.config import AdapterTrainConfig
from sglang_jetspec.tools.train.batches import pick_examples
from sglang_jetspec.tools.train.checkpoint import (
    Progress,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from sglang_jetspec.tools.train.data import is_held_out, load_examples, read_prompts
from sglang_jetspec.tools.train.features import capture_features
from sglang_jetspec.tools.train.log import RunLog, Step
from sglang_jetspec.tools.train.loop import learning_rate, make_optimizer
from sglang_jetspec.tools.train.target import load_target, tap_scales

TAP_SAMPLE = 2048
HELD_OUT_BATCHES = 4


class AdapterRun:
    """Everything a run derives from its configuration, before the first step."""

    def __init__(self, config: AdapterTrainConfig) -> None:
        self.config = config
        tokenizer = AutoTokenizer.from_pretrained(config.target)
        limit = config.max_sequence_tokens
        examples = load_examples(read_prompts(config.prompts), config.answers, tokenizer, limit)
        head = load_head_config(config.head)
        taps = head.target_layer_ids
        model: Any = load_target(str(config.target), torch.device(config.device))
        features = config.features_dir or config.out / "features"
        store = capture_features(model, taps, examples, features)
        model = model.float().cpu()
        layers = config.layers_per_module or default_layers(taps)
        shape = AdapterConfig(LayerShape.of_target(model), taps, layers)
        torch.manual_seed(config.seed)
        self.scales = tap_scales(store.sample_taps(TAP_SAMPLE)).to(config.device)
        self.adapter: Adapter = initial_adapter(shape, model).to(config.device)
        self.decoder = TargetSlice.of_target(model, taps[-1] + 1).to(config.device)
        self.embedding = model.get_input_embeddings().weight.detach().to(config.device)
        logprobs = token_logprobs(store, model.get_output_embeddings().weight.detach())
        self.source = AdapterSource(store, logprobs, head.block_size, config.kappa)
        held_out = [is_held_out(example.id, config.held_out_share) for example in examples]
        self.train_rows = [i for i, held in enumerate(held_out) if not held]
        self.held_out_rows = [i for i, held in enumerate(held_out) if held]

    def loss(self, batch: AdapterBatch) -> AdapterLoss:
        """Loss of one batch under the run's precision."""
        config = self.config
        device = torch.device(config.device).type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=config.bf16):
            return adapter_loss(
                self.adapter, self.decoder, self.embedding, self.scales, batch, config.kl_weight
            )

    def batch_at(self, step: int) -> AdapterBatch:
        """The training batch of `step`."""
        return self._batch(self.train_rows, self.config.seed, step)

    def held_out(self) -> Step:
        """Mean loss, agreement and cosine over a fixed sample of held-out blocks."""
        size = self.config.sequences_per_step
        steps = min(HELD_OUT_BATCHES, len(self.held_out_rows) // size)
        rows = []
        with torch.no_grad():
            for step in range(steps):
                rows.append(measurements(self.loss(self._batch(self.held_out_rows, 0, step))))
        keys = rows[0] if rows else ()
        return {f"held_out_{key}": sum(row[key] for row in rows) / len(rows) for key in keys}

    def _batch(self, rows: list[int], seed: int, step: int) -> AdapterBatch:
        config = self.config
        lengths = [len(example.token_ids) for example in self.source.store.examples]
        picked = pick_examples(rows, lengths, config.sequences_per_step, seed, step)
        return self.source.sample(picked, config.anchors_per_sequence, seed, step).to(config.device)


def measurements(loss: AdapterLoss) -> Step:
    """What is logged of a batch."""
    layers = {f"cosine_distance_{i}": value for i, value in enumerate(loss.cosine.tolist())}
    return {
        "loss": loss.total.item(),
        "kl": loss.kl.item(),
        "agreement": loss.agreement.item(),
        **layers,
    }


def train(state: AdapterRun) -> Progress:
    """Train from the newest checkpoint in the run's folder on."""
    config, adapter, progress = state.config, state.adapter, Progress()
    recent: list[Step] = []
    optimizer = make_optimizer(adapter, config)
    if found := list_checkpoints(config.out):
        saved = load_checkpoint(found[-1])
        adapter.load_state_dict(saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(saved["step"], saved["seconds"])
        recent = saved["recent"]
    log = RunLog(config.out / "log.jsonl", recent)
    log.rewind(progress.step)

    def save() -> None:
        states = {
            "adapter": adapter.state_dict(),
            "optimizer": optimizer.state_dict(),
            "recent": log.recent,
        }
        save_checkpoint(config.out, progress, states, config.keep_checkpoints)

    begun = time.perf_counter() - progress.seconds
    last_saved = time.perf_counter()
    with tqdm(total=config.steps, initial=progress.step, desc="Training", unit="step") as bar:
        while progress.step < config.steps:
            rate = learning_rate(config, progress.step / config.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = state.loss(state.batch_at(progress.step))
            loss.total.backward()
            nn.utils.clip_grad_norm_(adapter.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            log.recent.append({"lr": rate, **measurements(loss)})
            progress.step += 1
            progress.seconds = time.perf_counter() - begun
            bar.update()
            if progress.step % config.log_every == 0:
                means = log.write_average(progress)
                bar.set_postfix({key: round(means[key], 3) for key in ("loss", "agreement")})
            if time.perf_counter() - last_saved > config.checkpoint_minutes * 60:
                save()
                last_saved = time.perf_counter()
        save()
        log.write(progress, state.held_out())
    return progress


def run(config: AdapterTrainConfig) -> dict[str, object]:
    """Train (or resume), export, and return a summary."""
    config.out.mkdir(parents=True, exist_ok=True)
    state = AdapterRun(config)
    progress = train(state)
    save_adapter(state.adapter, config.out / "adapter")
    return {
        "adapter": str(config.out / "adapter"),
        "steps": progress.step,
        "minutes": round(progress.seconds / 60, 2),
        "parameters": sum(p.numel() for p in state.adapter.parameters()),
        **state.held_out(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags, train, and print the summary as one JSON line."""
    print(json.dumps(run(tyro.cli(AdapterTrainConfig, args=argv, prog="jetspec train-adapter"))))


if __name__ == "__main__":
    main()
