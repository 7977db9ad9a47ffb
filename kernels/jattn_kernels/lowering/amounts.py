"""Probabilities as whole numbers: how fine they are, such that a row's sum has two halves of 32 bits."""


def half_bits(vocab_size: int) -> int:
    """Bits of each half of an amount; the halves of a row's amounts add up in 32 bits."""
    return min(14, 32 - (vocab_size - 1).bit_length())


def unit(vocab_size: int) -> float:
    """The likeliest token's amount: the greatest float32 whose halves have so many bits."""
    bits = 2 * half_bits(vocab_size)
    return float(2**bits - 2 ** max(bits - 24, 0))
