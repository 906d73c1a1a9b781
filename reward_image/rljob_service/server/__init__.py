"""The HTTP server of a service: routes, lanes, execution and metrics."""
