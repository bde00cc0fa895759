"""NoLoCo's step equals its equation over many rounds, keeps the mean of replicas, and mixes as fast as theory says."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimizers.gossip import GossipSettings, gossip_update, variance_factor
from optimizers.outer import OuterSettings, build_outer
from optimizers.presets import PRESETS, method_from_settings

SIZE = 3
Vector = list[float]


def reference_round(
    phi: list[Vector], momentum: list[Vector], theta: list[Vector], groups: list[list[int]], rules: tuple[float, ...]
) -> None:
    """The paper's equation, one number at a time: m <- mu m + eta mean(theta - phi) + gamma (mean(phi) - phi)."""
    mu, eta, gamma = rules
    before = [list(vector) for vector in phi]
    for group in groups:
        for i in group:
            for k in range(len(phi[i])):
                step = sum(theta[j][k] - before[j][k] for j in group) / len(group)
                mean = sum(before[j][k] for j in group) / len(group)
                momentum[i][k] = mu * momentum[i][k] + eta * step + gamma * (mean - before[i][k])
                phi[i][k] = before[i][k] + momentum[i][k]


def drawn_groups(peers: int, size: int, rng: random.Random) -> list[list[int]]:
    order = list(range(peers))
    rng.shuffle(order)
    return [order[at : at + size] for at in range(0, peers, size)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rules", [(0.5, 0.7, 0.7), (0.3, 0.4, 1.1), (0.0, 1.0, 1.0)])
def test_it_equals_the_equation_over_many_rounds(size: int, rules: tuple[float, float, float]) -> None:
    peers, rng = 6, random.Random(1)
    mu, eta, gamma = rules
    outer = build_outer(OuterSettings("heavyball", eta, mu))
    phi = [[rng.gauss(0, 1) for _ in range(SIZE)] for _ in range(peers)]
    momentum = [[0.0] * SIZE for _ in range(peers)]
    replicas = [{"w": torch.tensor(vector)} for vector in phi]
    states = [outer.init(replica) for replica in replicas]
    for number in range(60):
        groups = drawn_groups(peers, size, rng)
        # Inner steps that pull every peer to a point of its own: the deltas do not vanish.
        theta = [[0.9 * x + 0.1 * (i + k) / 5 for k, x in enumerate(vector)] for i, vector in enumerate(phi)]
        deltas = [
            {"w": replicas[i]["w"] * 0.1 - torch.tensor([0.1 * (i + k) / 5 for k in range(SIZE)])} for i in range(peers)
        ]
        reference_round(phi, momentum, theta, groups, rules)
        new = dict(enumerate(replicas))
        for group in groups:
            mean_delta = {"w": sum((deltas[i]["w"] for i in group), torch.zeros(SIZE)) / len(group)}
            mean = sum((replicas[i]["w"] for i in group), torch.zeros(SIZE)) / len(group)
            for i in group:
                apart = {"w": replicas[i]["w"] - mean} if len(group) > 1 else None
                new[i], states[i] = gossip_update(
                    outer,
                    eta,
                    gamma,
                    replica=replicas[i],
                    state=states[i],
                    delta=mean_delta,
                    apart=apart,
                    round_index=number,
                )
        replicas = [new[i] for i in range(peers)]
        for i in range(peers):
            torch.testing.assert_close(replicas[i]["w"], torch.tensor(phi[i]), rtol=1e-5, atol=1e-5)


def test_without_momentum_it_is_plain_averaging() -> None:
    outer = build_outer(OuterSettings("sgd", 1.0))
    phi = [torch.tensor([4.0]), torch.tensor([2.0])]
    theta = [torch.tensor([3.0]), torch.tensor([0.0])]
    delta = {"w": (phi[0] - theta[0] + phi[1] - theta[1]) / 2}
    for own in phi:
        new, _ = gossip_update(
            outer, 1.0, 1.0, replica={"w": own}, state={}, delta=delta, apart={"w": own - 3.0}, round_index=0
        )
        torch.testing.assert_close(new["w"], torch.tensor([1.5]))


@given(st.integers(2, 5), st.floats(0.1, 1.4), st.floats(0, 0.9), st.integers(0, 2**32))
def test_a_meeting_keeps_the_mean_of_its_members(size: int, mixing: float, momentum: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outer = build_outer(OuterSettings("heavyball", 0.5, momentum))
    replicas = [torch.randn(4, generator=generator) for _ in range(size)]
    mean = sum(replicas, torch.zeros(4)) / size
    moved = []
    for replica in replicas:
        new, _ = gossip_update(
            outer,
            0.5,
            mixing,
            replica={"w": replica},
            state=outer.init({"w": replica}),
            delta={"w": torch.zeros(4)},
            apart={"w": replica - mean},
            round_index=0,
        )
        moved.append(new["w"])
    torch.testing.assert_close(sum(moved, torch.zeros(4)) / size, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "mixing", "momentum"), [(2, 1.0, 0.0), (4, 1.0, 0.0), (2, 0.7, 0.5), (4, 0.5, 0.3)])
def test_replicas_mix_as_fast_as_theory_says(size: int, mixing: float, momentum: float) -> None:
    peers, rounds, rng = 4096, 12, random.Random(7)
    x = [[rng.gauss(0, 1)] for _ in range(peers)]
    m = [[0.0] for _ in range(peers)]
    variances = []
    for _ in range(rounds):
        reference_round(x, m, [list(v) for v in x], drawn_groups(peers, size, rng), (momentum, 0.0, mixing))
        mean = sum(v[0] for v in x) / peers
        variances.append(sum((v[0] - mean) ** 2 for v in x) / peers)
    measured = (variances[-1] / variances[5]) ** (1 / (rounds - 6))
    assert measured == pytest.approx(variance_factor(size, mixing, momentum), rel=0.05)


@given(st.integers(2, 8), st.floats(0.1, 1.2), st.floats(0, 0.9), st.integers(0, 2**32))
def test_where_the_replicas_come_to_rest_stays_whoever_meets_how_often(
    peers: int, mixing: float, momentum: float, seed: int
) -> None:
    """Peers at different rounds, some of them alone: the sum of phi + momentum / (1 - momentum) m is kept."""
    rng = random.Random(seed)
    x = [[rng.gauss(0, 1)] for _ in range(peers)]
    m = [[rng.gauss(0, 1)] for _ in range(peers)]

    def rest() -> float:
        return sum(x[i][0] + momentum / (1 - momentum) * m[i][0] for i in range(peers))

    before = rest()
    for _ in range(10):
        group = rng.sample(range(peers), rng.randint(1, peers))
        reference_round(x, m, [list(v) for v in x], [group], (momentum, 0.0, mixing))
        assert rest() == pytest.approx(before, rel=1e-6, abs=1e-6)


def test_without_momentum_the_variance_shrinks_by_the_size_of_the_groups() -> None:
    assert [round(variance_factor(size), 6) for size in (2, 4, 8)] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mode": "chat"}, "mode = 'chat': must be one of consensus, gossip"),
        ({"gossip.group": 1}, "gossip.group = 1: must lie between 2 and"),
        ({"gossip.mixing": 0}, "gossip.mixing = 0.0: must be above 0"),
        ({"gossip.mixing": 1.9}, r"gossip.mixing = 1.9: replicas would never come closer with outer.momentum = 0.3"),
        ({"gossip.chain": ""}, "gossip.chain has 0 characters"),
        ({"outer.kind": "nesterov"}, "outer.kind = 'nesterov': must be one of sgd, heavyball where mode is 'gossip'"),
        ({"inner.kind": "none"}, "inner.kind = 'none'"),
        ({"merge": "mean_of_senders"}, "merge = 'mean_of_senders': where mode is 'gossip'"),
        ({"merge": "rda"}, "merge = 'rda': where mode is 'gossip'"),
    ],
)
def test_a_wrong_setting_of_a_gossip_run_is_named(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_from_settings("noloco", overrides)


def test_the_preset_mixes() -> None:
    method = PRESETS["noloco"]
    assert method.mode == "gossip" and method.gossip == GossipSettings()
    assert variance_factor(2, method.gossip.mixing, method.outer.momentum) < 0.75
