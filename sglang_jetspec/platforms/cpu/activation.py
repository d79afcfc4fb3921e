"""Entry point `jetspec_cpu` of group `sglang.srt.platforms`: claim hosts without an accelerator."""

import importlib.util
import os

PLATFORM_NAME = "jetspec_cpu"
PLATFORM_CLASS = "sglang_jetspec.platforms.cpu.platform.JetSpecCpuPlatform"

# Vendor packages that add a torch device; one that is installed announces an accelerator host.
_VENDOR_PACKAGES = ("torch_npu", "torch_musa", "torchada", "habana_frameworks", "torch_xla")


def accelerator_present() -> bool:
    """Whether torch sees a CUDA, ROCm, XPU or MPS device, or a vendor's device package exists."""
    import torch

    return (
        torch.cuda.is_available()
        or torch.xpu.is_available()
        or torch.backends.mps.is_available()
        or any(importlib.util.find_spec(name) for name in _VENDOR_PACKAGES)
    )


def activate() -> str | None:
    """Return the platform class's path where this platform should serve, otherwise None.

    `SGLANG_PLATFORM=jetspec_cpu` always selects it. Unasked, it stays away from hosts with an
    accelerator and from SGLang's own CPU engine (`SGLANG_USE_CPU_ENGINE=1`).
    """
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return PLATFORM_CLASS
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_present():
        return None
    return PLATFORM_CLASS
