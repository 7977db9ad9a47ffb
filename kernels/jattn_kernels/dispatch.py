"""Which implementation serves a call, and why."""

from typing import NamedTuple

from jattn_kernels.call import AttentionCall, Implementation
from jattn_kernels.mosaic import MOSAIC
from jattn_kernels.xla import XLA

# In order of preference.
IMPLEMENTATIONS: tuple[Implementation, ...] = (MOSAIC, XLA)


class Choice(NamedTuple):
    """The implementation that serves a call, and the sentence that says why."""

    implementation: Implementation
    reason: str


def choose(
    call: AttentionCall,
    implementation: str | None = None,
    *,
    among: tuple[Implementation, ...] = IMPLEMENTATIONS,
) -> Choice:
    """The implementation for a call: the one asked for, or the first of `among` that does not refuse.

    Raises:
        ValueError: `implementation` names none of them.
        NotImplementedError: The one asked for refuses, or all do; the message has the sentence of each.
    """
    by_name = {entry.name: entry for entry in among}
    if implementation is not None and implementation not in by_name:
        choices = ", ".join(by_name)
        raise ValueError(f"`implementation` must be None or one of: {choices}. Got implementation={implementation!r}.")
    refusals = {entry.name: entry.refuses(call) for entry in among}
    candidates = among if implementation is None else (by_name[implementation],)
    for entry in candidates:
        if refusals[entry.name] is None:
            return Choice(entry, _reason(entry.name, implementation, refusals))
    sentences = " ".join(sentence for entry in candidates if (sentence := refusals[entry.name]))
    able = [name for name, refusal in refusals.items() if refusal is None]
    advice = f"Use implementation={able[0]!r}." if able else "No implementation serves this call."
    raise NotImplementedError(f"{sentences} {advice}")


def _reason(name: str, asked: str | None, refusals: dict[str, str | None]) -> str:
    if asked is not None:
        return f"`{name}` was asked for."
    passed_over = []
    for other, refusal in refusals.items():
        if other == name:
            break
        passed_over.append(refusal or "")
    return " ".join([f"`{name}` is the first choice that serves this call.", *passed_over])
