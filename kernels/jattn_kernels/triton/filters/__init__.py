"""Filters in Triton: what min-p, top-k and top-p keep of each row's tokens."""
