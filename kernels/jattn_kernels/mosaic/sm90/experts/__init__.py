"""Mixtures of experts on Hopper: products of rows grouped by expert."""
