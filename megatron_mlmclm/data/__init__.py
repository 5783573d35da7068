"""Text -> documents -> samples. The room's front door; each name is imported when it is first asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mlmclm.data.blend import Blend, SampleId
    from megatron_mlmclm.data.dataset import EncoderDataset, Reading, Sources
    from megatron_mlmclm.data.indexed import IndexedReader, IndexedWriter, read_sidecar
    from megatron_mlmclm.data.packed import PackedStream, open_stream
    from megatron_mlmclm.data.stream import DocumentStream, Stream, TokenStream
    from megatron_mlmclm.data.tokenizer import Tokenizer
    from megatron_mlmclm.data.words import word_marks

_HOME = {
    "Blend": "blend",
    "EncoderDataset": "dataset",
    "Reading": "dataset",
    "SampleId": "blend",
    "Sources": "dataset",
    "IndexedReader": "indexed",
    "IndexedWriter": "indexed",
    "read_sidecar": "indexed",
    "word_marks": "words",
    "PackedStream": "packed",
    "open_stream": "packed",
    "DocumentStream": "stream",
    "Stream": "stream",
    "TokenStream": "stream",
    "Tokenizer": "tokenizer",
}

__all__ = [
    "Blend",
    "DocumentStream",
    "EncoderDataset",
    "Reading",
    "IndexedReader",
    "IndexedWriter",
    "PackedStream",
    "SampleId",
    "Sources",
    "Stream",
    "TokenStream",
    "Tokenizer",
    "open_stream",
    "read_sidecar",
    "word_marks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
