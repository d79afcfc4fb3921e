"""Reliability diagrams of a calibration."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
from sklearn.calibration import calibration_curve

from sglang_jetspec.foresight.calibration import IDENTITY, ClassCalibration
from sglang_jetspec.tools.foresight.fit import Observed, judged_drafts

BINS = 10


def plot_reliability(held: Observed, fitted: ClassCalibration, path: Path) -> None:
    """Predicted against observed acceptance of drafts, before and after calibration."""
    inputs, accepted = judged_drafts(held)
    figure, axes = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for name, values in (("uncalibrated", IDENTITY), ("calibrated", fitted)):
        weights = torch.tensor(values.coefficients, dtype=torch.float64)
        chances = torch.sigmoid(inputs.double() @ weights)
        observed, predicted = calibration_curve(
            accepted.numpy(), chances.numpy(), n_bins=BINS, strategy="quantile"
        )
        axes.plot(predicted, observed, marker="o", label=name)
    axes.set(xlabel="predicted chance of acceptance", ylabel="accepted share")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
