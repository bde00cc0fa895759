"""The wrapper that unpacks once gives what the compressor gives, and forgets what is old."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from compression.chain import parse_chain
from compression.remembering import Remembering
from compression.seam import InvalidPacket, TensorSpec

CHAIN = parse_chain("dct(64) topk(32/4096) bits(1)")
SPECS = [TensorSpec((70, 65), torch.float32)]
IDENTITY = parse_chain("identity all fp32")
FEW = [TensorSpec((4,), torch.float32)]


def payload(seed: int) -> bytes:
    tensor = torch.randn(70, 65, generator=torch.Generator().manual_seed(seed))
    return CHAIN.pack([CHAIN.compress(tensor)], SPECS)


def test_a_payload_is_unpacked_once_and_alike() -> None:
    remembering = Remembering(CHAIN)
    first = remembering.unpack(payload(0), SPECS)
    assert remembering.unpack(bytes(bytearray(payload(0))), SPECS) is first
    (expected,) = CHAIN.unpack(payload(0), SPECS)
    assert torch.equal(CHAIN.coefficients(first[0], SPECS[0]), CHAIN.coefficients(expected, SPECS[0]))


def test_the_oldest_is_forgotten() -> None:
    remembering = Remembering(CHAIN, payloads_max=2)
    first = remembering.unpack(payload(0), SPECS)
    for seed in (1, 2):
        remembering.unpack(payload(seed), SPECS)
    assert remembering.unpack(payload(0), SPECS) is not first


def test_no_more_bytes_are_kept_than_allowed() -> None:
    remembering = Remembering(CHAIN, bytes_max=len(payload(0)) - 1)
    first = remembering.unpack(payload(0), SPECS)
    assert remembering.unpack(payload(0), SPECS) is not first


def test_what_is_refused_is_refused_again() -> None:
    remembering = Remembering(CHAIN)
    for _ in range(2):
        with pytest.raises(InvalidPacket):
            remembering.unpack(b"nothing of the kind", SPECS)


def test_threads_may_unpack_at_the_same_time() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        remembering = Remembering(IDENTITY, payloads_max=40)
        given = [IDENTITY.pack([IDENTITY.compress(torch.full((4,), float(n)))], FEW) for n in range(60)]
        expected = [len(IDENTITY.unpack(payload, FEW)) for payload in given]

        def unpack_all() -> None:
            for _ in range(20):
                assert [len(remembering.unpack(payload, FEW)) for payload in given] == expected

        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(unpack_all) for _ in range(4)]:
                future.result()
    finally:
        sys.setswitchinterval(before)
