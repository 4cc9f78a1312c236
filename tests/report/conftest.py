import pytest


@pytest.fixture
def portrait_steps():
    """Here the page is what is tested, so its portraits are whole."""
    return 10
