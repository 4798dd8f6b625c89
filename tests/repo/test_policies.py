"""Rules over every registered policy: a new one is held to them from its first day."""

from __future__ import annotations

from pathlib import Path

import pytest

from slacktide.core import policies
from slacktide.core.policy import get, names
from slacktide.core.spec import parameters_of, parse_policies

FILES = sorted(path.stem for path in Path(policies.__path__[0]).glob("*.py") if not path.stem.startswith("_"))


def test_one_file_per_policy_and_named_like_it():
    assert sorted(name.replace("-", "_") for name in names()) == FILES
    for name in names():
        assert get(name).__module__ == f"slacktide.core.policies.{name.replace('-', '_')}"


def test_no_policy_is_called_all():
    assert "all" not in names()  # `--policy all` means every one


@pytest.mark.parametrize("name", names())
def test_parameters_have_a_form_on_the_command_line_and_an_explanation(name):
    for parameter in parameters_of(get(name)):
        assert parameter.doc, f"{name}: no docstring below {parameter.name}"
        if not parameter.required and parameter.default is not None:
            assert parameter.convert(str(parameter.default)) == parameter.default
        assert parameter.required or parameter.default is not None or parameter.optional


@pytest.mark.parametrize("name", names())
def test_a_policy_can_be_asked_for_by_name_alone(name):
    (spec,) = parse_policies([name])
    assert spec.label == spec.name == name
    policy = spec.build()
    assert hasattr(policy, "plan") or hasattr(policy, "score")


@pytest.mark.parametrize("name", names())
def test_description_starts_with_a_sentence(name):
    from slacktide.cli.policies import describe

    assert describe(name)["summary"].endswith(".")
