"""State files: what the sequences of a cache hold, so that any split of the same model can go on from there.

    magic, version, bytes of the header | header (JSON) | digest so far | states of the sequences | rows | digest of everything before

Numbers are little-endian. The header says which model and cache types the rows belong to and how many there are, so that the length of the
file follows from it. States: int32 tokens, then a bit per position that is held. Rows: whole cells by sequence, layer, K then V, in order
of position; of a layer with a sliding window only those that it still has. Nothing in a file depends on devices or on where the cache lies.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from numba_meta.errors import NumbaMetaError, UsageError
from numba_meta.interrupts import held_back, let_through
from numba_meta.models.cache.cells import NO_CELL, UNKNOWN, SequenceState
from numba_meta.models.cache.operations import CacheOperations, CacheTensor
from numba_meta.models.files.gguf import GGUFFile

MAGIC = b"nmstate\n"
VERSION = 1
_PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the header
_DIGEST_BYTES = 16
_MOST_HEADER_BYTES = 16 << 20
_BYTES_AT_ONCE = 16 << 20
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ModelIdentity:
    """What must agree between the model that saved a state and the one that loads it.

    `digest`: of its constants and of samples of its weights.
    """

    architecture: str
    n_layer: int
    n_vocab: int
    digest: str

    def __str__(self) -> str:
        return f"{self.architecture}, {self.n_layer} layers, {self.n_vocab} tokens, {self.digest[:8]}"


def identify_model(file: GGUFFile, n_layer: int, n_vocab: int) -> ModelIdentity:
    """The identity of a model file, the same for all ways to cut it into parts; reads a few bytes of every tensor."""
    digest = _new_digest()
    for key, value in sorted(file.metadata.items()):
        if key.startswith(f"{file.architecture}.") and not isinstance(value, list):
            digest.update(f"{key}={value!r}\n".encode())
    for name, tensor in sorted(file.tensors.items()):
        digest.update(f"{name} {tensor.dtype.name} {list(tensor.shape)}\n".encode())
        for start in (0, tensor.n_bytes // 2):
            digest.update(file.sample(name, start, 64))
    return ModelIdentity(file.architecture, n_layer, n_vocab, digest.hexdigest())


# ---- saving ----------------------------------------------------------------------------------------------------------------------------


def save_state(path: str | Path, model: ModelIdentity, cache: CacheOperations) -> None:
    """Writes all sequences of a cache to a file, which is replaced as a whole or not at all.

    Raises `NumbaMetaError` where it cannot be written.
    """
    used = [s for s in range(cache.cells.shape.n_sequences) if cache.cells.length(s)]
    states = {s: cache.cells.state(s) for s in used}
    header = {
        "model": asdict(model),
        "cache_types": _cache_types(cache),
        "layers": [[layer.k.cell_bytes, layer.v.cell_bytes, layer.window] for layer in cache.layers],
        "sequences": [
            {
                "sequence": s,
                "n_tokens": len(state.tokens),
                "n_rows": sum(state.is_held),
                "n_window_rows": len(_row_cells(cache, s, True)) if cache.cells.shape.window else 0,
                "window_start": state.window_start,
                "shortest": state.shortest,
            }
            for s, state in states.items()
        ],
    }
    _replace_file(Path(path), _with_digests(json.dumps(header).encode(), _payload(cache, states)))


def _payload(cache: CacheOperations, states: dict[int, SequenceState]) -> Iterator[Array]:
    for state in states.values():
        yield np.array(state.tokens, "<i4")
        yield np.packbits(np.array(state.is_held, np.bool_))
    for sequence in states:
        for layer in cache.layers:
            cells = _row_cells(cache, sequence, bool(layer.window))
            for tensor in (layer.k, layer.v):
                for part in _parts(cells, tensor):
                    yield cache.memory.read_cells(tensor.name, part)


def _row_cells(cache: CacheOperations, sequence: int, local: bool) -> Array:
    """The cells that hold a row of a sequence, in order of position."""
    row = cache.cells.table_row(sequence, local)
    held: Array = row[row != NO_CELL]
    return held


def _parts(cells: Array, tensor: CacheTensor) -> Iterator[Array]:
    step = max(1, _BYTES_AT_ONCE // max(1, tensor.cell_bytes))
    for at in range(0, len(cells), step):
        yield cells[at : at + step]


def _with_digests(header: bytes, payload: Iterable[Array]) -> Iterator[bytes]:
    digest = _new_digest()
    for part in (_PREFIX.pack(MAGIC, VERSION, len(header)), header):
        digest.update(part)
        yield part
    part = digest.digest()
    digest.update(part)
    yield part
    for array in payload:
        part = array.tobytes()
        digest.update(part)
        yield part
    yield digest.digest()


def _replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Writes beside the file and renames, so that at any time there is the old file or the new one."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file; expected a path for a state file")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    _remove_abandoned(path)
    try:
        with held_back(), _removed_in_the_end(beside):
            with open(beside, "xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # as long as somebody writes it
                for part in parts:
                    let_through()
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    except OSError as error:
        raise NumbaMetaError(f"{path}: the state cannot be saved ({error.strerror}); choose another path or make room") from None


@contextmanager
def _removed_in_the_end(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Removes what saves that were killed left beside a file: nobody holds its lock."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        try:
            with open(left, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        except OSError:  # it is being written, or it is not ours
            continue


# ---- loading ---------------------------------------------------------------------------------------------------------------------------


def load_state(path: str | Path, model: ModelIdentity, cache: CacheOperations) -> None:
    """Makes the sequences of a cache those of a file. All is checked first: where an error is raised, the cache is as it was.

    Raises `NumbaMetaError` for a damaged file, `UsageError` for one of another model or other cache types, `ContextFullError` where it does
    not fit.
    """
    path = Path(path)
    try:
        with _open(path) as file:
            state = _StateFile(path, file)
            state.check_belongs(model, cache)
            state.check_bytes()
            states = state.read_states(model.n_vocab)
            cache.cells.restore(states)
            try:
                state.read_rows(cache, states)
            except BaseException:
                cache.cells.clear()  # the file was sound a moment ago; half of its rows are of no use
                raise
            cache.write_tables(range(cache.cells.shape.n_sequences))
    except OSError as error:
        raise _cannot_be_read(path, error) from None


def check_state_file(path: Path) -> None:
    """Raises what `load_state` would for a file that is none or whose beginning is damaged, whatever the model."""
    try:
        with _open(path) as file:
            _StateFile(path, file)
    except OSError as error:
        raise _cannot_be_read(path, error) from None


def _cannot_be_read(path: Path, error: OSError) -> NumbaMetaError:
    return NumbaMetaError(f"{path}: the state cannot be read ({error.strerror}); check the path")


def _open(path: Path) -> BinaryIO:
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise UsageError(f"{path}: is no regular file; expected a state file")
    return open(path, "rb")


@dataclass(frozen=True)
class _SavedSequence:
    """What the header says of a sequence; see `SequenceState`."""

    sequence: int
    n_tokens: int
    n_rows: int
    n_window_rows: int
    window_start: int
    shortest: int

    @property
    def is_possible(self) -> bool:
        positions = (self.n_rows, self.window_start, self.shortest)
        return self.sequence >= 0 and 0 <= self.n_window_rows <= self.n_rows and all(0 <= p <= self.n_tokens for p in positions)


class _StateFile:
    """A state file that is being read, part after part. Raises `NumbaMetaError` for a header that is damaged."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._n_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX.size)
        if prefix[: len(MAGIC)] != MAGIC[: len(prefix)] or not prefix:
            raise NumbaMetaError(f"{path}: is no state file (it begins with {prefix[:8]!r}); expected one that was saved by numba_meta")
        if len(prefix) < _PREFIX.size:
            raise self._truncated(_PREFIX.size)
        _, version, n_header = _PREFIX.unpack(prefix)
        if version != VERSION:
            raise NumbaMetaError(f"{path}: is a state file of version {version}, expected {VERSION}; save it again with this version")
        self._start = _PREFIX.size + n_header + _DIGEST_BYTES
        if n_header > _MOST_HEADER_BYTES:
            raise self._corrupted(f"a header of {n_header} bytes")
        if self._start > self._n_bytes:
            raise self._truncated(self._start)
        header, digest = file.read(n_header), file.read(_DIGEST_BYTES)
        if _new_digest(prefix + header).digest() != digest:
            raise self._corrupted("its header does not fit its digest")
        try:
            fields = json.loads(header)
            self.model = ModelIdentity(**fields["model"])
            self.cache_types = [str(name) for name in fields["cache_types"]]
            self.layers = [[int(n) for n in layer] for layer in fields["layers"]]
            self.sequences = [_SavedSequence(**{key: int(n) for key, n in entry.items()}) for entry in fields["sequences"]]
            sound = all(saved.is_possible for saved in self.sequences) and all(min(layer) >= 0 and len(layer) == 3 for layer in self.layers)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            sound = False
        if not sound or len({saved.sequence for saved in self.sequences}) < len(self.sequences):
            raise self._corrupted("its header makes no sense")

    def check_belongs(self, model: ModelIdentity, cache: CacheOperations) -> None:
        """Raises `UsageError` unless the file was saved by this model with these cache types."""
        if self.model != model:
            models = f"another model ({self.model}), this one is {model}"
            raise UsageError(f"{self._path}: is the state of {models}; load the model that saved it")
        if self.cache_types != (types := _cache_types(cache)):
            raise UsageError(
                f"{self._path}: holds K and V as {', '.join(self.cache_types)}, the cache as {', '.join(types)}; "
                f"load the model with the same (cache_type_k, --cache-type-k {self.cache_types[0]}; "
                f"cache_type_v, --cache-type-v {self.cache_types[-1]})"
            )
        if self.layers != [[layer.k.cell_bytes, layer.v.cell_bytes, layer.window] for layer in cache.layers]:
            raise self._corrupted("its layers are not those of its model")

    def check_bytes(self) -> None:
        """Raises `NumbaMetaError` unless the file is as long as its header says and every byte is what was saved."""
        expected = self._start + sum(self._sequence_bytes(saved) for saved in self.sequences) + _DIGEST_BYTES
        if self._n_bytes < expected:
            raise self._truncated(expected)
        if self._n_bytes > expected:
            raise self._corrupted(f"it has {self._n_bytes} bytes, expected {expected}")
        digest, left = _new_digest(), expected - _DIGEST_BYTES
        self._file.seek(0)
        while left:
            let_through()
            part = self._read(min(left, _BYTES_AT_ONCE))
            digest.update(part)
            left -= len(part)
        if self._read(_DIGEST_BYTES) != digest.digest():
            raise self._corrupted("its bytes do not fit their digest")
        self._file.seek(self._start)

    def _sequence_bytes(self, saved: _SavedSequence) -> int:
        rows = sum((k_bytes + v_bytes) * (saved.n_window_rows if window else saved.n_rows) for k_bytes, v_bytes, window in self.layers)
        return 4 * saved.n_tokens + -(-saved.n_tokens // 8) + rows

    def read_states(self, n_vocab: int) -> dict[int, SequenceState]:
        """The states of the sequences, by sequence."""
        states = {}
        for saved in self.sequences:
            n = saved.n_tokens
            tokens = np.frombuffer(self._read(4 * n), "<i4")
            held = np.unpackbits(np.frombuffer(self._read(-(-n // 8)), np.uint8))[:n].astype(bool)
            n_window_rows = int(held[saved.window_start :].sum()) if any(window for *_, window in self.layers) else 0
            known = ((tokens >= UNKNOWN) & (tokens < n_vocab)).all()
            if not known or int(held.sum()) != saved.n_rows or n_window_rows != saved.n_window_rows:
                raise self._corrupted(f"sequence {saved.sequence} makes no sense")
            states[saved.sequence] = SequenceState(tuple(tokens.tolist()), tuple(held.tolist()), saved.window_start, saved.shortest)
        return states

    def read_rows(self, cache: CacheOperations, states: dict[int, SequenceState]) -> None:
        """Fills the cells of sequences that were restored. A shorter window than the one that was saved takes the last rows."""
        for saved in self.sequences:
            for layer in cache.layers:
                cells = _row_cells(cache, saved.sequence, bool(layer.window))
                n_left_out = (saved.n_window_rows if layer.window else saved.n_rows) - len(cells)
                for tensor in (layer.k, layer.v):
                    self._file.seek(n_left_out * tensor.cell_bytes, os.SEEK_CUR)
                    for part in _parts(cells, tensor):
                        let_through()
                        rows = np.frombuffer(self._read(len(part) * tensor.cell_bytes), np.uint8)
                        cache.memory.write_cells(tensor.name, part, rows.reshape(len(part), tensor.cell_bytes))

    def _read(self, n_bytes: int) -> bytes:
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise self._truncated(self._file.tell() - len(data) + n_bytes)
        return data

    def _truncated(self, n_bytes: int) -> NumbaMetaError:
        sizes = f"{self._n_bytes} bytes, expected {n_bytes} or more"
        return NumbaMetaError(f"{self._path}: the state file is truncated: {sizes}; save it again")

    def _corrupted(self, what: str) -> NumbaMetaError:
        return NumbaMetaError(f"{self._path}: the state file is corrupted: {what}; save it again")


def _cache_types(cache: CacheOperations) -> list[str]:
    first = cache.layers[0]
    return [first.k.dtype.name, first.v.dtype.name]


def _new_digest(data: bytes = b"") -> Any:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)
