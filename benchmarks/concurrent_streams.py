"""Decode through the whole service: many streaming clients against one, in one run.

usage: python -m benchmarks.concurrent_streams --model DIR [--clients N] [--quick] [--json FILE]

Starts a daemon of its own on a free loopback port. Every round runs one client, then N at once;
both count the tokens that came over HTTP per second from the first token of the round to the last,
so that reading the prompts does not count. Also prints the time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.result import Row, write

_PROMPT = "Write about the sea."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """When tokens came: seconds on the monotonic clock, one entry per event with text."""

    started_s: float
    arrivals_s: tuple[float, ...]
    completion_tokens: int

    @property
    def first_token_s(self) -> float:
        """From the request to the first text."""
        return self.arrivals_s[0] - self.started_s


async def _stream(http: httpx.AsyncClient, max_tokens: int) -> Stream:
    body = {
        "messages": [{"role": "user", "content": _PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
    }
    started_s = time.monotonic()
    arrivals: list[float] = []
    tokens = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(json.dumps(event["error"]))
            if not event["choices"]:
                tokens = event["usage"]["completion_tokens"]
            elif event["choices"][0]["delta"].get("content"):
                arrivals.append(time.monotonic())
    return Stream(started_s=started_s, arrivals_s=tuple(arrivals), completion_tokens=tokens)


def _decode_tokens_per_s(streams: list[Stream]) -> float:
    # from when the last stream has begun: only then all of them decode together
    begin_s = max(stream.arrivals_s[0] for stream in streams)
    end_s = min(stream.arrivals_s[-1] for stream in streams)
    tokens = 0.0
    for stream in streams:
        per_event = stream.completion_tokens / len(stream.arrivals_s)
        tokens += per_event * sum(begin_s < at_s <= end_s for at_s in stream.arrivals_s)
    return tokens / (end_s - begin_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running daemon of the benchmark's own."""

    base_url: str
    runtime_dir: Path


@asynccontextmanager
async def service(model_dir: Path) -> AsyncIterator[Service]:
    """Start a daemon on a free loopback port and wait until it can serve; stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "freetokend.daemon", "--model", str(model_dir)),
            *("--port", "0", "--set", f"service.runtime_dir={name}/run"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        base_url = ""
        async for raw in process.stderr:
            line = raw.decode()
            if match := re.search(r"http-listening address=(\S+)", line):
                base_url = match[1]
            if re.search(r"link\.session engine-ready", line):
                break
        drain = asyncio.create_task(process.stderr.read())
        try:
            if not base_url:
                raise RuntimeError("the daemon did not start; run it by hand to see why")
            yield Service(base_url=base_url, runtime_dir=Path(name) / "run")
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            await drain


async def _run(arguments: argparse.Namespace) -> list[Row]:
    rounds_count, tokens = (3, 24) if arguments.quick else (5, 48)
    one_rates: list[float] = []
    many_rates: list[float] = []
    first_tokens: list[float] = []
    async with service(arguments.model) as running:
        limits = httpx.Limits(max_connections=arguments.clients)
        async with httpx.AsyncClient(base_url=running.base_url, timeout=600, limits=limits) as http:
            await _stream(http, 8)
            for _ in range(rounds_count):
                one = await _stream(http, tokens)
                many = await asyncio.gather(
                    *(_stream(http, tokens) for _ in range(arguments.clients))
                )
                one_rates.append(_decode_tokens_per_s([one]))
                many_rates.append(_decode_tokens_per_s(many))
                first_tokens.append(one.first_token_s)
    print(f"time to first token, one client: {statistics.median(first_tokens):.3f} s")
    ratios = [many / one for many, one in zip(many_rates, one_rates, strict=True)]
    return [
        Row(
            case=f"decode, {arguments.clients} streaming clients over HTTP",
            ours=statistics.median(many_rates),
            rival="one client",
            rival_value=statistics.median(one_rates),
            unit="tokens/s",
            ratio=statistics.median(ratios),
            goal=2.0,
        )
    ]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="an FTW directory")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="3 short rounds")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    write(asyncio.run(_run(arguments)), arguments.json)


if __name__ == "__main__":
    main()
