#!/usr/bin/env python3
"""Records what transformers renders for the chat-template corpus in fixtures/chat_templates/.

For every template and conversation, and for every snippet, the prompt or the fact that transformers raises goes to
fixtures/chat_templates/expected/. Run it with a Python that has transformers and jinja2 after changing the corpus:

    python scripts/oracle/record_chat_templates.py
"""

import datetime
import json
import pathlib
import sys

import jinja2
from transformers.utils import chat_template_utils

CORPUS = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "chat_templates"


def fix_clock(now):
    """Makes `strftime_now` format a fixed time."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    chat_template_utils.datetime = Clock


def render(template, conversation, special_tokens):
    """The prompt, or how transformers refuses: the template's own message, or only that it fails."""
    options = {**special_tokens, **conversation.get("kwargs", {})}
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[conversation["messages"]],
            tools=conversation.get("tools"),
            documents=conversation.get("documents"),
            chat_template=template,
            continue_final_message=conversation.get("continue_final_message", False),
            add_generation_prompt=conversation.get("add_generation_prompt", False),
            **options,
        )
    except jinja2.exceptions.TemplateError as error:
        if type(error) is jinja2.exceptions.TemplateError:
            return {"raised": error.message}
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001
        message = str(error).split("Final message to continue")[0]
        return {"error": f"{type(error).__name__}: {message}"}
    return {"text": rendered[0]}


def write(path, value):
    text = json.dumps(value, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def main():
    suite = json.loads((CORPUS / "conversations.json").read_text(encoding="utf-8"))
    fix_clock(datetime.datetime.fromisoformat(suite["now"]))
    expected = CORPUS / "expected"
    expected.mkdir(exist_ok=True)
    for old in expected.glob("*.json"):
        old.unlink()
    count = 0
    for path in sorted((CORPUS / "templates").glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        results = {
            conversation["name"]: render(template, conversation, suite["special_tokens"])
            for conversation in suite["conversations"]
        }
        write(expected / f"{path.stem}.json", results)
        count += len(results)
    snippets = json.loads((CORPUS / "snippets.json").read_text(encoding="utf-8"))
    conversation = next(c for c in suite["conversations"] if c["name"] == "multi_turn")
    results = [render(snippet, conversation, suite["special_tokens"]) for snippet in snippets]
    write(CORPUS / "snippets_expected.json", results)
    print(f"{count} prompts and {len(results)} snippets recorded", file=sys.stderr)


if __name__ == "__main__":
    main()
