"""The summary is JSON that every parser reads."""

from __future__ import annotations

import json
import math

from simulator.options import Summary, Tokens, tokens_by_peer


def test_a_loss_that_nobody_measured_is_null() -> None:
    summary = Summary("distro", "gpt-nano", 1, 0, 4, 3, 5.5, math.nan, True, 1.0, 1.0, 2.0, Tokens(3, 2, 1), 1.0, 0)
    fields = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    assert fields["loss_last"] is None
    assert fields["loss_first"] == 5.5
    assert fields["tokens"] == {"processed": 3, "merged": 2, "lost": 1, "by_peer": {}}


def test_tokens_are_counted_by_peer_and_in_total() -> None:
    tokens = tokens_by_peer({"a": (30, 20), "b": (10, 10)})
    assert (tokens.processed, tokens.merged, tokens.lost) == (40, 30, 10)
    assert tokens.by_peer == {"a": (30, 20, 10), "b": (10, 10, 0)}
