"""Runs bloc97/DeMo for test_published.py.

    python -m tests.peer.published_demo DeMo/demo.py

The file is that of github.com/bloc97/DeMo at the commit below; it needs einops.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from tests.peer.published import MATRICES, VECTORS, Shapes, Weights, checkout_from, keep, on_all_peers, weights

FILE = Path(__file__).with_suffix(".json")
COMMIT = "0e48145d702b25f83055e11d9585a9c11bcfe154"
STEPS = 60
SETTINGS = {"lr": 0.003, "compression_decay": 0.95, "compression_chunk": 8, "weight_decay": 0.1}
KEPT = {"matrices": 6, "vectors": 3}
"""Coefficients of each tile: of 8 x 8, and of 8."""


def main() -> None:
    file = checkout_from("demo.py", __doc__)
    cases: dict[str, Shapes] = {"matrices": MATRICES, "vectors": VECTORS}
    keep(FILE, COMMIT, {name: on_all_peers(partial(run, file, name, shapes))[0] for name, shapes in cases.items()})


def run(file: Path, name: str, shapes: Shapes, peer: int) -> object:
    """`DeMo` as its repository has it."""
    found = importlib.util.spec_from_file_location("demo", file)
    assert found is not None and found.loader is not None
    demo: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(demo)
    model = Weights(weights(shapes))
    optimizer = demo.DeMo(list(model.parameters()), compression_topk=KEPT[name], **SETTINGS)
    for step in range(STEPS):
        model.set_gradients(peer, step)
        optimizer.step()
    return model.as_lists()


if __name__ == "__main__":
    main()
