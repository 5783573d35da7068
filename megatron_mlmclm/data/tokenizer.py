"""A Hugging Face tokenizer folder, through the `tokenizers` library alone: no transformers, no torch, fast to start."""

import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from megatron_mlmclm.errors import UserError

ROLES = ("mask_token", "eos_token", "bos_token", "pad_token", "unk_token", "cls_token", "sep_token")


class Tokenizer:
    """Text <-> ids, and which id plays which part. Special tokens are never added by itself.

    `folder`: where it was loaded from. Ids are Python ints; a part that no token plays is None.
    """

    def __init__(self, folder: Path, backend: tokenizers.Tokenizer, roles: dict[str, int], fingerprint: str) -> None:
        self.folder = folder
        self.backend = backend
        self.roles = roles
        self.fingerprint = fingerprint  # 64 hex digits: which ids text becomes

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Load a folder with tokenizer.json. Errors: UserError naming the file and the mend."""
        folder = Path(folder)
        path = tokenizer_json(folder)
        content = path.read_bytes()
        try:
            backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path}: not a tokenizer: {error}") from error
        # Files may carry a cut or a fill made for one model's batches: here neither may change what is read.
        backend.no_truncation()
        backend.no_padding()
        return cls(folder, backend, _role_ids(folder, backend), _fingerprint(content, backend))

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1, added tokens counted: the size an embedding must have at least."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token."""
        return self.roles.get("mask_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a document."""
        return self.roles.get("eos_token")

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a document."""
        return self.roles.get("bos_token")

    @property
    def pad_id(self) -> int | None:
        """Id of the filler token."""
        return self.roles.get("pad_token")

    @property
    def fill_id(self) -> int:
        """What stands on padding: the filler token or, without one, EOS, or some id: nobody reads it."""
        return next((number for number in (self.pad_id, self.eos_id) if number is not None), 0)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text: every token with a part, and every added token marked special."""
        added = self.backend.get_added_tokens_decoder().items()
        return frozenset(self.roles.values()) | {number for number, token in added if token.special}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens around it."""
        return [found.ids for found in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens written out."""
        return self.backend.decode([int(number) for number in ids], skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary piece, None if there is no such piece."""
        return self.backend.token_to_id(token)

    def id_to_token(self, number: int) -> str | None:
        """The vocabulary piece of an id, None if there is none."""
        return self.backend.id_to_token(number)


def tokenizer_json(folder: Path) -> Path:
    """Path of `folder`'s tokenizer.json. UserError if the folder or the file is missing."""
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; a tokenizer is a folder with tokenizer.json (mlmclm tokenizer train)"
        )
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; load the tokenizer with transformers.AutoTokenizer and save_pretrained() makes one"
        )
    return path


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in `folder`/`name`, {} where there is no such file. UserError if it is not one."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        settings = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path}: not a JSON object")
    return settings


def named_roles(folder: Path) -> dict[str, str]:
    """Which token plays which part ("mask_token" -> "[MASK]"), by special_tokens_map.json and tokenizer_config.json."""
    settings = read_settings(folder, "special_tokens_map.json") | read_settings(folder, "tokenizer_config.json")
    named = {}
    for role in ROLES:
        token = settings.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[role] = content
    return named


def _role_ids(folder: Path, backend: tokenizers.Tokenizer) -> dict[str, int]:
    roles = {}
    for role, token in named_roles(folder).items():
        number = backend.token_to_id(token)
        if number is None:
            raise UserError(f"{folder}: {role} is {token!r}, which tokenizer.json does not hold; correct its settings")
        roles[role] = number
    return roles


def _fingerprint(content: bytes, backend: tokenizers.Tokenizer) -> str:
    """A hash of how text becomes ids. Which pieces play a part is left out: declaring a mask token changes no id."""
    settings = orjson.loads(content)
    rules = {key: value for key, value in settings.items() if key not in ("added_tokens", "truncation", "padding")}
    vocabulary = sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(orjson.dumps([rules, vocabulary], option=orjson.OPT_SORT_KEYS)).hexdigest()
