"""Text to token ids and back, and chat messages to a prompt. Refuses to know the model, and torch.

`token_bytes` is the ground: a token is a piece of a UTF-8 byte string, not of text, and one character may be split over
several tokens. `decode` is the joined bytes, decoded once.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from labkit.errors import LoadError, RequestError
from labkit.models.folder import read_json

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer. `vocab_size` counts the ids that it can name, added tokens included."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` lets the model's own rule add BOS; off for text from a chat template."""
        ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the joined bytes; what is no UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes a token stands for; empty for a special token unless asked for, and for an id without a token."""
        ...

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """The prompt text for `[{"role": …, "content": …}, …]`, ending where the assistant begins."""
        ...


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder, through the `tokenizers` library and a sandboxed template.

    Args:
        folder: holds `tokenizer.json`, and the template in `tokenizer_config.json` or `chat_template.jinja`.
        eos_token_ids, bos_token_id: as the model's configuration names them.

    Raises:
        LoadError: files missing or damaged, code in the folder, or neither byte-level BPE nor byte fallback.
    """

    def __init__(self, folder: Path, eos_token_ids: tuple[int, ...] = (), bos_token_id: int | None = None) -> None:
        from tokenizers import Tokenizer as Rust

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise LoadError(
                f"the tokenizer of {folder}",
                "there is no tokenizer.json",
                "Write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
            )
        settings = read_json(folder / "tokenizer_config.json") or {}
        if "auto_map" in settings:
            raise LoadError(
                f"the tokenizer of {folder}",
                "it wants to run Python code from the folder (auto_map), which is never done here",
                "Use a model whose tokenizer.json says everything.",
            )
        self.eos_token_ids, self.bos_token_id = tuple(eos_token_ids), bos_token_id
        try:
            text = path.read_text(encoding="utf-8")
            self._rust = Rust.from_str(text)
        except Exception as error:  # the library raises bare Exception
            why = f"the file cannot be read: {error}"
            raise LoadError(f"the tokenizer {path}", why, "Copy the folder again.") from error
        self._byte_level = _is_byte_level(self._rust.decoder, path)
        added = self._rust.get_added_tokens_decoder()
        self._added = {id_: token.content for id_, token in added.items()}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._template_text = _find_template(folder, settings)
        self._template_values = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._rust.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        if skip_special_tokens and token_id in self._special:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._rust.id_to_token(token_id) if token_id >= 0 else None
        if token is None:  # embeddings are often padded beyond the vocabulary
            return b""
        if self._byte_level:
            letters = _byte_of_letter()
            return bytes(letters[c] for c in token) if all(c in letters for c in token) else token.encode()
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """See `Tokenizer`. RequestError when there is no template, or when it refuses the messages."""
        _check_messages(messages)
        if self._template_text is None:
            raise RequestError("a chat prompt", "this model has no chat template", "Send the text as a plain prompt.")
        try:
            values = {"messages": list(messages), "add_generation_prompt": True, **self._template_values}
            return _compile_template(self._template_text).render(values)
        except Exception as error:  # a template is a program: it may fail in any way on messages it was not made for
            why = f"the model's chat template refuses it: {error}"
            raise RequestError("a chat prompt", why, "Check the roles and their order.") from error


class ByteTokenizer:
    """One token per byte, for models with random weights: their text means nothing, but every id must have one.

    Ids 0…255 are bytes; an id from 256 up to `vocab_size` decodes to its number in brackets, `⟨300⟩`. There are no
    special tokens: a random model must not end by chance.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...] = (), bos_token_id: int | None = None) -> None:
        if vocab_size < 256:
            raise LoadError(f"a vocabulary of {vocab_size}", "one token per byte needs 256", "Use a larger one.")
        self.vocab_size = vocab_size
        self.eos_token_ids, self.bos_token_id = tuple(eos_token_ids), bos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        if 0 <= token_id < 256:
            return bytes([token_id])
        return f"⟨{token_id}⟩".encode() if 0 <= token_id < self.vocab_size else b""

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """`role: content` lines, then `assistant:`."""
        _check_messages(messages)
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


def _check_messages(messages: Sequence[Message]) -> None:
    good = not isinstance(messages, (str, bytes)) and len(messages) > 0
    if not good or not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
        raise RequestError(
            f"chat messages {str(messages)[:60]!r}",
            "they must be a non-empty list of messages with a role and a content",
            "Write [{'role': 'user', 'content': 'Hello'}].",
        )


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet, a letter for each byte: printable bytes stand for themselves, the rest follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}


def _is_byte_level(decoder: Any, path: Path) -> bool:
    """Whether tokens are written in GPT-2's alphabet (else in text with byte fallback). LoadError for anything else."""
    kinds = re.findall(r"\b(ByteLevel|ByteFallback|Metaspace)\b", repr(decoder))
    if "ByteLevel" in kinds:
        return True
    if kinds:
        return False
    raise LoadError(
        f"the tokenizer {path}",
        f"its decoder ({str(decoder)[:60]}) is neither byte-level nor with byte fallback",
        "Use a model of the Llama or Qwen3 family.",
    )


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, Mapping) else value


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


@functools.lru_cache(maxsize=8)
def _compile_template(text: str) -> Any:
    """A chat template comes with the model, so it is untrusted: it runs in jinja2's immutable sandbox.

    Options, filters and globals are those that templates on the hub are written for.
    """
    import datetime

    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def strftime_now(format_: str) -> str:
        return datetime.datetime.now().strftime(format_)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_extension(), loopcontrols]
    )
    environment.filters["tojson"] = tojson  # jinja2's own escapes HTML
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(text)


def _generation_extension() -> type:
    """`{% generation %} … {% endgeneration %}` marks assistant text for training; here its body is plain output."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
