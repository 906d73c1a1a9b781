"""The work queue and the reconcile loop. No I/O with Kubernetes."""
