"""Releases: `python -m dev.release VERSION` checks, makes the commits and the tag, and builds what is published.

changelog, checks and plan are pure; git, packages, images and registry do the work, in a clone: until everything is
built, the checkout stays as it is.
"""
