"""A kernel compiled alone and then a program that calls it, for an H200; prints how often it was compiled, as JSON.

python -m tests.jattn.harness.kernel_of_a_step FOLDER    (where Mosaic is told to write what it compiles)
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core
from jax.sharding import SingleDeviceSharding

from jattn.kernel_compilation import compile_alone
from jattn_kernels import rms_norm
from jattn_kernels.call import Device, assume_device
from tests.jattn.harness.two_gpus import H200


def main(folder: Path) -> None:
    """Compiles them, and one more program."""
    assume_device(Device("gpu", (9, 0), 132))
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=H200
    )
    placed = SingleDeviceSharding(topology.devices[0])

    def lowered(width):
        x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed) for shape in ((8, width), (width,)))
        step = jax.jit(lambda x, scale: rms_norm(x, scale, eps=1e-6, implementation="mosaic"))
        return step.trace(x, scale).lower(lowering_platforms=("cuda",))

    def made():
        """Kernels that were compiled since this was asked last."""
        count = 0
        for file in folder.glob("*.ptx"):
            count += 1
            file.unlink()
        return count

    step = lowered(2048)
    kernels = dict(core.KNOWN_KERNELS)
    for kernel in kernels.items():
        compile_alone(*kernel, topology.devices[0])
    found = {"kernels": len(kernels), "made alone": made()}
    step.compile()
    found["made again for the step"] = made()
    lowered(4096).compile()
    found["made for another step"] = made()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
