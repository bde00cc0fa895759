"""Which contributions are lacking and whom to ask next for each; pure bookkeeping, bounded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

from averaging.messages import DIGESTS_MAX
from averaging.record import Hash
from averaging.timing import Pace
from network.seam import PeerID

WANTED_MAX = 4 * DIGESTS_MAX


@dataclass(slots=True)
class _Want:
    sources: list[PeerID]
    due: float
    """When it is first asked for."""
    asked: float | None = None
    """When it was asked for last, or nobody was there to ask."""
    tries: int = 0

    def due_at(self, retry: float) -> float:
        return self.due if self.asked is None else self.asked + retry * min(8, max(1, self.tries))


@final
class Fetcher:
    """Asks one source after another for each wanted digest until it comes or is no longer wanted."""

    def __init__(self) -> None:
        self._wanted: dict[Hash, _Want] = {}
        self.pace = Pace()
        """From the last question to the answer: too short if it is to an earlier one, but then waits grow anyway."""

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, digest: Hash) -> bool:
        return digest in self._wanted

    def need(self, digests: Sequence[Hash], sources: Sequence[PeerID], due: float) -> None:
        """Wants `digests`, first asked for at `due`: what is pushed anyway should get the time to arrive."""
        for digest in digests:
            want = self._wanted.get(digest)
            if want is not None:
                want.sources.extend(p for p in sources if p not in want.sources)
            elif len(self._wanted) < WANTED_MAX:
                self._wanted[digest] = _Want(list(sources), due)

    def arrived(self, digest: Hash, now: float) -> None:
        want = self._wanted.pop(digest, None)
        if want is not None and want.asked is not None and want.tries:
            self.pace = self.pace.observed(now - want.asked)

    def clear(self) -> None:
        self._wanted.clear()

    def keep(self, digests: Collection[Hash]) -> None:
        """Nothing else is wanted any more; of these, what is, is still on its way."""
        self._wanted = {digest: self._wanted[digest] for digest in digests if digest in self._wanted}

    def next_due(self, retry: float) -> float | None:
        return min((want.due_at(retry) for want in self._wanted.values()), default=None)

    def ask(self, now: float, retry: float, linked: Callable[[PeerID], bool]) -> dict[PeerID, list[Hash]]:
        """What to ask of whom now; each is asked again, of the next source, `retry` seconds later."""
        requests: dict[PeerID, list[Hash]] = {}
        for digest, want in self._wanted.items():
            if want.due_at(retry) > now:
                continue
            want.asked = now
            sources = [p for p in want.sources if linked(p)]
            if sources:
                source = sources[want.tries % len(sources)]
                want.tries += 1
                if len(requests.setdefault(source, [])) < DIGESTS_MAX:
                    requests[source].append(digest)
        return requests
