"""Every chain on Gaussian, heavy-tailed and real tensors: size against the entropy bound, error, speed and memory.

    python -m benchmarks.codecs [--quick] [--parameters N] [--chain TEXT ...] [--demo PATH] [--json FILE] [--plot FILE]

`bits/p` is bits a parameter, `times` how much smaller than float32; `bits/v` bits a sent value; `bound` the entropy of
evenly spread indices plus that of the levels; `over` the packet above that bound, scales and header included. `error`
is |decoded - tensor| / |tensor|; `lost` the same over the coefficients that were sent, so what the values cost. Speeds
are millions of parameters a second, best of several runs, for `encode` (tensors to bytes), `decode` (bytes to tensors)
and `local` (what a sender does: encode, and decode its own packet), on one thread (by the process's own CPU time, so
that a busy machine disturbs little) and on two (by the clock on the wall). `MB`: memory beyond what was held before.

Beside them hivemind's compressions and, with `--demo PATH`, the published DeMo code (`demo.py`, which is not part of
this project and needs einops), and the time of both with eight peers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import lgamma, log
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from averaging.merge import build_merge
from benchmarks.codec_data import matrices, momentum
from benchmarks.codec_rivals import DeMo, Rival, demo_rival, hivemind_rivals, load_demo
from compression.chain import Chain, parse_chain
from compression.indices import counts_of
from compression.levels import codes_of
from compression.merging import merge_flat
from compression.seam import Flat, Packet, TensorSpec

CHAINS = (
    "dct(64) topk(8/4096) bits(1)",
    "dct(64) topk(32/4096) bits(1)",
    "dct(64) topk(64/4096) bits(1)",
    "dct(64) topk(32/4096) bits(2)",
    "dct(64) topk(64/4096) bits(2)",
    "dct(64) topk(32/4096) fp32",
    "identity topk(4/4096) bits(1)",
    "identity topk(64/4096) bits(2)",
    "identity topk(64/4096) bits(4)",
    "identity topk(128/4096) bits(8)",
    "identity globaltopk(1/64) bits(2)",
    "identity random(64/4096) bits(4)",
    "identity mask(64/4096) bits(2)",
    "identity all bits(1)",
    "identity all bits(2)",
    "identity all bits(4)",
    "identity all int(4)",
    "identity all e3m0",
    "identity all bits(8)",
    "identity all int(8)",
    "identity all fp16",
    "identity all bf16",
)
STANDARD = "dct(64) topk(32/4096) bits(1)"
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One chain on one data set."""

    chain: str
    data: str
    k: int | None
    bits: int
    bits_per_parameter: float
    bits_per_value: float
    entropy_bits_per_value: float | None
    relative_error: float
    encode_mparams_per_s: float
    decode_mparams_per_s: float
    threads: int
    local_mparams_per_s: float
    encode_mparams_per_s_2_threads: float
    decode_mparams_per_s_2_threads: float
    lost: float | None
    peak_megabytes: float | None
    parameters: int


def main() -> None:
    arguments = parse_arguments()
    parameters = min(arguments.parameters, 1 << 18) if arguments.quick else arguments.parameters
    repetitions = 1 if arguments.quick else 3
    demo = load_demo(arguments.demo) if arguments.demo else None
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{platform.machine()}, {versions}, {parameters:,} parameters")
    data = matrices(parameters)
    torch.set_num_threads(2)
    data["gpt-small"] = momentum("gpt-small", *((2, 1) if arguments.quick else (30, 4)), parameters_max=parameters)
    print(heading())
    rows: list[Row] = []
    for name, tensors in data.items():
        for text in arguments.chain or CHAINS:
            rows.append(measure_chain(parse_chain(text), name, tensors, repetitions))
            print(line(rows[-1]), flush=True)
        rivals = hivemind_rivals(tensors)
        published = demo_rival(demo, tensors) if demo else None
        for rival in [*rivals, *([published.rival] if published else [])]:
            rows.append(measure_rival(rival, name, tensors, repetitions))
            print(line(rows[-1]), flush=True)
        if name != "student-3":
            print("\n".join(time_table(parse_chain(STANDARD), tensors, published, repetitions)), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="262,144 parameters, one run each: under 30 s")
    parser.add_argument("--parameters", type=int, default=10_485_760)
    parser.add_argument("--chain", action="append", help="measure this chain instead of the usual ones; repeatable")
    parser.add_argument("--demo", type=Path, help="demo.py of the published DeMo optimiser, to compare with")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="draw error against bits here (needs matplotlib)")
    return parser.parse_args()


def measure_chain(chain: Chain, data: str, tensors: Tensors, repetitions: int) -> Row:
    specs = [TensorSpec.of(tensors[name]) for name in sorted(tensors)]
    packets = chain.compress_all(tensors)
    packet = chain.pack(packets, specs)
    count = sum(len(part.levels) for part in packets)
    decoded = chain.decompress_all(packets, specs)
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: chain.pack(chain.compress_all(tensors), specs),
        "decode": lambda: chain.decompress_all(chain.unpack(packet, specs), specs),
        "own": lambda: chain.decompress_all(packets, specs),
    }
    one, two = speeds(works, 1, repetitions), speeds(works, 2, repetitions)
    total = sum(tensor.numel() for tensor in tensors.values())
    selection = chain.selection
    return Row(
        chain=str(chain),
        data=data,
        k=getattr(selection, "kept", None),
        bits=chain.values.level_bits,
        bits_per_parameter=8 * len(packet) / total,
        bits_per_value=8 * len(packet) / count,
        entropy_bits_per_value=bound_bits(chain, packets, specs) / count,
        relative_error=error([tensors[name] for name in sorted(tensors)], decoded),
        encode_mparams_per_s=total / one["encode"] / 1e6,
        decode_mparams_per_s=total / one["decode"] / 1e6,
        threads=1,
        local_mparams_per_s=total / (one["encode"] + one["own"]) / 1e6,
        encode_mparams_per_s_2_threads=total / two["encode"] / 1e6,
        decode_mparams_per_s_2_threads=total / two["decode"] / 1e6,
        lost=lost(chain, tensors),
        peak_megabytes=peak_megabytes(lambda: (works["encode"](), works["decode"]())),
        parameters=total,
    )


def measure_rival(rival: Rival, data: str, tensors: Tensors, repetitions: int) -> Row:
    sent, bits = rival.encode()
    works: dict[str, Callable[[], object]] = {"encode": rival.encode, "decode": lambda: rival.decode(sent)}
    one, two = speeds(works, 1, repetitions), speeds(works, 2, repetitions)
    total = sum(tensor.numel() for tensor in tensors.values())
    return Row(
        chain=rival.name,
        data=data,
        k=rival.k,
        bits=rival.bits,
        bits_per_parameter=bits / total,
        bits_per_value=bits / rival.values,
        entropy_bits_per_value=None,
        relative_error=error(list(tensors.values()), rival.decode(sent)),
        encode_mparams_per_s=total / one["encode"] / 1e6,
        decode_mparams_per_s=total / one["decode"] / 1e6,
        threads=1,
        local_mparams_per_s=total / (one["encode"] + one["decode"]) / 1e6,
        encode_mparams_per_s_2_threads=total / two["encode"] / 1e6,
        decode_mparams_per_s_2_threads=total / two["decode"] / 1e6,
        lost=None,
        peak_megabytes=peak_megabytes(lambda: (rival.encode(), rival.decode(sent))),
        parameters=total,
    )


def speeds(works: Mapping[str, Callable[[], object]], threads: int, repetitions: int) -> dict[str, float]:
    """The best of several runs of each, in turn, in seconds."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repetitions):
        for name, work in works.items():
            start = clock()
            work()
            best[name] = min(best[name], clock() - start)
    torch.set_num_threads(1)
    return best


def bound_bits(chain: Chain, packets: list[Packet], specs: list[TensorSpec]) -> float:
    """log2 C(n, k) for the indices of each chunk with what it sends, and the entropy of the levels' symbols."""
    values = chain.values
    codes = codes_of([packet.levels for packet in packets], values)
    low = values.level_bits - 1 - values.symbol_bits
    counts = np.bincount(((codes >> low) & ((1 << values.symbol_bits) - 1)).astype(np.int64))
    shares = counts[counts > 0] / max(1, len(codes))
    bits = len(codes) * (1 + low - float((shares * np.log2(shares)).sum()))
    chunks = chain.frame(specs).chunks()
    if chunks is None or chain.selection.drawn:
        return bits
    indices = [packet.indices.numpy() for packet in packets if packet.indices is not None]
    pairs = zip(chunks.lengths.tolist(), counts_of(indices, chunks).tolist(), strict=True)
    return bits + sum(log_binomial(n, k) for n, k in pairs)


def log_binomial(n: int, k: int) -> float:
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


def error(tensors: list[Tensor], decoded: list[Tensor]) -> float:
    pairs = list(zip(tensors, decoded, strict=True))
    off = sum(float((got.view(tensor.shape) - tensor).double().square().sum()) for tensor, got in pairs)
    return (off / sum(float(tensor.double().square().sum()) for tensor in tensors)) ** 0.5


def lost(chain: Chain, tensors: Tensors) -> float:
    off = energy = 0.0
    for tensor in tensors.values():
        packet = chain.compress(tensor)
        coefficients = chain.transform.forward(tensor)
        values = coefficients if packet.indices is None else coefficients[packet.indices]
        off += float((chain.values_of(packet) - values).double().square().sum())
        energy += float(values.double().square().sum())
    return float((off / energy) ** 0.5)


def peak_megabytes(work: Callable[[], object]) -> float | None:
    """Linux only: the kernel's own peak of resident memory, set back before."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # What was freed before would hide what is taken now.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_megabytes("VmRSS")
        work()
        return max(0.0, _status_megabytes("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _status_megabytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in lines if text.startswith(field)) / 1024


def time_table(chain: Chain, tensors: Tensors, published: DeMo | None, repetitions: int) -> list[str]:
    """Where a sender's and a receiver's CPU time goes, on one thread, beside the matrix products alone; in turn."""
    specs = [TensorSpec.of(tensors[name]) for name in sorted(tensors)]
    total = sum(tensor.numel() for tensor in tensors.values())
    packets = chain.compress_all(tensors)
    packet = chain.pack(packets, specs)
    coefficients = [chain.transform.forward(tensor) for tensor in tensors.values()]
    flat = [chain.flatten(packets, specs) for _ in range(8)]
    merge = build_merge("mean")
    block = torch.randn(2048, 64)
    basis = torch.randn(64, 64)
    block64, basis64 = block.double(), basis.double()
    times = total // block.numel()

    def merged(unpacked: list[Flat]) -> object:
        result = merge_flat(unpacked, lambda parts: merge.merge([{"": part} for part in parts], [1] * 8)[""])
        return chain.restore_all(result, specs)

    works: dict[str, Callable[[], object]] = {
        "forward DCT": lambda: [chain.transform.forward(tensor) for tensor in tensors.values()],
        "top-k": lambda: [chain.selection.select(part, len(part)) for part in coefficients],
        "compress (both, and levels)": lambda: chain.compress_all(tensors),
        "pack": lambda: chain.pack(packets, specs),
        "unpack": lambda: chain.unpack(packet, specs),
        "inverse DCT of one packet": lambda: chain.decompress_all(packets, specs),
        "merge and decode 8 peers": lambda: merged(flat),
        "the same, unpacking included": lambda: merged(
            [chain.flatten(chain.unpack(packet, specs), specs) for _ in range(8)]
        ),
        "two float32 products alone": lambda: [torch.mm(block, basis) for _ in range(2 * times)],
        "two float64 products alone": lambda: [torch.mm(block64, basis64) for _ in range(2 * times)],
    }
    if published is not None:
        sent, _ = published.rival.encode()
        works["DeMo: encode"] = published.rival.encode
        works["DeMo: decode"] = lambda: published.rival.decode(sent)
        works["DeMo: merge and decode 8 peers"] = lambda: published.merge(8)
    best = speeds(works, 1, repetitions)
    lines = [f"    {name:32} {1e3 * seconds:8.1f} ms" for name, seconds in best.items()]
    if published is not None:
        ours = best["compress (both, and levels)"] + best["pack"] + best["inverse DCT of one packet"]
        theirs = best["DeMo: encode"] + best["DeMo: decode"]
        lines.append(f"    encode and local decode: {theirs / ours:.2f} times the speed of DeMo as published")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: install the extra 'plot'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({row.data for row in rows})
    figure, axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 6), sharey=True, squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        for row in rows:
            if row.data == name:
                axis.plot(row.bits_per_parameter, row.relative_error, "o" if row.entropy_bits_per_value else "x")
                axis.annotate(row.chain, (row.bits_per_parameter, row.relative_error), fontsize=6)
        axis.set(xscale="log", yscale="log", title=name, xlabel="bits a parameter", ylabel="relative error")
        axis.grid(visible=True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def heading() -> str:
    names = f"{'bits/p':>8} {'times':>6} {'bits/v':>7} {'bound':>6} {'over':>6} {'error':>7} {'lost':>7}"
    return f"{'chain':34} {'data':9} {names}  {'encode 1/2':>11} {'decode 1/2':>11} {'local':>6} {'MB':>5}"


def line(row: Row) -> str:
    bound = row.entropy_bits_per_value
    over = f"{bound:6.2f} {100 * (row.bits_per_value / bound - 1):5.2f}%" if bound else " " * 13
    lost_text = f"{row.lost:7.4f}" if row.lost is not None else " " * 7
    memory = f"{row.peak_megabytes:5.0f}" if row.peak_megabytes is not None else "    -"
    return (
        f"{row.chain:34} {row.data:9} {row.bits_per_parameter:8.4f} {32 / row.bits_per_parameter:6.0f}"
        f" {row.bits_per_value:7.3f} {over} {row.relative_error:7.4f} {lost_text} "
        f" {row.encode_mparams_per_s:>5.0f}/{row.encode_mparams_per_s_2_threads:>5.0f}"
        f" {row.decode_mparams_per_s:>5.0f}/{row.decode_mparams_per_s_2_threads:>5.0f}"
        f" {row.local_mparams_per_s:6.0f} {memory}"
    )


if __name__ == "__main__":
    main()
