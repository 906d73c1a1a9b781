"""TRL: reward functions of lists, and classes of environment_factory."""
