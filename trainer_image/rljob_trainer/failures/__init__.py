"""Errors of libraries: whether the user can fix them, and the line that says what is wrong."""
