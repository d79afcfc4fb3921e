import json

from sglang_jetspec.tools.foresight.fixture_data import write_prompts


def test_prompt_sets_share_nothing(tmp_path):
    taken = {"a"}
    for seed, name in ((101, "calibration"), (102, "evaluation")):
        write_prompts(tmp_path / name, 150, seed, taken)
    sets = [
        [json.loads(line)["turns"][0] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("calibration", "evaluation")
    ]
    assert len(set(sets[0]) | set(sets[1])) == 300
    assert len(taken) == 301
