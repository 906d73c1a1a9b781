"""`python -m rljob_cluster.images`: builds RLJob's images with buildah or docker."""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rljob_cluster.host.commands import ClusterError
from rljob_cluster.images.base_image import NoBaseError
from rljob_cluster.images.build import FOLDERS, BuildResult, build_image
from rljob_cluster.images.tools import choose_tool


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        tool = choose_tool()
        build = functools.partial(build_image, tool=tool, archive=options.archive, pin_base=options.pin_base)
        results = [build(Path.cwd(), name) for name in options.names]
        results += [] if options.names else list(_build_all(build))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.output == "json":
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _print_table(results)
    return 0


def _build_all(build: Callable[[Path, str], BuildResult]) -> Iterator[BuildResult]:
    """Leave out what has no base here: few jobs need another Python."""
    for index, name in enumerate(FOLDERS):
        share = f"{index / len(FOLDERS):.0%}"
        print(f"image {index + 1} of {len(FOLDERS)} ({share} are built): {name}", file=sys.stderr, flush=True)
        try:
            yield build(Path.cwd(), name)
        except NoBaseError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rljob_cluster.images", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="IMAGE", help=f"one of {', '.join(FOLDERS)}; default: all")
    parser.add_argument(
        "--archive", action="store_const", const="yes", default="no", help="also write an archive of each image"
    )
    parser.add_argument(
        "--loadable", action="store_const", const="needed", dest="archive",
        help="also write an archive if a cluster on this machine cannot link to buildah's store",
    )  # fmt: skip
    parser.add_argument("--pin-base", action="store_true", help="build on one digest of the base, not on its tag")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in FOLDERS]:
        parser.error(f"unknown image: {', '.join(unknown)}; use one of {', '.join(FOLDERS)}")
    return options


def _print_table(results: Sequence[BuildResult]) -> None:
    print(f"{'IMAGE':<24}{'SIZE':>9}{'SECONDS':>9}  ARCHIVE")
    for r in results:
        print(f"{r.image:<24}{r.size_mb:>6} MB{r.seconds:>9}  {r.archive or '-'}{' (unchanged)' if r.reused else ''}")


if __name__ == "__main__":
    sys.exit(main())
