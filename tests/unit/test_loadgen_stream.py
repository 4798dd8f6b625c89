"""Server-sent events and token counts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.loadgen.stream import MAX_EVENT, Answer, Events, StreamError, error_text


def events(*pieces: bytes) -> list[str]:
    parser = Events()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data:a\n\n", ["a"]),  # the blank after the colon is optional
        (b"data:  a\n\n", [" a"]),
        (b": ping\n\ndata: a\n\n: ping\n\n", ["a"]),  # comments
        (b"event: message\nid: 7\nretry: 10\ndata: a\n\n", ["a"]),
        (b"data: {\ndata: }\n\n", ["{\n}"]),
        (b"data: a", ["a"]),  # the stream ends without an empty line
        (b"data: a\n", ["a"]),
        (b"", []),
        (b"\n\n\n", []),
        ("data: é漢\n\n".encode(), ["é漢"]),
    ],
)
def test_events_are_read_as_the_standard_says(text, expected):
    assert events(text) == expected
    assert events(*(text[i : i + 1] for i in range(len(text)))) == expected  # cut everywhere


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\ufeff", codec="utf-8"), min_size=1)), st.data())
def test_cuts_between_reads_do_not_matter(texts, data):
    stream = "".join(f"data: {text}\n\n" for text in texts).encode()
    cut = data.draw(st.integers(0, len(stream)))
    assert events(stream[:cut], stream[cut:]) == texts


@pytest.mark.parametrize("text", [b"<html>\n", b'{"error": "x"}\n', b"dat: a\n", b"data: \xff\xfe\n\n"])
def test_what_is_no_event_stream_is_refused(text):
    with pytest.raises(StreamError):
        events(text)


def test_an_endless_event_is_refused():
    with pytest.raises(StreamError, match="more than"):
        events(b"data: " + b"x" * (MAX_EVENT + 1))


def answer(*steps) -> Answer:
    """Events with their times: (time, object or text)."""
    found = Answer()
    for now, data in steps:
        found.event(data if isinstance(data, str) else json.dumps(data), now)
    return found


def chunk(total=None, finish=None, **choice):
    usage = {} if total is None else {"usage": {"prompt_tokens": 5, "completion_tokens": total}}
    return {"choices": [{"index": 0, "text": "", "finish_reason": finish} | choice]} | usage


def test_tokens_are_those_of_the_usage_whatever_the_chunks():
    steps = [(1.0, chunk(0)), (2.0, chunk(1)), (3.0, chunk(4, text="abc")), (3.5, chunk(4)), (4.0, chunk(6, "length"))]
    found = answer(*steps, (4.1, {"choices": [], "usage": {"completion_tokens": 6}}), (4.2, "[DONE]"))
    assert found.times == [2.0, 3.0, 3.0, 3.0, 4.0, 4.0]
    assert (found.delivered, found.prompt_tokens, found.finish_reason, found.done) == (6, 5, "length", True)
    assert not found.by_chunk


def test_without_a_usage_token_ids_or_logprobs_are_counted():
    ids = answer((1.0, chunk(token_ids=[1, 2])), (2.0, chunk(token_ids=[])), (3.0, chunk(token_ids=[3])))
    assert ids.times == [1.0, 1.0, 3.0]
    logprobs = answer((1.0, chunk(logprobs={"tokens": ["a", "b"]})), (2.0, chunk(logprobs={"content": [{}]})))
    assert logprobs.times == [1.0, 1.0, 2.0]
    assert not ids.by_chunk
    assert not logprobs.by_chunk


def test_without_any_count_chunks_stand_in_and_the_answer_says_so():
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    word = {"choices": [{"delta": {"content": "word"}}]}
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    last = {"choices": [], "usage": {"completion_tokens": 7}}
    found = answer((1.0, role), (2.0, thought), (3.0, word), (4.0, last))
    assert found.times == [2.0, 3.0]
    assert found.by_chunk
    assert found.delivered == 7


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "no JSON object"),
        ({"error": {"message": "out of\nmemory", "code": 500}}, "the server reports: out of memory"),
        (chunk(3, "error"), "finish_reason error after 3 tokens"),
        (chunk(1), "falls from 2 to 1"),
    ],
)
def test_broken_answers_are_named(data, part):
    found = answer((1.0, chunk(2)))
    with pytest.raises(StreamError, match=part):
        found.event(data if isinstance(data, str) else json.dumps(data), 2.0)


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"completion_tokens": None}, {"completion_tokens": "3"}, {"completion_tokens": 10**12}, [], 7, True],
)
def test_odd_usages_are_no_counts(usage):
    assert answer((1.0, {"choices": [{"text": "a"}], "usage": usage})).times == [1.0]
    assert answer((1.0, {"choices": "x", "usage": usage})).times == []


def test_error_texts_of_every_shape_are_one_line():
    for data in ({"error": {"message": "a\nb"}}, {"error": "a b"}, {"message": "a b"}, "a  b"):
        assert error_text(data) == "a b"
    assert len(error_text("x" * 999)) == 200
