"""Option sources, their order, defaults and refusals."""

import pytest

from sglang_jetspec.config import (
    OptionError,
    Options,
    PartialOptions,
    causality_override,
    read_environment,
    resolve_options,
)
from sglang_jetspec.foresight.options import ForesightOptions
from sglang_jetspec.heads.format import parse_head_config

RAW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "num_target_layers": 8,
    "block_size": 8,
    "dflash_config": {"causal_head": True, "mask_token_id": 5, "target_layer_ids": [1, 5]},
}


def head(jetspec=None, **changes):
    raw = {**RAW, **changes}
    if jetspec is not None:
        raw["jetspec"] = jetspec
    return parse_head_config(raw)


def resolve(config=None, on_cpu=True, environ=None, **flags):
    return resolve_options(
        config or head(), on_cpu=on_cpu, flags=PartialOptions(**flags), environ=environ or {}
    )


def test_defaults_follow_device_and_block():
    assert resolve() == Options(num_draft_tokens=8, width=4, depth=7, tree="best_first")
    assert resolve(on_cpu=False) == Options(64, 7, 7, "best_first")
    assert resolve(head(block_size=16), on_cpu=False).depth == 15
    assert resolve().block_size == 8


def test_first_source_wins():
    block = {"num_draft_tokens": 16, "width": 3, "tree": "algorithm1"}
    environ = {"SGLANG_JETSPEC_NUM_DRAFT_TOKENS": "32", "SGLANG_JETSPEC_DEPTH": "5"}
    options = resolve(head(block), environ=environ, num_draft_tokens=12)
    assert options == Options(num_draft_tokens=12, width=3, depth=5, tree="algorithm1")
    assert resolve(head(block), environ=environ).num_draft_tokens == 16
    assert resolve(environ=environ).num_draft_tokens == 32


def test_tree_never_asks_for_more_nodes_than_its_shape_has():
    assert resolve(num_draft_tokens=64, width=1, depth=7).num_draft_tokens == 8
    assert resolve(num_draft_tokens=64, width=2, depth=2).num_draft_tokens == 7
    assert resolve(num_draft_tokens=4, depth=7) == Options(4, 4, 3, "best_first")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_draft_tokens": 1}, "--speculative-num-draft-tokens=1"),
        ({"num_draft_tokens": 257}, "use 2 to 256"),
        ({"depth": 8}, "--speculative-num-steps=8.*use a depth of 1 to 7"),
        ({"depth": 0}, "--speculative-num-steps=0"),
        ({"width": 0}, "--speculative-eagle-topk=0"),
        ({"width": 513}, "--speculative-eagle-topk=513"),
        ({"tree": "beam"}, "tree='beam'.*algorithm1, best_first"),
        ({"tree": "hybrid", "tree_options": {"beta": 1}}, "tree_options of tree='hybrid'.*`beta`"),
        ({"tree": "chain", "width": 2}, "eagle-topk=2: tree='chain' has a width of 1"),
    ],
)
def test_refusals_name_the_flag_value_and_fix(flags, message):
    with pytest.raises(OptionError, match=message):
        resolve(**flags)


def test_bidirectional_head_drafts_chains_only():
    dflash = head(dflash_config={**RAW["dflash_config"], "causal_head": False})
    assert resolve(dflash) == Options(8, 1, 7, "best_first")
    with pytest.raises(OptionError, match=r"bidirectionally.*--speculative-eagle-topk 1"):
        resolve(dflash, width=2)


def test_a_user_may_branch_over_a_bidirectional_head():
    dflash = head(dflash_config={**RAW["dflash_config"], "causal_head": False})
    assert resolve(dflash, tree="ddtree") == Options(8, 4, 7, "ddtree")
    assert resolve(dflash, tree="ddtree", width=2, num_draft_tokens=16).width == 2
    assert resolve(dflash, tree="chain") == Options(8, 1, 7, "chain")


def test_tree_options_come_from_head_block_or_environment():
    block = {"tree": "hybrid", "tree_options": {"alpha": -1}}
    assert resolve(head(block)).tree_builder().alpha == -1.0
    environ = {"SGLANG_JETSPEC_TREE": "top2gap", "SGLANG_JETSPEC_TREE_OPTIONS": '{"beta": 2}'}
    builder = resolve(environ=environ).tree_builder()
    assert (builder.beta, builder.center) == (2.0, 1.0)
    with pytest.raises(OptionError, match=r"TREE_OPTIONS='\{'"):
        read_environment({"SGLANG_JETSPEC_TREE_OPTIONS": "{"})
    with pytest.raises(OptionError, match="tree_options"):
        read_environment({"SGLANG_JETSPEC_TREE_OPTIONS": "[1]"})


def test_heads_with_a_sequential_part_search_their_own_trees():
    dspark = head(markov_rank=8, block_size=7)
    options = resolve(dspark)
    assert (options.width, options.depth, options.num_draft_tokens) == (1, 7, 8)
    assert options.block_size == 7  # the anchor row drafts
    assert resolve(dspark, width=3).width == 3
    with pytest.raises(OptionError, match="tree='hybrid': the rows of a dspark head"):
        resolve(dspark, tree="hybrid")


def test_unknown_keys_and_values_are_refused():
    with pytest.raises(OptionError, match=r"config\.json.*budget"):
        resolve(head({"budget": 16}))
    with pytest.raises(OptionError, match=r"SGLANG_JETSPEC_.*budget"):
        read_environment({"SGLANG_JETSPEC_BUDGET": "16"})
    with pytest.raises(OptionError, match="num_draft_tokens"):
        read_environment({"SGLANG_JETSPEC_NUM_DRAFT_TOKENS": "many"})
    assert read_environment({"SGLANG_JETSPEC_CACHE": "x", "PATH": "y"}) == PartialOptions()


PLUS_PLUS = {"token_input": True, "draft_shift": True}


def test_a_token_head_drafts_trees_unless_asked_to_refine():
    options = resolve(head(PLUS_PLUS))
    assert (options.num_draft_tokens, options.width, options.depth) == (8, 4, 7)
    assert options.foresight is None
    assert options.block_size == 7  # every row of a shifted block drafts
    assert resolve(head({"token_input": True})).block_size == 8


def test_jetspec_plus_plus_drafts_chains():
    environ = {"SGLANG_JETSPEC_PASSES": "3", "SGLANG_JETSPEC_REFRESHES": "2"}
    options = resolve(head({**PLUS_PLUS, "outcomes": 4}), environ=environ)
    assert (options.width, options.depth, options.num_draft_tokens) == (1, 7, 8)
    assert options.foresight == ForesightOptions(3, 2, 4, None, 64)
    block = {**PLUS_PLUS, "passes": 4, "rule": "geometric", "max_foresight_blocks": 9}
    assert resolve(head(block), environ=environ).foresight == ForesightOptions(
        4, 2, 0, "geometric", 9
    )


@pytest.mark.parametrize(
    ("jetspec", "changes", "flags", "named"),
    [
        ({**PLUS_PLUS, "passes": 1}, {}, {"width": 2}, "--speculative-eagle-topk=2: refined and"),
        ({**PLUS_PLUS, "refreshes": 1}, {}, {}, "refreshes=1, passes=0"),
        ({"passes": 1}, {}, {}, "passes=1: this head reads masks"),
        ({**PLUS_PLUS, "outcomes": 2, "tree": "algorithm1"}, {}, {}, "this is tree='algorithm1'"),
        (
            {"outcomes": 2},
            {"dflash_config": {**RAW["dflash_config"], "causal_head": False}},
            {},
            "with a dflash head",
        ),
    ],
)
def test_what_jetspec_plus_plus_does_not_go_with(jetspec, changes, flags, named):
    with pytest.raises(OptionError, match=named):
        resolve(head(jetspec, **changes), **flags)


def test_causality_override():
    assert causality_override({}) is None
    assert causality_override({"SGLANG_JETSPEC_CAUSAL": "1"}) is True
    assert causality_override({"SGLANG_JETSPEC_CAUSAL": "0"}) is False
    with pytest.raises(OptionError, match="use 0 or 1"):
        causality_override({"SGLANG_JETSPEC_CAUSAL": "yes"})
