"""Exchanges between the GPUs of a host, which store into each other's memory."""
