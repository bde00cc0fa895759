"""One process with hivemind's `DecentralizedAverager` over 1 million float32 parameters; see `round_overhead`."""

from __future__ import annotations

import json
import sys
import time

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.dht import DHT

from benchmarks.children import answer

PARAMETERS = 1_000_000


def run_averager(peers: int, seconds_max: float) -> None:
    """One of so many, whose rounds fail after `seconds_max`. A round starts as soon as its group is full, the fastest
    that it can: no time is spent waiting for more peers.
    """
    line = json.loads(sys.stdin.readline())
    dht = DHT(initial_peers=line["initial_peers"], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = None
    try:
        averager = DecentralizedAverager(
            [torch.randn(PARAMETERS)],
            dht,
            prefix="benchmark",
            target_group_size=peers,
            min_group_size=peers,
            start=True,
        )
        answer({"addresses": [str(address) for address in dht.get_visible_maddrs()]})
        for text in sys.stdin:
            begin = json.loads(text)["at"]
            time.sleep(max(0.0, begin - time.monotonic()))
            ready = time.monotonic()
            try:
                group = averager.step(timeout=seconds_max, allow_retries=False)
            except Exception as error:  # It raises many kinds; a failed round is a result too.
                answer({"ready": ready, "done": None, "error": repr(error)[:200]})
                continue
            answer({"ready": ready, "done": time.monotonic(), "members": len(group) if group else 0})
    finally:
        if averager is not None:
            averager.shutdown()
        dht.shutdown()
