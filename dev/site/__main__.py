"""`python -m dev.site build|serve`: see the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from dev.site.tree import PAGES, ROOT, write_tree

ZENSICAL = Path(sys.executable).with_name("zensical")
_POLL_SECONDS = 2.0


def build() -> int:
    """Build the site; a link or an anchor that does not exist is an error. Return the exit code."""
    print(f"{write_tree()} pages in {PAGES.relative_to(ROOT)}", flush=True)
    return subprocess.run([ZENSICAL, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode


def serve(address: str) -> int:
    """Serve the site, and write changed pages again, until the server ends or Ctrl-C. Return its exit code."""
    write_tree()
    server = subprocess.Popen([ZENSICAL, "serve", "--dev-addr", address], cwd=ROOT)
    try:
        while server.poll() is None:
            time.sleep(_POLL_SECONDS)
            write_tree()
    except KeyboardInterrupt:
        print(flush=True)
    finally:
        server.terminate()
    return server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build or serve the site of the documentation.")
    parser.add_argument("action", choices=("build", "serve"))
    parser.add_argument("--address", default="localhost:8010", help="of the server; default %(default)s")
    arguments = parser.parse_args()
    if not ZENSICAL.is_file():
        parser.error("Zensical is not installed; run `make docs`, or `uv sync --only-group docs --inexact`")
    return build() if arguments.action == "build" else serve(arguments.address)


if __name__ == "__main__":
    sys.exit(main())
