import json

import pytest

from sglang_jetspec.tools.train.config import parse

REQUIRED = ["--target", "T", "--prompts", "P", "--out", "O"]


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'target = "org/name"\nprompts = "p.jsonl"\nsteps = 7\nlearning_rate = 1e-4\n'
        "target_layer_ids = [1, 2]\n[generation]\ntemperature = 0.7\n"
    )
    config = parse(["--config", str(path), "--out", "run", "--steps", "9"])
    assert config.target == "org/name"
    assert config.steps == 9
    assert config.learning_rate == 1e-4
    assert config.target_layer_ids == (1, 2)
    assert config.generation.temperature == 0.7
    assert config.generation.max_new_tokens == 256


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_other_formats(tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    path.write_text(json.dumps({"seed": 3, "minutes": None}))
    assert parse(["--config", str(path), *REQUIRED]).seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "unknown field `stepz`"),
        ("[generation]\ntemprature = 1", r"unknown field `temprature` - at `\$.generation`"),
        ('steps = "many"', r"Expected `int`, got `str` - at `\$.steps`"),
        ("objective = 'kl'", r"Invalid enum value 'kl' - at `\$.objective`"),
        ("learning_rate = 0", r"`\$.learning_rate`"),
        ("[generation]\nbatch_size = 0", r"`\$.generation.batch_size`"),
        ("steps = ", r"run.toml: Invalid value"),
    ],
)
def test_unfit_files_are_refused_by_key(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse(["--config", str(path), *REQUIRED])


def test_unfit_flags_are_refused_by_name():
    with pytest.raises(ValueError, match=r"`\$.held_out_share`"):
        parse([*REQUIRED, "--held-out-share", "1.5"])


def test_unknown_kinds_of_file_and_missing_ones(tmp_path):
    with pytest.raises(ValueError, match=r"run.ini: use one of .toml"):
        parse(["--config", "run.ini", *REQUIRED])
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"run\.json: holds no object"):
        parse(["--config", str(tmp_path / "run.json"), *REQUIRED])
    with pytest.raises(ValueError, match="No such file"):
        parse(["--config", str(tmp_path / "run.toml"), *REQUIRED])


def test_help_tells_what_the_paper_used(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--loss-decay-gamma" in text
    assert "Peak of the schedule. Paper: 3e-4" in text
