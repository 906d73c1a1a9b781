"""The core of RLJob: observe -> plan (pure) -> apply, on a cluster (rljob_operator) or on this machine (rljob_cli)."""
