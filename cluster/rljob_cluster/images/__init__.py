"""Builds, reads and writes container images. `python -m rljob_cluster.images` builds those of RLJob."""
