"""A real Kubernetes on one machine, from Go modules and Debian packages: for tests, and for trying RLJob."""
