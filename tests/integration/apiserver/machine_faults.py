"""What the rules of the operator's machine share: faults of requests, and what others may have done before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from door import LIST_FAULTS, WRITE_FAULTS
from hypothesis import strategies as st
from kubernetes import client

NUMBERS = st.sampled_from([1, 2, 1, 3, 2, 4, 6, 9, 13, 19])
"""Of requests. An edit takes a few writes, a new job thirty."""
FAULTS = st.tuples(
    st.dictionaries(NUMBERS, st.sampled_from(WRITE_FAULTS), min_size=1, max_size=4),
    st.dictionaries(NUMBERS, st.sampled_from(LIST_FAULTS), max_size=1),
)
LABELS = {"app.kubernetes.io/managed-by": "someone"}


@contextlib.contextmanager
def unless(code: int) -> Iterator[None]:
    """What the operator, or a controller, may have done before."""
    try:
        yield
    except client.ApiException as error:
        if error.status != code:
            raise
