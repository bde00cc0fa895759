"""How far the replicas of a gossip run are apart, and what they are like together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peer.checkpoint import ANCHOR

Replica = Mapping[str, Tensor]


def distance_max(replicas: Sequence[Replica]) -> float:
    """The largest |x - y| of any two, as a share of |mean of all|; 0 for fewer than two. Euclidean, all weights."""
    if len(replicas) < 2:
        return 0.0
    rows = torch.stack([_flat(replica) for replica in replicas])
    mean = rows.mean(dim=0)
    # Distances from the mean first: small differences of large numbers would drown in rounding.
    rows = (rows - mean).double()
    return float(torch.cdist(rows, rows).max() / mean.double().norm().clamp(min=1e-30))


def mean_of(replicas: Sequence[Replica]) -> dict[str, Tensor]:
    return {name: torch.stack([replica[name] for replica in replicas]).mean(dim=0) for name in replicas[0]}


def saved_replicas(folders: Sequence[Path]) -> list[Replica]:
    """The newest saved replicas of the peers with these folders; those without one are left out."""
    replicas: list[Replica] = []
    for folder in folders:
        for path in sorted(folder.glob(f"runs/*/snapshot/{ANCHOR}"))[:1]:
            try:
                replicas.append(load_file(path))
            except (OSError, SafetensorError):
                continue
    return replicas


def _flat(replica: Replica) -> Tensor:
    return torch.cat([replica[name].reshape(-1).float() for name in sorted(replica)])
