"""What carries the loss is the answer and its end, for any template and any tokenizer."""

from __future__ import annotations

import pytest

from lazytrain.jobs.data import render_prompt, stop_ids
from lazytrain.jobs.errors import InputError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOINED = "{% for m in messages %}{{ m.content }}{% endfor %}"

ROW = {"instruction": "Add.", "output": " It is 2 ", "system": "Be terse."}
PAIR = {"query": "1+1?", "response": "2"}


@pytest.fixture
def chatml(make_tokenizer):
    return make_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=CHATML, eos_token="<|im_end|>")


def text_and_loss(tokenizer, prepared) -> tuple[str, str]:
    ids, start = prepared.train.input_ids[0], prepared.train.answer_starts[0]
    return tokenizer.decode(ids), tokenizer.decode(ids[start:])


class TestChatTemplates:
    def test_chatml(self, load, write_rows, chatml) -> None:
        prepared = load(write_rows(ROW), tokenizer=chatml)
        text, loss = text_and_loss(chatml, prepared)
        prompt = "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"
        assert text == f"{prompt} It is 2 <|im_end|>"
        assert loss == " It is 2 <|im_end|>"
        assert prepared.train.prompts == [prompt]

    @pytest.mark.parametrize("answer", ["assistant", "<|im_end|>", "\n", "user\n1+1?", "x\n\n"])
    def test_answers_that_look_like_the_template(self, load, write_rows, chatml, answer: str) -> None:
        if not answer.strip():
            answer = "a" + answer
        prepared = load(write_rows({"query": "1+1?", "response": answer}), tokenizer=chatml)
        assert text_and_loss(chatml, prepared)[1] == answer + "<|im_end|>"

    def test_a_marker_of_what_is_generated_changes_nothing(self, load, write_rows, make_tokenizer, chatml) -> None:
        turn = "{{ m.content }}<|im_end|>\n"  # a template drops a line's end only after a block
        generated = f"{{% generation %}}{turn}{{% endgeneration %}}"
        marked = f"{{% if m.role == 'assistant' %}}{generated}{{% else %}}{turn}{{% endif %}}"
        template = CHATML.replace(turn, marked)
        tokenizer = make_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=template, eos_token="<|im_end|>")
        with_marker, without = (text_and_loss(t, load(write_rows(ROW), tokenizer=t)) for t in (tokenizer, chatml))
        assert with_marker == without

    def test_text_that_the_template_puts_before_an_answer(self, load, write_rows, make_tokenizer) -> None:
        """What generation has to write by itself is learned; what the generation prompt holds is not."""
        in_prompt = CHATML.replace("assistant\n{% endif", "assistant\n<think></think>{% endif").replace(
            "{{ m.content }}", "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
        )
        not_in_prompt = in_prompt.replace("assistant\n<think></think>", "assistant\n")
        for template, loss in ((in_prompt, "2<|im_end|>"), (not_in_prompt, "<think></think>2<|im_end|>")):
            tokenizer = make_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=template)
            prepared = load(write_rows(PAIR), tokenizer=tokenizer)
            assert text_and_loss(tokenizer, prepared)[1] == loss

    def test_a_template_without_an_end_gets_one(self, load, write_rows, make_tokenizer) -> None:
        tokenizer = make_tokenizer(template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        text, loss = text_and_loss(tokenizer, load(write_rows(PAIR), tokenizer=tokenizer))
        assert text == "user: 1+1?\nassistant: 2</s>"
        assert loss == "assistant: 2</s>"

    def test_the_end_of_a_turn_that_is_not_the_end_token_stops_generation(self, load, write_rows, make_tokenizer):
        specials = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        tokenizer = make_tokenizer(specials=specials, template=CHATML, eos_token="<|endoftext|>")
        assert text_and_loss(tokenizer, load(write_rows(PAIR), tokenizer=tokenizer))[1] == "2<|im_end|>"
        assert stop_ids(tokenizer) == [1, 2]

    @pytest.mark.parametrize(
        ("template", "words"),
        [
            ("{{ raise_exception('no system role') }}", "the chat template refuses: no system role"),
            ("{% for m in messages %}{% if m.role == 'user' %}u{% endif %}{% endfor %}", "leaves the answer out"),
            (CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"), "otherwise than the prompt"),
        ],
    )
    def test_a_template_that_cannot_serve_is_refused(
        self, load, write_rows, make_tokenizer, template: str, words: str
    ) -> None:
        with pytest.raises(InputError, match=words):
            load(write_rows(PAIR), tokenizer=make_tokenizer(template=template))


class TestBeginAndEnd:
    def test_a_template_that_prints_it_and_a_tokenizer_that_adds_it(self, load, write_rows, make_tokenizer) -> None:
        tokenizer = make_tokenizer(template="<s>" + CHATML, auto_bos=True, bos_token="<s>")
        ids = load(write_rows(PAIR), tokenizer=tokenizer).train.input_ids[0]
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id

    def test_plain_rows_start_as_the_tokenizer_does(self, load, write_rows, make_tokenizer) -> None:
        tokenizer = make_tokenizer(auto_bos=True, bos_token="<s>")
        train = load(write_rows(PAIR), tokenizer=tokenizer).train
        assert train.input_ids[0] == [*tokenizer("1+1?\n2").input_ids, tokenizer.eos_token_id]
        assert train.prompts == ["<s>1+1?\n"]

    @pytest.mark.parametrize("pad", [None, "<s>", "</s>", "<pad>"])
    def test_one_end_a_row_whatever_pads(self, load, write_rows, make_tokenizer, pad: str | None) -> None:
        tokenizer = make_tokenizer(specials=("<s>", "</s>", "<pad>"), bos_token="<s>", pad_token=pad)
        train = load(write_rows(PAIR), tokenizer=tokenizer).train
        assert train.input_ids[0].count(tokenizer.eos_token_id) == 1
        assert train.input_ids[0][-1] == tokenizer.eos_token_id

    def test_render_prompt_is_that_of_training(self, load, write_rows, chatml, tokenizer) -> None:
        for one in (chatml, tokenizer):
            assert render_prompt(one, "1+1?") == load(write_rows(PAIR), tokenizer=one).train.prompts[0]
        assert stop_ids(tokenizer) == [tokenizer.eos_token_id]
        assert stop_ids(chatml) == [chatml.eos_token_id]


class TestTheBoundary:
    def test_a_token_across_it_belongs_to_the_answer(self, load, write_rows, make_tokenizer) -> None:
        tokenizer = make_tokenizer(merges=((".", "m"),), template=JOINED)
        prepared = load(write_rows({"query": "call .", "response": "memory()"}), tokenizer=tokenizer)
        assert text_and_loss(tokenizer, prepared) == ("call .memory()</s>", ".memory()</s>")

    def test_characters_of_several_tokens(self, load, write_rows, tokenizer) -> None:
        prepared = load(write_rows({"query": "é🙂", "response": "🙂é"}))
        assert text_and_loss(tokenizer, prepared) == ("é🙂\n🙂é</s>", "🙂é</s>")
        assert prepared.report.supervised_tokens == 4 + 2 + 1

    def test_the_first_token_of_a_row_is_never_predicted(self, load, write_rows, make_tokenizer) -> None:
        tokenizer = make_tokenizer(merges=(("a", "b"),), template=JOINED)
        train = load(write_rows({"query": "a", "response": "bc"}), tokenizer=tokenizer).train
        assert train.answer_starts == [1]
