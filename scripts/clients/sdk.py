#!/usr/bin/env python3
"""The openai and anthropic SDKs against `mlx-bun serve` on tiny models.

usage: $(python3 scripts/clients/setup.py) scripts/clients/sdk.py
"""

import json
import tempfile
import unittest
import urllib.request
from pathlib import Path

import anthropic
import openai

from server import CHECKPOINTS, TEMPLATES, serving

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
HELLO = [{"role": "user", "content": "Hello"}]


class Clients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        template = str(TEMPLATES / "hermes_tools.jinja")
        cls.context = serving(CHECKPOINTS / "llama-f32", "--temp", "0", "--chat-template", template)
        url, _ = cls.context.__enter__()
        cls.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        cls.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        # The model would write blanks wherever JSON allows some.
        blanks = [cls.tokens(url, blank) for blank in ("\n", "\t", "\r", " ", "  ", "\n\n")]
        cls.no_blanks = {str(token): -1000 for tokens in blanks for token in tokens}

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    @staticmethod
    def tokens(url, text):
        body = json.dumps({"content": text, "add_special": False}).encode()
        with urllib.request.urlopen(f"{url}/tokenize", body) as reply:
            return json.load(reply)["tokens"]

    def chat(self, **fields):
        return self.openai.chat.completions.create(model="m", **{"messages": HELLO, "max_tokens": 16, **fields})

    def test_chat_and_its_stream_agree(self):
        whole = self.chat()
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual(whole.usage.completion_tokens, 16)
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual(chunks[-1].usage.completion_tokens, 16)

    def test_logprobs(self):
        content = self.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        self.assertEqual(len(content), 16)
        self.assertEqual(len(content[0].top_logprobs), 3)

    def test_tools_whole_and_streamed(self):
        fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100, "parallel_tool_calls": False}
        fields["logit_bias"] = self.no_blanks
        choice = self.chat(**fields).choices[0]
        self.assertEqual(choice.finish_reason, "tool_calls")
        call = choice.message.tool_calls[0]
        self.assertIn(json.loads(call.function.arguments)["city"], ["Paris", "Rome"])
        with self.openai.chat.completions.stream(model="m", messages=HELLO, **fields) as stream:
            final = stream.get_final_completion()
        self.assertEqual(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments)
        history = [*HELLO, choice.message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny"})
        self.assertIsNotNone(self.chat(messages=history, tools=[TOOL]).choices[0].message.content)

    def test_structured_output(self):
        schema = {"name": "weather", "strict": True, "schema": PARAMETERS}
        reply = self.chat(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=200)
        self.assertIn(json.loads(reply.choices[0].message.content)["city"], ["Paris", "Rome"])

    def test_completions(self):
        whole = self.openai.completions.create(model="m", prompt="Hello", max_tokens=8, stop=["\n\n"])
        stream = self.openai.completions.create(model="m", prompt="Hello", max_tokens=8, stop=["\n\n"], stream=True)
        self.assertEqual("".join(c.choices[0].text for c in stream if c.choices), whole.choices[0].text)

    def test_responses_with_history(self):
        create = self.openai.responses.create
        first = create(model="m", input="Hello", instructions="Be brief", max_output_tokens=6)
        self.assertEqual(first.status, "incomplete")
        second = create(model="m", input="And?", previous_response_id=first.id, max_output_tokens=6)
        self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)
        self.assertEqual(self.openai.responses.retrieve(first.id).output_text, first.output_text)
        with self.openai.responses.stream(model="m", input="Hello", max_output_tokens=6) as stream:
            events = list(stream)
        deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        # As at OpenAI, whose SDK has a final response only where the limit did not cut it.
        self.assertEqual(events[-1].type, "response.incomplete")
        self.assertEqual(events[-1].response.output_text, deltas)
        self.assertEqual(events[-1].response.output[-1].status, "incomplete")
        # Held to a text, the reply ends by itself.
        held = {"extra_body": {"guided_regex": "yes"}}
        with self.openai.responses.stream(model="m", input="Hello", **held) as stream:
            self.assertEqual(stream.get_final_response().output_text, "yes")
        self.openai.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            create(model="m", input="And?", previous_response_id=first.id)

    def test_responses_tools(self):
        tool = {"type": "function", **TOOL["function"], "strict": True}
        fields = {"model": "m", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        fields["extra_body"] = {"logit_bias": self.no_blanks}
        reply = self.openai.responses.create(input="Weather?", max_output_tokens=100, **fields)
        call = next(item for item in reply.output if item.type == "function_call")
        self.assertIn(json.loads(call.arguments)["city"], ["Paris", "Rome"])
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
        reply = self.openai.responses.create(
            model="m", input=[answer], previous_response_id=reply.id, tools=[tool], max_output_tokens=8
        )
        self.assertTrue(reply.output)

    def test_models(self):
        self.assertEqual(self.openai.models.list().data[0].id, "llama-f32")
        self.assertEqual(self.openai.models.retrieve("llama-f32").owned_by, "mlx-bun")
        with self.assertRaises(openai.NotFoundError):
            self.openai.models.retrieve("none")

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(messages=[{"role": "user", "content": "Hello " * 600}])
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=9)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(anthropic.BadRequestError):
            self.anthropic.messages.create(model="m", max_tokens=5, messages=[])

    def test_messages(self):
        whole = self.anthropic.messages.create(model="m", max_tokens=8, messages=HELLO, system="Be brief")
        self.assertEqual(whole.stop_reason, "max_tokens")
        with self.anthropic.messages.stream(model="m", max_tokens=8, messages=HELLO, system="Be brief") as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, whole.content[0].text)
        self.assertEqual(final.usage.output_tokens, 8)
        counted = self.anthropic.messages.count_tokens(model="m", messages=HELLO, system="Be brief")
        self.assertGreater(counted.input_tokens, 3)

    def test_messages_tools(self):
        tool = {"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}
        fields = {"model": "m", "max_tokens": 100, "tools": [tool]}
        any_tool = {"type": "any", "disable_parallel_tool_use": True}
        reply = self.anthropic.messages.create(messages=HELLO, tool_choice=any_tool, **fields)
        self.assertEqual(reply.stop_reason, "tool_use")
        call = next(block for block in reply.content if block.type == "tool_use")
        self.assertIn(call.input["city"], ["Paris", "Rome"])
        with self.anthropic.messages.stream(messages=HELLO, tool_choice=any_tool, **fields) as stream:
            streamed = next(block for block in stream.get_final_message().content if block.type == "tool_use")
        self.assertEqual(streamed.input, call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
        history = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        self.assertTrue(self.anthropic.messages.create(messages=history, **fields).content)


class Keys(unittest.TestCase):
    def test_a_wrong_key_is_refused(self):
        with serving(CHECKPOINTS / "llama-f32", "--api-key", "secret") as (url, _):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
            with self.assertRaises(openai.AuthenticationError):
                client.models.list()
            self.assertTrue(client.with_options(api_key="secret").models.list().data)
            with self.assertRaises(anthropic.AuthenticationError):
                wrong = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
                wrong.messages.create(model="m", max_tokens=1, messages=HELLO)


class Embeddings(unittest.TestCase):
    def test_embeddings(self):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "tiny-embedding"
            model.symlink_to(CHECKPOINTS / "qwen3-f32")
            with serving(model) as (url, _):
                client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
                # The SDK asks for base64 by itself.
                reply = client.embeddings.create(model="m", input=["Hello", "there"])
                self.assertEqual([entry.index for entry in reply.data], [0, 1])
                for entry in reply.data:
                    self.assertAlmostEqual(sum(x * x for x in entry.embedding), 1, places=4)
                plain = client.embeddings.create(model="m", input="Hello", encoding_format="float", dimensions=8)
                self.assertEqual(len(plain.data[0].embedding), 8)


if __name__ == "__main__":
    unittest.main()
