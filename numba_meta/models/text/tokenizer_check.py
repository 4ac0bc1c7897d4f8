"""Whether a file's tokenizer can be built, told from its header alone, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numba_meta.errors import ModelFileError
from numba_meta.models.text.tokenizer_bpe import merge_pairs
from numba_meta.models.text.vocabulary import Vocabulary, read_vocabulary


def check_tokenizer(metadata: Mapping[str, Any], n_rows: int | None = None) -> Vocabulary:
    """The vocabulary of a header whose tokenizer can be built; `n_rows`: rows of the embedding, None where they are not known.

    Raises ModelFileError, in one line, for what is missing, unknown, or does not fit together. Takes a fraction of what building takes.
    """
    vocabulary = read_vocabulary(metadata)
    if vocabulary.model == "gpt2":
        merge_pairs(vocabulary)
    if n_rows is not None and vocabulary.n_vocab > n_rows:
        raise ModelFileError(f"tokenizer.ggml.tokens holds {vocabulary.n_vocab} tokens, the embedding {n_rows} rows; expected a row each")
    return vocabulary


def tokenizer_problem(metadata: Mapping[str, Any], n_rows: int | None = None) -> str | None:
    """One line that says why the tokenizer of a header cannot be built; None where it can."""
    try:
        check_tokenizer(metadata, n_rows)
    except ModelFileError as error:
        return f"the tokenizer cannot be built: {error}"
    return None


def refuse_text(file_name: str, problem: str | None) -> None:
    """Raises ModelFileError, which names the file, where there is a `tokenizer_problem`."""
    if problem is not None:
        raise ModelFileError(f"{file_name}: {problem}; text needs one: use a file with a tokenizer that is known here")


def n_choosable(metadata: Mapping[str, Any], n_rows: int) -> int:
    """How many of the embedding's rows are tokens, which alone can be chosen: all of them where the file lists no tokens."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    return min(len(tokens), n_rows) if isinstance(tokens, list) and tokens else n_rows
