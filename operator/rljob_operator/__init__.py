"""The operator: a watch, a cache, a Lease and metrics around the reconcile core (rljob_core)."""
