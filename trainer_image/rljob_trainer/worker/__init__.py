"""The process of a trainer Pod: a Ray node that offers its ranks."""
