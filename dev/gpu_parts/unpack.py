"""Unpacks the archives of `pack.py` next to the torch of the Python that runs this, and prints what imports.

    python3 dev/gpu_parts/unpack.py parts /tmp/env && /tmp/env/bin/python bench/accept_gpu.py --only doctor

It needs the standard library alone. ENV becomes a virtual environment: the archives' packages come first, then RLJob's
own, from this checkout, then those of this Python. The exit code is 1 if a module that a job needs does not import.
"""

import lzma
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LACKS = Path(__file__).with_name("torch_lacks.py")
MODULES = """torch triton transformers peft ray flashinfer vllm vllm.cumem_allocator vllm._C_stable_libtorch
vllm._moe_C_stable_libtorch vllm.vllm_flash_attn._vllm_fa2_C vllm.vllm_flash_attn._vllm_fa3_C
vllm.v1.worker.gpu_worker vllm.v1.worker.gpu.model_runner vllm.v1.engine.async_llm rljob_trainer.policy.policy
rljob_trainer.rollout.engine rljob_trainer.rollout.server rljob_trainer.head rljob_service rljob_cli.main"""
"""What a job on a GPU imports."""


def unpack(folder: Path, site: Path) -> None:
    """Unpack all volumes of `folder` into `site`."""
    found = {int(path.suffix[1:]): path for path in folder.glob("parts.tar.xz.*")}
    if missing := set(range(1, max(found, default=1) + 1)) - found.keys():
        raise SystemExit(f"{folder} lacks parts.tar.xz.{min(missing)}, which pack.py writes")
    whole = site / "parts.tar.xz"
    with whole.open("wb") as file:
        file.writelines(found[number].read_bytes() for number in sorted(found))
    with lzma.open(whole) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extractall(site)  # Python 3.11.2, which Debian 12 has, knows no filter
    whole.unlink()


def add_checkout(site: Path, python: Path) -> None:
    """Make RLJob's packages importable, with their entry points and programs."""
    paths = []
    for file in sorted(ROOT.glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        paths.append(str(file.parent))
        folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
        groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
        lines = [line for group, points in groups.items() for line in (f"[{group}]", *map(" = ".join, points.items()))]
        (folder / "entry_points.txt").write_text("\n".join(lines))
        for name, target in project.get("scripts", {}).items():
            module, function = target.split(":")
            program = python.with_name(name)
            program.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
            program.chmod(0o755)
    (site / LACKS.name).write_text(LACKS.read_text())
    (site / "rljob.pth").write_text("\n".join(["import torch_lacks", *paths, sysconfig.get_path("purelib")]))


def try_import(python: Path, module: str) -> tuple[bool, str]:
    """Return whether a module imports, and its version or the error."""
    code = f"import torch, importlib; print(getattr(importlib.import_module({module!r}), '__version__', ''))"
    ended = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    said = ended.stderr if ended.returncode else ended.stdout
    return ended.returncode == 0, next(reversed(said.splitlines()), "")


def main() -> int:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    folder, env = (Path(each).resolve() for each in sys.argv[1:])
    venv.create(env)
    python, site = env / "bin/python", Path(sysconfig.get_path("purelib", vars={"base": str(env)}))
    unpack(folder, site)
    add_checkout(site, python)
    failed = False
    for module in MODULES.split():
        imports, said = try_import(python, module)
        print(f"{module:36} {'imports' if imports else 'FAILED':8} {said}", flush=True)
        failed |= not imports
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
