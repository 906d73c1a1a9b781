"""A real Kubernetes on one machine, and the images of RLJob. Imports go one way: lifecycle, node, images, host."""
