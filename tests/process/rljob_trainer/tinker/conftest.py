"""The models of these tests are tiny."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would only wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Callable[[str, int], dict[str, Any]]:
    """What a scenario wrote with this number of ranks. `folder` is the module's."""
    return lambda name, num_ranks: torch.load(folder / f"{name}-{num_ranks}.pt", weights_only=False)
