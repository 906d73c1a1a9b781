"""Runs code that the policy wrote: in processes of the worker, or in a sandbox of agent-sandbox."""
