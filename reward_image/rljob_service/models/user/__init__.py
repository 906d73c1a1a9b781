"""Chat models that play the simulated user of a conversation."""
