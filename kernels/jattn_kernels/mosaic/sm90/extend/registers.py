"""How the warpgroups of extend's kernel share an SM's registers."""

from typing import NamedTuple

from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes


class Registers(NamedTuple):
    """Of a thread of each warpgroup; those of all threads of a block are 65,536 at most."""

    consumer: int
    producer: int
    converter: int = 0

    @classmethod
    def of(cls, dtypes: ExtendDtypes) -> "Registers":
        """Those of a kernel, which has a converter warpgroup or not."""
        if not dtypes.converts:
            return cls(consumer=232, producer=40)
        if not dtypes.rotates:
            return cls(consumer=208, producer=24, converter=72)
        return cls(consumer=192, producer=24, converter=104)
