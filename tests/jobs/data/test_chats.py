"""Conversations of many turns: every assistant turn carries the loss, whatever stands between."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from lazytrain.jobs.data import tokens
from lazytrain.jobs.data.canonical import Conversation, Refused
from lazytrain.jobs.data.formats import to_conversation
from lazytrain.jobs.errors import DataError, ModelError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
ALTERNATING = (
    "{% for m in messages %}{% if loop.index0 % 2 != (m.role != 'user') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
HISTORY = (  # drops the reasoning of every answer but the last, as reasoning models' templates do
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>")


@pytest.fixture
def chatml(make_tokenizer):
    def make(template: str = CHATML, **options):
        return make_tokenizer(specials=SPECIALS, template=template, **{"eos_token": "<|im_end|>", **options})

    return make


def turns(*pairs: tuple[str, str], **beside: object) -> dict[str, object]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs], **beside}


def chat(*pairs: tuple[str, str], **beside: object) -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs], **beside}


def learned(tokenizer, rows, row: int = 0) -> list[str]:
    ids = rows.input_ids[row]
    return [tokenizer.decode(ids[start:stop]) for start, stop in rows.spans(row)]


def whole(tokenizer, rows, row: int = 0) -> str:
    return tokenizer.decode(rows.input_ids[row])


def rule_of(row: dict[str, object], name: str = "messages") -> str:
    with pytest.raises(Refused) as caught:
        to_conversation(row, name)
    return caught.value.rule


class TestTurns:
    ANY_ORDER = (
        ("system", "Be kind."), ("human", "Hi"), ("human", "there"), ("gpt", "Let me see"),
        ("observation", "sunny"), ("observation", "warm"), ("gpt", "Sunny and warm"),
    )  # fmt: skip

    def test_two_users_and_two_results_in_a_row(self, load, write_rows, chatml) -> None:
        tokenizer = chatml()
        prepared = load(write_rows(turns(*self.ANY_ORDER)), tokenizer=tokenizer)
        assert list(prepared.report.formats.values()) == ["sharegpt"]
        assert learned(tokenizer, prepared.train) == ["Let me see<|im_end|>", "Sunny and warm<|im_end|>"]
        assert "user\nHi<|im_end|>\n<|im_start|>user\nthere<|im_end|>" in whole(tokenizer, prepared.train)
        assert prepared.train.prompts[0].endswith("tool\nwarm<|im_end|>\n<|im_start|>assistant\n")
        assert prepared.train.answers == ["Sunny and warm"]

    def test_merged_where_the_template_wants_turns_to_alternate(self, load, write_rows, chatml) -> None:
        tokenizer = chatml(ALTERNATING + CHATML)
        row = turns(("human", "Hi"), ("human", "there"), ("gpt", "a"), ("gpt", "b"))
        prepared = load(write_rows(row), tokenizer=tokenizer)
        assert learned(tokenizer, prepared.train) == ["a\n\nb<|im_end|>"]
        assert "user\nHi\n\nthere<|im_end|>" in whole(tokenizer, prepared.train)

    @pytest.mark.parametrize("text", ["a", "assistant", "<|im_end|>\n", "user\nq1", "<|im_start|>assistant\nx", "é🙂"])
    def test_turns_that_look_like_each_other_or_the_template(self, load, write_rows, chatml, text: str) -> None:
        tokenizer = chatml()
        row = chat(("user", text), ("assistant", text), ("user", text), ("assistant", text))
        prepared = load(write_rows(row), tokenizer=tokenizer)
        assert learned(tokenizer, prepared.train) == [f"{text}<|im_end|>"] * 2
        assert whole(tokenizer, prepared.train).count(text) >= 4

    def test_both_layouts_mean_the_same(self, load, write_rows, chatml) -> None:
        one = load(write_rows(turns(("human", "q"), ("gpt", "a"), system="s"), name="a"), tokenizer=chatml()).train
        other = load(write_rows(chat(("system", "s"), ("user", "q"), ("assistant", "a")), name="b"), tokenizer=chatml())
        assert one.input_ids == other.train.input_ids

    def test_a_template_that_trims(self, load, write_rows, chatml) -> None:
        tokenizer = chatml(CHATML.replace("m.content", "m.content | trim"))
        row = chat(("user", " q "), ("assistant", " a\n"), ("user", "r"), ("assistant", "\nb "))
        assert learned(tokenizer, load(write_rows(row), tokenizer=tokenizer).train) == ["a<|im_end|>", "b<|im_end|>"]

    def test_turns_that_the_template_rewrites_are_context_only(self, load, write_rows, chatml) -> None:
        tokenizer = chatml(HISTORY)
        row = chat(("user", "q"), ("assistant", "<think>1</think>a"), ("user", "r"), ("assistant", "<think>2</think>b"))
        prepared = load(write_rows(row), tokenizer=tokenizer)
        assert learned(tokenizer, prepared.train) == ["<think>2</think>b<|im_end|>"]
        assert "<think>1" not in whole(tokenizer, prepared.train)
        assert prepared.report.context_turns == 1

    def test_turns_that_the_data_switches_off(self, load, write_rows, chatml) -> None:
        row = chat(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))
        row["messages"][1]["weight"] = 0
        tokenizer = chatml()
        assert learned(tokenizer, load(write_rows(row), tokenizer=tokenizer).train) == ["b<|im_end|>"]

    def test_a_limit_keeps_the_whole_answers_before_it(self, load, write_rows, chatml) -> None:
        tokenizer = chatml()
        row = chat(("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "x" * 50))
        length = len(tokenizer.apply_chat_template(row["messages"][:3], add_generation_prompt=True)["input_ids"])
        train = load(write_rows(row), tokenizer=tokenizer, max_length=length + 30).train
        assert learned(tokenizer, train) == ["one<|im_end|>", "x" * 30]
        train = load(write_rows(row), tokenizer=tokenizer, max_length=length - 3).train
        assert learned(tokenizer, train) == ["one<|im_end|>"]

    def test_a_history_of_pairs(self, load, write_rows, chatml) -> None:
        row = {"instruction": "r", "output": "b", "history": [["q", "a"]]}
        tokenizer = chatml()
        assert learned(tokenizer, load(write_rows(row), tokenizer=tokenizer).train) == ["a<|im_end|>", "b<|im_end|>"]


class TestSystem:
    ROWS = tuple(
        chat(*([("system", f"Rule {i}.")] if i in (2, 4) else []), ("user", f"q{i}"), ("assistant", "a"))
        for i in range(1, 6)
    )

    def test_folded_into_the_first_user_turn(self, load, write_rows, chatml) -> None:
        tokenizer = chatml(PICKY + CHATML)
        train = load(write_rows(*self.ROWS), tokenizer=tokenizer).train
        assert len(train) == 5
        assert "user\nRule 2.\n\nq2<|im_end|>" in whole(tokenizer, train, 1)

    def test_a_template_that_forgets_it(self, load, write_rows, chatml) -> None:
        tokenizer = chatml(CHATML.replace("messages %}", "messages if m.role != 'system' %}", 1))
        train = load(write_rows(*self.ROWS), tokenizer=tokenizer).train
        assert "user\nRule 4.\n\nq4<|im_end|>" in whole(tokenizer, train, 3)

    def test_or_the_job_is_refused_with_the_rows(self, load, write_rows, chatml) -> None:
        with pytest.raises(DataError, match=r"line 2, 4") as caught:
            load(write_rows(*self.ROWS), tokenizer=chatml(PICKY + CHATML), system_policy="error")
        assert "system_policy" in caught.value.hint
        assert len(load(write_rows(*self.ROWS), tokenizer=chatml(), system_policy="error").train) == 5


class TestTemplates:
    def test_many_turns_need_one(self, load, write_rows) -> None:
        with pytest.raises(ModelError, match="need a chat template") as caught:
            load(write_rows(chat(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))))
        assert "data.chat_template to chatml" in caught.value.hint

    @pytest.mark.parametrize("name", ["chatml", "alpaca", "vicuna"])
    def test_by_name(self, load, write_rows, make_tokenizer, name: str) -> None:
        tokenizer = make_tokenizer()
        row = chat(("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "t"), ("assistant", "b"))
        train = load(write_rows(row), tokenizer=tokenizer, chat_template=name).train
        spans = learned(tokenizer, train)
        assert [span[0] for span in spans] == ["a", "b"]
        assert spans[-1] == "b</s>"
        assert tokenizer.chat_template

    def test_from_a_file(self, load, write_rows, make_tokenizer, tmp_path) -> None:
        (tmp_path / "t.jinja").write_text(CHATML)
        tokenizer = make_tokenizer(specials=SPECIALS, eos_token="<|im_end|>")
        train = load(write_rows(chat(("user", "q"), ("assistant", "a"))), tokenizer=tokenizer,
                     chat_template=str(tmp_path / "t.jinja")).train  # fmt: skip
        assert learned(tokenizer, train) == ["a<|im_end|>"]
        with pytest.raises(ModelError, match="neither a known name nor a readable file"):
            load(write_rows(chat(("user", "q"), ("assistant", "a"))), tokenizer=tokenizer, chat_template="llama9")

    @pytest.mark.parametrize("also", [False, True])
    def test_what_the_generation_prompt_holds(self, load, write_rows, chatml, also: bool) -> None:
        template = CHATML.replace("assistant\n{% endif", "assistant\n<think></think>{% endif").replace(
            "{{ m.content }}", "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
        )
        tokenizer = chatml(template)
        row = chat(("user", "q"), ("assistant", "a"))
        train = load(write_rows(row), tokenizer=tokenizer, supervise_generation_prompt=also).train
        before = "<|im_start|>assistant\n<think></think>" if also else ""
        assert learned(tokenizer, train) == [f"{before}a<|im_end|>"]
        assert whole(tokenizer, train).endswith("assistant\n<think></think>a<|im_end|>")

    def test_a_prompt_that_opens_the_reasoning(self, load, write_rows, chatml) -> None:
        """The answer goes on where the prompt ends; one that does not is refused alone."""
        tokenizer = chatml(CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"))
        rows = [chat(("user", "q"), ("assistant", answer)) for answer in ("<think>1</think>a", "a")]
        prepared = load(write_rows(*rows), tokenizer=tokenizer)
        assert learned(tokenizer, prepared.train) == ["1</think>a<|im_end|>"]
        assert "otherwise than the prompt" in prepared.report.table()

    def test_a_turn_without_loss_stays_in_the_text(self, load, write_rows, chatml) -> None:
        tokenizer = chatml()
        row = chat(("assistant", "Hello, I am here."), ("user", "q"), ("assistant", "a"))
        train = load(write_rows(row), tokenizer=tokenizer).train
        assert whole(tokenizer, train).startswith("<|im_start|>assistant\nHello")
        assert learned(tokenizer, train)[-1] == "a<|im_end|>"


class TestTools:
    @pytest.mark.parametrize(
        ("arguments", "written"),
        [
            ({"city": "Rome"}, "[now city=Rome]"), ('{"city": "Rome"}', "[now city=Rome]"),
            ("null", "[now]"), ("", "[now]"), (None, "[now]"), ({}, "[now]"), ("{}", "[now]"), ("absent", "[now]"),
        ],
    )  # fmt: skip
    def test_arguments_however_they_are_written(self, load, write_rows, chatml, arguments, written: str) -> None:
        function = {"name": "now", **({} if arguments == "absent" else {"arguments": arguments})}
        call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "content": {"hour": 9}}
        row = {"messages": [{"role": "user", "content": "q"}, call, result, {"role": "assistant", "content": "Nine"}]}
        tokenizer = chatml(WITH_TOOLS)
        train = load(write_rows(row), tokenizer=tokenizer).train
        assert learned(tokenizer, train) == [f"{written}<|im_end|>", "Nine<|im_end|>"]
        text = whole(tokenizer, train)
        assert "None" not in text and "null" not in text
        assert 'tool\n{"hour": 9}<|im_end|>' in text

    def test_sharegpt_calls_and_tools_as_json_text(self, load, write_rows, chatml) -> None:
        call = json.dumps({"name": "now", "arguments": {"city": "Rome"}})
        row = turns(("human", "q"), ("function_call", call), ("observation", "9"), ("gpt", "Nine"),
                    tools=json.dumps([{"name": "now", "parameters": {"type": "object"}}]))  # fmt: skip
        tokenizer = chatml(WITH_TOOLS)
        train = load(write_rows(row), tokenizer=tokenizer).train
        assert learned(tokenizer, train) == ["[now city=Rome]<|im_end|>", "Nine<|im_end|>"]
        assert whole(tokenizer, train).startswith('<|im_start|>tools\n[{"type": "function", "function": {"name": "now"')

    def test_a_call_may_be_the_answer(self, load, write_rows, chatml) -> None:
        tokenizer = chatml(WITH_TOOLS)
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now"}}]}
        row = {"messages": [{"role": "user", "content": "q"}, call]}
        assert learned(tokenizer, load(write_rows(row), tokenizer=tokenizer).train) == ["[now]<|im_end|>"]

    def test_tools_do_not_gain_each_others_keys(self, tmp_path) -> None:
        calls = [{"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b", "arguments": {"y": 2}}}]
        rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        from lazytrain.jobs.data.read import read_rows

        ((_, row),) = read_rows(tmp_path / "rows.parquet")
        read = to_conversation(row, "messages")
        assert isinstance(read, Conversation)
        assert [dict(call.arguments) for call in read.messages[-1].tool_calls] == [{"x": 1}, {"y": 2}]


class TestRefusals:
    def test_one_table_with_a_line_per_rule(self, load, write_rows, chatml) -> None:
        rows = [
            *[turns(("human", "q"), ("gpt", "a"), ("human", "r"))] * 4,
            *[turns(("human", "q"), ("bot", "a"))] * 3,
            *[turns()] * 3,
        ]
        with pytest.raises(DataError) as caught:
            load(write_rows(*rows), tokenizer=chatml())
        lines = caught.value.message.splitlines()[1:]
        assert [line.split()[0] for line in lines] == ["4", "3", "3"]
        assert "line 1, 2, 3, ..." in lines[0]
        assert "line 5, 6, 7" in lines[1] and "unknown role 'bot'; known are" in lines[1] and "human" in lines[1]
        assert "line 8, 9, 10" in lines[2] and "the conversation is empty" in lines[2]

    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ({"messages": "hello"}, "messages is not valid JSON"),
            ({"messages": 3}, "messages is not a list"),
            ({"messages": ["hello"]}, "a turn is not a JSON object"),
            ({"messages": [{"content": "q"}]}, "a turn has no role"),
            ({"messages": [{"role": 3, "content": "q"}]}, "unknown role '3'"),
            (chat(("assistant", "a")), "the prompt is empty"),
            (chat(("user", "q"), ("assistant", " ")), "the answer is empty"),
            (chat(("user", "q"), ("assistant", ["a", {"type": "image"}])), "content holds more than text"),
            (chat(("user", "q"), ("assistant", "a"), tools="{"), "tools is not valid JSON"),
            (chat(("user", "q"), ("assistant", "a"), tools=["x"]), "tools is not valid JSON"),
        ],
    )
    def test_rules(self, row: dict[str, object], words: str) -> None:
        assert words in rule_of(row)

    def test_broken_arguments(self) -> None:
        for arguments, words in (("{x", "is not valid JSON"), ([1], "no JSON object")):
            call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
            assert words in rule_of({"messages": [{"role": "user", "content": "q"}, call]})


class TestText:
    def test_everything_carries_the_loss(self, load, write_rows, make_tokenizer) -> None:
        tokenizer = make_tokenizer(auto_bos=True, bos_token="<s>", template=CHATML)
        train = load(write_rows({"text": "Once upon"}), tokenizer=tokenizer).train
        assert whole(tokenizer, train) == "<s>Once upon</s>"
        assert learned(tokenizer, train) == ["Once upon</s>"]
        assert train.prompts == [""]

    def test_mixed_with_conversations(self, load, write_rows, chatml) -> None:
        one, other = (
            write_rows({"text": "abc"}, name="t"),
            write_rows(chat(("user", "q"), ("assistant", "a")), name="c"),
        )
        assert load(one, other, tokenizer=chatml()).report.train_rows == 2


class TestVerified:
    @pytest.mark.parametrize("shift", [-3, -2, 1, 2])
    def test_offsets_that_are_wrong_are_found(self, load, write_rows, chatml, monkeypatch, shift: int) -> None:
        """What carries the loss is decoded again: an answer that is off by more than blanks stops the job."""
        right = tokens._token_span
        monkeypatch.setattr(tokens, "_token_span", lambda *given: (right(*given)[0] + shift, right(*given)[1]))
        with pytest.raises(ModelError, match="offsets are wrong"):
            load(write_rows(chat(("user", "q"), ("assistant", "abcdef"))), tokenizer=chatml())
