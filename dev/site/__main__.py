"""`python -m dev.site build|serve|publish`: see the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from dev.site.publish import publish, write_settings
from dev.site.tree import PAGES, ROOT, write_tree

ZENSICAL = Path(sys.executable).with_name("zensical")
_POLL_SECONDS = 2.0


def build(repository: str = "", address: str = "") -> int:
    """Build the site; a link or an anchor that does not exist is an error. Return the exit code."""
    print(f"{write_tree(repository=repository)} pages in {PAGES.relative_to(ROOT)}", flush=True)
    settings = write_settings(address) if address else ROOT / "zensical.toml"
    command = [ZENSICAL, "build", "--strict", "--clean", "--config-file", settings]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


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
    parser.add_argument("action", choices=("build", "serve", "publish"))
    parser.add_argument("--address", default="localhost:8010", help="of the server; default %(default)s")
    parser.add_argument("--repository", default="", help="publish: its address, for links that edit a page")
    parser.add_argument("--site", default="", help="publish: the address of the site")
    parser.add_argument("--folder", type=Path, help="publish: the folder with all versions")
    parser.add_argument("--version", default="dev", help="publish: its folder; default %(default)s")
    arguments = parser.parse_args()
    if not ZENSICAL.is_file():
        parser.error("Zensical is not installed; run `make docs`, or `uv sync --only-group docs --inexact`")
    if arguments.action == "publish":
        failed = build(arguments.repository, f"{arguments.site.rstrip('/')}/{arguments.version}/")
        if not failed:
            publish(arguments.folder, arguments.version)
        return failed
    return build() if arguments.action == "build" else serve(arguments.address)


if __name__ == "__main__":
    sys.exit(main())
