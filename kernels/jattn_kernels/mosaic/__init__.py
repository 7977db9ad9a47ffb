"""Attention in Pallas Mosaic GPU, one folder an architecture."""

from jattn_kernels.mosaic.implementation import MOSAIC as MOSAIC
