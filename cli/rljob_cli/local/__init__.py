"""The local backend: a store like an API server, controllers of three workloads, and a kubelet over processes."""
