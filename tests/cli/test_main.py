"""The command line: parsing, dispatch, errors, and what it costs to ask for help."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_jetspec.cli import main as cli
from sglang_jetspec.cli.serve import command_line, example_request
from sglang_jetspec.tools import demo_target
from sglang_jetspec.tools.bench.server import ServerError
from sglang_jetspec.tools.model_pair import resolve_pair
from sglang_jetspec.tools.train.config import TrainConfig


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_target, "prepare_demo_target", lambda: "/cache/target")
    monkeypatch.setattr(demo_target, "demo_head_path", lambda: "/package/head")


def test_help_lists_the_commands_without_importing_torch() -> None:
    program = (
        "import sys\n"
        "from sglang_jetspec.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "slow = {'torch', 'sglang', 'transformers'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in [
        "doctor",
        "serve",
        "demo-paths",
        "bench",
        "fuzz",
        "train",
        "train-adapter",
        "calibrate",
    ]:
        assert command in done.stdout


def test_training_takes_a_file_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainConfig] = []
    monkeypatch.setattr(cli, "run", lambda command, others=(): seen.append(command))
    (tmp_path / "run.toml").write_text('target = "T"\nprompts = "P"\nsteps = 3\n')
    cli.main(["train", "--config", str(tmp_path / "run.toml"), "--out", "O", "--seed", "5"])
    (config,) = seen
    assert (config.target, config.steps, config.seed, config.out) == ("T", 3, 5, Path("O"))


def test_demo_paths(demo: None, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["demo-paths", "--json"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"target": "/cache/target", "head": "/package/head"}
    cli.main(["demo-paths"])
    assert "/cache/target" in capsys.readouterr().out


def test_serve_execs_sglang_and_passes_other_flags_on(
    demo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, args: called.append([path, *args]))
    cli.main(["serve", "--port", "31234", "--tp-size", "2", "--disable-radix-cache"])
    ((path, *args),) = called
    assert path == args[0] == sys.executable
    assert args[1:3] == ["-m", "sglang.launch_server"]
    flags = " ".join(args)
    assert "--model-path /cache/target" in flags
    assert "--speculative-algorithm JETSPEC --speculative-draft-model-path /package/head" in flags
    assert args[-5:] == ["--port", "31234", "--tp-size", "2", "--disable-radix-cache"]
    assert "curl http://127.0.0.1:31234/v1/chat/completions" in capsys.readouterr().out


def test_the_curl_line_is_valid_json_for_a_reachable_address() -> None:
    line = example_request("0.0.0.0", 30000)
    assert "http://127.0.0.1:30000/" in line
    body = json.loads(line.split("-d '")[1].removesuffix("'"))
    assert body["messages"][0]["role"] == "user"


def test_command_line_of_a_given_pair() -> None:
    line = command_line("T", "H", "0.0.0.0", 1)
    assert line[line.index("--model-path") + 1] == "T"
    assert line[line.index("--speculative-draft-model-path") + 1] == "H"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["doctor", "--bogus"], "unknown argument --bogus"),
        (["bench", "--data", "/nope"], "--data /nope: no such file or folder"),
        (["bench", "--data", ".", "--arms", "eagle"], "'eagle' is no arm"),
        (["serve", "--target", "T"], "--head is missing"),
        (["train", "--config", "run.ini"], "run.ini: use one of .toml"),
        (["fuzz", "--target", "T", "--head", "H", "--replay", "/nope"], "/nope"),
    ],
)
def test_a_refused_option_is_one_line_and_code_two(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_failed_run_is_one_line_and_an_error_of_ours_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: Exception) -> Callable[..., None]:
        def run(*args: object) -> None:
            raise error

        return run

    monkeypatch.setattr(cli, "run", failing(ServerError("the server ended with code 1")))
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "jetspec: the server ended with code 1\n"
    monkeypatch.setattr(cli, "run", failing(RuntimeError("mat1 and mat2 shapes differ")))
    with pytest.raises(RuntimeError, match="mat1"):
        cli.main(["doctor"])


def test_pairs(demo: None) -> None:
    assert resolve_pair(None, None) == ("/cache/target", "/package/head")
    assert resolve_pair("T", "H") == ("T", "H")
    assert resolve_pair(None, "H") == ("/cache/target", "H")
    assert resolve_pair("T", None, needs_head=False) == ("T", "")
    with pytest.raises(ValueError, match="--head is missing"):
        resolve_pair("T", None)
