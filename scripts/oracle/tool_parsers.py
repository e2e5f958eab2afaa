#!/usr/bin/env python3
"""Records what mlx-lm's tool parsers and its text state machine make of a corpus, mutated texts included, and which
parser it chooses for each template of fixtures/chat_templates.

usage: tool_parsers.py

Writes fixtures/tool_parsers/oracle.json. Calls are recorded as the engine promises them: a name and a JSON object of
arguments. What mlx-lm returns beside that (no name, arguments of another kind, any exception) is `malformed`; values
that JSON lacks are `unrepresentable`, and only the absence of a crash is checked for them. Run it with the oracle's
Python (scripts/oracle/setup.py).
"""

import importlib
import json
import random
from pathlib import Path
from types import SimpleNamespace

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import _infer_tool_parser

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
OUT = FIXTURES / "tool_parsers" / "oracle.json"
MUTATIONS = 5

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "metric": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"type": "object"},
                    "note": {"type": ["string", "null"]},
                    "level": {"enum": ["low", 2, None]},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "free": {},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "bare"}},
]


def qwen(name, *pairs):
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
    return f"\n<function={name}>\n{parameters}</function>\n"


def glm(name, *pairs, tag=""):
    body = "".join(
        f"<{tag}arg_key>{k}</{tag}arg_key>\n<{tag}arg_value>{v}</{tag}arg_value>\n" for k, v in pairs
    )
    return f"{name}\n{body}"


def minimax(name, *pairs):
    body = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in pairs)
    return f'\n<invoke name="{name}">\n{body}</invoke>\n'


def k3(name, *items):
    body = "".join(
        f'<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>' for k, t, v in items
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{body}<|close|>call<|sep|>'


VALUES = [
    ("city", "Paris"),
    ("city", "42"),
    ("days", "3"),
    ("days", "3.5"),
    ("days", " 1_000 "),
    ("ratio", "0.25"),
    ("ratio", "2.0"),
    ("metric", "True"),
    ("metric", "off"),
    ("tags", '["a", "b"]'),
    ("tags", "['a', 'b']"),
    ("where", '{"lat": 1.5, "lon": null}'),
    ("where", "{'lat': (1, 2), 'x': True}"),
    ("note", "null"),
    ("note", "none"),
    ("level", "2"),
    ("either", "7"),
    ("either", "seven"),
    ("free", "[1, 2]"),
    ("unknown", "5"),
    ("city", 'say "hi" <b>&amp;</b>\nline two'),
]

CORPUS = {
    "json_tools": [
        '\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n',
        '{"name": "ping", "arguments": {}}',
        '[{"name": "ping", "arguments": {}}, {"name": "bare", "arguments": {"a": [1, {"b": null}]}}]',
        '{"name": "get_weather", "arguments": {"city": "Z\\u00fcrich \\ud83d\\ude00", "ratio": 1e-3}}',
    ],
    "qwen3_coder": [qwen("get_weather", pair) for pair in VALUES]
    + [qwen("get_weather", *VALUES[:3], ("metric", "true")), qwen("ping"), qwen("nobody", ("a", "1"))],
    "gemma4": [
        'call:get_weather{city:<|"|>Paris<|"|>,days:3}',
        'call:get_weather{where:{lat:1.5,name:<|"|>a{b}"c<|"|>},tags:[<|"|>x<|"|>,<|"|>y<|"|>],metric:true}',
        "call:ping{}call:bare{a:null}",
        'call:get-weather{city:<|"|>line\none<|"|>}',
        'text before call:ping{} and after',
    ],
    "function_gemma": [
        "call:get_weather{city:<escape>Paris, France<escape>,days:3}",
        "call:get_weather{metric:true,tags:[1],free:abc}",
        "call:ping{}",
    ],
    "glm47": [glm("get_weather", pair) for pair in VALUES]
    + [
        glm("get_weather", *VALUES[:4]),
        "ping",
        'get_weather {"city": 5, "days": "3", "free": "[1]"}',
        "get_weather\n{'city': True, 'where': {'a': [1.0, None, 'x']}}",
        'get_weather city=Paris days=3 note="two words"',
        "get_weather just some words",
        '{"name": "get_weather", "arguments": {"city": {"a": 1.5}, "days": "2"}}',
        '[{"function": "ping", "arguments": "{}"}]',
        '{"tool": {"name": "get_weather", "arguments": {"city": 1}}}',
        '{"function": {"name": "ping", "arguments": {"x": "1"}}, "arguments": null}',
        "a<arg_key>k</arg_key>\\n <arg_value>v</arg_value>",
    ],
    "longcat": [glm("get_weather", pair, tag="longcat_") for pair in VALUES[:6]]
    + ['{"name": "ping", "arguments": {"a": 1}}', "ping"],
    "kimi_k2": [
        '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>',
        'functions.ping:12 <|tool_call_argument_begin|> {}',
        '<|tool_call_begin|>ping:0<|tool_call_argument_begin|>{}<|tool_call_end|>'
        '<|tool_call_begin|>functions.a:b:1<|tool_call_argument_begin|>{"x": [1]}<|tool_call_end|>',
        "functions.ping:0<|tool_call_argument_begin|>{'a': True}",
    ],
    "kimi_k3": [
        k3("get_weather", ("city", "string", "Paris"), ("days", "integer", "3"), ("where", "object", '{"a": 1}')),
        k3("ping") + k3("get_weather", ("city", "string", "5"), ("days", "integer", "three")),
        '<|open|>call tool="a &quot;b&quot;"<|sep|><|open|>json type="object"<|sep|>{"x": 1}'
        "<|close|>json<|sep|><|close|>call<|sep|>",
        '<|open|>call index="1"<|sep|><|close|>call<|sep|>' + k3("ping"),
    ],
    "minicpm5": [f'"get_weather"><param name="{k}">{v}</param>' for k, v in VALUES if "<" not in v]
    + [
        '"get_weather"><param name="city"><![CDATA[a < b & c\n]]></param><param name="days">2</param>',
        '<function name="ping"></function><function name="bare"><param name="x">1</param></function>',
        "'ping'>",
    ],
    "minimax_m2": [minimax("get_weather", pair) for pair in VALUES]
    + [minimax("get_weather", *VALUES[:3]) + minimax("ping")],
    "mistral": [
        '[{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc123XYZ"}]',
        '[{"name": "ping"}, {"name": "bare", "arguments": "{\\"a\\": 1}"}]',
        'get_weather[ARGS]{"city": "Paris", "days": 3}',
        'get_weather[ARGS]{"city": "a"}ping [ARGS] {}',
        "[]",
    ],
    "muse_spark": [
        '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days" string="false">3</atem:parameter>\n</atem:invoke>',
        '<atem:invoke id="1" name="ping"></atem:invoke><atem:invoke name="bare">'
        '<atem:parameter name="x"> </atem:invoke> {"a"</atem:parameter></atem:invoke>',
        '<atem:invoke name="ping">',
    ],
    "pythonic": [
        '[get_weather(city="Paris", days=3)]',
        "[ping(), a.b.c(x=[1, {'y': true}], z=None)]",
        "[get_weather(city='it\\'s', ratio=-1.5e3, metric=False,)]",
        '[get_weather(city="unclosed, days=3)]',
        '[get_weather(city=Paris, days=3)]',
        'Sure: [get_weather("Paris")] done',
        "[get_weather(tags=('a', 'b'), where={'lat': 1, 2: 'x'})]",
        '[get_weather(city="a" "b", free=1 + 2)]',
    ],
}

REPLIES = {
    "json_tools": [
        "<think>I need it.</think>\n\n<tool_call>\n{\"name\": \"ping\", \"arguments\": {}}\n</tool_call>",
        "Hello <b>you</b> <thin k> and </think> then <tool_call>{\"name\": \"ping\", \"arguments\": {}}</tool_call> bye",
        "<think>half a thought",
        "a<think>b<tool_call>{\"name\": \"ping\", \"arguments\": {\"x\": 1}}</tool_call>c</think>d",
        "<tool_call>{\"name\": \"ping\", \"arguments\": {}}</tool_call>\n"
        "<tool_call>{\"name\": \"ping\", \"arguments\": {\"y\": 2}}</tool_call>",
        "<tool_call>{\"name\": \"ping\", \"arguments\": {}}",
        "plain text, nothing else <tool_cal",
    ],
    "gemma4": ["<|channel>thought\nhm<channel|>Yes <|tool_call>call:ping{}<tool_call|>"],
    "mistral": ["Let me see.[TOOL_CALLS]ping[ARGS]{}"],
    "kimi_k3": [
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
        "<|open|>tools<|sep|>" + k3("ping") + "<|close|>tools<|sep|><|close|>message<|sep|>"
    ],
    "minicpm5": ['<think>a</think>b<function name="ping"></function>c'],
    "longcat": ["<longcat_think>a</longcat_think>" + "<longcat_tool_call>"
                + glm("ping", ("a", "1"), tag="longcat_") + "</longcat_tool_call>"],
}

THINK = {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
}
XTML = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")


def mutate(text, rng):
    kind = rng.randrange(6)
    at = rng.randrange(len(text) + 1)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[at + rng.randint(1, 4) :]
    if kind == 2:
        return text[:at] + rng.choice('{}[]<>"\'=:,|\n \\0e-é') + text[at:]
    if kind == 3:
        return rng.choice([text + " tail", "head " + text, text + "\n", " " + text])
    if kind == 4:
        return text + text
    end = rng.randrange(at, len(text) + 1)
    return text[:at] + text[at:end].swapcase() + text[end:]


def calls(parser, text):
    """What mlx-lm makes of a text, in the engine's terms."""
    try:
        parsed = parser(text, TOOLS)
    except Exception:  # noqa: BLE001
        return {"malformed": True}
    out = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(call, dict):
            return {"malformed": True}
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError:
                return {"malformed": True}
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return {"malformed": True}
        try:
            json.dumps(arguments, allow_nan=False)
            json.dumps(arguments, ensure_ascii=False).encode()
        except (TypeError, ValueError):
            return {"unrepresentable": True}
        out.append({"name": name, "arguments": arguments} | ({"id": call["id"]} if call.get("id") else {}))
    return {"calls": out} if out else {"malformed": True}


def reply(name, module, text, initial):
    """The response loop of mlx_lm/server.py over a whole text."""
    think = THINK.get(name, ("<think>", "</think>"))
    tokenizer = SimpleNamespace(
        has_thinking=True,
        think_start=think[0],
        think_end=think[1],
        has_tool_calling=True,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        response_transitions={},
        structural_markers=XTML if name == "kimi_k3" else (),
    )
    state = make_text_state_machine(tokenizer).make_state(initial)
    state, segments = TextStateMachine.split(state, text)
    state, rest, current = TextStateMachine.flush(state)
    out = {"reasoning": "", "content": "", "calls": []}
    tool, previous = "", initial
    for current, clean in [*segments, (current, rest)]:
        if current == "reasoning":
            out["reasoning"] += clean
        elif current == "tool":
            tool += clean
        else:
            if previous == "tool":
                out["calls"] += calls(module.parse_tool_call, tool)["calls"]
                tool = ""
            out["content"] += clean
        previous = current
    if previous == "tool" and tool:
        out["calls"] += calls(module.parse_tool_call, tool)["calls"]
    return out


def main():
    rng = random.Random(5)
    cases, replies = [], []
    for name, texts in CORPUS.items():
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        seen = set()
        mutations = MUTATIONS if len(texts) < 12 else 1
        for text in texts:
            for candidate in [text] + [mutate(text, rng) for _ in range(mutations)]:
                if candidate not in seen:
                    seen.add(candidate)
                    cases.append({"parser": name, "text": candidate} | calls(module.parse_tool_call, candidate))
    for name, texts in REPLIES.items():
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        for text in texts:
            for initial in ["normal", "reasoning"]:
                replies.append(
                    {"parser": name, "think": THINK.get(name, ("<think>", "</think>"))[0], "text": text,
                     "initial": initial} | reply(name, module, text, initial)
                )
    templates = {
        path.stem: _infer_tool_parser(SimpleNamespace(chat_template=path.read_text("utf-8"), get_vocab=dict))
        for path in sorted((FIXTURES / "chat_templates" / "templates").glob("*.jinja"))
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(case, ensure_ascii=False) for case in cases]
    reply_lines = [json.dumps(case, ensure_ascii=False) for case in replies]
    OUT.write_text(
        '{"templates": ' + json.dumps(templates) + ',\n"tools": ' + json.dumps(TOOLS) + ',\n"cases": [\n' + ",\n".join(lines)
        + '\n],\n"replies": [\n' + ",\n".join(reply_lines) + "\n]}\n",
        encoding="utf-8",
    )
    print(len(cases), "cases", len(replies), "replies")


main()
