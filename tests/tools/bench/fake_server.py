"""A stand-in for `sglang.launch_server`: the endpoints the benchmark uses, standard library only.

Run as a program. The answer repeats the prompt's first ids; `--exit-code` ends at start-up,
`--child` starts a grandchild that ignores SIGTERM and writes its pid to the given file.
"""

import argparse
import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACCEPTANCE_LENGTH = 2  # tokens per verify round it reports


class Handler(BaseHTTPRequestHandler):
    delay_s = 0.0
    shift = 0
    healthy_at = 0.0

    def do_GET(self) -> None:
        self.answer(200 if time.monotonic() > self.healthy_at else 503, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/flush_cache"):
            self.answer(200, {})
            return
        ids = body.get("input_ids")
        if not ids or "sampling_params" not in body:
            self.answer(400, {"error": {"message": "input_ids is missing"}})
            return
        time.sleep(self.delay_s)
        count = body["sampling_params"]["max_new_tokens"]
        output = [(ids[i % len(ids)] + self.shift) % 1000 for i in range(count)]
        meta = {
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "e2e_latency": self.delay_s,
            "finish_reason": {"type": "length"},
        }
        if self.shift == 0:
            meta["spec_verify_ct"] = -(-count // ACCEPTANCE_LENGTH)
        self.answer(200, {"text": str(output), "output_ids": output, "meta_info": meta})

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        print(*args, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--shift", type=int, default=0)
    parser.add_argument("--healthy-after", type=float, default=0.0)
    parser.add_argument("--exit-code", type=int)
    parser.add_argument("--child")
    options, _ = parser.parse_known_args()
    print("fake server starting", flush=True)
    if options.exit_code is not None:
        print("flag --nonsense is unknown", flush=True)
        sys.exit(options.exit_code)
    if options.child:
        code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code])
        with open(options.child, "w") as file:
            file.write(str(child.pid))
    Handler.delay_s = options.delay
    Handler.shift = options.shift
    Handler.healthy_at = time.monotonic() + options.healthy_after
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
