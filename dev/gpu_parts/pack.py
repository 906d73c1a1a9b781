"""Puts together what a GPU machine with only CPython and torch lacks: archives of a given number and size.

    python dev/gpu_parts/pack.py parts --number 7 --megabytes 45 --has numpy,scipy,pyarrow

It installs the locked packages for GPUs, without their needs, into a scratch folder (3 GB), leaves out what
contents.yaml names and the machine has, compresses it with all cores, and divides the result for `unpack.py`.
"""

import argparse
import fnmatch
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONTENTS = Path(__file__).with_name("contents.yaml")
TESTS = r"(pytest|pytest-asyncio|pytest-xdist|hypothesis|execnet|iniconfig|pluggy|sortedcontainers)=="


def choose(requirements: Iterable[str], left_out: Sequence[str], has: str) -> Iterator[str]:
    """Yield the requirements that are packed. `left_out`: patterns of names. `has`: names on the machine."""
    present = {name.lower().replace("_", "-") for name in has.split(",")}
    for requirement in requirements:
        name = re.split(r"[=\s;@\[]", requirement, maxsplit=1)[0]
        if name not in present and not any(re.fullmatch(pattern, name) for pattern in left_out):
            yield requirement


def find_files(folder: Path, left_out: Sequence[str]) -> list[Path]:
    """Return the files to pack. Similar ones follow each other, which compresses better."""
    files = {path: str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    kept = (path for path, name in files.items() if not any(fnmatch.fnmatch(name, each) for each in left_out))
    return sorted(kept, key=lambda path: (path.suffix, path))


def pack(files: Sequence[Path], folder: Path, to: Path, num_bytes: int, preset: int, block: int = 2**26) -> int:
    """Write parts.tar.xz.1, parts.tar.xz.2, ... of at most `num_bytes`, and return how many. Together they are a tar:
    streams of xz, each of `block` bytes, one per thread at a time."""
    with tempfile.NamedTemporaryFile(prefix="gpu-parts-") as whole:
        with tarfile.open(whole.name, "w") as tar:
            for path in files:
                tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
        starts = range(0, Path(whole.name).stat().st_size, block)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            data = b"".join(
                pool.map(lambda start: lzma.compress(os.pread(whole.fileno(), block, start), preset=preset), starts)
            )
    for old in to.glob("parts.tar.xz.*"):
        old.unlink()
    starts = range(0, len(data), num_bytes)
    for number, start in enumerate(starts, 1):
        (to / f"parts.tar.xz.{number}").write_bytes(data[start : start + num_bytes])
    return len(starts)


def read_lock(uv: str) -> list[str]:
    """Return the locked requirements of jobs on GPUs, and of the tests."""
    command = f"{uv} export -q --frozen --no-hashes --no-annotate --no-header --no-emit-workspace --extra gpu".split()
    jobs, all_ = (
        subprocess.run([*command, *group], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        for group in (["--no-default-groups"], ["--group", "dev"])
    )
    return jobs + [line for line in all_ if re.match(TESTS, line) and line not in jobs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the archives go")
    parser.add_argument("--number", type=int, default=7, help="of archives, at most")
    parser.add_argument("--megabytes", type=float, default=45, help="of one archive, at most")
    parser.add_argument("--has", default="", metavar="NAME,...", help="packages of the machine, which are not packed")
    parser.add_argument("--python", default="3.12", help="its version of CPython")
    parser.add_argument("--preset", type=int, default=3, help="of xz, 0 to 9")
    options = parser.parse_args()
    uv, contents = str(ROOT / ".tools/bin/uv"), yaml.safe_load(CONTENTS.read_text())
    wanted = list(choose(read_lock(uv), contents["packages"], options.has))
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-parts-") as scratch:
        folder, requirements = Path(scratch, "site"), Path(scratch, "requirements.txt")
        requirements.write_text("\n".join(wanted))
        install = [uv, "pip", "install", "-q", "--no-deps", "--python-version", options.python]
        subprocess.run([*install, "--target", str(folder), "--requirement", str(requirements)], check=True)
        files = find_files(folder, contents["files"])
        number = pack(files, folder, options.folder, int(options.megabytes * 10**6), options.preset)
    print(f"{len(wanted)} packages, {len(files)} files: {number} archives")
    if number > options.number:
        print(f"error: --number is {options.number}: leave out more, by --has or in {CONTENTS}", file=sys.stderr)
    return int(number > options.number)


if __name__ == "__main__":
    sys.exit(main())
