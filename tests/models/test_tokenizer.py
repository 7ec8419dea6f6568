"""Text, bytes and chat prompts: equal to transformers' tokenizer on the same folder, safe at every split."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from labkit.errors import LoadError, RequestError
from labkit.models.tokenizer import ByteTokenizer, FolderTokenizer

TEXTS = [
    "The capital of France is",
    "",
    " leading and trailing  spaces \n\n",
    "Grüße, naïve café — “quotes” … 東京 Привет مرحبا",
    "🌶️👩‍👩‍👧‍👦 emoji 🎉🎉",
    "def f(x):\n\treturn x**2 + 3.14159  # 1234567890\n",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> <repo_name>x<|im_",
    "\x00\x07control \u200b\ufeff\ufffd",
]  # fmt: skip
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&\"'</b>"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2\n"}, {"role": "user", "content": " 3 🎉"}],
]  # fmt: skip


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> FolderTokenizer:
    return FolderTokenizer(model_dir, (2,), 1)


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_equal_transformers(ours: FolderTokenizer, theirs: Any, text: str) -> None:
    ids = theirs(text).input_ids
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_ids_known_from_the_model_itself(ours: FolderTokenizer) -> None:
    """Recorded from transformers' own reading of the GGUF file, which shares nothing with our conversion."""
    assert ours.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert ours.encode("<|im_start|>a<|im_end|>")[0::2] == [1, 2]
    assert ours.vocab_size == 49152


def test_random_ids_decode_as_in_transformers_and_byte_by_byte(ours: FolderTokenizer, theirs: Any) -> None:
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randint(1, 30))]
        text = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == text
        assert b"".join(map(ours.token_bytes, ids)).decode(errors="replace") == text


def test_c51_a_character_split_over_tokens_keeps_its_bytes(ours: FolderTokenizer) -> None:
    """U+1F336 is four bytes; single tokens of it are no text, together they are."""
    ids = ours.encode("\U0001f336")
    assert len(ids) > 1
    assert b"".join(ours.token_bytes(i) for i in ids) == "\U0001f336".encode()
    assert "\ufffd" in ours.decode(ids[:1])


def test_special_tokens_are_text_only_when_asked_for(ours: FolderTokenizer) -> None:
    assert (ours.token_bytes(2), ours.token_bytes(2, skip_special_tokens=False)) == (b"", b"<|im_end|>")
    assert ours.decode([2, 504]) == "The" and ours.decode([2, 504], skip_special_tokens=False) == "<|im_end|>The"


def test_an_id_without_a_token_is_empty(ours: FolderTokenizer) -> None:
    """Embeddings are often padded beyond the vocabulary; a random model samples such ids."""
    assert ours.token_bytes(49152) == ours.token_bytes(-1) == b""


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_chat_prompt_equals_transformers(ours: FolderTokenizer, theirs: Any, messages: list[dict[str, str]]) -> None:
    text = ours.apply_chat_template(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("messages", ["Hello", [], [{"role": "user"}], ["Hello"]], ids=repr)
def test_messages_of_another_form_are_refused(ours: FolderTokenizer, messages: Any) -> None:
    for tokenizer in (ours, ByteTokenizer(300)):
        with pytest.raises(RequestError, match="messages with a role and a content"):
            tokenizer.apply_chat_template(messages)


# --- tokenizers of other folders ---------------------------------------------------------------------------------


def write(folder: Path, tokenizer: Any, **settings: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def letters() -> Any:
    """One token per byte in GPT-2's alphabet, a BOS in front of every text, as Llama 3 has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    return tokenizer


def test_bos_is_added_to_text_and_not_to_a_chat_prompt(tmp_path: Path) -> None:
    """A chat template writes its own BOS; adding a second one changes what the model answers."""
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = FolderTokenizer(write(tmp_path, letters(), bos_token={"content": "<bos>"}, chat_template=template))
    assert tokenizer.encode("hi")[0] == 256 and len(tokenizer.encode("hi")) == 3
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<bos>hi"
    assert tokenizer.encode(prompt, add_special_tokens=False) == tokenizer.encode("hi")
    assert tokenizer.decode(tokenizer.encode("hi é")) == "hi é"


def test_an_added_token_is_plain_text_whatever_its_letters(tmp_path: Path) -> None:
    """In GPT-2's alphabet the letter é would be the byte E9; an added token is not written in that alphabet."""
    raw = letters()
    raw.add_tokens(["<é>"])
    tokenizer = FolderTokenizer(write(tmp_path, raw))
    assert tokenizer.token_bytes(257) == "<é>".encode()
    assert tokenizer.decode(tokenizer.encode("a<é>b")) == "a<é>b"


def test_every_byte_has_its_token(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(write(tmp_path, letters()))
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([b]) for b in range(256)]


def test_byte_fallback_tokenizers_of_the_first_llamas(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b"]
    vocab = {word: i for i, word in enumerate(words)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = FolderTokenizer(write(tmp_path, raw))
    for text in ("a b", "a é🎉b", "ab  \n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text == raw.decode(raw.encode(text).ids)


def test_another_decoder_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    raw = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    with pytest.raises(LoadError, match="neither byte-level nor with byte fallback"):
        FolderTokenizer(write(tmp_path, raw))


def test_code_in_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="run Python code from the folder"):
        FolderTokenizer(write(tmp_path, letters(), auto_map={"AutoTokenizer": ["x.X", None]}))


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        FolderTokenizer(tmp_path)
    write(tmp_path, letters())
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text()[:-50])
    with pytest.raises(LoadError, match=r"tokenizer\.json: the file cannot be read"):
        FolderTokenizer(tmp_path)


# --- templates ---------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "<hi> é"}]


def render(folder: Path, template: str | None, **settings: Any) -> str:
    return FolderTokenizer(write(folder, letters(), chat_template=template, **settings)).apply_chat_template(MESSAGES)


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__.x }}"):
        with pytest.raises(RequestError, match="template refuses"):
            render(tmp_path, attack)


def test_a_template_that_fails_on_a_message_is_a_sentence_too(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="template refuses it: .*str"):
        render(tmp_path, "{{ messages[0]['content'] + 1 }}")


def test_a_template_may_refuse_messages_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render(tmp_path, "{{ raise_exception('roles must alternate') }}")


def test_templates_get_what_they_are_written_for(tmp_path: Path) -> None:
    template = """
    {%- for m in messages %}
        {%- generation %}{{ m | tojson }}{% endgeneration %}
        {%- break %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ eos_token }}{% endif %}{{ strftime_now('%%') }}"""
    assert render(tmp_path, template, eos_token="</s>") == '{"role": "user", "content": "<hi> é"}</s>%'


def test_lines_that_hold_only_a_block_leave_nothing_behind(tmp_path: Path) -> None:
    assert render(tmp_path, "  {% if messages %}\nX\n  {% endif %}\nY") == "X\nY"


def test_a_template_file_and_named_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert render(tmp_path, named) == "D"  # type: ignore[arg-type]
    (tmp_path / "chat_template.jinja").write_text("F")
    assert render(tmp_path, named) == "F"  # type: ignore[arg-type]


def test_no_template_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        render(tmp_path, None)


# --- one token per byte ------------------------------------------------------------------------------------------


def test_byte_tokenizer_gives_every_id_a_text() -> None:
    tokenizer = ByteTokenizer(512)
    text = "Grüße 🎉"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([72, 300, 105]) == "H⟨300⟩i"
    assert "\ufffd" not in tokenizer.decode(range(256, 512))
    assert tokenizer.token_bytes(512) == b""
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "user: x\nassistant:"


def test_byte_tokenizer_needs_every_byte() -> None:
    with pytest.raises(LoadError, match="needs 256"):
        ByteTokenizer(255)
