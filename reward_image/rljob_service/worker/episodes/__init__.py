"""Episodes of programs and environments in a worker process: what they get, how they are called, what they return.

One process runs one episode at a time. Standard library only: it runs next to the user's packages.
"""
