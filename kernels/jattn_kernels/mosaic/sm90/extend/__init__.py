"""Extend: ragged queries, many of a sequence, over keys that are paged or not."""
