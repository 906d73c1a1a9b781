"""Builds the commands once, as a process of its own does, and not in each call of a test."""

import functools

import typer.testing

typer.testing._get_command = functools.cache(typer.testing._get_command)
