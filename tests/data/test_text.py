import json
import tracemalloc

import pytest

from megatron_mlmclm.data.text import find_files, iter_documents, iter_pieces, parse_piece
from megatron_mlmclm.errors import UserError


def read(path, content: bytes, key="text"):
    path.write_bytes(content)
    return list(iter_documents([path], key))


def test_jsonl_and_txt(tmp_path):
    lines = b'{"text": "one\\ntwo", "id": 1}\n\n  \r\n{"text": ""}\r\n{"text": "l\xc3\xa4st"}'
    assert read(tmp_path / "a.jsonl", lines) == ["one\ntwo", "", "läst"]
    assert read(tmp_path / "a.txt", b"\xef\xbb\xbfone \n\n \ntw\xc3\xb6\r\nthree") == ["one ", "twö", "three"]
    assert read(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"body": "x"}\n', "body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "a.jsonl:3: not JSON: "),
        (b"[1]", "a.jsonl:3: a JSON list, not an object"),
        (b'{"body": "x", "id": 2}', "a.jsonl:3: no key 'text'; its keys are: 'body', 'id' .*--text-key"),
        (b"{}", "a.jsonl:3: no key 'text'; its keys are: none"),
        (b'{"text": 5}', "a.jsonl:3: the value of 'text' is a int, not a string"),
        (b'{"text": null}', "a.jsonl:3: the value of 'text' is a NoneType"),
        (b'{"text": "\xe4"}', r"a.jsonl:3: byte 11 \(0xe4\) is not UTF-8"),
        (b'{"text": "\\ud800"}', "a.jsonl:3: not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.jsonl", b'{"text": "x"}\n\n' + line + b'\n{"text": "y"}\n')


def test_txt_that_is_not_utf8(tmp_path):
    with pytest.raises(UserError, match=r"a.txt:2: byte 2 \(0xff\) is not UTF-8"):
        read(tmp_path / "a.txt", b"fine\nx\xff\n")


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 10_000])
def test_pieces_of_any_size_give_the_same_documents_and_lines(tmp_path, piece_bytes):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " * (i % 9)}) + "\n" * (1 + i % 3) for i in range(60)))
    pieces = list(iter_pieces([path], piece_bytes))
    whole = list(iter_documents([path]))
    assert [d for piece in pieces for d in parse_piece(piece, "text")] == whole and len(whole) == 60
    lines = path.read_bytes().split(b"\n")
    assert all(lines[piece.line - 1] == piece.content.split(b"\n")[0] for piece in pieces)


def test_files_folders_globs(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.jsonl", "sub/d.csv", ".hidden.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")

    def names(*inputs):
        return [str(p.relative_to(tmp_path)) for p in find_files([f"{tmp_path}/{i}" for i in inputs])]

    assert names("") == ["a.jsonl", "b.txt", "sub/c.jsonl"]
    assert names("b.txt", "a.jsonl") == ["b.txt", "a.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "sub/c.jsonl"]
    (tmp_path / "x[1].txt").write_text("x\n")
    assert names("x[1].txt") == ["x[1].txt"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["none.txt"], "none.txt: no such file or folder"),
        (["*.jsonl"], "matches no .jsonl or .txt file"),
        (["empty"], "empty: a folder without"),
        (["a.csv"], "a.csv: is not .jsonl or .txt"),
        (["a.txt", "./*.txt"], "a.txt: named twice"),
        ([], "no input"),
    ],
)
def test_bad_inputs_are_named(tmp_path, monkeypatch, inputs, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=message):
        find_files(inputs)


def test_memory_is_flat(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some words to read, again and again\n" * 600_000)  # 21 MB
    tracemalloc.start()
    count = sum(1 for piece in iter_pieces([path]) for _ in range(piece.content.count(b"\n")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 600_000
    assert peak < 5e6
