"""Trace-time checks: the one place where a wrong shape or dtype becomes a sentence."""
