"""The HTTP server of a reward: routes, lanes, scoring and metrics."""
