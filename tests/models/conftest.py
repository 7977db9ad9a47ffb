"""Fixtures of the models' tests."""

import pytest

from tests import careful


@pytest.fixture
def compiled_with_care():
    """Where logits are held against another framework's to float32's last digits."""
    with careful.compiled_with_care():
        yield
