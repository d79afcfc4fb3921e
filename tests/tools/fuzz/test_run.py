"""`jetspec fuzz` from the requests to the reduced case, on servers that only pretend."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from sglang_jetspec.tools.bench.server import ServerError
from sglang_jetspec.tools.fuzz.answers import ask
from sglang_jetspec.tools.fuzz.cases import Case, Group
from sglang_jetspec.tools.fuzz.config import FuzzConfig
from sglang_jetspec.tools.fuzz.run import main, run

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3"


class Pretender:
    """Answers with the prompt's last tokens; a ``wrong`` one errs under a frequency penalty."""

    def __init__(self, wrong):
        self.wrong = wrong
        self.client = httpx.Client(
            transport=httpx.MockTransport(self.answer), base_url="http://server"
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def post(self, path, body):
        return self.client.post(path, json=body)

    def answer(self, request):
        if request.url.path == "/flush_cache":
            return httpx.Response(200)
        body = json.loads(request.content)
        sampling = body["sampling_params"]
        ids = body["input_ids"][-(sampling["max_new_tokens"] or 5) :]
        if self.wrong and "frequency_penalty" in sampling:
            ids = [*ids[:-1], 667]
        meta = {
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "finish_reason": {"type": "length", "length": len(ids)},
        }
        found = {"output_ids": ids, "text": "x" * len(ids), "meta_info": meta}
        if body.get("stream"):
            first = {**found, "output_ids": ids[:1]}
            pieces = "".join(f"data: {json.dumps(piece)}\n\n" for piece in (first, found))
            return httpx.Response(200, text=pieces + "data: [DONE]\n\n")
        copies = sampling.get("n", 1)
        return httpx.Response(200, json=[found] * copies if copies > 1 else found)


def start(wrong):
    return lambda args, env: Pretender(wrong and "JETSPEC" in args)


@pytest.fixture
def config(tmp_path):
    return FuzzConfig(
        requests=60,
        target=str(FIXTURE / "target"),
        head=str(FIXTURE / "head"),
        out=tmp_path / "found",
    )


def test_equal_servers_have_no_difference(config):
    result = run(config, start(wrong=False))
    assert result["requests"] == 60
    assert result["differences"] == result["refused"] == 0
    assert 40 < result["greedy"] < 60
    assert not config.out.exists()


def test_a_difference_is_reduced_written_and_found_again(config, capsys):
    result = run(config, start(wrong=True))
    assert result["differences"] > 5
    told = capsys.readouterr().err
    assert "seed 0, group" in told
    files = sorted(config.out.iterdir())
    assert len(files) == 5
    for path in files:
        (group,) = msgspec.json.decode(path.read_bytes(), type=list[Group])
        (case,) = group.cases
        sampling = (case.follow_up or case.body)["sampling_params"]
        assert sampling.keys() - {"temperature", "top_k", "max_new_tokens"} == {"frequency_penalty"}
        assert str(path) in told
    again = replace(config, replay=files[0])
    assert run(again, start(wrong=True))["differences"] == 1
    assert run(again, start(wrong=False))["differences"] == 0


def test_a_stream_that_breaks_off_is_the_servers_error():
    class Broken(Pretender):
        def answer(self, request):
            raise httpx.RemoteProtocolError("peer closed connection")

        def log_tail(self):
            return "; end of the log"

    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "stream": True}
    with (
        Broken(wrong=False) as server,
        pytest.raises(ServerError, match=r"peer closed connection.*end of the log"),
    ):
        ask(server, Group(0, False, [Case(body)]))


def test_the_code_says_whether_there_was_a_difference(config, monkeypatch, capsys):
    for wrong in (False, True):
        monkeypatch.setattr(
            "sglang_jetspec.tools.fuzz.run.run",
            lambda config, wrong=wrong: {"differences": int(wrong)},
        )
        with pytest.raises(SystemExit) as end:
            main(config)
        assert end.value.code == int(wrong)
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["differences"] == int(wrong)


@pytest.mark.parametrize("name", ["requests", "nodes", "width", "depth", "context_length"])
def test_options_out_of_range_are_named(name):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 0"):
        FuzzConfig(**{name: 0})
