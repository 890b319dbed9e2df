#!/usr/bin/env bash
# From a real chat model to a conversation: demo.sh BIN FOLDER, the programs of an environment, and where to work.
set -euo pipefail
bin=$1
model=$("$bin/python" "$(dirname "${BASH_SOURCE[0]}")/models/smollm2.py")
mkdir -p "$2"
cd "$2"
question="What is photosynthesis? Answer in one sentence."
say() { printf '\n$ llmforge %s\n' "$*"; }
forge() { say "$@"; "$bin/llmforge" "$@"; }

forge init "$model" -o smollm2.yaml --name smollm2 --force
forge build smollm2.yaml
forge run smollm2 "$question" --chat
forge gate smollm2
rm -rf models
forge triton smollm2 -o models

port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
say serve smollm2 --port "$port"
"$bin/llmforge" serve smollm2 --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
"$bin/python" - "$port" "$question" <<'ASK'
import json, sys, time, urllib.error, urllib.request

url, content = f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", sys.argv[2]
asked = {"model": "smollm2", "messages": [{"role": "user", "content": content}], "max_tokens": 64, "temperature": 0}
request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
for _ in range(300):
    try:
        print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
        break
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError:  # it does not listen yet
        time.sleep(0.2)
else:
    sys.exit("the server did not answer")
ASK
kill -INT "$server"
wait "$server" || true

forge run smollm2 --chat
