"""SGLang's frontend language, the OpenAI client, the offline engine and SGLang's benchmark."""

import json

import pytest
from harness import LLGUIDANCE, tree
from programs import CLIENTS, EXAMPLES, run_client, run_engine, run_program

server_16 = pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)


@pytest.mark.parametrize(
    "server", [tree(16, 4, 7, *LLGUIDANCE)], indirect=True, ids=lambda s: s.name
)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_prints_what_it_prints_without_speculation(server, plain, name):
    assert json.loads(run_client(name, server)) == json.loads(plain.programs[name])


def test_the_clients_show_what_they_are_about(plain):
    shown = json.loads(plain.programs["frontend.py"])
    assert all(shown["stories"])
    assert [set(record) for record in shown["records"]] == [{"name", "age", "city"}] * 3
    assert shown["mood"] in ("happy", "tired", "afraid")
    assert f"10 + 15 = {shown['sum']}" in shown["forks"]
    assert int(shown["sum"]) >= 0
    assert shown["streamed"]
    shown = json.loads(plain.programs["openai_client.py"])
    assert shown["tools"]["name"] == "get_weather"
    assert shown["tools"]["arguments"]["city"] in ("Bergen", "Lisbon", "Turin")
    assert set(shown["response_format"]) == {"name", "age"}
    assert len(shown["completions"]) == 4
    assert 1 <= len(shown["logprobs"]) <= 16
    assert all(count == 3 for _, _, count in shown["logprobs"])
    assert shown["chat"]["text"]
    assert shown["stream"]["tokens"] > 1


def test_the_offline_engine_writes_what_a_server_without_speculation_writes(plain):
    printed = run_engine()
    shown = json.loads(printed[printed.index("{\n") :])
    expected = [answer["text"] for answer in plain.answers["offline"]]
    assert shown["texts"] == expected
    assert shown["streamed"] == expected[0]
    assert shown["acceptance_length"] > 1.2


@server_16
def test_sglangs_benchmark_runs_without_a_hub(server, tmp_path):
    out = tmp_path / "result.jsonl"
    run_program(
        "bench_serving.sh",
        *(str(server.client.base_url).rstrip("/"), "--num-prompts", "12"),
        *("--output-file", str(out), "--disable-tqdm"),
        HF_HUB_OFFLINE="1",
    )
    (result,) = map(json.loads, out.read_text().splitlines())
    assert result["completed"] == 12
    assert result["total_output_tokens"] > 12 * 16
    assert result["accept_length"] > 1.0


def test_every_example_is_run_here():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == {*CLIENTS, "offline_engine.py", "bench_serving.sh"}
