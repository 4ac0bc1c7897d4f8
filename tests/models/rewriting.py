"""A copy of a small GGUF file with other metadata or tensors, made by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

REMOVED = object()  # stands for a key or tensor that the copy lacks
Typed = tuple[Any, gguf.GGUFValueType]


def rewrite(
    source: Path, path: Path, metadata: Mapping[str, Typed | object] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """Copies `source` to `path`. `metadata`: (value, type) or REMOVED by key; `tensors`: an array, (raw rows, type) or REMOVED by name."""
    reader = gguf.GGUFReader(source)
    metadata, tensors = dict(metadata or {}), dict(tensors or {})
    architecture = metadata.pop("general.architecture", (reader.get_field("general.architecture").contents(), None))[0]
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in metadata:
            continue
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for key, value in metadata.items():
        if value is not REMOVED:
            writer.add_key_value(key, *value)
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, value in tensors.items():
        if value is not REMOVED:
            rows, kind = value if isinstance(value, tuple) else (value, None)
            writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
