"""Tensors to small packets and back; the only place that parses a stranger's tensor. Pure, no I/O."""
