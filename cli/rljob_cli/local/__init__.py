"""The local backend: an API-server-like store, the controllers of three workloads, and a kubelet over processes."""
