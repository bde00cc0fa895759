"""A swarm whose owners reduce, with a link for few of all pairs: everybody's work is merged, and nobody is missed."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from averaging.node import SPARE_LINKS
from averaging.rounds import RECENT_ROUNDS
from benchmarks.large_groups import PAYLOAD_BYTES, NoiseInParts
from network.seam import PeerID
from simulator.outcome import SwarmConfig
from simulator.swarm import Swarm
from simulator.virtual_time import VirtualConfig, run_virtual

PEERS = 18
PARTS = 6
ROUNDS = 14
FROZEN_ROUND = 6
FROZEN_SECONDS = 12.0
"""Too long to stay a voter, too short for links to break."""
CONFIG = SwarmConfig(
    peers=PEERS,
    rounds=ROUNDS,
    train_seconds=4.0,
    train_spread=(0.95, 1.05),
    speed_spread=0.1,
    parts=PARTS,
    voters_max=3,
)


@dataclass
class Seen:
    """A moment shortly after a commit, as all peers see it."""

    round: int
    named: set[int] = field(default_factory=set)
    """By the last records."""
    links: dict[int, int] = field(default_factory=dict)
    spare: dict[int, int] = field(default_factory=dict)
    """Links of who is not named to others who are not."""
    missed: list[tuple[int, int]] = field(default_factory=list)
    """(named peer, whom it takes for dead)."""
    unheard: set[int] = field(default_factory=set)
    """Of whose shares not all was merged in this round."""


@dataclass
class Story:
    """A voter is frozen for a while, others vote in its place, and of its many links it keeps few."""

    frozen: int = -1
    moments: list[Seen] = field(default_factory=list)
    learners: dict[PeerID, NoiseInParts] = field(default_factory=dict)

    def learner(self, me: PeerID) -> NoiseInParts:
        return self.learners.setdefault(me, NoiseInParts(me, PARTS))

    async def tell(self, swarm: Swarm) -> None:
        """Runs beside the swarm."""
        done = 0
        while done < ROUNDS:
            await anyio.sleep(1)
            if swarm.checker.newest == done:
                continue
            done = swarm.checker.newest
            if done == FROZEN_ROUND:
                await self.freeze_a_voter(swarm)
            elif 0 < done < ROUNDS:
                self.look(swarm)

    async def freeze_a_voter(self, swarm: Swarm) -> None:
        tip = swarm.checker.tip
        assert tip is not None
        self.frozen = max(map(swarm.number_of, tip.voters))
        swarm.world.freeze(swarm.peer_of(self.frozen))
        await anyio.sleep(FROZEN_SECONDS)
        swarm.world.thaw(swarm.peer_of(self.frozen))

    def look(self, swarm: Swarm) -> None:
        unheard = {swarm.number_of(peer) for peer, learner in self.learners.items() if learner.heard < 1}
        seen, now = Seen(swarm.checker.newest, unheard=unheard), anyio.current_time()
        for number, member in sorted(swarm.members.items()):
            engine = member.node.engine
            records = engine.chain.records[-RECENT_ROUNDS:]
            named = frozenset().union(*(record.peers for record in records))
            seen.links[number] = len(member.linked)
            if engine.me in named:
                seen.named.add(number)
                dead = [p for p in sorted(swarm.numbers) if not engine._outbox.alive(p, now)]
                seen.missed += [(number, swarm.number_of(p)) for p in dead]
            else:
                assert named <= set(member.linked), f"peer {number} after round {seen.round}"
                seen.spare[number] = len(set(member.linked) - named)
        self.moments.append(seen)


def test_spare_links_are_few_and_nobody_is_missed_for_want_of_a_link() -> None:
    story = Story()

    async def program() -> None:
        await Swarm(CONFIG, story.learner, payload_bytes_max=2 * PAYLOAD_BYTES).run(story.tell)

    run_virtual(program, config=VirtualConfig(virtual_seconds_max=1000))
    assert len(story.moments) >= ROUNDS - 4
    for seen in story.moments:
        assert len(seen.spare) >= PEERS - 5, "few are named"
        assert max(seen.spare.values()) <= 2 * SPARE_LINKS, f"after round {seen.round}"
        assert all(seen.links[number] == PEERS - 1 for number in seen.named), "whom the log names has a link to all"
        assert not seen.missed, f"after round {seen.round}: dead to those who decide"
        late = {story.frozen} if FROZEN_ROUND < seen.round <= FROZEN_ROUND + RECENT_ROUNDS else set()
        assert seen.unheard <= late, f"of round {seen.round}"
    links = [seen.links[story.frozen] for seen in story.moments]
    assert links[0] == PEERS - 1 and links[-1] <= 3 + 2 * SPARE_LINKS, "it voted, and closed what it needs no more"
