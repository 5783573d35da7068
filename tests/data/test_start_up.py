"""The room starts without torch, and its front door imports nothing before it is asked."""

import subprocess
import sys

ROOM = (
    *("blend", "fit", "indexed", "inspect", "pack", "packed", "plan_file", "preprocess", "stream", "text"),
    *("tokenizer", "tokenizer_make", "tokenizer_verb"),
)


def test_no_heavy_import():
    program = (
        "import importlib, sys, megatron_mlmclm.data as room\n"
        "assert 'numpy' not in sys.modules\n"
        f"[importlib.import_module(f'megatron_mlmclm.data.{{name}}') for name in {ROOM}]\n"
        "room.Blend, room.IndexedReader, room.IndexedWriter, room.SampleId, room.TokenStream, room.Tokenizer\n"
        "heavy = {'torch', 'megatron', 'transformers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "try: room.nothing\n"
        "except AttributeError: print('fine')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "fine\n"
