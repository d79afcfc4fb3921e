"""One real SGLang server as a context manager: started in its own process group, always ended.

    with Server(["--model-path", target, "--device", "cpu"]) as server:
        answer = server.generate("Hello", max_new_tokens=8)

Used by the benchmark and by the end-to-end tests, so it neither prints nor depends on either.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from sglang_jetspec.tools.errors import CommandError

HOST = "127.0.0.1"
TAIL_LINES = 40
REAP_S = 5.0  # longest wait for killed processes to leave the process table


class ServerError(CommandError):
    """The server did not start, ended early, or answered with an error; says what it logged."""


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _signal_group(group: int, number: int) -> bool:
    """Signals every member (0 only looks); whether there was one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


class Server:
    """`python -m sglang.launch_server ARGS` and a client for it.

    Args:
        args: the server's arguments; a free port is added where they hold no `--port`.
        env: variables added to this process's environment; None as a value removes one.
        log: file that takes its output, overwritten; None: a temporary one, kept after an error.
        start_timeout_s: longest wait for the first healthy answer.
        request_timeout_s: longest wait for one answer.
        command: what to run in place of SGLang's launcher (tests pass a fake).

    Raises:
        ServerError: from start(), with the end of the log.
    """

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str | None] | None = None,
        *,
        log: Path | None = None,
        start_timeout_s: float = 600.0,
        request_timeout_s: float = 600.0,
        command: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
    ) -> None:
        self.args = list(args)
        if "--port" in self.args:
            self.port = int(self.args[self.args.index("--port") + 1])
        else:
            self.port = free_port()
            self.args += ["--port", str(self.port)]
        self.command = [*command, *self.args]
        # SGLang leaves sockets in its temporary folder, so it gets one of its own.
        self._scratch = Path(tempfile.mkdtemp(prefix="sglang-"))
        wanted = {**os.environ, "TMPDIR": str(self._scratch), **(env or {})}
        self.env = {name: value for name, value in wanted.items() if value is not None}
        self.start_timeout_s = start_timeout_s
        self.log = log or self._scratch / "server.log"
        self.client = httpx.Client(
            base_url=f"http://{HOST}:{self.port}",
            timeout=request_timeout_s,
            trust_env=False,
            # The server closes idle connections after 5 s; one must not be used just then.
            limits=httpx.Limits(keepalive_expiry=1.0),
        )
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if kind is None or self.log.parent != self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self) -> None:
        """Starts the process and returns once it answers health checks."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )
        deadline = time.monotonic() + self.start_timeout_s
        while not self.healthy():
            if (code := self.process.poll()) is not None:
                raise ServerError(f"the server ended with code {code} at start-up{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server was not healthy after {self.start_timeout_s:.0f} s"
                    f"{self.log_tail()}"
                )
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Whether the server answers its health check (which decodes one token) right now."""
        try:
            return self.client.get("/health", timeout=20.0).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Kills the whole process group and returns once it is gone. Safe to call twice.

        A polite end takes SGLang over 5 s, and a server under test has nothing to save.
        """
        self.client.close()
        if self.process is None:
            return
        group = self.process.pid  # the leader's pid is the group's id
        some_left = _signal_group(group, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + REAP_S
        while some_left and time.monotonic() < deadline:
            time.sleep(0.02)
            some_left = _signal_group(group, 0)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """POSTs JSON; returns the answer whatever its status. Raises ServerError on no answer."""
        try:
            return self.client.post(path, json=dict(body))
        except httpx.TransportError as error:
            raise ServerError(f"POST {path}: {error!r}{self.log_tail()}") from error

    def generate(self, prompt: str | Sequence[Any], **sampling: Any) -> Any:
        """POST /generate of a text, token ids, or a list of either.

        Keyword arguments are sampling parameters (greedy unless `temperature` is given). Returns
        SGLang's answer: `text`, `output_ids`, `meta_info`; a list of these for a list of prompts.
        """
        is_text = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], str))
        body = {
            "text" if is_text else "input_ids": prompt,
            "sampling_params": {"temperature": 0.0, **sampling},
        }
        return self._checked("/generate", body)

    def chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Any:
        """POST /v1/chat/completions, greedy unless `temperature` is given."""
        body = {"model": "default", "messages": list(messages), "temperature": 0.0, **fields}
        return self._checked("/v1/chat/completions", body)

    def _checked(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = self.post(path, body)
        if answer.status_code != 200:
            raise ServerError(f"POST {path}: HTTP {answer.status_code}: {answer.text[:2000]}")
        return answer.json()

    def log_text(self) -> str:
        """Everything the server has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self) -> str:
        """The end of the log, set off for an error message."""
        lines = self.log_text().splitlines()[-TAIL_LINES:]
        return f"; end of {self.log}:\n" + "\n".join(f"  {line}" for line in lines)
