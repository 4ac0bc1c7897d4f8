"""Tiny random GGUF models for tests and benchmarks: real metadata keys, every weight type, activations of order 1.

    python tests/synthetic.py OUT.gguf llama q4_k            # 2 layers, 256 wide, 397 tokens

Written with the `gguf` package alone, so that a fault in numba_meta's own reader cannot hide in its test files.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

FLOATS = ("f32", "f16", "bf16")
ENCODED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")  # the gguf package quantizes to these
# Types made of random bytes: offset of the scale, offset of the minimum, minimum per scale that centres the values on 0.
RANDOM_FIELDS: dict[str, tuple[int, int | None, float]] = {
    "q2_k": (80, 82, 1.5), "q3_k": (108, None, 0.0), "q4_k": (0, 2, 7.5), "q5_k": (0, 2, 15.5), "q6_k": (208, None, 0.0),
    "iq4_nl": (0, None, 0.0), "iq4_xs": (0, None, 0.0),
}  # fmt: skip
TYPE_NAMES = (*FLOATS, *ENCODED, *RANDOM_FIELDS)
# general.file_type as llama.cpp numbers it
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15, "q5_k": 17, "q6_k": 18,
    "iq4_nl": 25, "iq4_xs": 30, "bf16": 32,
}  # fmt: skip
MIN_VOCAB = 300
_POOL_ELEMENTS = 1 << 22  # larger matrices repeat the rows of a pool of this size, so that benchmarks need not wait

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types of llama.cpp

_MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "n d", "i s", "Ġ c", "o r", "Ġ i", "Ġa nd", "in g",
)  # fmt: skip
_PIECES = ("▁t", "in", "▁a", "er", "on", "he", "re", "▁the", "an", "▁s", "at", "▁w", "nd", "▁and", "ing", "is")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a synthetic model; `head_dim` is the width of a head of Q, K and V alike."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    context_length: int
    sliding_window: int


def _rng(seed: int, name: str) -> np.random.Generator:
    """A tensor's values depend on seed and name alone, not on what was drawn before."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _random_blocks(rng: np.random.Generator, rows: int, cols: int, type_name: str, sigma: float) -> npt.NDArray[np.uint8]:
    """Random quants and sub-scales under scales that give values of standard deviation `sigma`."""
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    at, minimum_at, ratio = RANDOM_FIELDS[type_name]

    def set_scales(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> None:
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
        if minimum_at is not None:
            blocks[:, minimum_at : minimum_at + 2] = (scales * ratio).astype(np.float16).view(np.uint8).reshape(-1, 2)

    probe = np.random.default_rng(0).integers(0, 256, (256, block_bytes), dtype=np.uint8)
    set_scales(probe, np.ones(256, np.float32))
    unit = float(gguf.quants.dequantize(probe, kind).std())
    blocks = rng.integers(0, 256, (rows * cols // block_size, block_bytes), dtype=np.uint8)
    set_scales(blocks, (sigma / unit * rng.uniform(0.7, 1.3, len(blocks))).astype(np.float32))
    return blocks.reshape(rows, cols // block_size * block_bytes)


def random_matrix(rng: np.random.Generator, rows: int, cols: int, type_name: str, sigma: float) -> npt.NDArray[np.uint8]:
    """A random matrix of standard deviation `sigma` as stored rows, uint8 [rows, row_bytes]. `cols` must fill whole blocks."""
    if type_name not in TYPE_NAMES:
        raise ValueError(f"no weight type {type_name}; expected one of {', '.join(TYPE_NAMES)}")
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    block_size = gguf.GGML_QUANT_SIZES[kind][0]
    if cols % block_size:
        raise ValueError(f"rows of {cols} elements do not fill blocks of {type_name} ({block_size} elements)")
    n_pool = min(rows, max(1, _POOL_ELEMENTS // cols))
    if type_name in RANDOM_FIELDS:
        pool = _random_blocks(rng, n_pool, cols, type_name, sigma)
    else:
        values = rng.standard_normal((n_pool, cols), dtype=np.float32) * np.float32(sigma)
        pool = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    return pool if n_pool == rows else pool[np.arange(rows) % n_pool]


def _add_matrix(writer: gguf.GGUFWriter, seed: int, name: str, rows: int, cols: int, types: dict[str, str], sigma: float) -> None:
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    type_name = types.get(name, types.get(part, types["default"]))
    try:
        raw = random_matrix(_rng(seed, name), rows, cols, type_name, sigma)
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from None
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[type_name.upper()])


def _add_norm(writer: gguf.GGUFWriter, seed: int, name: str, width: int, scale: float = 1.0) -> None:
    writer.add_tensor(name, (scale * (1 + 0.1 * _rng(seed, name).standard_normal(width))).astype(np.float32))


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where visible, else the next code point from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]


def _add_gpt2_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Byte-level BPE as SmolLM2 has it: specials, 256 bytes, merged tokens, then unused ones."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merged = [merge.replace(" ", "") for merge in _MERGES]
    tokens = [*specials, *_byte_characters(), *merged]
    types = [CONTROL] * len(specials) + [NORMAL] * (256 + len(merged))
    for i in range(n_vocab - len(tokens)):
        tokens.append(f"<unused{i}>")
        types.append(UNUSED)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_spm_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """SentencePiece as Gemma has it: specials, 256 byte tokens, pieces by falling score, then unused ones; no template."""
    specials = [(token, CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")]
    specials += [("[multimodal]", USER_DEFINED), ("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL)]
    specials += [(token, USER_DEFINED) for token in ("\n", "\n\n", "  ")]
    letters = ["▁", *"etaoinshrdlucmfwypvbgkjqxz"]
    pieces = [*_PIECES[: n_vocab - len(specials) - 256 - len(letters)], *letters]
    tokens = [token for token, _ in specials] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    types = [kind for _, kind in specials] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [-1000.0] * len(specials) + [0.0] * 256 + [-float(i) for i in range(len(pieces))]
    for i in range(n_vocab - len(tokens)):
        tokens.append(f"<unused{i}>")
        types.append(CONTROL)
        scores.append(-1000.0)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_sep_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _add_common_keys(writer: gguf.GGUFWriter, shape: Shape, file_type: int) -> None:
    writer.add_type("model")
    writer.add_name("synthetic")
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)


def _add_llama_keys(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_rope_dimension_count(shape.head_dim)
    if shape.head_dim * shape.n_head != shape.n_embd:  # as real files do, only where it does not follow from the width
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)


def _add_gemma3_keys(writer: gguf.GGUFWriter, shape: Shape) -> None:
    # Without the sliding-window pattern, the local rope base, the rope dimension count and the vocabulary size, like the real file.
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(shape.sliding_window)


def _add_layer(writer: gguf.GGUFWriter, shape: Shape, types: dict[str, str], seed: int, layer: int) -> None:
    prefix = f"blk.{layer}."
    n_embd, n_q, n_kv = shape.n_embd, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim

    def matrix(part: str, rows: int, cols: int) -> None:
        _add_matrix(writer, seed, f"{prefix}{part}.weight", rows, cols, types, cols**-0.5)

    def norm(part: str, width: int, scale: float = 1.0) -> None:
        _add_norm(writer, seed, f"{prefix}{part}.weight", width, scale)

    norm("attn_norm", n_embd)
    matrix("attn_q", n_q, n_embd)
    matrix("attn_k", n_kv, n_embd)
    matrix("attn_v", n_kv, n_embd)
    matrix("attn_output", n_embd, n_q)
    if shape.architecture == "gemma3":
        norm("attn_q_norm", shape.head_dim)
        norm("attn_k_norm", shape.head_dim)
        norm("post_attention_norm", n_embd, 0.5)
    norm("ffn_norm", n_embd)
    matrix("ffn_gate", shape.n_ff, n_embd)
    matrix("ffn_up", shape.n_ff, n_embd)
    matrix("ffn_down", n_embd, shape.n_ff)
    if shape.architecture == "gemma3":
        norm("post_ffw_norm", n_embd, 0.5)


def write_model(
    path: str | Path,
    architecture: str = "llama",
    *,
    n_layer: int = 2,
    n_embd: int = 256,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int = 512,
    n_vocab: int = 397,
    types: dict[str, str] | str = "q4_0",
    tied: bool = True,
    context_length: int = 512,
    sliding_window: int = 16,
    seed: int = 0,
    split_max_tensors: int = 0,
) -> Path:
    """Writes a random `llama` or `gemma3` model and returns the path of the file (of the first part, where split).

    `types` is one type name for all matrices, or names by tensor (`blk.0.attn_q.weight`) or part (`attn_q`, `token_embd`,
    `output`), with `default` for the rest; norms are f32. `tied`: no `output.weight`, the embedding serves. Rows must fill
    whole blocks: 256-element types need `n_embd`, `n_ff` and `n_head * head_dim` in multiples of 256. With
    `split_max_tensors` the model is written as `-00001-of-0000N.gguf` files of at most so many tensors.
    """
    if architecture not in ("llama", "gemma3"):
        raise ValueError(f"no synthetic {architecture} model; expected llama or gemma3")
    if n_vocab < MIN_VOCAB:
        raise ValueError(f"n_vocab is {n_vocab}; the tokenizer takes at least {MIN_VOCAB}")
    path = Path(path)
    by_part = {"default": types} if isinstance(types, str) else {"default": "q4_0", **types}
    width = head_dim or n_embd // n_head
    shape = Shape(architecture, n_layer, n_embd, n_head, n_head_kv, width, n_ff, n_vocab, context_length, sliding_window)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    _add_common_keys(writer, shape, FILE_TYPES[by_part["default"]])
    if architecture == "llama":
        _add_llama_keys(writer, shape)
        _add_gpt2_tokenizer(writer, n_vocab)
    else:
        _add_gemma3_keys(writer, shape)
        _add_spm_tokenizer(writer, n_vocab)
    _add_matrix(writer, seed, "token_embd.weight", n_vocab, n_embd, by_part, 2.0 * n_embd**-0.5)
    _add_norm(writer, seed, "output_norm.weight", n_embd)
    if not tied:
        _add_matrix(writer, seed, "output.weight", n_vocab, n_embd, by_part, 2.0 * n_embd**-0.5)
    for layer in range(n_layer):
        _add_layer(writer, shape, by_part, seed, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    n_parts = len(writer.tensors)
    writer.close()
    return path if n_parts == 1 else path.with_name(f"{path.stem}-00001-of-{n_parts:05}.gguf")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} OUT.gguf llama|gemma3 {'|'.join(TYPE_NAMES)}")
    print(write_model(sys.argv[1], sys.argv[2], types=sys.argv[3]))
