import json

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors.torch import save_file

from sglang_jetspec.heads.format import (
    HeadError,
    check_tensors,
    default_target_layer_ids,
    expected_tensors,
    load_head_config,
    parse_head_config,
    resolve_head,
)

REQUEST = httpx.Request("GET", "https://example.org")


def raw_config(**changes):
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "vocab_size": 100,
        "num_target_layers": 6,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 3]},
    }
    return {**raw, **changes}


def with_dflash(**changes):
    return raw_config(dflash_config={**raw_config()["dflash_config"], **changes})


@pytest.mark.parametrize(
    ("raw", "override", "causal"),
    [
        (raw_config(), None, False),
        (raw_config(is_causal=True), None, True),
        (raw_config(text_config={"is_causal": True}), None, True),
        ({**with_dflash(causal=False), "is_causal": True}, None, False),
        (with_dflash(causal=True, causal_head=False), None, False),
        (with_dflash(causal=False, causal_head=True), None, True),
        (with_dflash(causal_head=True), False, False),
        (with_dflash(causal_head=False), True, True),
    ],
)
def test_causality_follows_the_most_specific_key(raw, override, causal):
    assert parse_head_config(raw, override).causal is causal


def test_rope_theta_is_read_from_either_spelling():
    assert parse_head_config(raw_config()).rope_theta == 1e6
    raw = raw_config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    del raw["rope_theta"]
    assert parse_head_config(raw).rope_theta == 5e5


def test_absent_taps_are_spread_evenly():
    raw = raw_config(num_hidden_layers=5, num_target_layers=36, dflash_config={"mask_token_id": 9})
    assert parse_head_config(raw).target_layer_ids == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(1, 36) == (18,)
    assert default_target_layer_ids(2, 30) == (1, 27)


def test_more_taps_than_draft_layers_are_allowed():
    config = parse_head_config(with_dflash(target_layer_ids=[0, 1, 2, 4]))
    assert expected_tensors(config)["fc.weight"] == (16, 64)


@pytest.mark.parametrize("ids", [[], [1, 5], [3, 1], [1, 1], [-1, 2], ["1"]])
def test_unusable_taps_are_refused(ids):
    with pytest.raises(HeadError, match=r"dflash_config\.target_layer_ids is .*below 5"):
        parse_head_config(with_dflash(target_layer_ids=ids))


def test_last_but_one_target_layer_is_the_deepest_tap():
    assert parse_head_config(with_dflash(target_layer_ids=[4])).target_layer_ids == (4,)


@pytest.mark.parametrize("mask", [None, -1, 100, True])
def test_mask_token_must_be_a_target_token(mask):
    with pytest.raises(HeadError, match="mask_token_id"):
        parse_head_config(with_dflash(mask_token_id=mask))


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (raw_config(block_size=1), "block_size"),
        (raw_config(block_size=None), "block_size"),
        (raw_config(hidden_size="16"), "hidden_size"),
        (raw_config(num_key_value_heads=3), "num_attention_heads"),
        (raw_config(jetspec={"draft_vocab_size": 101}), "draft_vocab_size"),
        (raw_config(jetspec={"draft_vocab_size": 0}), "draft_vocab_size"),
        (raw_config(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (raw_config(rope_scaling={"rope_type": "yarn"}), "rope scaling"),
        (with_dflash(target_hidden_size=32), "target_hidden_size"),
        (with_dflash(projector_type="mamba"), "projector_type.*jetspec, dflash, dspark, domino"),
        (with_dflash(conv_kernel_size=4), "conv_kernel_size"),
        (raw_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (raw_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (with_dflash(causal_head="false"), r"dflash_config\.causal_head is 'false'"),
        (raw_config(is_causal="no"), "is_causal is 'no'"),
        (raw_config(jetspec={"token_input": "false"}), r"jetspec\.token_input is 'false'"),
        (raw_config(jetspec={"draft_shift": 1}), r"jetspec\.draft_shift is 1"),
        (raw_config(jetspec=["token_input"]), "jetspec is .*must be an object"),
        (raw_config(dflash_config="jetspec"), "dflash_config is 'jetspec'"),
        (raw_config(rms_norm_eps="1e-6"), "rms_norm_eps is '1e-6'"),
        (raw_config(rope_theta=-1), "rope_theta is -1"),
        (with_dflash(target_layer_ids=3), "target_layer_ids is 3"),
        (with_dflash(target_layer_ids=[True, 3]), "target_layer_ids is .*True"),
    ],
)
def test_unusable_fields_are_named(raw, field):
    with pytest.raises(HeadError, match=field):
        parse_head_config(raw)


def dspark(**changes):
    return raw_config(
        architectures=["Qwen3DSparkModel"],
        block_size=7,
        mask_token_id=99,
        target_layer_ids=[1, 3],
        dflash_config=None,
        **{"markov_rank": 6, "markov_head_type": "vanilla", **changes},
    )


def domino(**changes):
    keys = {"projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 5}
    return with_dflash(**{**keys, "emb_dim": 3, "shift_label": True, **changes})


@pytest.mark.parametrize(
    ("raw", "kind", "depth", "idle", "first"),
    [
        (with_dflash(causal_head=True), "jetspec", 3, 1, 1),
        (raw_config(), "dflash", 3, 1, 1),
        (dspark(), "dspark", 7, 0, 0),
        (dspark(sample_from_anchor=False), "dspark", 7, 1, 1),
        (with_dflash(projector_type="dspark", markov_rank=6), "dspark", 4, 0, 0),
        (raw_config(dspark_config={"markov_rank": 6}), "dspark", 4, 0, 0),
        (domino(), "domino", 3, 1, 0),
        (domino(shift_label=False), "domino", 3, 1, 1),
    ],
)
def test_kinds_are_recognised(raw, kind, depth, idle, first):
    config = parse_head_config(raw)
    shape = (config.kind, config.max_depth, config.idle_rows, config.first_row)
    assert shape == (kind, depth, idle, first)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (dspark(markov_head_type="lstm"), "markov_head_type is 'lstm'; use one of vanilla"),
        (dspark(markov_rank=0), "markov_rank is 0"),
        (dspark(markov_rank=None), "markov_rank is missing"),
        (dspark(enable_confidence_head="yes"), "enable_confidence_head is 'yes'"),
        (dspark(vocab_size=None), "vocab_size is None"),
        (dspark(jetspec={"draft_vocab_size": 101}), "draft_vocab_size is 101"),
        (domino(pure_draft_prefix_len=2), r"dflash_config\.pure_draft_prefix_len is 2"),
        (domino(gru_hidden_dim=None), r"dflash_config\.gru_hidden_dim is missing"),
        ({**domino(), "emb_dim": 4}, r"emb_dim is 4, dflash_config\.emb_dim is 3"),
        (domino(shift_label=1), "shift_label is 1; it must be true or false"),
    ],
)
def test_unusable_parts_of_a_kind_are_named(raw, message):
    with pytest.raises(HeadError, match=message):
        parse_head_config(raw)


def test_copies_of_the_target_in_a_dspark_checkpoint_are_left_aside(tmp_path):
    def add(tensors):
        tensors |= {"lm_head.weight": torch.zeros(100, 16)}
        tensors |= {"embed_tokens.weight": torch.zeros(100, 16)}

    write_head(tmp_path, dspark(), add)
    check_tensors(tmp_path, load_head_config(tmp_path))


def test_weights_of_another_kind_are_refused(tmp_path):
    write_head(tmp_path, dspark())
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    with pytest.raises(HeadError, match=r"as a dflash head: unknown .*confidence_head\.proj"):
        check_tensors(tmp_path, load_head_config(tmp_path))


def test_jetspec_block_is_kept():
    config = parse_head_config(raw_config(jetspec={"draft_vocab_size": 10, "note": "x"}))
    assert config.draft_vocab_size == 10
    assert config.jetspec["note"] == "x"
    assert expected_tensors(config)["draft_token_ids"] == (10,)


def test_published_tensor_count():
    raw = raw_config(num_hidden_layers=5, num_target_layers=36, dflash_config={"mask_token_id": 9})
    assert len(expected_tensors(parse_head_config(raw))) == 58


def write_head(folder, raw, edit=lambda tensors: None):
    tensors = {
        name: torch.zeros(shape, dtype=torch.bfloat16)
        for name, shape in expected_tensors(parse_head_config(raw)).items()
    }
    edit(tensors)
    names = sorted(tensors)
    for part, chosen in enumerate((names[::2], names[1::2])):  # sharded, as large heads are
        save_file({n: tensors[n] for n in chosen}, folder / f"model-{part}.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


def test_complete_sharded_head_passes(tmp_path):
    write_head(tmp_path, raw_config())
    check_tensors(tmp_path, load_head_config(tmp_path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"missing norm\.weight \(16,\)"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(3, 2)}), r"unknown lm_head\.weight"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(16, 48)}),
            r"fc\.weight has shape \(16, 48\), expected \(16, 32\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, edit, message):
    write_head(tmp_path, raw_config(), edit)
    with pytest.raises(HeadError, match=message):
        check_tensors(tmp_path, load_head_config(tmp_path))


def test_broken_folders_are_explained(tmp_path):
    with pytest.raises(HeadError, match="does not exist"):
        load_head_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HeadError, match="not valid JSON"):
        load_head_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(HeadError, match="not valid JSON"):
        load_head_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(HeadError, match="holds no JSON object"):
        load_head_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    with pytest.raises(HeadError, match="holds no"):
        check_tensors(tmp_path, load_head_config(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(HeadError, match="unreadable"):
        check_tensors(tmp_path, load_head_config(tmp_path))


def test_local_folder_is_used_as_it_is(tmp_path):
    assert resolve_head(str(tmp_path)) == tmp_path


def test_hub_download_never_asks_for_pickles(monkeypatch, tmp_path):
    asked = {}

    def download(name, revision, allow_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("sglang_jetspec.heads.format.snapshot_download", download)
    assert resolve_head("owner/some-head", "abc") == tmp_path
    assert asked == {
        "name": "owner/some-head",
        "revision": "abc",
        "patterns": ["config.json", "*.safetensors"],
    }


def test_missing_local_folder_is_explained(tmp_path):
    with pytest.raises(HeadError, match="neither a local folder nor"):
        resolve_head(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("403", response=httpx.Response(403, request=REQUEST)), "is gated"),
        (LocalEntryNotFoundError("no connection"), "cannot be reached"),
        (OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), "cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_explained(monkeypatch, error, message):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr("sglang_jetspec.heads.format.snapshot_download", download)
    with pytest.raises(HeadError, match=f"'owner/some-head'.*{message}"):
        resolve_head("owner/some-head")
