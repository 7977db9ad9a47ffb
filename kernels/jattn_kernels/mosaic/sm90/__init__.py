"""Attention kernels for Hopper (sm_90a) in Pallas Mosaic GPU."""
