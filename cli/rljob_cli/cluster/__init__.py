"""Commands on jobs in a Kubernetes cluster."""
