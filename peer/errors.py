"""How a peer ends when it does not end well: one exception a cause that a caller (the command line) tells apart.

The user's own mistakes stay `ValueError` (a setting and its value) and `FileNotFoundError`. The text of each is what
the user reads: what happened, to which address, run or file, and what to do about it.
"""

from __future__ import annotations


class NetworkFailed(Exception):
    """Nobody could be reached, or no place to listen: all entry points are silent, the port is taken."""


class RunNotFound(Exception):
    """The swarm answers, but it trains no such run, or several and none was named."""


class TrainingFailed(Exception):
    """The training ended without its goal: it diverged for good, or time was up before the rounds were."""


class TwinFound(TrainingFailed):
    """Another process takes part with the same identity."""
