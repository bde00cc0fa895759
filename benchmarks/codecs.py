"""Every chain on Gaussian and heavy-tailed tensors: size against the entropy bound, error, and speed.

    python benchmarks/codecs.py [--quick] [--parameters N] [--chain TEXT ...] [--json FILE]

`bits/p` is bits a parameter; `bits/v` bits a sent value; `bound` the entropy of evenly spread indices plus the
levels' bits; `over` the packet above that bound, scales and header included. `error` is |decoded - tensor|/|tensor|;
`lost` the same over the coefficients that were sent, so what the values cost. Speeds are millions of parameters a
second, best of several runs, for `encode` (tensor to bytes), `decode` (bytes to tensor) and both, as a sender does,
on one thread (by its own CPU time, so that a busy machine disturbs little) and on two (by the clock on the wall).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import lgamma, log
from pathlib import Path

import torch
from torch import Tensor

from compression.chain import Chain, parse_chain
from compression.seam import TensorSpec

CHAINS = (
    "dct(64) topk(8/4096) bits(1)",
    "dct(64) topk(32/4096) bits(1)",
    "dct(64) topk(32/4096) bits(2)",
    "dct(64) topk(32/4096) fp32",
    "identity topk(64/4096) bits(1)",
    "identity topk(64/4096) bits(2)",
    "identity topk(64/4096) bits(4)",
    "identity all bits(1)",
    "identity all bits(2)",
    "identity all bits(4)",
    "identity all bits(8)",
    "identity all fp16",
)


@dataclass(frozen=True)
class Row:
    """One chain on one tensor."""

    chain: str
    tensor: str
    parameters: int
    packet_bytes: int
    bits_per_parameter: float
    bits_per_value: float
    bound_per_value: float
    over_percent: float
    error: float
    lost: float
    encode: dict[int, float]
    decode: dict[int, float]
    both: dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="half a million parameters and few repetitions: under 30 s"
    )
    parser.add_argument("--parameters", type=int, default=10_485_760)
    parser.add_argument("--chain", action="append", help="measure this chain instead of the usual ones; repeatable")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    parameters = min(arguments.parameters, 1 << 19) if arguments.quick else arguments.parameters
    repetitions = 2 if arguments.quick else 5
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    print(heading())
    rows = []
    for name, tensor in tensors(parameters).items():
        for text in arguments.chain or CHAINS:
            rows.append(measure(parse_chain(text), name, tensor, repetitions))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def tensors(parameters: int) -> dict[str, Tensor]:
    """Matrices of about as many elements; a momentum's coefficients lie between these two."""
    rows = max(1, parameters // 2048)
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(rows, 2048, generator=generator)
    # Student's t with 3 degrees of freedom: a Gaussian over the root of a chi-square.
    squares = sum(torch.randn(rows, 2048, generator=generator).square() for _ in range(3))
    assert isinstance(squares, Tensor)
    heavy = torch.randn(rows, 2048, generator=generator) / (squares / 3).sqrt()
    return {"gaussian": gaussian * 1e-3, "student-3": heavy * 1e-3}


def measure(chain: Chain, name: str, tensor: Tensor, repetitions: int) -> Row:
    specs = [TensorSpec.of(tensor)]
    packet = chain.compress(tensor)
    data = chain.pack([packet], specs)
    decoded = chain.decompress(packet, specs[0])
    count = len(packet.levels)
    bound = bound_bits(chain, specs)
    speeds: dict[str, dict[int, float]] = {"encode": {}, "decode": {}, "both": {}}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        clock = time.process_time if threads == 1 else time.perf_counter
        encode = seconds(lambda: chain.pack([chain.compress(tensor)], specs), repetitions, clock)
        decode = seconds(lambda: chain.decompress(chain.unpack(data, specs)[0], specs[0]), repetitions, clock)
        for key, spent in (("encode", encode), ("decode", decode), ("both", encode + decode)):
            speeds[key][threads] = tensor.numel() / spent / 1e6
    return Row(
        chain=str(chain),
        tensor=name,
        parameters=tensor.numel(),
        packet_bytes=len(data),
        bits_per_parameter=8 * len(data) / tensor.numel(),
        bits_per_value=8 * len(data) / count,
        bound_per_value=bound / count,
        over_percent=100 * (8 * len(data) / bound - 1),
        error=float((decoded - tensor).norm() / tensor.norm()),
        lost=lost(chain, tensor),
        **speeds,
    )


def bound_bits(chain: Chain, specs: list[TensorSpec]) -> float:
    """log2 C(n, k) for the indices of each chunk, and the levels as they are."""
    frame = chain.frame(specs)
    chunks = frame.chunks()
    if chunks is None:
        return sum(frame.sizes) * chain.values.level_bits
    pairs = zip(chunks.lengths.tolist(), chunks.capacities.tolist(), strict=True)
    bits: float = sum(log_binomial(n, k) + k * chain.values.level_bits for n, k in pairs)
    return bits


def log_binomial(n: int, k: int) -> float:
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


def lost(chain: Chain, tensor: Tensor) -> float:
    coefficients = chain.transform.forward(tensor)
    indices = chain.selection.select(coefficients)
    values = coefficients if indices is None else coefficients[indices]
    blocks = chain.values.blocks(len(values), chain.selection.alike)
    decoded = chain.values.dequantise(*chain.values.quantise(values, blocks))
    return float((decoded - values).norm() / values.norm())


def seconds(work: Callable[[], object], repetitions: int, clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(repetitions):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best


def heading() -> str:
    speeds = "  ".join(f"{name:>11}" for name in ("encode 1/2", "decode 1/2", "both 1/2"))
    names = f"{'bits/p':>7} {'bits/v':>7} {'bound':>6} {'over':>6} {'error':>7} {'lost':>7}"
    return f"{'chain':31} {'tensor':9} {names}  {speeds}"


def line(row: Row) -> str:
    speeds = "  ".join(f"{speed[1]:>5.0f}/{speed[2]:>5.0f}" for speed in (row.encode, row.decode, row.both))
    return (
        f"{row.chain:31} {row.tensor:9} {row.bits_per_parameter:7.4f} {row.bits_per_value:7.3f}"
        f" {row.bound_per_value:6.2f} {row.over_percent:5.2f}% {row.error:7.4f} {row.lost:7.4f}  {speeds}"
    )


if __name__ == "__main__":
    main()
