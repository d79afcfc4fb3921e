"""One short run of every kind of head, from answers to a folder that loads as that kind."""

import json

import pytest
import torch

from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.train.run import run

SIZES = {"markov_rank": 8, "gru_hidden_dim": 8, "emb_dim": 8, "draft_vocab_size": None}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dflash", {"causal": False}),
        ("dspark", {"kind": "dspark", "causal": False, "markov_head_type": "rnn"}),
        ("domino", {"kind": "domino", "causal": False}),
    ],
)
def test_each_kind_trains_and_loads(kind, settings, train_config):
    torch.set_num_threads(1)
    config = train_config(**SIZES, **settings)
    assert run(config)["steps"] == 6
    head, _ = load_reference_head(config.out / "head")
    assert head.config.kind == kind
    if head.correction is not None:
        name = {"dspark": "markov_head.markov_w2", "domino": "embed_proj.2"}[kind]
        assert head.get_parameter(f"{name}.weight").abs().sum() > 0  # starts at zero
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    measured = [row["acceptance_length"] for row in rows if "acceptance_length" in row]
    chain = f"chain{head.config.max_depth}"
    assert measured
    assert all(1 <= row[chain] <= head.config.max_depth + 1 for row in measured)
