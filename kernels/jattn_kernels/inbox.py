"""Where lies what in the memory through which the devices of a host hand each other numbers.

Each device has an inbox, into which the others store:

    words 0 to 255      of each block, how many exchanges it has done
    word 256            1 once a block has waited in vain: from then on none waits
    word 512 on         of each block two slots, which exchanges take in turn; a slot has a lane for each other device,
                        and with more than two devices another one for each, for sums that are handed on

A word of a lane is EMPTY until it is stored to, and EMPTY again once it is read: what is stored is its own sign that it
has arrived.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

EMPTY = 0x80008000  # a word of two numbers -0.0 in 16 bits; senders store something else in its place
MOST_BLOCKS = 256  # which a GPU has room for at once, or runs in their order
FAILED = MOST_BLOCKS
HEADER = 2 * MOST_BLOCKS
WORD_BYTES = 4
PIECE_WORDS = 4  # what a thread stores at a time
PIECE_BYTES = WORD_BYTES * PIECE_WORDS
_SLOTS_WORDS = 2**23  # of all slots, about
_LEAST_LANE = 4096  # words: a row of 8,192 numbers in 16 bits


@dataclasses.dataclass(frozen=True)
class Inbox:
    """An inbox as every device of a group has one; static.

    Attributes:
        devices: Of the group.
        lane_words: Words of 32 bits that one device stores at most in an exchange of a block, a power of two.
    """

    devices: int
    lane_words: int

    def __post_init__(self):
        if self.devices < 2 or self.lane_words < 4 or self.lane_words & (self.lane_words - 1):
            raise ValueError(
                "`devices` must be at least 2, and `lane_words` a power of two from 4 on. "
                f"Got devices={self.devices}, lane_words={self.lane_words}."
            )

    @classmethod
    def of(cls, devices: int) -> "Inbox":
        """The one that so many devices use: some 32 MiB, or more where lanes would be shorter than a row."""
        lanes = cls(devices, 4).lanes
        fitting = _SLOTS_WORDS // (2 * MOST_BLOCKS * lanes)
        return cls(devices, max(2 ** (fitting.bit_length() - 1), _LEAST_LANE))

    @property
    def lanes(self) -> int:
        """Of a slot."""
        others = self.devices - 1
        return others if self.devices == 2 else 2 * others

    @property
    def words(self) -> int:
        """Of the whole inbox."""
        return HEADER + 2 * MOST_BLOCKS * self.lanes * self.lane_words

    def lane(self, sender: int, reader: int) -> int:
        """Where a device finds what another one stored, by their numbers in the group."""
        return sender - (sender > reader)

    def table(self, addresses: Sequence[int], *, loopback: bool = False) -> UInt32[np.ndarray, "devices columns"]:
        """What each device must know to exchange: a row for each, addresses as two words, the low one first.

        Its own inbox; its lane in the first slot of each other device's, the device behind it first; its number.

        Args:
            addresses: Of the inboxes, in bytes.
            loopback: Whether each device stores into its own inbox, in the others' place: it waits for none of them,
                and what it computes is of no use.
        """
        rows = []
        for own in range(self.devices):
            places = [addresses[own]]
            for distance in range(1, self.devices):
                other = (own + distance) % self.devices
                lane = self.lane(other, own) if loopback else self.lane(own, other)
                inbox = addresses[own] if loopback else addresses[other]
                places.append(inbox + WORD_BYTES * lane * self.lane_words)
            words = [word for place in places for word in (place & 0xFFFFFFFF, place >> 32)]
            rows.append([*words, own, 0])
        return np.array(rows, np.uint32)
