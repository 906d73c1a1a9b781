"""The kubelet: Pods of the store as processes of this machine."""
