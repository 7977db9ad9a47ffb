"""Calls of Triton's kernels that hold no more than what runs.

jaxlib 0.11.2 finds a call by its whole text, which it copies first, under one lock of all devices; and XLA asks for it
twice a call each time that a step runs. A call of ours has 23 KB, most of it for debuggers: 7 us, so that a decode step
of Llama-3-8B shapes with 65 of them took the host 3.2 ms on four H200s.
"""

import re
from typing import Any

# PTX's sections for debuggers are behind all code; the other lines say where each instruction comes from.
_DEBUG_SECTIONS = "\t.section\t.debug"
_OF_NO_INSTRUCTION = re.compile(r"^\s*\.(loc|file)\b.*\n|[ \t]*//.*", re.MULTILINE)


class ShortCalls:
    """jaxlib's module that makes calls, in its place: a kernel gets neither its source nor what is for debuggers.

    Args:
        library: jaxlib's module.
    """

    def __init__(self, library: Any):
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def TritonKernel(self, name: str, warps: int, ctas: int, shared: int, code: str, source: str, *others: Any) -> Any:
        """As jaxlib's, which runs the code and keeps the source for nobody."""
        del source
        return self._library.TritonKernel(name, warps, ctas, shared, without_debugging(code), "", *others)


def without_debugging(code: str) -> str:
    """The same PTX without comments and what is for debuggers; other code, as a path to it, as it is."""
    if ".version" not in code:
        return code
    return re.sub(r"\n\s*\n+", "\n", _OF_NO_INSTRUCTION.sub("", code.partition(_DEBUG_SECTIONS)[0]))
