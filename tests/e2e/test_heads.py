"""Every kind of head, tree and target family: what is committed is the target's own tokens.

Heads and targets are made by seed; exactness does not need a good head. Kinds share servers: a tree
kind is tried with a head or a target that needs a server of its own anyway.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from harness import FIXTURE, generate_all, tree
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from workloads import WORKLOADS, prompts

from sglang_jetspec.heads.format import load_head_config
from sglang_jetspec.tools.fixture.variants import head_as, random_head, random_target


@dataclass(frozen=True)
class Case:
    """A head on the fixture's target; `shape` is (nodes, width, depth)."""

    head: str
    tree: str
    shape: tuple[int, int, int]
    options: str = "{}"
    least_acceptance: float = 1.0

    @property
    def environment(self) -> dict[str, str]:
        return {"SGLANG_JETSPEC_TREE": self.tree, "SGLANG_JETSPEC_TREE_OPTIONS": self.options}


CASES = [
    Case("dspark", "best_first", (16, 3, 6)),
    Case("domino", "best_first", (12, 2, 7), least_acceptance=1.5),
    Case("domino-some-tokens", "best_first", (12, 2, 7), least_acceptance=1.3),
    Case("dflash", "ddtree", (16, 4, 7)),
    Case("jetspec", "hybrid", (16, 4, 7), '{"alpha": 0.5}', least_acceptance=1.5),
    Case("jetspec", "entropy", (12, 4, 7)),
]
WORKLOAD_NAMES = ("single", "lengths", "context_limit")


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, Path]:
    """The fixture's head as each kind. The Domino one keeps its causality and alignment, and gets
    a small bias, so that it drafts well; once more it drafts from seven tokens of eight."""
    folder, source = tmp_path_factory.mktemp("heads"), FIXTURE / "head"
    head_as("dspark", source, folder / "dspark", seed=1)
    head_as("dflash", source, folder / "dflash", seed=1)
    changes = {"shift_label": False, "causal_head": True}
    head_as("domino", source, folder / "domino", seed=1, bias_scale=0.1, changes=changes)
    ids = torch.arange(load_head_config(source).vocab_size)
    head_as(
        "domino",
        source,
        folder / "domino-some-tokens",
        seed=1,
        bias_scale=0.1,
        changes=changes,
        draft_token_ids=ids[ids % 8 > 0],
    )
    return {path.name: path for path in folder.iterdir()} | {"jetspec": source}


def acceptance(answers):
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    return tokens / sum(a["meta_info"]["spec_verify_ct"] for a in answers)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.head}-{case.tree}")
def test_every_id_equals_plain_decoding(case, heads, plain):
    setup = tree(*case.shape, **case.environment)
    head = ("--speculative-draft-model-path", str(heads[case.head]))
    with replace(setup, args=setup.args + head).server() as server:
        log = server.log_text()
        assert f"({case.head.partition('-')[0]}), Options(" in log
        assert f"tree='{case.tree}'" in log
        for name in WORKLOAD_NAMES:
            answers = WORKLOADS[name].ask(server)
            expected = [answer["output_ids"] for answer in plain.answers[name]]
            assert [answer["output_ids"] for answer in answers] == expected, name
            if name == "single":
                assert acceptance(answers) >= case.least_acceptance


def greedy(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """transformers' own greedy answer."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("llama", "top2gap", '{"beta": 2.0}'),
        ("qwen3_moe", "profile", '{"rates": [[0.6, 0.2, 0.1], [0.5, 0.1], [0.4]]}'),
    ],
)
def test_other_families_answer_as_transformers_does(family, kind, options, tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FIXTURE / "target")
    model = random_target(family, tokenizer, seed=5)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    random_head("jetspec", model, tmp_path / "head", seed=1)
    asked = prompts(10, seed=5)
    expected = [greedy(model, prompt, 48) for prompt in asked]
    assert all(len(set(ids)) > 12 for ids in expected)
    environment = {"SGLANG_JETSPEC_TREE": kind, "SGLANG_JETSPEC_TREE_OPTIONS": options}
    setup = tree(16, 3, 7, **environment)
    paths = ("--model-path", str(tmp_path / "target"))
    paths += ("--speculative-draft-model-path", str(tmp_path / "head"))
    with replace(setup, args=setup.args + paths).server() as server:
        assert f"tree='{kind}'" in server.log_text()
        for batch in (1, 5):
            answers = generate_all(server, asked, batch, max_new_tokens=48, ignore_eos=True)
            assert [answer["output_ids"] for answer in answers] == expected
            server.post("/flush_cache", {})
