"""Build the site of the documentation: `python -m dev.site build|serve`. Needs the group `docs` of pyproject.toml.

The pages are Markdown files of the repository, as GitHub shows them. The generator, Zensical, reads one folder, and
Markdown with rules of its own. So `tree.py` writes a copy of the pages to `.site/pages`, in which `links.py` has
replaced the links to other files, and `blocks.py` has separated what the dialects of Markdown divide differently.
"""
