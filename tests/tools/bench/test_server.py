"""The server driver against a fake server."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_jetspec.tools.bench.server import Server, ServerError

FAKE = (sys.executable, str(Path(__file__).with_name("fake_server.py")))


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip() not in ("", "Z")


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_generates_and_ends() -> None:
    with Server(["--healthy-after", "0.5"], command=FAKE) as server:
        answer = server.generate([5, 6, 7], max_new_tokens=4)
        assert answer["output_ids"] == [5, 6, 7, 5]
        assert server.process is not None
        pid = server.process.pid
        assert alive(pid)
    assert not alive(pid)
    assert not server.log.parent.exists()


def test_the_whole_group_ends_when_the_body_raises(tmp_path: Path) -> None:
    """Also a child that ignores SIGTERM; the log stays where it was asked for."""
    pid_file = tmp_path / "pid"
    args = ["--child", str(pid_file)]
    server = Server(args, command=FAKE, log=tmp_path / "log")

    def body() -> None:
        with server:
            assert alive(int(wait_for(pid_file)))
            raise KeyError("body")

    with pytest.raises(KeyError):
        body()
    assert not alive(int(pid_file.read_text()))
    assert "fake server starting" in (tmp_path / "log").read_text()
    assert not Path(server.env["TMPDIR"]).exists()


def test_an_early_end_is_noticed_and_shows_the_log() -> None:
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"code 3.*(\n.*)*--nonsense is unknown"):
        Server(["--exit-code", "3"], command=FAKE).__enter__()
    assert time.monotonic() - start < 20


def test_a_server_that_never_gets_healthy_is_ended(tmp_path: Path) -> None:
    server = Server(
        ["--healthy-after", "600"], command=FAKE, log=tmp_path / "log", start_timeout_s=1.0
    )
    with pytest.raises(ServerError, match="not healthy after 1 s"), server:
        pass
    assert server.process is not None
    assert not alive(server.process.pid)


def test_http_errors_carry_the_servers_words() -> None:
    with Server([], command=FAKE) as server:
        with pytest.raises(ServerError, match=r"HTTP 400.*input_ids is missing"):
            server.generate([], max_new_tokens=1)
        assert server.post("/generate", {}).status_code == 400


def test_a_server_killed_while_serving_is_reported(tmp_path: Path) -> None:
    with Server([], command=FAKE, log=tmp_path / "log") as server:
        assert server.process is not None
        os.kill(server.process.pid, 9)
        server.process.wait()
        with pytest.raises(ServerError, match="fake server starting"):
            server.generate([1], max_new_tokens=1)


def test_port_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETSPEC_TEST_GONE", "1")
    server = Server(["--port", "31999"], {"JETSPEC_TEST_GONE": None, "JETSPEC_TEST": "2"})
    assert server.port == 31999
    assert server.command.count("--port") == 1
    assert server.env["JETSPEC_TEST"] == "2"
    assert "JETSPEC_TEST_GONE" not in server.env
    server.log.parent.rmdir()
