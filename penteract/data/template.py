"""Chat templates: the messages of a conversation as one text, in Jinja as tokenizers ship it.

A template sees `messages` (each a `role` and a `content`), `add_generation_prompt`, `bos_token` and
`eos_token`. It is rendered in jinja2's sandbox, with `raise_exception` and the filter `tojson`, and
`{% generation %}` blocks are text like any other. Dates are not given, so that a text is a function
of the messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penteract.data.tokenizers import Tokenizer
from penteract.errors import UserError

Message = Mapping[str, str]

DEFAULT = """\
{% for message in messages %}
{{ message.role }}:
{{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}
"""


class ChatTemplate:
    """A compiled template with the names of its tokens. Raises UserError where it cannot be."""

    def __init__(self, source: str, *, bos: str, eos: str, name: str) -> None:
        self.source, self.bos, self.eos, self.name = source, bos, eos, name
        # As Hugging Face's tokenizers compile theirs.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"template {name}, line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """The text of `messages`; with `answer` an assistant's message begins behind them."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=answer,
                bos_token=self.bos,
                eos_token=self.eos,
            )
        except Exception as error:  # what a template does wrong can raise anything
            raise UserError(f"template {self.name}: {error}") from None

    @property
    def hash(self) -> str:
        """Changes when the template or the names of its tokens do."""
        return hashlib.sha256(json.dumps([self.source, self.bos, self.eos]).encode()).hexdigest()

    def to_dict(self) -> dict[str, str]:
        """What `from_dict` makes it of again: kept beside token files and in checkpoints."""
        name = Path(self.name).name  # where the file lay then says nothing of the template
        return {"template": self.source, "bos": self.bos, "eos": self.eos, "name": name}

    @classmethod
    def from_dict(cls, kept: Mapping[str, str]) -> ChatTemplate:
        """The template that `to_dict` gave."""
        return cls(kept["template"], bos=kept["bos"], eos=kept["eos"], name=kept["name"])


def find_template(
    path: str | None, spec: str, tokenizer: Tokenizer, *, kept: Mapping[str, str] | None = None
) -> ChatTemplate:
    """The template at `path`, or `kept`, or that beside the tokenizer.json `spec`, or the default.

    `kept` is what `to_dict` gave. Beside a tokenizer are chat_template.jinja, or the
    `chat_template` of tokenizer_config.json, which names bos_token and eos_token too; without that
    eos_token is the token that ends a document. Raises UserError.
    """
    if path is None and kept is not None:
        return ChatTemplate.from_dict(kept)
    beside = Path("" if spec == "bytes" else spec).parent
    settings: dict[str, Any] = {}
    if spec != "bytes" and (beside / "tokenizer_config.json").exists():
        settings = _settings(beside / "tokenizer_config.json")
    jinja = beside / "chat_template.jinja"
    if path is not None:
        name, source = path, _of_file(Path(path))
    elif spec != "bytes" and jinja.exists():
        name, source = str(jinja), _of_file(jinja)
    elif settings.get("chat_template"):
        beside /= "tokenizer_config.json"
        name, source = str(beside), _of_settings(beside, settings)
    else:
        name, source = "(default)", DEFAULT
    names = {number: text for text, number in tokenizer.specials.items()}
    eos = _token(settings, "eos_token") or names.get(tokenizer.end_of_document, "")
    return ChatTemplate(source, bos=_token(settings, "bos_token"), eos=eos, name=name)


def _of_file(path: Path) -> str:
    if path.suffix == ".json":
        return _of_settings(path, _settings(path))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"template {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"template {path}: not UTF-8") from None


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"template {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"template {path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"template {path}: not a tokenizer_config.json")
    return found


def _of_settings(path: Path, settings: Mapping[str, Any]) -> str:
    """The `chat_template` of a tokenizer_config.json: a text, or the one named default of some."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = (entry for entry in found if isinstance(entry, dict))
        default = (entry for entry in named if entry.get("name") == "default")
        found = next(default, {}).get("template")
    if not isinstance(found, str):
        raise UserError(f"template {path}: no text under chat_template, or none named default")
    return found


def _token(settings: Mapping[str, Any], key: str) -> str:
    found = settings.get(key)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what is between."""

    tags = {"generation"}  # noqa: RUF012 — as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
