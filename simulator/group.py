"""The group of a simulated run: everyone is there at the first round, and no round is too small for all."""

from __future__ import annotations

from peer.spec import GroupPart
from simulator.options import SimulateOptions


def group_of(options: SimulateOptions) -> GroupPart:
    limit = GroupPart().max_peers
    return GroupPart(start_peers=options.peers, max_peers=max(limit, options.peers), parts=options.parts)
