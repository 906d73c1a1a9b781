"""RLJob's server of services: a user's Python function as isolated, bounded, observable requests.

Empty on purpose: worker processes import from this package and must stay small (standard library only).
"""
