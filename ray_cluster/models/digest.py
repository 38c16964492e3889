"""Which model it is, by the contents of its files: other weights are another model."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# what diffusers and transformers read of a folder
_READ = {".json", ".txt", ".model", ".safetensors", ".bin"}
_NUM_THREADS = 4


def model_digest(folder: Path) -> str:
    """Return a digest of the names and contents of all files that a model is loaded from.

    Every byte counts: weights that differ in a few tensors make other images. Hashing goes on
    without the interpreter's lock, some GB/s with the files in memory.
    """
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in _READ and path.is_file() and _is_component(path, folder)
    )
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="digest") as threads:
        digests = list(threads.map(_file_digest, paths))
    whole = hashlib.sha256()
    for path, digest in zip(paths, digests, strict=True):
        whole.update(f"{path.relative_to(folder).as_posix()}\0{digest}\0".encode())
    return whole.hexdigest()


def _is_component(path: Path, folder: Path) -> bool:
    """Whether it belongs to a component, or is the index; cards lie beside them."""
    return path.parent != folder or path.name == "model_index.json"


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
