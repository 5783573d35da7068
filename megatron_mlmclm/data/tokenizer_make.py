"""Make tokenizers: train a byte-level BPE, or declare a reserved piece of an existing one its mask token."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_mlmclm.aside import new_folder
from megatron_mlmclm.data.tokenizer import named_roles, read_settings, tokenizer_json
from megatron_mlmclm.errors import UserError

SPECIALS = {"pad_token": "[PAD]", "mask_token": "[MASK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}  # ids 0 .. 3
MIN_VOCAB = len(SPECIALS) + 256  # every byte has a piece, so any text can be written

# Pieces that tokenizers keep in reserve, the plainest first; of numbered ones the lowest is taken.
RESERVED = (
    r"\[MASK\]|<mask>|<\|mask\|>",
    r"<\|reserved_special_token_(\d+)\|>",  # Llama 3: _0 is id 128002
    r"\[control_(\d+)\]",  # Mistral
    r"<SPECIAL_(\d+)>",  # Mistral Nemo
    r"\[unused(\d+)\]",  # BERT
    r"<unused(\d+)>",  # Gemma
)
COPIED = ("token*.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.jinja")


class MaskChoice(NamedTuple):
    """What `add_mask_token` did: the mask's piece and id, and whether it had been the mask token before."""

    piece: str
    id: int
    was_there: bool


def train_bpe(text_iter: Iterator[str], vocab_size: int, output: str | Path, show_progress: bool = False) -> int:
    """Train a byte-level BPE on `text_iter` and save it as the new folder `output`; gives the vocabulary's true size.

    That is below `vocab_size` where the text has too few pairs to merge. Special tokens: ids 0 to 3. Errors: UserError.
    """
    if vocab_size < MIN_VOCAB:
        raise UserError(
            f"--vocab-size {vocab_size}: at least {MIN_VOCAB} (256 bytes and {len(SPECIALS)} special tokens)"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[tokenizers.AddedToken(**_declare(role, token)) for role, token in SPECIALS.items()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    with new_folder(Path(output)) as folder:
        backend.train_from_iterator(text_iter, trainer)
        backend.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {role: _declare(role, token) for role, token in SPECIALS.items()}
        _write(folder / "special_tokens_map.json", settings)
        typed = {role: {"__type": "AddedToken", **token} for role, token in settings.items()}
        plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        _write(folder / "tokenizer_config.json", plain | typed)
    return backend.get_vocab_size()


def add_mask_token(
    folder: str | Path, output: str | Path, piece: str | None = None, *, optional: bool = False
) -> MaskChoice | None:
    """Copy the tokenizer in `folder` to the new folder `output`, where a reserved piece is its mask token.

    Nothing is renamed and no id is added, so a model's embedding keeps its size. A tokenizer that has a mask token is
    copied as it is. `piece`: the piece to take, by default one of the known reserved ones; where there is none and the
    mask is `optional`, the copy has none and None is returned. Errors: UserError.
    """
    folder, output = Path(folder), Path(output)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_json(folder)))
    present = named_roles(folder).get("mask_token")
    if present is not None and piece not in (None, present):
        raise UserError(f"{folder}: its mask token is {present!r} already; leave out --piece to copy it as it is")
    chosen = present if present is not None else _choose(folder, backend, piece, optional=optional)
    number = None if chosen is None else backend.token_to_id(chosen)
    if number is None and chosen is not None:
        raise UserError(f"{folder}: mask_token is {chosen!r}, which tokenizer.json does not hold; correct its settings")
    with new_folder(output) as copy:
        for pattern in COPIED:
            for path in folder.glob(pattern):
                shutil.copyfile(path, copy / path.name)
        if present is None and chosen is not None:
            _declare_mask(copy, chosen, number)
    return None if chosen is None else MaskChoice(chosen, number, present is not None)


def _choose(folder: Path, backend: tokenizers.Tokenizer, piece: str | None, *, optional: bool) -> str | None:
    """The piece to use as mask: `piece` if it is free, else the first of RESERVED that is there."""
    vocab = backend.get_vocab(with_added_tokens=True)
    taken = {token: role for role, token in named_roles(folder).items()}
    added = backend.get_added_tokens_decoder().values()
    spare = sorted((token.content for token in added if token.special and token.content not in taken), key=vocab.get)
    offer = f"give --piece, of: {', '.join(spare[:20])}" if spare else "it has no special piece to spare for --piece"
    if piece is not None:
        if piece not in vocab:
            raise UserError(f"{folder}: has no piece {piece!r}; {offer}")
        if piece in taken:
            raise UserError(f"{folder}: {piece!r} is its {taken[piece]}; {offer}")
        return piece
    for pattern in RESERVED:
        matches = [m for m in map(re.compile(pattern).fullmatch, vocab) if m and m.string not in taken]
        if matches:
            return min(matches, key=lambda m: int(m.group(m.lastindex or 0)) if m.lastindex else 0).string
    if optional:
        return None
    raise UserError(f"{folder}: no piece known to be reserved; {offer}")


def _declare(role: str, content: str) -> dict[str, Any]:
    """An added token. The mask takes the space before it, as RoBERTa's does: it stands for a piece with its space."""
    flags = {"single_word": False, "lstrip": role == "mask_token", "rstrip": False, "normalized": False}
    return {"content": content, **flags, "special": True}


def _declare_mask(folder: Path, piece: str, number: int) -> None:
    """Write `piece` (id `number`) down as the mask token in each of `folder`'s files that speaks of such things."""
    token = _declare("mask_token", piece)

    def in_tokenizer(settings: dict[str, Any]) -> None:
        others = [entry for entry in settings.get("added_tokens", []) if entry["id"] != number]
        settings["added_tokens"] = sorted([*others, {"id": number, **token}], key=lambda entry: entry["id"])

    def in_config(settings: dict[str, Any]) -> None:
        settings["mask_token"] = {"__type": "AddedToken", **token}
        if "added_tokens_decoder" in settings:
            settings["added_tokens_decoder"][str(number)] = token

    _change(folder, "tokenizer.json", in_tokenizer)
    _change(folder, "tokenizer_config.json", in_config)
    if (folder / "special_tokens_map.json").exists():
        _change(folder, "special_tokens_map.json", lambda settings: settings.update(mask_token=token))


def _change(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    settings = read_settings(folder, name)
    change(settings)
    _write(folder / name, settings)


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))
