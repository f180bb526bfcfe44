"""What all tests of the nano model share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order: what is run twice is equal to the last bit."""
    torch = pytest.importorskip("torch", reason="training needs the extra training")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
