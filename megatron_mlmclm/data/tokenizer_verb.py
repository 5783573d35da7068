"""`mlmclm tokenizer train` and `mlmclm tokenizer add-mask`."""

import argparse
import sys

from megatron_mlmclm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two sub-verbs."""
    jobs = parser.add_subparsers(dest="job", metavar="JOB", required=True)
    train = jobs.add_parser("train", help="train a byte-level BPE with [PAD] [MASK] [BOS] [EOS] as ids 0 to 3")
    train.add_argument("inputs", nargs="+", metavar="INPUT", help="text, in all the forms that preprocess reads")
    train.add_argument("--vocab-size", type=int, required=True, metavar="N", help="pieces, special tokens counted")
    train.add_argument("--output", required=True, metavar="DIR", help="folder to make; transformers loads it")
    train.add_argument("--text-key", default="text", metavar="KEY", help="key of the text in .jsonl (default: text)")
    mask = jobs.add_parser("add-mask", help="copy a tokenizer, declaring a reserved piece its mask token (same ids)")
    mask.add_argument("folder", metavar="DIR", help="folder with tokenizer.json")
    mask.add_argument("--output", required=True, metavar="DIR", help="folder to make")
    mask.add_argument("--piece", metavar="P", help="piece to use (default: a known reserved one, as Llama 3's 128002)")


def run(args: argparse.Namespace) -> None:
    """Do the sub-verb and say in a line what came of it."""
    (_train if args.job == "train" else _add_mask)(args)


def _train(args: argparse.Namespace) -> None:
    from megatron_mlmclm.data.sources import find_sources
    from megatron_mlmclm.data.text import iter_documents
    from megatron_mlmclm.data.tokenizer_make import train_bpe

    seen = 0

    def documents():  # noqa: ANN202
        nonlocal seen
        for document in iter_documents(find_sources(args.inputs), args.text_key):
            seen += 1
            yield document
        if not seen:
            raise UserError(f"{', '.join(args.inputs)}: holds no document; every line is blank")

    size = train_bpe(documents(), args.vocab_size, args.output, show_progress=sys.stderr.isatty())
    few = f" (of {args.vocab_size:,} asked: the text has no more pairs to merge)" if size < args.vocab_size else ""
    print(f"{args.output}: {size:,} pieces{few}, from {seen:,} documents")


def _add_mask(args: argparse.Namespace) -> None:
    from megatron_mlmclm.data.tokenizer_make import add_mask_token

    choice = add_mask_token(args.folder, args.output, args.piece)
    how = "had it already, copied as it was" if choice.was_there else "declared; no id was added or renamed"
    print(f"{args.output}: mask token {choice.piece!r}, id {choice.id} ({how})")
