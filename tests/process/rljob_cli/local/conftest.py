"""A local cluster for every test of this folder."""

from tests.support.local_cluster import cluster

__all__ = ["cluster"]
