"""Attention in Triton: decode, extend, paged, ragged and latent, by one kernel."""
