from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from slacktide.core import policy as registry
from slacktide.core.spec import parameters_of, parse_policies
from slacktide.errors import InputError


@dataclass(frozen=True)
class Plain:
    """Serve in order."""

    def score(self, view):
        return view.live.arrival_time


@dataclass(frozen=True)
class Tuned:
    """Serve by a tuned order."""

    window: int = 3
    """How many steps
    to look ahead."""
    margin: float = 0.5
    strict: bool = True
    """Whether to be strict."""
    chunker: Literal["greedy", "even"] = "greedy"
    cap: int | None = None
    note: str = "x"
    _hidden: int = 0
    state: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: expected at least 1")

    def score(self, view):
        return view.live.arrival_time


@dataclass(frozen=True)
class Needy:
    """Needs a number."""

    count: int

    def score(self, view):
        return view.live.arrival_time


@dataclass(frozen=True)
class Seer:
    """Sees the future."""

    oracle = True

    def score(self, view):
        return view.live.arrival_time


POLICIES = {"plain": Plain, "tuned": Tuned, "needy": Needy, "seer": Seer}


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(POLICIES))
    monkeypatch.setattr(registry, "_load_in_tree", lambda: None)


def one(text, engine=None):
    (spec,) = parse_policies([text], engine)
    return spec


def test_a_list_with_parameters_is_the_example_of_the_design():
    specs = parse_policies(["plain,tuned:window=4,chunker=even"])
    assert [spec.label for spec in specs] == ["plain", "tuned:window=4,chunker=even"]
    assert specs[1].parameters == {"window": 4, "chunker": "even"}
    assert specs[1].build() == Tuned(window=4, chunker="even")


def test_several_lists_keep_their_order_and_duplicates_get_a_number():
    specs = parse_policies(["tuned:window=4", "plain, tuned:window=4", "tuned:window=5,plain,plain"])
    labels = ["tuned:window=4", "plain", "tuned:window=4#2", "tuned:window=5", "plain#2", "plain#3"]
    assert [spec.label for spec in specs] == labels


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("margin=0.25", 0.25),
        ("margin=inf", float("inf")),
        ("strict=off", False),
        ("strict=TRUE", True),
        ("cap=7", 7),
        ("cap=none", None),
        ("note=a:b", "a:b"),
        ("chunker=even", "even"),
    ],
)
def test_values_are_typed_by_their_field(item, value):
    spec = one(f"tuned:{item}")
    assert spec.parameters == {item.partition("=")[0]: value}


def test_a_parameter_may_stand_behind_a_colon_or_a_comma_and_hold_a_colon():
    assert one("tuned:window=4,note=a:b").parameters == {"window": 4, "note": "a:b"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tund", ["unknown policy 'tund'", "did you mean tuned"]),
        ("tuned:windw=3", ["'tuned'", "windw", "did you mean window"]),
        ("tuned:window=many", ["window='many'", "a whole number"]),
        ("tuned:window=2.5", ["window='2.5'", "a whole number"]),
        ("tuned:margin=nan", ["margin='nan'", "a number"]),
        ("tuned:strict=maybe", ["strict='maybe'", "true or false"]),
        ("tuned:chunker=odd", ["chunker='odd'", "greedy or even"]),
        ("tuned:cap=x", ["cap='x'", "a whole number or none"]),
        ("tuned:window=0", ["window=0: expected at least 1"]),
        ("tuned:window=1,window=2", ["window is given twice"]),
        ("tuned:window", ["'tuned'", "parameter=value", "'window'"]),
        ("tuned:", ["parameter=value"]),
        ("tuned:_hidden=1", ["_hidden"]),
        ("tuned:state=1", ["state"]),
        ("plain:window=3", ["'plain' has no parameters"]),
        ("needy", ["needs count", "needy:count=..."]),
        ("window=3,tuned", ["stands before any policy"]),
        ("plain,,tuned", ["empty item"]),
        ("", ["empty item"]),
        ("nowhere:Class", ["cannot import module 'nowhere'"]),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_expected(text, parts):
    with pytest.raises(InputError) as caught:
        parse_policies([text])
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_no_policy_at_all_is_a_mistake():
    with pytest.raises(InputError, match="no policy named"):
        parse_policies([])


def test_a_class_of_the_user_is_imported_by_name(monkeypatch, tmp_path):
    (tmp_path / "my_policies.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Mine:\n    window: int = 1\n    def score(self, view):\n        return view.live.priority\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = one("my_policies:Mine:window=2")
    assert (spec.name, spec.label) == ("my_policies:Mine", "my_policies:Mine:window=2")
    assert spec.build().window == 2


def test_a_class_that_is_no_policy_is_refused():
    with pytest.raises(InputError, match="expected a class with a method"):
        parse_policies(["statistics:NormalDist"])


def test_all_means_every_policy_that_is_no_oracle(monkeypatch):
    monkeypatch.delitem(registry._REGISTRY, "needy")
    assert [spec.label for spec in parse_policies(["all"])] == ["plain", "tuned"]
    assert [spec.label for spec in parse_policies(["all,seer"])] == ["plain", "tuned", "seer"]


def test_engine_settings_are_taken_by_every_policy_and_stand_apart():
    spec = one("plain:max-num-seqs=8", {"max_num_seqs": int})
    assert spec.label == "plain:max_num_seqs=8"
    assert spec.engine == spec.parameters == {"max_num_seqs": 8}
    assert spec.build() == Plain()


def test_a_parameter_that_is_an_engine_setting_too_is_both():
    spec = one("tuned:window=8", {"window": str})
    assert spec.engine == {"window": 8}
    assert spec.build() == Tuned(window=8)


def test_an_engine_setting_that_cannot_be_read_is_a_mistake():
    with pytest.raises(InputError, match="engine setting max_num_seqs='x'"):
        one("plain:max_num_seqs=x", {"max_num_seqs": int})


def test_the_record_has_every_parameter():
    assert one("tuned:window=4,max_num_seqs=8", {"max_num_seqs": int}).all_parameters() == {
        "window": 4,
        "margin": 0.5,
        "strict": True,
        "chunker": "greedy",
        "cap": None,
        "note": "x",
        "max_num_seqs": 8,
    }


def test_parameters_carry_type_default_and_the_string_below_the_field():
    found = {parameter.name: parameter for parameter in parameters_of(Tuned)}
    assert list(found) == ["window", "margin", "strict", "chunker", "cap", "note"]
    assert found["window"].doc == "How many steps to look ahead."
    assert found["margin"].doc == ""
    assert found["chunker"].choices == ("greedy", "even")
    assert (found["cap"].kind, found["cap"].optional, found["cap"].default) == (int, True, None)
    assert parameters_of(Needy)[0].required


def test_a_public_field_without_a_form_on_the_command_line_is_found():
    @dataclass
    class Odd:
        table: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match="table"):
        parameters_of(Odd)


def test_a_class_that_is_no_dataclass_has_no_parameters():
    class Bare:
        def plan(self, view):
            return None

    assert parameters_of(Bare) == ()
