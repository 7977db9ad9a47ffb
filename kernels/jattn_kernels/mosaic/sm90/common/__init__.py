"""What the Hopper kernels share: tiles, copies, logits, conversion, rotation."""
