"""The attention backends this plug-in adds to SGLang's choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TREE_ATTENTION = "jetspec_triton"


def register_backend(name: str, create: Callable[[Any], Any]) -> None:
    """Make ``name`` a value of SGLang's attention-backend options. Safe to call twice.

    create: from a model runner to its attention backend.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if name not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([name])
    if name not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([name])
    register_attention_backend(name)(create)


def register_tree_attention() -> None:
    """Register `jetspec_triton`; Triton is imported only when a server chooses it."""

    def create(model_runner: Any) -> Any:
        from sglang_jetspec.backends.triton_tree import TreeAttentionBackend

        return TreeAttentionBackend(model_runner)

    register_backend(TREE_ATTENTION, create)
