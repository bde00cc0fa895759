"""The progress line of a simulated swarm: it says of which round the loss is, and counts as people do."""

from __future__ import annotations

from cli.progress import line
from simulator.progress import Progress


def test_before_the_first_round_it_says_what_starts() -> None:
    assert line(Progress(peers_wanted=1, rounds_goal=9)).endswith("starting 1 peer ...")


def test_a_loss_that_is_not_of_the_newest_round_says_of_which() -> None:
    progress = Progress(peers_wanted=4, rounds_goal=9, peers=4, round=3, members=4, loss=2.5, loss_round=3)
    assert "round 3/9  4 peers (4 in it)  loss 2.500  anchor" in line(progress)
    progress.round = 4
    assert "loss 2.500 after round 3" in line(progress)


def test_the_loss_in_training_is_shown_until_there_is_another() -> None:
    progress = Progress(peers_wanted=4, rounds_goal=9, round=1, train_loss=5.25, restarts=1)
    assert "loss 5.250 in training" in line(progress) and "1 restart" in line(progress)
