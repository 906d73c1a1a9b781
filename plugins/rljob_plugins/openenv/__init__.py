"""OpenEnv: environments, in this process or in a server."""
