"""RLJob on a GPU machine without a network: its packages as archives, next to the torch of that machine."""
