"""The whole benchmark against fake servers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_jetspec.tools.bench import run as bench
from sglang_jetspec.tools.bench.config import BenchConfig
from sglang_jetspec.tools.bench.server import Server, ServerError

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder with a three-word tokenizer and a chat template."""
    words = Tokenizer(models.WordLevel({"user": 0, "Why": 1, "How": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    folder = tmp_path / "target"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for task, question in (("first", "Why ?"), ("second", "How ?")):
        rows = [
            {"id": f"{task}-{i}", "task": task, "turns": [question * (i + 1)]} for i in range(3)
        ]
        (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_arms_take_turns_and_never_overlap(target: Path, data: Path, tmp_path: Path) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    servers: list[Server] = []

    def factory(args: list[str], env: dict[str, str], log: Path | None) -> Server:
        assert all(server.process and server.process.poll() is not None for server in servers)
        started.append((args, env))
        speculative = "JETSPEC" in args
        extra = ["--delay", "0.01"] if speculative else ["--delay", "0.03", "--shift", "1"]
        server = Server([*args, *extra], env, log=log, command=(sys.executable, str(FAKE)))
        servers.append(server)
        return server

    config = BenchConfig(
        data=(data,),
        arms="ar,jetspec:n=16,tree=algorithm1",
        target=str(target),
        head="HEAD",
        limit=2,
        max_tokens=6,
        batch=2,
        repeats=2,
        server_args="--mem-fraction-static 0.5",
        out=tmp_path / "out",
    )
    result = bench.run(config, factory)

    assert ["JETSPEC" in args for args, _ in started] == [False, True, False, True]
    assert started[1][1] == {"SGLANG_JETSPEC_TREE": "algorithm1"}
    for args, _ in started:
        assert args[args.index("--model-path") + 1] == str(target)
        assert args[args.index("--mem-fraction-static") + 1] == "0.5"
    assert all(server.process and server.process.poll() is not None for server in servers)

    name = "jetspec:n=16,tree=algorithm1"
    assert result["arms"][name]["requests"] == 8
    assert result["arms"][name]["completion_tokens"] == 48
    assert result["arms"][name]["acceptance_length"] == 2.0
    assert result["arms"]["ar"]["acceptance_length"] is None
    assert result["speedup"][name] > 1.2
    assert result["identical"][name]["share"] == 0.0  # the fake baseline shifts its ids by one
    assert list(result["tasks"]) == ["first", "second"]
    assert result["setting"]["versions"]["sglang"]

    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert saved["arms"] == result["arms"]
    passes = (tmp_path / "out" / "passes.jsonl").read_text().splitlines()
    assert len(passes) == 8
    assert len(list((tmp_path / "out").glob("*.log"))) == 4


def test_table_and_json_line(
    target: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def factory(args: list[str], env: dict[str, str], log: Path | None) -> Server:
        return Server(args, env, log=log, command=(sys.executable, str(FAKE)))

    whole = bench.run
    monkeypatch.setattr(bench, "run", lambda config: whole(config, factory))
    bench.main(
        BenchConfig(
            data=(data / "first.jsonl",), arms="ar,jetspec", target=str(target), head="H", repeats=1
        )
    )
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["identical"]["jetspec"]["share"] == 1.0
    assert any("speed-up" in line for line in lines)
    assert any("100%" in line and "jetspec" in line for line in lines)


def test_a_failing_arm_ends_the_run_with_its_log(target: Path, data: Path) -> None:
    def factory(args: list[str], env: dict[str, str], log: Path | None) -> Server:
        extra = ["--exit-code", "2"] if "JETSPEC" in args else []
        return Server([*args, *extra], env, log=log, command=(sys.executable, str(FAKE)))

    config = BenchConfig(data=(data,), target=str(target), head="H", repeats=1)
    with pytest.raises(ServerError, match="--nonsense is unknown"):
        bench.run(config, factory)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_run_leaves_no_server(
    target: Path, data: Path, tmp_path: Path, number
) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
        import sys
        from pathlib import Path
        from sglang_jetspec.tools.bench import run as bench
        from sglang_jetspec.tools.bench.config import BenchConfig
        from sglang_jetspec.tools.bench.server import Server

        def factory(args, env, log):
            extra = ["--delay", "60", "--child", {str(pid_file)!r}]
            command = (sys.executable, {str(FAKE)!r})
            return Server([*args, *extra], env, log=log, command=command)

        data = (Path({str(data)!r}),)
        bench.run(BenchConfig(data=data, target={str(target)!r}, head="H"), factory)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        # A test run in a shell's background has been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)  # the first request is under way
    run.send_signal(number)
    assert run.wait(30) != 0
    child = int(pid_file.read_text())
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True)
    assert state.stdout.strip() in ("", "Z"), f"server child {child} outlived the run"
    assert os.getpid() != child
