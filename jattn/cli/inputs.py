"""What the command line reads: prompts and checkpoint folders."""

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

# Beginnings that suit the default checkpoint, which has read Python's standard library.
DEFAULT_PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """',
    "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self",
)


def nonempty_path(text: str) -> Path:
    """What a flag or an argument says, which would be the folder one is in if it were empty."""
    if not text:
        raise typer.BadParameter("must not be empty.")
    return Path(text)


CheckpointArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="CHECKPOINT",
        parser=nonempty_path,
        help="Hugging Face checkpoint folder; the bundled one by default.",
    ),
]


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not empty; `-` is standard input.

    Raises:
        ValueError, FileNotFoundError: There are none, or no such file that can be read.
    """
    try:
        content = _read_input() if str(path) == "-" else path.read_bytes()
        lines = content.decode("utf-8-sig").splitlines()  # some editors begin a file with a mark of its encoding
    except FileNotFoundError:
        raise FileNotFoundError(f"`--prompt-file` must be a file, or - for standard input. Got {path}.") from None
    except OSError as error:
        raise ValueError(f"`--prompt-file` must be a file that can be read: {error.strerror}. Got {path}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"`--prompt-file` must be UTF-8 text. Got {path}.") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"`--prompt-file` must hold at least one prompt. Got {path}.")
    return prompts


def _read_input() -> bytes:
    if sys.stdin is None:
        raise ValueError("Standard input must be open, for `--prompt-file -`.")
    return sys.stdin.buffer.read()


def chats(path: Path, prompts: Sequence[str], system: str | None) -> list[str]:
    """What the checkpoint's chat template makes of each prompt; before the weights load, for it may refuse.

    Raises:
        ValueError: There is no prompt or no template, or it refuses.
    """
    from jattn.serving.frontend.chat import ChatTemplate

    if not prompts:
        raise ValueError("`--chat` needs a `--prompt` or a `--prompt-file`.")
    template = ChatTemplate(path)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [template.render([*before, {"role": "user", "content": prompt}]) for prompt in prompts]


def model_folder(flag: str, path: Path) -> Path:
    """The path, if it is a folder.

    Raises:
        FileNotFoundError: It is none; how to download what it may name instead.
    """
    from jattn.checkpoint import check_folder

    check_folder(path, flag)
    return path


def default_checkpoint() -> Path:
    """The folder that an installed package announces.

    Raises:
        ValueError: None does.
    """
    for announced in entry_points(group="jattn.checkpoints", name="default"):
        return announced.load()()
    raise ValueError("`--model` must be given: no installed package brings a default checkpoint.")
