"""RLJob's operator: observe -> plan (pure) -> apply, over a cluster or over this machine."""
