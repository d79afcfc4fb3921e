"""Which targets a head fits."""

import pytest

from sglang_jetspec.heads.fit import fit_problems
from sglang_jetspec.heads.format import HeadConfig, parse_head_config

HEAD = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 1000,
    "num_target_layers": 8,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 999, "target_layer_ids": [1, 6], "causal_head": True},
}


def head(**changes: object) -> HeadConfig:
    return parse_head_config({**HEAD, **changes})


def test_a_fitting_target_has_no_problems() -> None:
    assert fit_problems(head(), 64, 8, [1000]) == []
    assert fit_problems(head(vocab_size=None, num_target_layers=None), 64, 8, [1000]) == []


def test_a_vocabulary_may_be_named_by_its_padded_or_its_real_size() -> None:
    assert fit_problems(head(), 64, 8, [1024, 1000]) == []
    assert fit_problems(head(vocab_size=1024), 64, 8, [1024, 1000]) == []
    assert fit_problems(head(vocab_size=1064), 64, 8, [1024, 1000]) != []


@pytest.mark.parametrize(
    ("hidden", "layers", "vocab", "message"),
    [
        (128, 8, 1000, "hidden_size is 64, the target's is 128"),
        (64, 8, 1200, "vocab_size is 1000, the target's is 1200"),
        (64, 8, 900, "mask_token_id is 999, the target has 900 tokens"),
        (64, 7, 1000, "target_layer_ids is [1, 6], the target's states are captured up to layer 5"),
        (64, 9, 1000, "num_target_layers is 8, the target's 9"),
    ],
)
def test_misfits_are_named(hidden: int, layers: int, vocab: int, message: str) -> None:
    assert any(message in problem for problem in fit_problems(head(), hidden, layers, [vocab]))
