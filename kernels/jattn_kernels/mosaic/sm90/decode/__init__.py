"""Decode of paged keys: one or a few query tokens a sequence, whose keys are split over the SMs."""
