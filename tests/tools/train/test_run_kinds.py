"""One short run of every kind of head, from answers to a folder that loads as that kind."""

import json

import pytest
import torch

from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.train.run import run

SIZES = {"markov_rank": 8, "gru_hidden_dim": 8, "emb_dim": 8}


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dflash", {"causal": False}),
        ("dspark", {"kind": "dspark", "causal": False, "markov_head_type": "rnn"}),
        ("domino", {"kind": "domino", "causal": False}),
    ],
)
def test_each_kind_trains_and_loads(kind, settings, draft_vocab_size, train_config):
    torch.set_num_threads(1)
    config = train_config(**SIZES, **settings, draft_vocab_size=draft_vocab_size)
    assert run(config)["steps"] == 6
    head, ids = load_reference_head(config.out / "head")
    assert head.config.draft_vocab_size == draft_vocab_size
    assert draft_vocab_size is None or ids.unique().numel() == draft_vocab_size
    assert head.config.kind == kind
    if head.correction is not None:
        name = {"dspark": "markov_head.markov_w2", "domino": "embed_proj.2"}[kind]
        weight = head.get_parameter(f"{name}.weight")
        assert weight.abs().sum() > 0  # starts at zero
        assert draft_vocab_size in (None, len(weight))
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    measured = [row["acceptance_length"] for row in rows if "acceptance_length" in row]
    chain = f"chain{head.config.max_depth}"
    assert measured
    assert all(1 <= row[chain] <= head.config.max_depth + 1 for row in measured)
