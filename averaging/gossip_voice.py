"""What one peer says in a meeting, signed for that meeting alone, and how it judges what others say."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from averaging.contribution import Contribution, parse_contribution, sign_contribution
from averaging.gossip import NONCE_BYTES, GossipConfig, GossipTiming, meeting_id
from averaging.gossip_meeting import Terms
from averaging.gossip_messages import OVERHEAD_BYTES_MAX, WAIT_MILLISECONDS_MAX, Invite
from averaging.record import Hash, Malformed
from network.identity import Signer
from network.seam import PeerID

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Said:
    """What a peer brings to the meetings of one round."""

    payload: bytes
    weight: int
    base: bytes
    round: int


@final
class Voice:
    """`refusals` are the newest contributions that were no good, with the reasons."""

    def __init__(
        self, signer: Signer, config: GossipConfig, rng: random.Random, *, run_id: str, check: Callable[[bytes], None]
    ) -> None:
        self.refusals: deque[tuple[PeerID | None, str]] = deque(maxlen=100)
        self._signer = signer
        self._config = config
        self._rng = rng
        self._run_id = run_id
        self._check = check

    @property
    def frame_bytes_max(self) -> int:
        return self._config.payload_bytes_max + OVERHEAD_BYTES_MAX

    def draw_invite(self, said: Said, wait_seconds: float) -> Invite:
        """To a meeting that nobody has heard of."""
        nonce = self._rng.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "big")
        return Invite(nonce, said.round, min(int(1000 * max(0.0, wait_seconds)), WAIT_MILLISECONDS_MAX))

    def sign(self, said: Said, invite: Invite, organiser: PeerID) -> Contribution:
        meeting = meeting_id(self._run_id, organiser, invite.round, invite.nonce)
        return sign_contribution(self._signer, meeting, said.weight, said.base, False, said.payload)

    def terms(self, said: Said, invite: Invite, organiser: PeerID, timing: GossipTiming) -> Terms:
        config = self._config
        return Terms(
            mine=self.sign(said, invite, organiser),
            round=said.round,
            group_size=config.group_size,
            members_min=max(2, config.min_peers),
            exchange_seconds=timing.exchange_seconds(config),
            answer_seconds=timing.answer_seconds(config),
            round_leap_max=config.round_leap_max,
            judge=self.judge,
        )

    def judge(self, encoded: bytes, meeting: Hash, owner: PeerID | None) -> Contribution | None:
        """See `Terms.judge`."""
        try:
            contribution = parse_contribution(encoded, self._signer, self.frame_bytes_max)
            if contribution.prev != meeting:
                raise Malformed("contribution: it is for another meeting")
            if owner not in (None, contribution.owner):
                raise Malformed(f"contribution: it is of {contribution.owner}")
            if not 0 < contribution.weight <= self._config.weight_max:
                raise Malformed(f"contribution.weight: {contribution.weight} is not within {self._config.weight_max}")
            self._check(contribution.payload)
        except ValueError as error:
            self.refusals.append((owner, str(error)))
            log.warning("refused what %s said in a meeting: %s", owner or "somebody", error)
            return None
        return contribution
