"""The client half of quickstart.sh: waits for the daemon, then asks one streamed question.

Standard library only, so that it shows what any HTTP client would see.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from collections.abc import Iterator


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait(port: int, pid: int, timeout_s: float) -> int:
    """Poll /readyz until it says yes, the daemon has gone, or time is up."""
    deadline_s = time.monotonic() + timeout_s
    said = ""
    while time.monotonic() < deadline_s:
        if not os.path.isdir(f"/proc/{pid}"):
            return 1
        try:
            status, body = _get(port, "/readyz")
        except OSError:
            status, body = 0, b""
        if status == 200:
            return 0
        text = body.decode(errors="replace").strip()[:160]
        if text and text != said:
            print(f"   {text}", file=sys.stderr)
            said = text
        time.sleep(0.2)
    return 1


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    for raw in response:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event: dict[str, object] = json.loads(line[len("data: ") :])
            if "error" in event:
                raise RuntimeError(json.dumps(event["error"]))
            yield event


def chat(port: int, prompt: str, max_tokens: int) -> int:
    """One streamed chat completion; prints the text as it comes, then the two figures."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    started_s = time.monotonic()
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"content-type": "application/json"},
    )
    response = connection.getresponse()
    if response.status != 200:
        print(response.read().decode(errors="replace"), file=sys.stderr)
        return 1
    print(f"\n> {prompt}\n")
    first_s = last_s = started_s
    completion_tokens = 0
    for event in _events(response):
        usage = event.get("usage")
        if isinstance(usage, dict):
            completion_tokens = int(usage["completion_tokens"])
        choices = event.get("choices")
        text = choices[0]["delta"].get("content") if isinstance(choices, list) and choices else None
        if text:
            last_s = time.monotonic()
            if first_s == started_s:
                first_s = last_s
            print(text, end="", flush=True)
    decode_s = last_s - first_s
    # a tiny model's answer can come in one burst, which says nothing about a rate
    rate = f"{(completion_tokens - 1) / decode_s:.1f}" if decode_s > 0.05 else "too fast to time,"
    print(
        f"\n\n   time to first token {first_s - started_s:.2f} s, "
        f"{completion_tokens} tokens, {rate} tokens/s"
    )
    return 0


def main() -> int:
    """Parse the command line and run one of the two halves."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    waiting = commands.add_parser("wait")
    waiting.add_argument("--port", type=int, required=True)
    waiting.add_argument("--pid", type=int, required=True)
    waiting.add_argument("--timeout-s", type=float, default=600.0)
    chatting = commands.add_parser("chat")
    chatting.add_argument("--port", type=int, required=True)
    chatting.add_argument("--prompt", required=True)
    chatting.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    if arguments.command == "wait":
        return wait(arguments.port, arguments.pid, arguments.timeout_s)
    try:
        return chat(arguments.port, arguments.prompt, arguments.max_tokens)
    except (OSError, RuntimeError) as error:
        print(f"error: the request failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
