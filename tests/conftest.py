"""What all tests share: the option that writes golden files anew."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files under tests/data anew")


@pytest.fixture
def golden(request):
    """Compare a text with a golden file, or write the file when pytest was told to."""

    def check(path, text):
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest --update-golden, then read what it wrote"
        assert text == path.read_text(), (
            f"{path} differs; if that is meant, run pytest --update-golden and read the diff"
        )

    return check
