"""Verification: the target's choices and what a round accepts. Plain torch, no SGLang."""

from sglang_jetspec.verification.acceptance import Acceptance, accept, accept_lazily
from sglang_jetspec.verification.sampling import Sampling, target_choices

__all__ = ["Acceptance", "Sampling", "accept", "accept_lazily", "target_choices"]
