"""Who is there and what they say: the directory, signed records, membership and progress. Knows nothing of tensors."""
