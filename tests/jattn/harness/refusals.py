"""What a refusal must tell: the argument's name. How it says so is tested where the sentence is made."""

import re

import pytest


def refused(call, argument, error=ValueError):
    """Asserts that `call` raises `error` with a sentence whose first name is `argument`."""
    with pytest.raises(error, match=rf"^[^`]*`{re.escape(argument)}`"):
        call()
