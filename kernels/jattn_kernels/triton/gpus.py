"""The NVIDIA GPUs that the Triton kernels are for."""

from jattn_kernels.call import Device

# Bytes of shared memory that a program may have, by compute capability.
SHARED_MEMORY = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
# Of the largest GPU of each, where JAX does not know.
_SMS = {(8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188}


def num_sms(device: Device) -> int:
    """Streaming multiprocessors of a GPU."""
    return device.num_sms or _SMS.get(device.compute_capability or (8, 0), 108)
