"""One training peer: run specification, composition root, loop, data, checkpoints, reports."""
