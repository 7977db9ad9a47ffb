"""The constants of the kernel that finds what is kept."""

import dataclasses

import triton

from jattn_kernels.lowering.amounts import half_bits, unit

_WARPS, _FEW_WARPS = 16, 4
_FEW_LOGITS = 16384  # of a row that few warps share
_PLACES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class FiltersConfig:
    """Constants of the kernel.

    Attributes:
        vocab_size: Tokens of a row.
        warps: Of a program.
        vector: Neighbours that a thread loads at once: as many as divide a row, up to 16 bytes.
        unroll: Blocks that are loaded one behind the other; amounts of so many fit 32 bits.
        thresholds: Logits that a pass tries; a power of two.
        depth: Tokens that each place of a block may hold in registers; a power of two.
    """

    vocab_size: int
    warps: int
    vector: int
    unroll: int = 4
    thresholds: int = 8
    depth: int = 8

    @property
    def unit(self) -> float:
        """The likeliest token's amount."""
        return unit(self.vocab_size)

    @property
    def half_bits(self) -> int:
        """Where a sum is cut in two to be rounded."""
        return half_bits(self.vocab_size)

    @property
    def threads(self) -> int:
        """Of a program."""
        return 32 * self.warps

    @property
    def places(self) -> int:
        """Of a thread in a block."""
        return _PLACES

    @property
    def block(self) -> int:
        """Logits of a block."""
        return self.places * self.threads

    @property
    def blocks(self) -> int:
        """Of a row."""
        return triton.cdiv(self.vocab_size, self.block)

    @property
    def turns(self) -> int:
        """Of a pass over a row."""
        return triton.cdiv(self.blocks, self.unroll)


def config_of(vocab_size: int) -> FiltersConfig:
    """The constants for rows of so many tokens."""
    return FiltersConfig(
        vocab_size=vocab_size,
        warps=_FEW_WARPS if vocab_size < _FEW_LOGITS else _WARPS,
        vector=next(size for size in (4, 2, 1) if vocab_size % size == 0),
    )
