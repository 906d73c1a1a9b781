"""One process with verl and TRL for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.integration.peers.environment import Peers


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would only wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
