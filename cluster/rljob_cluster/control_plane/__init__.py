"""The control plane processes, their certificates, and fake nodes for tests."""
