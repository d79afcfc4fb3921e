"""Where 16-bit arithmetic pays."""

import torch


def computes_bf16(device: torch.device) -> bool:
    """Whether `device` multiplies bf16 in hardware; emulated, it is slower than fp32."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True
