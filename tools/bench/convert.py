"""How much memory conversions take, on a synthetic Llama of 3.2B bf16 parameters (6.4 GB, removed afterwards).

    python tools/bench/convert.py [--layers 28] [--json FILE] [--folder DIR]

Counted is anonymous memory (RssAnon), beyond what the interpreter has once everything is imported: what is mapped from
files belongs to the page cache. Three figures: an import, an export, and the start of one rank from the folder. The
import is read back: its export must equal the source.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import compared, make_parser, resident, tell

GIB = 1024**3
SHARD = 1_000_000_000
BYTES_PER_LAYER = 202_000_000
TENSOR_PARALLEL = 4  # of the rank that starts
SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--layers", type=int, default=28, help="28 make 3.2B parameters")
    parser.add_argument("--folder", type=Path, help="where to put the temporary files (default: the system's place)")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        JOBS[args.job](args.work)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        need_room(Path(folder), args.layers)
        tell(results(Path(folder), args.layers, args.rounds), args.json)


def need_room(folder: Path, layers: int) -> None:
    """Leave with status 2 where `folder` cannot take model, import and export."""
    needed, free = 3 * BYTES_PER_LAYER * (layers + 5), shutil.disk_usage(folder).free  # 5: of the embedding
    if free < needed:
        print(f"convert: {folder} has {free / 1e9:.0f} GB free of {needed / 1e9:.0f} GB; give --folder or --layers")
        sys.exit(2)


def results(work: Path, layers: int, rounds: int) -> Iterator[dict]:
    """Peak memory of each job against what it may take: a ratio of 1.05 is the most for an import, 1 for the others."""
    size = make_llama(work / "llama", layers)
    print(f"{size / 1e9:.2f} GB of weights, {layers} layers", flush=True)

    def told(case: str, job: str, peer: Callable[[], float]) -> dict:
        return compared(case, "GB", [(peak(job, work) / 1e9, peer() / 1e9) for _ in range(rounds)])

    yield told("convert: import / model", "import", lambda: size)
    yield told("convert: export / (shard x 1.3 + GiB)", "export", lambda: 1.3 * SHARD + GIB)
    check_equal(work / "llama", work / "back")
    start = work / "start.json"  # the rank writes it: bytes of its slices, and of the largest
    yield told("convert: start / (slices + largest)", "start", lambda: sum(json.loads(start.read_text())))


def make_llama(folder: Path, layers: int) -> int:
    """A folder as transformers writes it, a layer a file, with a tokenizer; returns the weights' bytes."""
    import tokenizers
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from megatron_mlmclm.convert.mapping import shapes
    from megatron_mlmclm.recipe.schema import ModelSection

    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)
    config.save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"[MASK]": 0, "a": 1}, "a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"mask_token": "[MASK]"}')
    model = ModelSection(
        num_layers=layers,
        hidden_size=SHAPE["hidden_size"],
        ffn_hidden_size=SHAPE["intermediate_size"],
        num_attention_heads=SHAPE["num_attention_heads"],
        num_query_groups=SHAPE["num_key_value_heads"],
        kv_channels=SHAPE["head_dim"],
        seq_length=SHAPE["max_position_embeddings"],
        tie_embeddings=True,
    )
    noise = torch.randn(10_000_019).bfloat16()  # as long as a prime: no two rows are alike
    wanted, weight_map = shapes(model, SHAPE["vocab_size"]), {}
    for name in wanted:
        weight_map[name] = f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors"
    for file in dict.fromkeys(weight_map.values()):
        tensors = {}
        for name, shape in wanted.items():
            if weight_map[name] == file:
                count = math.prod(shape)
                tensors[name] = noise.repeat(math.ceil(count / len(noise)))[:count].reshape(shape)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    total = sum(2 * math.prod(shape) for shape in wanted.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def check_equal(source: Path, back: Path) -> None:
    import torch

    from megatron_mlmclm.convert.source import open_source

    a, b = open_source(source), open_source(back)
    assert {*a.shape} == {*b.shape}
    assert all(torch.equal(a.read(name), b.read(name)) for name in a), "the export is not the source"
    print("loaded back: every tensor of the export equals the source", flush=True)


def peak(job: str, work: Path) -> float:
    """The most anonymous memory of a process that does `job`, beyond what it had when it was ready."""
    command = [sys.executable, __file__, "--job", job, "--work", str(work)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    base, most = float(child.stdout.readline().split()[1]), 0
    while child.poll() is None:
        most = max(most, resident("RssAnon", child.pid))
        time.sleep(0.002)
    if child.returncode:
        raise SystemExit(f"{job} failed")
    return most - base


def ready() -> None:
    print("ready", resident("RssAnon"), flush=True)


def do_import(work: Path) -> None:
    from transformers import LlamaConfig  # noqa: F401

    from megatron_mlmclm.convert import import_hf

    shutil.rmtree(work / "imported", ignore_errors=True)  # of the round before
    ready()
    import_hf(work / "llama", work / "imported")


def do_export(work: Path) -> None:
    import megatron.core.dist_checkpointing.serialization  # noqa: F401
    from transformers import LlamaConfig  # noqa: F401

    from megatron_mlmclm.convert import export_hf

    shutil.rmtree(work / "back", ignore_errors=True)
    ready()
    export_hf(work / "imported", work / "back", target="llama", max_shard_size=f"{SHARD // 1_000_000}MB")


def do_start(work: Path) -> None:
    """What a rank of tensor parallel size 4 does before its first step: build its part of the model, and fill it."""
    from megatron_mlmclm import platform

    platform.prepare()
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_mlmclm.convert import fill_weights, model_values, open_source
    from megatron_mlmclm.model.init import sharded_tensors
    from megatron_mlmclm.recipe.schema import ModelSection

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=TENSOR_PARALLEL)
    parallel_state.initialize_model_parallel(TENSOR_PARALLEL, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    model = ModelSection.model_validate(model_values(work / "llama"))
    ready()
    chunk = build_chunk(model)
    source = open_source(work / "llama")
    fill_weights([chunk], source, model, model.vocab_size)
    sizes = [tensor.data.nbytes for tensor in sharded_tensors(chunk)]
    (work / "start.json").write_text(json.dumps([sum(sizes), max(sizes)]))
    os._exit(0)  # the fake group has nothing to leave


def build_chunk(model: "ModelSection") -> "GPTModel":  # noqa: F821
    from types import SimpleNamespace

    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_mlmclm.attention import Pattern
    from megatron_mlmclm.model.build import layer_spec

    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=False,
        perform_initialization=False,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
    )
    spec = layer_spec(SimpleNamespace(transformer=config), pattern=Pattern("causal"))
    return GPTModel(
        config,
        spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=model.tie_embeddings,
    )


JOBS: dict[str, Callable[[Path], None]] = {"import": do_import, "export": do_export, "start": do_start}

if __name__ == "__main__":
    main()
