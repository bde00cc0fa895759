"""Chains are named in a run's specification; a wrong name says what is wrong and what there is."""

from __future__ import annotations

import pytest

from compression.chain import Chain, parse_chain
from compression.quantise import Levels
from compression.select import All, TopK
from compression.transform import Dct, Identity
from compression.values import Floats


def test_names_are_values() -> None:
    assert parse_chain("dct(64) topk(32/4096) bits(1)") == Chain(Dct(64), TopK(32, 4096), Levels("bits(1)"))
    assert parse_chain("  identity   all\tfp16 ") == Chain(Identity(), All(), Floats("fp16"))
    assert str(parse_chain("dct(064) topk(1/08) bits(1)")) == "dct(64) topk(1/8) bits(1)"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"three words"),
        ("fp16", r"three words, a transform \(dct\(n\), identity\)"),
        ("fft(64) all fp16", r"transform 'fft\(64\)' does not exist; there are dct\(n\), identity"),
        ("dct(x) all fp16", r"transform 'dct\(x\)' does not exist"),
        (
            "dct(64) top(3) fp16",
            r"selection 'top\(3\)' does not exist; there are topk\(k/n\), .*, mask\(k/n\), all",
        ),
        ("dct(64) all int8", r"values 'int8' does not exist; there are fp32, bf16, fp16, bits\(b\), int\(b\), e3m0"),
        ("dct(64) all bits(3)", r"bits\(3\): .*bits\(1\), bits\(2\), bits\(4\), bits\(8\)"),
        ("dct(1) all fp16", r"dct\(1\)"),
        ("dct(99999999999) all fp16", r"does not exist"),
        ("identity topk(9/8) fp16", r"topk\(9/8\)"),
    ],
)
def test_a_wrong_name_is_explained(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_chain(text)
