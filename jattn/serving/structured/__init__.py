"""Structured output: what a text must look like, which tokens may come next, and how steps are told."""
