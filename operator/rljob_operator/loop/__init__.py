"""The work queue, the reconcile loop, and its health and metrics."""
