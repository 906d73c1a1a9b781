"""OpenRLHF: reward functions of queries, and agents with reset and step."""
