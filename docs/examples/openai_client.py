"""The OpenAI Python client against a running server.

    make serve                              # or any other SGLang server
    python docs/examples/openai_client.py --base-url http://127.0.0.1:30000

A very small model may fill JSON with white space until its tokens are used up; the server's flag
--constrained-json-disable-any-whitespace forbids that.

Prints one JSON object. Decoding is greedy, so it is the same with and without speculation.
"""

import json

import tyro
from openai import OpenAI

MODEL = "default"  # SGLang serves one model under any name
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bergen", "Lisbon", "Turin"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(text: str) -> dict:
    """What every chat request below shares."""
    return {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": text}]}


def chat(client: OpenAI) -> dict:
    answer = client.chat.completions.create(
        **ask("Tell a story about Mira the fox."), max_tokens=64, frequency_penalty=0.4
    )
    return {"text": answer.choices[0].message.content, "tokens": answer.usage.completion_tokens}


def stream(client: OpenAI) -> dict:
    pieces = client.chat.completions.create(
        **ask("Count 9 numbers from 7 in steps of 5."),
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, tokens = "", None
    for piece in pieces:
        if piece.choices:
            text += piece.choices[0].delta.content or ""
        if piece.usage:
            tokens = piece.usage.completion_tokens
    return {"text": text, "tokens": tokens}


def completions(client: OpenAI) -> list[str]:
    answer = client.completions.create(
        model=MODEL,
        prompt=["Ones: 7 plus 5 is", "Mira the fox lived near"],
        temperature=0,
        max_tokens=24,
        stop=["."],
        n=2,
    )
    return [choice.text for choice in answer.choices]


def tools(client: OpenAI) -> dict:
    """A call the model must make; its arguments follow the schema."""
    answer = client.chat.completions.create(
        **ask("How is the weather in Lisbon?"),
        max_tokens=96,
        parallel_tool_calls=False,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    message = answer.choices[0].message
    if message.tool_calls is None:  # a server without --tool-call-parser leaves the call as text
        (call,) = json.loads(message.content)
        return {"name": call["name"], "arguments": call["parameters"]}
    (call,) = message.tool_calls
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


def response_format(client: OpenAI) -> dict:
    answer = client.chat.completions.create(
        **ask("Write a record for Otto from Turin."),
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
    )
    return json.loads(answer.choices[0].message.content)


def logprobs(client: OpenAI) -> list:
    """Tokens with their log-probability and the three likeliest, one entry a token."""
    answer = client.chat.completions.create(
        **ask("Add 17 and 25."), max_tokens=16, logprobs=True, top_logprobs=3
    )
    return [
        [entry.token, round(entry.logprob, 2), len(entry.top_logprobs)]
        for entry in answer.choices[0].logprobs.content
    ]


def main(base_url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
    parts = (chat, stream, completions, tools, response_format, logprobs)
    print(json.dumps({part.__name__: part(client) for part in parts}, indent=2))


if __name__ == "__main__":
    tyro.cli(main)
