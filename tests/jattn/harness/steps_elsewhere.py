"""Steps that other processes can import."""

import os
import sys

import jax.numpy as jnp

from jattn_kernels import rms_norm
from jattn_kernels.call import default_device


def grown(held, by):
    """A step that gives back what is donated to it."""
    return {"held": held["held"] + by}, by


def number_of_its_process(x):
    """Whatever traces it says who it is."""
    return x + os.getpid()


def sms_of_the_device(x):
    """As dispatch would ask."""
    return x + (default_device().num_sms or 0)


def product(x):
    return jnp.dot(x, x)


def normed(x, scale):
    """By the kernel of the device."""
    return rms_norm(x, scale, eps=1e-6)


def printed(x):
    print("a step that prints")
    return x * 2


def failing(x):
    raise RuntimeError("no such\nstep")


def ending(x):
    """Its process is gone, unless that is the tests' own."""
    if "pytest" not in sys.modules:
        os._exit(1)
    return x * 3
