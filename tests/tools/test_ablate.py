import json

import pytest

from sglang_jetspec.tools.ablate import AblateConfig, ablate, plot
from sglang_jetspec.tools.fixture.target import MASK, build_target, save_target, train_tokenizer


@pytest.fixture
def base(tmp_path):
    """Settings of a run of two steps on an untrained target."""
    tokenizer = train_tokenizer(seed=0)
    save_target(build_target(tokenizer, seed=0), tokenizer, tmp_path / "target")
    ids = tokenizer.encode("One two three four five six seven. " * 2, add_special_tokens=False)
    rows = [{"id": str(i), "prompt": f"Count to {i}."} for i in range(10)]
    answers = [
        {"id": row["id"], "answer_ids": ids[i:], "finished": True} for i, row in enumerate(rows)
    ]
    for name, lines in (("prompts", rows), ("answers", answers)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "target": str(tmp_path / "target"),
        "prompts": str(tmp_path / "prompts"),
        "answers": str(tmp_path / "answers"),
        "target_layer_ids": [0, 2],
        "draft_layers": 1,
        "block_size": 4,
        "mask_token_id": tokenizer.convert_tokens_to_ids(MASK),
        "draft_vocab_size": None,
        "steps": 2,
        "sequences_per_step": 2,
        "anchors_per_sequence": 2,
        "held_out_share": 0.5,
        "evaluate_budget": 6,
        "evaluate_width": 2,
        "evaluate_examples": 1,
        "bf16": False,
        "device": "cpu",
    }
    (tmp_path / "base.json").write_text(json.dumps(settings))
    return tmp_path / "base.json"


def variants(path, text):
    path.write_text(text)
    return path


def test_variants_share_features_and_are_compared(base, tmp_path):
    text = '[plain]\n[sft]\nobjective = "sft"\n[taps]\ntarget_layer_ids = [1, 2]\n'
    config = AblateConfig(base, variants(tmp_path / "v.toml", text), tmp_path / "out")
    results = ablate(config)
    assert list(results) == ["plain", "sft", "taps"]
    for row in results.values():
        assert row["step"] == 2
        assert set(row["acceptance_length"]) == {"chain3", "tree6"}
    assert results["plain"]["held_out_kl"] != results["sft"]["held_out_kl"]
    assert len(list((tmp_path / "out").glob("features-*"))) == 2
    plot(config.out, list(results), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[plain]\n[typo]\nobjectiv = 'sft'\n", r"\[typo\].*unknown field `objectiv`"),
        ("seed = 3\n", "seed is no table"),
        ("", "holds no variant"),
    ],
)
def test_unfit_variants_are_refused_before_any_run(base, tmp_path, text, message):
    config = AblateConfig(base, variants(tmp_path / "v.toml", text), tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        ablate(config)
    assert not (tmp_path / "out").exists()
