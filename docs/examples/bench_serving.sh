#!/usr/bin/env bash
# SGLang's own benchmark against a running server, without access to a model hub: the prompts are
# random token ids, the tokenizer is the one the server names. Further flags are passed on.
#
#   make serve
#   docs/examples/bench_serving.sh http://127.0.0.1:30000 --num-prompts 50
set -euo pipefail
url=${1:-http://127.0.0.1:30000}
shift || true
exec "${PYTHON:-python}" -m sglang.benchmark.serving --backend sglang --base-url "$url" \
    --dataset-name random-ids --random-input-len 64 --random-output-len 64 --random-range-ratio 0.5 \
    --num-prompts 20 --max-concurrency 4 "$@"
