"""A GGUF file as a Hugging Face folder, by transformers' own reader. Quantized weights become fp32."""

import contextlib
import io
import shutil
from pathlib import Path

import torch

from megatron_mlmclm.convert.families import BY_ARCHITECTURE
from megatron_mlmclm.errors import UserError


def unpack(file: Path, folder: Path) -> Path:
    """Write the model and tokenizer in `file` to the new folder `folder`, with the licences that lie beside the file.

    Needs the packages gguf and accelerate, and the whole model's memory in fp32.

    Raises:
        UserError: a package is missing, no such file, or transformers cannot read it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not file.is_file():
        raise UserError(f"{file}: no such file")
    where = {"gguf_file": file.name, "local_files_only": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of its own
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    except ImportError as error:
        raise UserError(f"{file}: {error}; install megatron_mlmclm[gguf], which reads it") from None
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        missing = "; install megatron_mlmclm[gguf], which reads it" if "pip install" in str(error) else ""
        raise UserError(f"{file}: cannot be read as GGUF: {error}{missing}") from None
    if (architecture := type(model).__name__) not in BY_ARCHITECTURE:
        raise UserError(
            f"{file}: architecture {architecture} is not known; known: {', '.join(sorted(BY_ARCHITECTURE))}"
        )
    # The weights are plain now; with its note on quantization transformers would refuse to save them.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for licence in file.parent.glob("LICEN[SC]E*"):
        shutil.copyfile(licence, folder / licence.name)
    return folder
