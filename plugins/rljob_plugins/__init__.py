"""Other projects' functions and environments: one module, or one folder, for each project.

Entry points name them (pyproject.toml). `signature.py`, and a module of a project without an environment, have the
forms of functions: the CLI reads them, so they import the standard library and rljob_api.functions alone. All other
modules run in workers. A project's own packages are imported when something of it is loaded, bound or played.
"""
