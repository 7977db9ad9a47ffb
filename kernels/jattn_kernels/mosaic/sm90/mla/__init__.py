"""Absorbed latent attention of many query rows a sequence."""
