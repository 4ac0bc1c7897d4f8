"""A model as its file describes it: its configuration, and the tensors that its graph reads. The header alone is read, and constants.

What a file holds is accepted only where it counts: a tensor that the graph leaves out would change what the model says, and nobody
would know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from numba_meta.dtypes import F32
from numba_meta.errors import ModelFileError
from numba_meta.graph import Graph
from numba_meta.models.architectures import ARCHITECTURES, Architecture
from numba_meta.models.architectures.base import Parts
from numba_meta.models.architectures.builder import BatchShape, GraphBuilder
from numba_meta.models.architectures.config import ModelConfig
from numba_meta.models.architectures.keys import Keys
from numba_meta.models.files.gguf import GGUFFile
from numba_meta.models.files.gguf_header import TensorInfo, shown
from numba_meta.tensor import Role

_LAYER_NAME = re.compile(r"blk\.([0-9]{1,6})\.")
# Tensors that change no text though no graph reads them.
_HARMLESS = (
    # Frequencies as old converters wrote them: they follow from the base.
    re.compile(r"(blk\.[0-9]+\.)?(attn_rot_embd|rope\.freqs|rotary_emb\.inv_freq)(\.weight)?"),
    re.compile(r"(v|mm)\..+"),  # an image encoder beside the text model: text does not pass through it
)


@dataclass(frozen=True)
class ModelDescription:
    """A model before anything is decided.

    `tensors`: all that its graphs read, in the order of the file; a tensor that holds several is several here.
    """

    architecture: Architecture
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]

    def graph(self, batch: BatchShape) -> Graph:
        """The graph of a step of these capacities."""
        return self.architecture.build(GraphBuilder(self.config, self.tensors, batch))


def describe_model(file: GGUFFile) -> ModelDescription:
    """The model in a file. Raises `ModelFileError` where its architecture is unknown, a value impossible, a tensor missing or unread."""
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelFileError(
            f"{file.path.name}: the architecture {shown(file.architecture, 60)!r} is not supported; supported are {known}"
        )
    keys = Keys(file)
    try:
        config = architecture.read(keys)
        whole = ModelDescription(architecture, config, _parted(file.tensors, architecture.parts(config, file.tensors)))
        graph = whole.graph(BatchShape(1, 1, 1, 1, 1, 1 if config.window else 0, F32, F32))
    except ModelFileError as error:
        raise error if str(error).startswith(file.path.name) else keys.error(str(error)) from None
    read = {leaf.name for leaf in graph.leaves if leaf.role is Role.WEIGHT}
    unread = [name for name in whole.tensors if name not in read and name not in config.constants]
    if (problem := _problem_of(unread, keys)) is not None:
        raise keys.error(problem)
    return ModelDescription(architecture, config, {name: info for name, info in whole.tensors.items() if name in read})


def _parted(tensors: Mapping[str, TensorInfo], parts: Parts) -> dict[str, TensorInfo]:
    """`tensors` with those that hold several replaced by their parts."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        own = parts.get(name, ())
        if not own:
            found[name] = info
            continue
        if info.shape[-1] != sum(n for _, n in own) or len(info.shape) > 2 or (len(info.shape) == 1 and info.dtype.is_quantized):
            names = " and ".join(f"{part} ({n})" for part, n in own)
            raise ModelFileError(f"the tensor {name} has the shape {list(info.shape)}, expected the outputs of {names}")
        first = 0
        for part, n in own:
            found[part] = info.outputs(part, first, n)
            first += n
    return found


def _problem_of(unread: Iterable[str], keys: Keys) -> str | None:
    """What is wrong with tensors that no graph reads; None where they are harmless."""
    wrong = [name for name in unread if not any(pattern.fullmatch(name) for pattern in _HARMLESS)]
    by_layer = {name: int(match[1]) for name in wrong if (match := _LAYER_NAME.match(name))}
    # Blocks of next-token prediction, which nothing here uses yet, are the last ones of `block_count`, and have tensors of that name.
    predicting = {layer for name, layer in by_layer.items() if layer >= keys.n_layer and ".nextn." in name}
    wrong = [name for name in wrong if by_layer.get(name, -1) not in predicting]
    if not wrong:
        return None
    first, more = shown(wrong[0]), f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    if by_layer.get(wrong[0], -1) >= keys.n_blocks:
        return f"the tensor {first}{more} belongs to no layer: {keys.name_of('block_count')} is {keys.n_blocks}; the file is damaged"
    return (
        f"the tensor {first}{more} has no place in a {keys.architecture} model here, so that what it does would be lost; "
        "use a file of the plain model"
    )
