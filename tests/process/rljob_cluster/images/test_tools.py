"""The choice of a container tool with real, fake commands on PATH: a fresh machine, where docker has no daemon."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Installs a program by writing a script that works, as the package would.
APT_GET = """\
echo "$*" >> {log}
[ "$1" = install ] || exit 0
for package in "$@"; do
  case $package in buildah|runc|debootstrap)
    printf '#!/bin/sh\\nexit 0\\n' > {folder}/$package; chmod +x {folder}/$package;;
  esac
done
"""


def write_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}")
    (folder / name).chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed by root only")
def test_fresh_machine_gets_buildah_and_runc_by_apt(tmp_path: Path) -> None:
    folder, log = tmp_path / "bin", tmp_path / "apt.log"
    folder.mkdir()
    write_program(folder, "docker", 'echo "Cannot connect to the Docker daemon" >&2; exit 1\n')
    write_program(folder, "apt-get", APT_GET.format(log=log, folder=folder))
    for name in ("sh", "chmod"):
        (folder / name).symlink_to(Path("/bin") / name)
    program = "from rljob_cluster.images.tools import choose_tool; print(choose_tool())"
    environment = {"PATH": str(folder), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "Buildah(runtime='runc')\n"
    assert done.stderr.splitlines()[-1] == (
        "building images with buildah (runc): no tool worked before (buildah is not installed, `docker info` fails)"
    )
    assert log.read_text().splitlines() == [
        "update",
        "install -y --no-install-recommends buildah",
        "update",
        "install -y --no-install-recommends runc",
    ]
