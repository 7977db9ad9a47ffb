"""The error of a machine on which JAX cannot start; apart from what imports JAX."""


class NoDeviceError(RuntimeError):
    """JAX found no device that it could run on."""
