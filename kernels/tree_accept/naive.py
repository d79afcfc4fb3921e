"""The torch program `tree_accept` must equal."""

from sglang_jetspec.verification.acceptance import accept as tree_accept

__all__ = ["tree_accept"]
