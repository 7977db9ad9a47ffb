"""Products of 8-bit rows and 8-bit weights on Hopper."""
