"""One node: a containerd and a kubelet, and how it gets its images."""
