"""Conversations: a model's chat template turns messages into the one text that the model was trained to answer.

Templates are Jinja programs that come with the weights, so they run in a sandbox (transformers' rules: blocks are trimmed,
`raise_exception` and `strftime_now` are there, data cannot be changed). jinja2 is an optional extra, imported when needed.

What somebody writes in a message is ordinary text: "<|im_end|>" typed by a user does not end their turn. The template's own
names of special tokens are the tokens.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanokv.errors import NanoKVError, UsageError

if TYPE_CHECKING:
    from nanokv.model import Model

Message = Mapping[str, str]  # "role" and "content"
MARKS = [chr(code) for code in range(0xE000, 0xE100)]  # private use: no meaning, rarely in a text


def encode_chat(model: "Model", messages: Sequence[Message]) -> list[int]:
    """The ids after which the model writes its next answer. The model's prefix is not put before them: templates write it.

    Raises UsageError for a model without a template, or messages that its template does not take; NanoKVError where jinja2
    is missing or the template is broken.
    """
    if model.chat_template is None:
        raise UsageError(f"{model.name} has no chat template: it was not trained for conversations")
    names = sorted(filter(None, model.tokenizer.special_tokens), key=len, reverse=True)
    mark = next((mark for mark in MARKS if not any(mark in message["content"] for message in messages)), None)
    if mark is None:
        raise UsageError("the messages hold every character of Unicode's first private block: take one out")
    special = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def guarded(content: str) -> str:
        """No special token's name is whole in it: a mark stands after its first character."""
        return special.sub(lambda name: name[0][0] + mark + name[0][1:], content) if special else content

    text = render(model, [{**message, "content": guarded(message["content"])} for message in messages])
    ids: list[int] = []
    for number, part in enumerate(special.split(text) if special else [text]):
        if number % 2:
            ids.append(model.tokenizer.special_tokens[part])
        elif plain := part.replace(mark, ""):
            ids += model.tokenizer.encode(plain)
    return ids


def render(model: "Model", messages: Sequence[Message]) -> str:
    """What the template makes of messages, up to where the answer begins."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise NanoKVError("chat templates need jinja2: pip install 'nanokv[chat]'") from None

    def refuse(message: str) -> None:
        raise UsageError(f"the chat template of {model.name} does not take these messages: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], keep_trailing_newline=True
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    try:
        return environment.from_string(model.chat_template or "").render(
            messages=list(messages), add_generation_prompt=True, **_edges(model)
        )
    except UsageError:
        raise
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as reason:
        raise NanoKVError(f"the chat template of {model.name} failed: {reason}") from None


def _edges(model: "Model") -> dict[str, Any]:
    """bos_token and eos_token by name, as far as the model has them."""
    names = {index: name for name, index in model.tokenizer.special_tokens.items()}
    ends = [names[index] for index in sorted(model.eos_token_ids) if index in names]
    begin = names.get(model.prefix[0], "") if model.prefix else ""
    return {"bos_token": begin, "eos_token": ends[0] if ends else ""}
