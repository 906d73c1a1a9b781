"""The work queue, the reconcile loop, and their health and metrics. No I/O with Kubernetes."""
