"""Products of few rows with weights in int4 on Hopper."""
