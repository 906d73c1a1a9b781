"""The rewards of a job: their clients, and which of them sees which samples together."""
