"""The real learner and its files: all peers hold the same bits, nothing foreign gets in, and what a run builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from averaging.contribution import Contribution, sign_contribution
from averaging.record import Hash
from models.registry import build_model
from network.seam import PeerID
from peer import checkpoint
from peer.build import Built, build_with, chosen_device, compressor_of, dense_bytes
from peer.data import Corpus, load_corpus
from peer.gossip_learner import GossipLearner
from peer.learner import Learner, Own, TorchLearner
from peer.owners_learner import OwnersLearner
from peer.spec import RunSpec, make_spec
from simulator.toy import ToySigner

SIGNERS = [ToySigner(number) for number in range(3)]
ME, OTHER = SIGNERS[0], SIGNERS[1]


def never() -> bool:
    return False


def contribution(signer: ToySigner, payload: bytes) -> Contribution:
    return sign_contribution(signer, Hash(bytes(32)), 10, bytes(16), True, payload)


def train_and_pack(learner: Learner) -> bytes:
    learner.train(0, never)
    return learner.pack(0)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(())


def spec_of(**settings: Any) -> RunSpec:
    return make_spec(PeerID(ME.peer_id), name="test", model="gpt-nano", preset="distro", settings=settings)


def built(corpus: Corpus, signer: ToySigner = ME) -> Built:
    torch.set_num_threads(1)
    return build_with(spec_of(batch=2), signer.peer_id, corpus)


def built_together(corpus: Corpus) -> list[TorchLearner | GossipLearner | OwnersLearner]:
    """Two learners that unpack each payload once between them, as in a virtual swarm."""
    torch.set_num_threads(1)
    spec = spec_of(batch=2)
    compressor = compressor_of(spec)
    return [build_with(spec, signer.peer_id, corpus, compressor=compressor).learner for signer in (ME, OTHER)]


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_two_peers_that_apply_the_same_rounds_hold_the_same_bits(corpus: Corpus) -> None:
    one, other = built(corpus).learner, built(corpus, OTHER).learner
    assert one.fingerprint() == other.fingerprint()
    for number in (1, 2):
        payloads = [contribution(ME, train_and_pack(one)), contribution(OTHER, train_and_pack(other))]
        one.apply(number, payloads, Own.SAID)
        other.apply(number, payloads[::-1], Own.SAID)
        assert one.fingerprint() == other.fingerprint()
        assert not equal(one.state.residual, other.state.residual)
    assert one.validation_loss() == other.validation_loss()


def test_peers_of_one_process_may_share_what_they_unpack(corpus: Corpus) -> None:
    together, apart = built_together(corpus), [built(corpus, signer).learner for signer in (ME, OTHER)]
    for number in (1, 2):
        for learners in (together, apart):
            said = [contribution(s, train_and_pack(one)) for s, one in zip((ME, OTHER), learners, strict=True)]
            for learner in learners:
                learner.apply(number, said, Own.SAID)
    assert len({learner.fingerprint() for learner in (*together, *apart)}) == 1
    for one, other in zip(together, apart, strict=True):
        assert equal(one.state.residual, other.state.residual)


def test_a_newcomer_replays_or_loads_to_the_same_bits(corpus: Corpus) -> None:
    one, replaying, loading = (built(corpus, s).learner for s in SIGNERS)
    payloads = [contribution(ME, train_and_pack(one))]
    one.apply(1, payloads, Own.SAID)
    replaying.apply(1, payloads, Own.NOTHING)
    files = one.dump(shared_only=True)
    assert loading.fingerprint_of(files) == one.fingerprint() != loading.fingerprint()
    assert loading.load(files, own=False) == one.fingerprint()
    assert replaying.fingerprint() == loading.fingerprint() == one.fingerprint()
    assert loading.state.residual == {}


def test_a_payload_that_cannot_be_merged_is_refused(corpus: Corpus) -> None:
    learner = built(corpus).learner
    payload = train_and_pack(learner)
    learner.check(payload)
    for bad in (b"", payload[:-1], payload + b"\0", bytes(len(payload))):
        with pytest.raises(ValueError):
            learner.check(bad)


# Checkpoints.


def test_a_state_goes_there_and_back_with_its_residual(corpus: Corpus) -> None:
    learner = built(corpus).learner
    learner.apply(1, [contribution(ME, train_and_pack(learner))], Own.SAID)
    train_and_pack(learner)
    learner.apply(2, [], Own.MISSED)
    state = learner.state
    assert state.residual and state.missed
    loaded = checkpoint.load(checkpoint.dump(state), state)
    assert equal(loaded.anchor, state.anchor) and equal(loaded.outer, state.outer)
    assert equal(loaded.residual, state.residual) and loaded.missed
    fresh = built(corpus).learner
    assert fresh.load(learner.dump(), own=True) == learner.fingerprint()
    assert equal(fresh.state.residual, state.residual)
    assert checkpoint.RESIDUAL not in learner.dump(shared_only=True)


def changed(files: Mapping[str, bytes], name: str, data: bytes | None) -> dict[str, bytes]:
    return {k: v for k, v in files.items() if k != name} | ({} if data is None else {name: data})


Spoil = Callable[[dict[str, Tensor]], dict[str, Tensor]]
SPOILT: dict[str, Spoil] = {
    "another name": lambda t: {f"{k}x": v for k, v in t.items()},
    "one too few": lambda t: dict(list(t.items())[1:]),
    "another shape": lambda t: {k: v.reshape(-1, 1) for k, v in t.items()},
    "another type": lambda t: {k: v.double() for k, v in t.items()},
    "not a number": lambda t: {k: torch.full_like(v, float("nan")) for k, v in t.items()},
    "infinite": lambda t: {k: torch.full_like(v, float("inf")) for k, v in t.items()},
}


@pytest.mark.parametrize("how", sorted(SPOILT))
def test_a_strangers_files_that_do_not_fit_change_nothing(how: str, corpus: Corpus) -> None:
    learner = built(corpus).learner
    before = learner.fingerprint()
    files = checkpoint.dump(replace(learner.state, anchor=SPOILT[how](learner.state.anchor)))
    with pytest.raises(ValueError):
        learner.fingerprint_of(files)
    with pytest.raises(ValueError):
        learner.load(files, own=False)
    assert learner.fingerprint() == before


def test_missing_cut_and_foreign_files_are_refused(corpus: Corpus) -> None:
    learner = built(corpus).learner
    files = learner.dump()
    for name in (checkpoint.ANCHOR, checkpoint.OUTER):
        for data in (None, b"", files[name][:-1], files[name][:10], bytes(100), b"\xff" * 100):
            with pytest.raises(ValueError):
                learner.fingerprint_of(changed(files, name, data))
    for data in (b"\xc1", b"\x81", b"\xff" * 3):
        with pytest.raises(ValueError):
            learner.fingerprint_of(changed(files, checkpoint.META, data))
    for harmless in (msgpack.packb([1]), msgpack.packb({"missed": 7}), None):
        assert learner.fingerprint_of(changed(files, checkpoint.META, harmless)) == learner.fingerprint()


# Building.


def test_what_is_built_follows_the_run(corpus: Corpus) -> None:
    spec = spec_of(batch=2)
    run = build_with(spec, ME.peer_id, corpus)
    model = build_model("gpt-nano", spec.run.seed)
    assert run.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    anchor = dict(model.named_parameters())
    assert all(torch.equal(tensor, anchor[name].detach()) for name, tensor in run.learner.state.anchor.items())
    state = [*run.learner.state.anchor.values(), *run.learner.state.outer.values()]
    assert run.engine.snapshot_bytes == 4 * sum(tensor.numel() for tensor in state)
    files = sum(len(data) for data in run.learner.dump().values())
    assert files <= run.snapshots.bytes_max


def test_no_honest_payload_is_beyond_the_limits(corpus: Corpus) -> None:
    run = built(corpus)
    trained = run.learner.train(0, never)
    assert 0 < trained.tokens <= run.engine.weight_max
    assert len(run.learner.pack(0)) <= run.engine.payload_bytes_max


def test_dense_bytes_are_those_of_a_ring() -> None:
    assert dense_bytes(1000, 1, 1) == 0
    assert dense_bytes(1000, 1, 2) == 4000
    assert dense_bytes(1000, 3, 4) == 2 * 3 / 4 * 4 * 1000 * 3


def test_a_device_that_is_not_there_is_named() -> None:
    assert chosen_device("cpu") == "cpu"
    assert chosen_device("auto") in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda:1"):
            chosen_device("cuda:1")


def test_training_that_diverges_offers_nothing(corpus: Corpus) -> None:
    learner = built(corpus).learner
    assert isinstance(learner, TorchLearner)
    spoilt = {name: torch.full_like(tensor, float("nan")) for name, tensor in learner.state.anchor.items()}
    learner.state = replace(learner.state, anchor=spoilt)
    trained = learner.train(0, never)
    assert trained.tokens == 0 and trained.loss != trained.loss
