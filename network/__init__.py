"""Byte streams between peers: the seam, its implementations, identity and framing. Knows nothing of tensors."""
