"""`jetspec calibrate`: fit outcome scores to rounds played on calibration prompts.

    python -m sglang_jetspec.tools.foresight.calibrate --target DIR --folder DIR --prompts FILE

FOLDER holds a JetSpec++ head and its `adapter/`. Writes `FOLDER/calibration/calibration.json` and
renews the manifest; reliability plots go to --plots. The last line of stdout is one JSON object.
"""

import json
from collections.abc import Sequence

import torch
import tyro
from sklearn.metrics import brier_score_loss
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from sglang_jetspec.foresight.calibration import (
    IDENTITY,
    Calibration,
    ClassCalibration,
    save_calibration,
    temperature_class,
)
from sglang_jetspec.foresight.folder import (
    ADAPTER,
    CALIBRATION,
    adapter_sha256,
    write_manifest,
)
from sglang_jetspec.foresight.refine import RefinePlan
from sglang_jetspec.tools.foresight.config import CalibrateConfig
from sglang_jetspec.tools.foresight.fit import Observed, fit_class, judged_drafts, observe
from sglang_jetspec.tools.foresight.models import Models, load_models
from sglang_jetspec.tools.foresight.prompts import read_prompt_ids
from sglang_jetspec.tools.foresight.rounds import RoundPlan, Session


def play(
    models: Models, plan: RoundPlan, config: CalibrateConfig, ids: list[list[int]]
) -> Observed:
    """Rounds over all prompts, reduced to what the fit reads."""
    parts = []
    batches = [ids[i : i + config.batch_size] for i in range(0, len(ids), config.batch_size)]
    name = temperature_class(plan.temperature == 0)
    for index, batch in enumerate(tqdm(batches, desc=f"Playing {name} rounds", unit="batch")):
        session = Session(models, plan, batch, config.max_new_tokens, config.seed + index)
        parts.append(observe(session.play()))
    columns = zip(*((p.features, p.lengths, p.bonus, p.anchors) for p in parts), strict=True)
    return Observed(*(torch.cat(column) for column in columns))


def calibrate(config: CalibrateConfig) -> dict[str, object]:
    """Play, fit, write; returns a summary with Brier scores before and after."""
    models = load_models(config.target, config.folder, config.folder / ADAPTER)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    ids = read_prompt_ids(config.prompts, tokenizer, config.count)
    refine = RefinePlan(config.passes, config.refreshes)
    classes: dict[str, ClassCalibration] = {}
    summary: dict[str, object] = {}
    for temperature in config.temperatures:
        plan = RoundPlan(refine, "predicted", temperature, collect_evidence=True)
        observed = play(models, plan, config, ids)
        name = temperature_class(temperature == 0)
        classes[name] = fit_class(observed, config.epsilon)
        _, held = observed.halves()
        summary[name] = reliability(held, classes[name])
        if config.plots is not None:
            from sglang_jetspec.tools.foresight.plots import plot_reliability

            plot_reliability(held, classes[name], config.plots / f"reliability-{name}.png")
    calibration = Calibration(
        target=config.target.name,
        adapter_sha256=adapter_sha256(config.folder),
        block_size=models.head.block_size,
        classes=classes,
    )
    path = config.folder / CALIBRATION
    path.parent.mkdir(exist_ok=True)
    save_calibration(calibration, path)
    write_manifest(config.folder)
    return {"calibration": str(path), **summary}


def reliability(held: Observed, fitted: ClassCalibration) -> dict[str, float]:
    """Brier scores of the drafts' acceptance chances on rounds that the fit did not see."""
    inputs, accepted = judged_drafts(held)
    scores = {"rounds": float(len(held))}
    for name, values in (("uncalibrated", IDENTITY), ("calibrated", fitted)):
        weights = torch.tensor(values.coefficients, dtype=torch.float64)
        chances = torch.sigmoid(inputs.double() @ weights)
        scores[f"brier_{name}"] = float(brier_score_loss(accepted.numpy(), chances.numpy()))
    return scores


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags, calibrate, and print the summary as one JSON line."""
    print(json.dumps(calibrate(tyro.cli(CalibrateConfig, args=argv, prog="jetspec calibrate"))))


if __name__ == "__main__":
    main()
