"""The files of a model besides its weights, which an export keeps: processors of images, licences, code."""

import shutil
from pathlib import Path

from rljob_inputs.models.files import open_model

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".ot")
_PAGES = (".md", ".gitattributes", ".gitignore")
"""Files of a repository; they describe another model."""


def copy_other_files(source: str, revision: str, folder: Path) -> None:
    """Copy them from `source`, a folder, hf://org/name or s3://bucket/path, to `folder`. An export writes its own
    files over them."""
    files = open_model(source, revision)
    for name in files.sizes:
        if "/" not in name and not name.startswith(".") and not name.endswith((*_WEIGHTS, *_PAGES)):
            shutil.copyfile(files.fetch(name), folder / name)
