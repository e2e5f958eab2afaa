#!/usr/bin/env python3
"""200 requests at a concurrency of 16, some of them bad, some of whose clients go: what is not provoked must not fail.

usage: python3 scripts/clients/load.py [REQUESTS] [CONCURRENCY]

Checks that every greedy reply is the one that the same request gets alone, that bad bodies get their 400, and that
memory, threads and open files are back where they were after the same load before. Standard library only.
"""

import asyncio
import json
import random
import sys
from pathlib import Path

from server import CHECKPOINTS, serving

# The end-of-sequence token of the tiny checkpoints is kept out, so that replies have the length asked for.
BIAS = {"2": -1000}
BAD = [b"{", b"[]", b'{"messages": []}', b'{"messages": "x"}', b'{"messages": [{"role": "user"}], "top_p": 7}']


async def post(address, body, give_up=None):
    """Status and text; with `give_up` the connection is closed after so many bytes of the reply."""
    host, port = address
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        await writer.drain()
        if give_up is not None:
            if give_up:
                await reader.read(give_up)
            return None, None
        raw = await reader.read()
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass
    head, _, text = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), text


def request(seed):
    chance = random.Random(seed)
    words = " ".join(chance.choice(["one", "two", "three", "four"]) for _ in range(chance.randint(1, 60)))
    tokens = chance.randint(1, 120)
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": tokens, "logit_bias": BIAS, "temperature": 0}
    return body


async def fire(address, count, concurrency, expected):
    gate = asyncio.Semaphore(concurrency)
    failures = []

    async def one(index):
        chance = random.Random(index * 7919)
        async with gate:
            kind = chance.random()
            body = request(index % len(expected))
            if kind < 0.1:
                status, _ = await post(address, chance.choice(BAD))
                if status != 400:
                    failures.append(f"request {index}: a bad body got {status}")
            elif kind < 0.25:
                body["stream"] = chance.random() < 0.5
                await post(address, json.dumps(body).encode(), give_up=chance.choice([0, 0, 200, 1000]))
            else:
                status, text = await post(address, json.dumps(body).encode())
                reply = json.loads(text)
                if status != 200:
                    failures.append(f"request {index}: {status} {text[:200]}")
                elif reply["choices"][0]["message"]["content"] != expected[index % len(expected)]:
                    failures.append(f"request {index}: another text than alone")

    await asyncio.gather(*(one(index) for index in range(count)))
    return failures


def footprint(process):
    base = Path("/proc") / str(process.pid)
    if not base.exists():
        return None
    status = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines())
    files = len(list((base / "fd").iterdir()))
    return {"rss_mb": int(status["VmRSS"].split()[0]) / 1024, "threads": int(status["Threads"]), "files": files}


async def idle(address):
    host, port = address
    for _ in range(600):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /stats HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        raw = await reader.read()
        writer.close()
        batch = json.loads(raw.partition(b"\r\n\r\n")[2])["batch"]
        if batch["active_rows"] == 0 and batch["pending_rows"] == 0:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"rows are left behind: {batch}")


async def check(url, process, count, concurrency):
    host, port = url.removeprefix("http://").split(":")
    address = (host, int(port))
    expected = []
    for seed in range(40):
        status, text = await post(address, json.dumps(request(seed)).encode())
        assert status == 200, text
        expected.append(json.loads(text)["choices"][0]["message"]["content"])
    failures = []
    # The first round is the baseline: allocators keep what they had.
    prints = []
    for _ in range(3):
        failures += await fire(address, count, concurrency, expected)
        await idle(address)
        prints.append(footprint(process))
    print(f"footprints after each round: {prints}")
    before, after = prints[0], prints[-1]
    if before:
        if after["files"] > before["files"] + 2:
            failures.append(f"open files grew from {before['files']} to {after['files']}")
        if after["threads"] > before["threads"] + 4:
            failures.append(f"threads grew from {before['threads']} to {after['threads']}")
        if after["rss_mb"] > before["rss_mb"] * 1.1 + 16:
            failures.append(f"memory grew from {before['rss_mb']:.0f} to {after['rss_mb']:.0f} MB")
    return failures


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    concurrency = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    with serving(CHECKPOINTS / "llama-f32", "--prompt-cache", "0.01") as (url, process):
        failures = asyncio.run(check(url, process, count, concurrency))
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    print(f"{3 * count} requests at {concurrency}: {len(failures)} failures")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
