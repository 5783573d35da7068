"""`mlmclm`: one command, a verb per job. A verb's room is imported only when the verb is called."""

import argparse
import importlib
import sys
from types import ModuleType

from megatron_mlmclm.errors import run_cleanly
from megatron_mlmclm.version import __version__

# verb -> (module offering add_arguments(parser) and run(args) -> int | None, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "doctor": ("megatron_mlmclm.platform.doctor", "what this machine has, which parts would be used, known traps"),
    "tokenizer": ("megatron_mlmclm.data.tokenizer_verb", "train a BPE tokenizer, or give an existing one a mask token"),
    "preprocess": ("megatron_mlmclm.data.preprocess", "text of any form -> Megatron indexed data (.bin, .idx)"),
    "merge-data": ("megatron_mlmclm.data.merge", "indexed data sets of one tokenizer -> one"),
    "inspect": ("megatron_mlmclm.data.inspect", "check indexed data and print what it holds"),
    "pack": ("megatron_mlmclm.data.pack", "plan samples of whole documents, for data.packing: packed"),
    "plan": ("megatron_mlmclm.study.plan_verb", "what recipes will do: parameters, phases, tokens, FLOPs"),
    "train": ("megatron_mlmclm.launch", "train a recipe: validates it, then starts torchrun"),
    "import-hf": ("megatron_mlmclm.convert.importer", "Hugging Face model -> Megatron checkpoint, for any layout"),
    "export-hf": ("megatron_mlmclm.convert.export", "Megatron checkpoint -> Hugging Face encoder or decoder"),
    "merge": ("megatron_mlmclm.convert.merge", "average the weights of two models"),
    "fill-mask": ("megatron_mlmclm.evaluate.fill_mask", "score mask filling on held-out text against a unigram guess"),
    "report": ("megatron_mlmclm.report.verb", "curves (PNG) and a one-page HTML report of a run"),
    "bench": ("megatron_mlmclm.bench", "compare speed and memory with peers, by the scripts of a checkout"),
}


def main() -> None:
    """Console entry point. Exit status: 0, 2 for a user's mistake (one line), else the verb's own."""
    run_cleanly(lambda: dispatch(sys.argv[1:]))


def dispatch(argv: list[str]) -> int | None:
    """Parse `argv` and run its verb. Only the named verb's module is imported."""
    parser = argparse.ArgumentParser(prog="mlmclm", description="Encoder pretraining on Megatron-Core")
    parser.add_argument("--version", action="version", version=f"mlmclm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    called = argv[0] if argv else None
    module: ModuleType | None = None
    for verb, (path, text) in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        if verb == called:
            module = importlib.import_module(path)
            module.add_arguments(sub)
    args, args.extra = parser.parse_known_args(argv)
    if args.extra and not getattr(args, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(args.extra)}")
    assert module is not None  # argparse has left already for an unknown verb
    return module.run(args)


if __name__ == "__main__":
    main()
