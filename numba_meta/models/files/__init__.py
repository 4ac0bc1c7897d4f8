"""Model files: found or fetched (`pull`, `known`), their headers and bytes (`gguf`, `gguf_header`, `file_bytes`).

Comes in: a name or a path. Goes out: a `GGUFFile`: metadata, where tensors lie, and their bytes as they are asked for.
"""
