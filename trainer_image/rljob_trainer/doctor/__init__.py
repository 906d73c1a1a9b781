"""A smoke test of a Pod: what trainers and rollouts need of a node and an image (docs/gpus.md)."""
