"""A coverage-guided fuzzer of the codec, for atheris (https://pypi.org/project/atheris); not a part of the test suite.

    python tests/compression/fuzz_codec.py -max_total_time=600 [folder with a corpus]

From the root of the checkout, with atheris in the environment. Every input is read as a packet of one of the chains:
with its own first bytes, or after the right header. Whatever is not refused with `InvalidPacket` must be finite, within
the tensors' bounds, and the one encoding of what it decodes to. libFuzzer writes an input that breaks this to a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import atheris

with atheris.instrument_imports(include=["compression"]):
    import torch

    from compression.chain import Chain, parse_chain
    from compression.header import describe, header_of, layout_of
    from compression.seam import InvalidPacket, TensorSpec

SHAPES = [(), (9,), (0,), (20, 30), (64, 64), (7, 5, 3)]
FIELDS = frozenset(
    (
        "length",
        "version",
        "chain",
        "layout",
        "coded",
        "full",
        "counts",
        "seeds",
        "scales",
        "indices",
        "levels",
        "header",
    )
)
CHAINS = [
    parse_chain(text)
    for text in (
        "dct(64) topk(32/4096) bits(1)",
        "identity topk(3/64) bits(2)",
        "identity topk(300/2000) e3m0",
        "dct(64) globaltopk(1/50) bits(4)",
        "identity random(3/64) bits(8)",
        "dct(8) mask(3/64) int(4)",
        "identity topk(5/64) fp16",
        "identity all bf16",
        "identity all fp32",
        "identity all bits(2)",
    )
]
# Enough values that their levels may come coded.
LARGE = parse_chain("identity all bits(2)"), [TensorSpec((96, 96), torch.float32)]
SPECS = [TensorSpec(shape, torch.float32) for shape in SHAPES]


def try_packet(data: bytes) -> None:
    if len(data) < 2:
        return
    chain, specs = LARGE if data[0] == len(CHAINS) else (CHAINS[data[0] % len(CHAINS)], SPECS)
    head = header_of(str(chain), layout_of(specs)) if data[1] & 1 else b""
    check(chain, specs, head + data[2:])


def check(chain: Chain, specs: list[TensorSpec], data: bytes) -> None:
    try:
        describe(data)
    except InvalidPacket as error:
        assert str(error).partition(":")[0] in FIELDS, error
    try:
        packets = chain.unpack(data, specs)
    except InvalidPacket as error:
        assert str(error).partition(":")[0] in FIELDS, error
        return
    assert chain.pack(packets, specs) == data, "two encodings of one content"
    for packet, spec in zip(packets, specs, strict=True):
        if packet.indices is not None and len(packet.indices):
            assert bool((packet.indices.diff() > 0).all())
            assert int(packet.indices[0]) >= 0
            assert int(packet.indices[-1]) < chain.transform.size(spec.shape)
    for tensor, spec in zip(chain.decompress_all(packets, specs), specs, strict=True):
        assert tuple(tensor.shape) == spec.shape
        assert bool(torch.isfinite(tensor).all())


def seeds() -> list[bytes]:
    """A valid packet of every chain, to start from."""
    inputs = []
    for number, (chain, specs) in enumerate([*((chain, SPECS) for chain in CHAINS), LARGE]):
        for scale in (0.0, 1e-3):
            tensors = {
                f"{i:02}": torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) * scale
                for i, spec in enumerate(specs)
            }
            packed = chain.pack(chain.compress_all(tensors), specs)
            inputs.append(bytes([number, 1]) + packed[describe(packed).header_bytes :])
            inputs.append(bytes([number, 0]) + packed)
    return inputs


def main() -> None:
    torch.set_num_threads(1)
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if folders:
        Path(folders[0]).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds()):
            (Path(folders[0]) / f"seed-{number:02}").write_bytes(data)
    atheris.Setup(sys.argv, try_packet)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
