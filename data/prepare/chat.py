"""Records of messages (`[{"role": "user", "content": "..."}, ...]`) as text, by the tokenizer's chat template.

The template is run as transformers runs it (`transformers.utils.chat_template_utils`, which would import torch into
each worker): the same Jinja settings, the same functions. `strftime_now` is left out, with which a template writes
today's date; templates have a fixed date for that case. Test: tests/data/prepare/test_chat.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from common.errors import UserError
from data.prepare.record_errors import UnlocatedRecordError

if TYPE_CHECKING:
    from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

FORMATS = ("jsonl", "parquet", "arrow")  # that can hold a list of messages
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # names of roles in records with `from` and `value`
_EXPECTED = 'a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, as a worker gets it.

    Args:
        source: the template in Jinja.
        variables: the tokenizer's special tokens by name, such as eos_token.
        special_tokens: texts that become control tokens, so that no message may contain them.
    """

    source: str
    variables: Mapping[str, str]
    special_tokens: Sequence[str]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, special_tokens: Sequence[str]) -> ChatTemplate:
        """The tokenizer's own template.

        Raises:
            UserError: it has none, or one that is no Jinja.
        """
        import jinja2

        source: Any = tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        if not source:
            raise UserError(
                f"{tokenizer.name_or_path} has no chat template",
                expected="chat_template in tokenizer_config.json, for --chat",
                found="none",
                do="take the tokenizer of a chat model, such as Qwen/Qwen2.5-0.5B-Instruct, or prepare plain text "
                "without --chat",
            )
        variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        template = cls(str(source), variables, tuple(special_tokens))
        try:
            _ = cls(str(source), variables, ())._compiled  # of a copy: what is compiled cannot be sent to a worker
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template of {tokenizer.name_or_path} cannot be read",
                expected="Jinja",
                found=f"line {error.lineno}: {error.message}",
                do="correct chat_template in tokenizer_config.json",
            ) from None
        return template

    @cached_property
    def _compiled(self) -> Any:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=False, **options)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self.source)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")

    def render(self, value: Any, field: str) -> str:
        """The text of one record's messages.

        Raises:
            UnlocatedRecordError: no list of messages, a message that spells a control token, or messages that the
                template refuses.
        """
        import jinja2

        if not isinstance(value, list) or not value:
            found = f"{type(value).__name__} {value!r}" if value != [] else "an empty list"
            raise UnlocatedRecordError(f"field {field!r} holds no messages: expected {_EXPECTED}", found)
        messages = [self._message(one, number) for number, one in enumerate(value, start=1)]
        try:
            text = self._compiled.render(messages=messages, add_generation_prompt=False, **self.variables)
            return _encodable(str(text))
        except (jinja2.TemplateError, TypeError) as error:
            raise UnlocatedRecordError(f"messages that the chat template refuses: {error}", repr(value)) from None

    def _message(self, message: Any, number: int) -> dict[str, Any]:
        if isinstance(message, dict) and "from" in message and "role" not in message:
            role = message["from"]
            message = {"role": _SHAREGPT.get(role, role), "content": message.get("value")}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UnlocatedRecordError(f"message {number} has no role: expected {_EXPECTED}", repr(message))
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UnlocatedRecordError(f"the content of message {number} is no text", repr(message))
        if content and (spelled := self._control.search(content)):
            what = f"message {number} spells the control token {spelled[0]}, which would end a turn or the document"
            raise UnlocatedRecordError(what, content)
        return {key: part for key, part in message.items() if part is not None or key == "content"}


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"lone surrogate {text[error.start]!r}"
        raise UnlocatedRecordError("text that is no valid Unicode", found) from None
    return text
