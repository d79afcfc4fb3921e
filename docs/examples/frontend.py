"""SGLang's frontend language against a running server.

    make serve                              # or any other SGLang server
    python docs/examples/frontend.py --base-url http://127.0.0.1:30000

Prints one JSON object. Decoding is greedy, so it is the same with and without speculation.
"""

import json

import sglang as sgl
import tyro

RECORD = r'\{"name": "[A-Z][a-z]{1,9}", "age": [1-9][0-9], "city": "[A-Z][a-z]{1,9}"\}'


@sgl.function
def conversation(s, name):
    """Two turns; the second sees the first."""
    s += sgl.user(f"Tell a story about {name} the fox.")
    s += sgl.assistant(sgl.gen("story", max_tokens=48))
    s += sgl.user(f"Write a record for {name} from Bergen.")
    s += sgl.assistant(sgl.gen("record", max_tokens=48, regex=RECORD))


@sgl.function
def mood(s, sentence):
    """The likelier of three words, by their log-probabilities."""
    s += sgl.user(f"How does this sound? {sentence}")
    s += sgl.assistant("It sounds " + sgl.select("mood", choices=["happy", "tired", "afraid"]))


@sgl.function
def lists(s):
    """Three continuations of one prefix at a time, joined again."""
    s += sgl.user("Count 6 numbers from 10 in steps of 1, 2 and 5.")
    s += sgl.assistant_begin()
    forks = s.fork(3)
    for fork, step in zip(forks, (1, 2, 5), strict=True):
        fork += f"Steps of {step}: 10, {10 + step}," + sgl.gen("rest", max_tokens=24, stop=".")
    s += "\n".join(fork["rest"].strip() for fork in forks)
    s += sgl.assistant_end()
    s += sgl.user("Add 10 and 15.")
    s += sgl.assistant("10 + 15 = " + sgl.gen("sum", max_tokens=4, dtype=int))


@sgl.function
def streamed(s):
    s += sgl.user("Reverse the list: apple, river, cloud, stone.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=32))


def main(base_url: str = "http://127.0.0.1:30000") -> None:
    sgl.set_default_backend(sgl.RuntimeEndpoint(base_url, chat_template_name="chatml"))
    names = ["Mira", "Otto", "Lena"]
    states = conversation.run_batch([{"name": name} for name in names], temperature=0)
    pieces = streamed.run(temperature=0, stream=True).text_iter("answer")
    joined = lists.run(temperature=0)
    result = {
        "stories": [state["story"] for state in states],
        "records": [json.loads(state["record"]) for state in states],
        "mood": mood.run(sentence="Mira found a brass key and laughed.")["mood"],
        "forks": joined.text(),
        "sum": joined["sum"],
        "streamed": "".join(pieces),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    tyro.cli(main)
